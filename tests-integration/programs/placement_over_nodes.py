"""Start the actors of a placement on several raylets of this machine, and report where they are.

The raylets have the numbers of GPUs that the task says, of which Ray only keeps count. In place of vLLM, the actor of
an engine starts the engine's ranks as vLLM's Ray executor does: in the bundles that VLLM_RAY_BUNDLE_INDICES names, each
with one GPU.

With "memory" nothing is started: the nodes are asked for their memory, and a model of a billion weights is checked
against it. What is not real of them are the figures in "memory", by the number of GPUs of the raylet.

With "generate" the GPUs are real, one for each raylet, and an engine of vLLM with a stage on each generates twice.

argv[1]: JSON of {"folder": of the run, "nodes": GPUs of each raylet, "runs": [...]}, where a run is {"overrides": of
the recipe, "hogs": GPUs of each raylet that another run holds, "train": whether its ranks load a model on the CPU,
"memory": bytes of nodes that are not real}.
Prints a line of JSON for each run.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rl_launcher.checks.preflight import NodeMemoryError
from rl_launcher.ray.build import refuse_small_nodes
from rl_launcher.ray.cluster import BUNDLES_ENV, SOCKETS_ENV, ClusterError, RayRuntime, look_at_cluster
from rl_launcher.ray.node_memory import measure_node
from rl_launcher.ray.placement import plan_placement
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

RECIPE = """
run_dir: run
policy: {model_name: model, dtensor_cfg: {device: cuda}, generation: {max_new_tokens: 8}}
data: {source: "data.jsonl"}
env: {reward: "reward.py:score"}
cluster: {runtime: ray, start_timeout_s: 300}
"""


def where():
    """The raylet of this process, and the GPUs that Ray has reserved for it."""
    context = ray.get_runtime_context()
    return {"node": context.get_node_id(), "reserved": context.get_accelerator_ids().get("GPU", [])}


def start_rank(handed_on):
    """Where a rank of an engine is, and where it makes its sockets."""
    for name, value in handed_on.items():
        os.environ.setdefault(name, value)  # as vLLM's RayWorkerProc does
    return {**where(), "sockets": os.environ[SOCKETS_ENV]}


class Looking:
    """What an actor says of its process."""

    def look(self):
        """Where it is, and what it may see."""
        return {**where(), "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")}

    def start_ranks(self):
        """Where the ranks of an engine are that its actor starts, as vLLM does that."""
        group = ray.util.get_current_placement_group()
        handed_on = dict(os.environ) | {SOCKETS_ENV: "/a/folder/of/this/node"}
        ranks = [
            ray.remote(start_rank)
            .options(
                num_cpus=0,
                num_gpus=1,
                runtime_env=ray.get_runtime_context().runtime_env,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=int(index)),
            )
            .remote(handed_on)
            for index in os.environ[BUNDLES_ENV].split(",")
        ]
        return ray.get(ranks, timeout=300)


class Hog:
    """Another run."""

    def ready(self):
        """Whether it has its GPUs."""
        return True


def hog(nodes, hogs):
    """Hold GPUs of raylets."""
    held = []
    for node, gpus in zip(nodes, hogs, strict=True):
        if gpus:
            strategy = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
            held.append(ray.remote(Hog).options(num_gpus=gpus, num_cpus=0, scheduling_strategy=strategy).remote())
    ray.get([each.ready.remote() for each in held], timeout=300)
    return held


def actors_of(runtime, placement):
    """Every rank of the trainer and every engine, and what they say."""
    places = [("trainer", place.rank, place.node, (place.slot,)) for place in placement.ranks]
    trainers = runtime.start_actors(places, sees="all")
    engines = [
        runtime.start_actor(
            role="engine",
            index=place.engine,
            node=place.node,
            slots=place.slots_on(place.node),
            threads=2,
            ranks=place.slots if placement.spans_nodes else (),
        )
        for place in placement.engines
    ]
    for actor in (*trainers, *engines):
        actor.make(Looking, timeout_s=300)
    return {
        "trainers": [actor.call("look", timeout_s=300) for actor in trainers],
        "engines": [actor.call("look", timeout_s=300) for actor in engines],
        "engine_ranks": [actor.call("start_ranks", timeout_s=300) for actor in engines]
        if placement.spans_nodes
        else [],
    }


def environments_of(runtime, placement, recipe, *, folder):
    """Have the ranks of the trainer load a model together; what their environments say of them by then."""
    import torch

    from rl_launcher.quickstart.tiny_model import build
    from rl_launcher.ray import policy
    from rl_launcher.ray.training_worker import TrainerSpec, TrainingWorker

    class Telling(TrainingWorker):
        def environment(self):
            names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
            ranks = torch.ones(1)
            torch.distributed.all_reduce(ranks)
            return {name: os.environ[name] for name in names} | {"met": int(ranks), "node": where()["node"]}

    model, tokenizer = build(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    spec = TrainerSpec(
        policy=recipe.policy, model_name=str(folder / "model"), num_ranks=len(placement.ranks), seed=0, threads=1
    )
    policy.TrainingWorker = Telling
    trained = policy.start_trainers(runtime, placement, spec)
    pending = [actor.submit("environment") for actor in runtime.actors]
    told = [each.result(timeout_s=300) for each in pending]
    trained.close()
    return told


def asked_for_memory(runtime, recipe, memory):
    """What the nodes say, and why a run of a model of a billion weights is refused, if it is."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    gpus_of = {node["NodeID"]: int(node["Resources"].get("GPU", 0)) for node in ray.nodes()}

    def measure(node_id):
        found = measure_node(node_id)
        changed = dict(memory.get(str(gpus_of[node_id]), {}))
        size = changed.pop("gpu_bytes", None)
        gpus = {} if size is None else {str(index): ("A GPU", size) for index in range(gpus_of[node_id])}
        return replace(found, host=f"raylet-{gpus_of[node_id]}", gpus=gpus, **changed)

    measured = [asdict(each) for each in runtime.measure_nodes()]
    with torch.device("meta"):
        shape = {"vocab_size": 10**5, "hidden_size": 10**4, "intermediate_size": 8, "num_hidden_layers": 0}
        model = Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=True))
    try:
        gpus = refuse_small_nodes(runtime, recipe, model, measure=measure)
    except NodeMemoryError as error:
        return {"measured": measured, "lacking": str(error)}
    return {"measured": measured, "gpus": gpus}


def run(task, cluster, nodes, *, folder):
    """One run of the recipe; what is where, or why it was refused."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE)
    overrides = [*task["overrides"], f"cluster.address={cluster.address}"]
    resolved = load_recipe(recipe, schema=Recipe, overrides=overrides).value
    placement = plan_placement(resolved)
    there = look_at_cluster(resolved.cluster)
    assert not ray.is_initialized()
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        raylets = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
        seen = {"there": [node.gpus for node in there], "raylets": raylets}
        held = hog(nodes, task["hogs"]) if "hogs" in task else []
        try:  # connected already, as after its own `ray.init`
            runtime = RayRuntime.start(replace(resolved.cluster, address=None), placement, run_dir=folder)
        except ClusterError as error:
            return {**seen, "refused": str(error), "held": len(held)}
        try:
            if "memory" in task:
                return {**seen, **asked_for_memory(runtime, resolved, task["memory"])}
            if task.get("train"):
                return {**seen, "environments": environments_of(runtime, placement, resolved, folder=folder)}
            gpus = [node.gpus for node in runtime.nodes]
            return {**seen, "gpus": gpus, **actors_of(runtime, placement), "text": runtime.explain()}
        finally:
            runtime.close()
    finally:
        ray.shutdown()


def generate(cluster, *, num_nodes, folder):
    """Refit an engine with a stage on each node twice, and have it and the model itself answer greedily."""
    for shared in ("with_ray", "."):
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent / shared))
    from ray_setup import make_setup

    from rl_generation import Sampling, load_transformers_engine

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    world = make_setup(
        folder, num_engines=1, backend="vllm", colocated=True, device="cuda", stages=num_nodes, nodes=num_nodes
    )
    try:
        prompts = [prompt.tokens for prompt in world.tiny.prompts[:8]]
        sampling = Sampling(max_new_tokens=9, temperature=0.0)
        seen = {"verified": [], "versions": [], "tokens": []}
        for version in range(2):
            world.policy.version = version
            seen["verified"].append(world.weight_sync(version=version).verified)
            rollouts = world.engine.generate(prompts, sampling)
            seen["versions"].append(max(rollout.version for rollout in rollouts))
            seen["tokens"].append([list(rollout.tokens) for rollout in rollouts])
        model, _ = load_transformers_engine(str(folder / "model"), tokenizer=str(folder / "model"))
        return {**seen, "expected": [list(rollout.tokens) for rollout in model.generate(prompts, sampling)]}
    finally:
        world.close()
        ray.shutdown()


def start_raylets(gpus, *, folder, real):
    """A cluster with a raylet for each number of GPUs. Ray gives each 30 seconds to start; some machines need more."""
    # Whatever the raylets' own folder is, `Cluster` notes their address here, and does not make this one.
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)
    while True:
        cluster = Cluster()
        try:
            nodes = [
                cluster.add_node(
                    num_cpus=16,
                    num_gpus=each,
                    include_dashboard=False,
                    temp_dir=folder,
                    env_vars={"CUDA_VISIBLE_DEVICES": str(index)} if real else None,
                )
                for index, each in enumerate(gpus)
            ]
        except Exception as error:
            cluster.shutdown()
            if "timed out during startup" not in str(error):
                raise
        else:
            cluster.wait_for_nodes(timeout=300)
            return cluster, nodes


def main(task):
    """Start the raylets, and one run after the other."""
    with tempfile.TemporaryDirectory(prefix="rl-ray-", ignore_cleanup_errors=True) as short:  # for names of sockets
        real = task.get("generate", False)
        cluster, nodes = start_raylets(task["nodes"], folder=short, real=real)
        try:
            if real:
                print(json.dumps(generate(cluster, num_nodes=len(nodes), folder=Path(task["folder"]))), flush=True)
                return
            for each in task["runs"]:
                print(json.dumps(run(each, cluster, nodes, folder=Path(task["folder"]))), flush=True)
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

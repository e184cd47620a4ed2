"""A trainer's rank and several engines over Ray with the model of `tiny_setup`, for tests of engines."""

import contextlib
import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tiny_setup import TinySetup

from rl_backends import DTensorConfig, OptimizerConfig
from rl_generation.seeding import CallSeeds
from rl_launcher.build.parts import RunEngine
from rl_launcher.quickstart.tiny_model import character_tokenizer
from rl_launcher.ray.build import StartedEngines, start_engines
from rl_launcher.ray.cluster import RayRuntime
from rl_launcher.ray.placement import EnginePlace, Placement, RankPlace
from rl_launcher.ray.policy import RayPolicy, start_trainers
from rl_launcher.ray.training_worker import TrainerSpec
from rl_launcher.schema import (
    AsyncConfig,
    ClusterConfig,
    DataConfig,
    EnvironmentConfig,
    GenerationConfig,
    GRPOStage,
    PolicyConfig,
    Recipe,
    VllmConfig,
)
from rl_launcher.schema.policy import ColocatedConfig, ResourcesConfig
from rl_refit import RefitConfig

PATIENCE_S = 420  # for what takes seconds on an idle machine

ENV = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for logprobs compiles
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

VLLM = {"enforce_eager": True, "max_model_len": 128, "max_num_seqs": 16, "kv_cache_memory_bytes": 32 << 20}


@dataclass(kw_only=True)
class RaySetup:
    """A cluster with `num_engines` engines, and a policy of one rank."""

    tiny: TinySetup
    runtime: RayRuntime
    policy: RayPolicy
    started: StartedEngines
    folder: Path
    events: list = field(default_factory=list)

    @property
    def engine(self):
        """All engines as one; where they share devices, calls enter the phase `generating`."""
        enter = self.started.enter_generating
        if enter is None:
            return self.started.engine
        return RunEngine(self.started.engine, seeds=CallSeeds(0), enter_generating=enter)

    @property
    def weight_sync(self):
        return self.started.weight_sync

    def pids(self):
        """Of the engines' actors, by number."""
        engines = [actor for actor in self.runtime.actors if actor.who.role == "engine"]
        return [actor.who.pid for actor in sorted(engines, key=lambda actor: actor.who.index)]

    def train(self):
        """An optimizer step, as far as an engine can tell; returns the version."""
        self.policy.version += 1
        return self.policy.version

    def close(self):
        with contextlib.suppress(Exception):
            self.engine.close()
        self.runtime.close()


def make_setup(
    folder,
    *,
    num_engines,
    backend="transformers",
    asynchronous=False,
    colocated=False,
    device="cpu",
    stages=1,
    nodes=1,
):
    """Start everything; `folder` takes the model and the logs.

    An engine has `stages` ranks: on one node, or each on another one, with the rank of the trainer on the first.
    """
    tiny = TinySetup.make()
    model = folder / "model"
    tiny.engine.model.save_pretrained(model)
    character_tokenizer().save_pretrained(model)
    recipe = make_recipe(
        folder,
        num_engines=num_engines,
        backend=backend,
        asynchronous=asynchronous,
        colocated=colocated,
        device=device,
        stages=stages,
    )
    if nodes > 1:
        num_slots, engines = (1,) * nodes, [tuple((node, 0) for node in range(nodes))]
    else:
        num_slots = (stages if colocated else num_engines * stages + 1,)
        first = [0 if colocated else index * stages + 1 for index in range(num_engines)]
        engines = [tuple((0, slot + stage) for stage in range(stages)) for slot in first]
    placement = Placement(
        num_slots=num_slots,
        device=device,
        colocated=colocated,
        ranks=(RankPlace(rank=0, node=0, slot=0),),
        engines=tuple(EnginePlace(engine=index, slots=slots) for index, slots in enumerate(engines)),
    )
    runtime = RayRuntime.start(recipe.cluster, placement, run_dir=folder)
    try:
        spec = TrainerSpec(policy=recipe.policy, model_name=str(model), num_ranks=1, seed=0, threads=1)
        policy = start_trainers(runtime, placement, spec)
        events = []
        started = start_engines(
            runtime,
            recipe,
            policy,
            model_name=str(model),
            stop_token_ids=tiny.chat.stop_token_ids,
            pad_token_id=0,
            on_event=lambda name, message, reaction: events.append((name, message, reaction)),
        )
    except BaseException:
        runtime.close()
        raise
    return RaySetup(tiny=tiny, runtime=runtime, policy=policy, started=started, folder=folder, events=events)


def make_recipe(folder, *, num_engines, backend, asynchronous, colocated, device, stages):
    vllm = VllmConfig()
    if backend == "vllm":
        vllm = VllmConfig(**VLLM, async_engine=asynchronous, pipeline_parallel_size=stages)
    apart = ColocatedConfig(enabled=False, resources=ResourcesConfig(gpus_per_node=num_engines * stages))
    return Recipe(
        run_dir=str(folder / "run"),
        policy=PolicyConfig(
            model_name=str(folder / "model"),
            dtensor_cfg=DTensorConfig(device=device),
            generation=GenerationConfig(
                backend=backend,
                max_new_tokens=9,
                vllm_cfg=vllm,
                colocated=ColocatedConfig() if colocated else apart,
            ),
            refit=RefitConfig(deadline_s=60.0, verify="full"),
        ),
        data=DataConfig(source="rl_launcher.quickstart.sort_digits:dataset"),
        env=EnvironmentConfig(reward="rl_launcher.quickstart.sort_digits:reward"),
        cluster=ClusterConfig(
            runtime="ray",
            gpus_per_node=stages if colocated else num_engines * stages + 1,
            env_vars=ENV,
            call_timeout_s=PATIENCE_S,
            start_timeout_s=PATIENCE_S,
        ),
        grpo=GRPOStage(
            max_num_steps=4,
            optimizer=OptimizerConfig(lr=1e-4),
            async_grpo=AsyncConfig(max_staleness=4, weights="in_flight") if asynchronous else None,
        ),
    )


def in_thread(call):
    """Start `call` in a thread; return a function that waits for it, and returns its result or raises its error."""
    box = {}

    def run():
        try:
            box["value"] = call()
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            box["error"] = error

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result():
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "the call has not ended"
        if "error" in box:
            raise box["error"]
        return box["value"]

    return result


def kill(pid):
    os.kill(pid, signal.SIGKILL)


def wait_until(holds):
    """Wait until `holds()`; the clock only decides when to give up."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.02)

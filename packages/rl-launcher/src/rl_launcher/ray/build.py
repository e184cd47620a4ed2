"""The parts of a run on Ray: refuse what is cheap to check, then start the cluster, the ranks and the engines.

This process, the driver, loads no weights and needs no GPU. It has the data, the tokenizer, the environment and the
training loops.
"""

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

from torch import nn

from rl_backends.backend import TrainingBackend
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import pad_token_id
from rl_generation.seeding import CallSeeds
from rl_launcher.build.companions import Companions
from rl_launcher.build.engines import engine_spec
from rl_launcher.build.inputs import closing, read_inputs, tokenize, tokenize_reward_pairs, tokenize_validation
from rl_launcher.build.models import adapters_of, bytes_of, check_teacher, read_skeleton
from rl_launcher.build.parts import NoEngine, NoWeightSync, Parts, RunEngine
from rl_launcher.checks.preflight import KnownModel, check_nodes
from rl_launcher.errors import is_refusal
from rl_launcher.ray.cluster import ClusterError, RayRuntime
from rl_launcher.ray.colocation import ColocatedModel, Colocation, check_colocation
from rl_launcher.ray.dispatch import RayEngine
from rl_launcher.ray.engine_pool import EnginePool, OnEvent
from rl_launcher.ray.node_memory import MeasureNode, measure_node
from rl_launcher.ray.placement import Placement, plan_placement
from rl_launcher.ray.policy import RayPolicy, start_trainers
from rl_launcher.ray.refit import RayWeightSync
from rl_launcher.ray.remote_calls import Actor
from rl_launcher.ray.training_worker import TrainerSpec
from rl_launcher.ray.worker_failures import RemoteError
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import RunDirectory
from rl_observe.health import EventQueue
from rl_refit.refit import CountedWeightSync

THREADS = 64
"""Methods of an engine's actor that run at the same time: calls that wait in line, and checks whether it is alive."""


def build_on_ray(recipe: Recipe, *, run_dir: Path, objects: Objects = NO_OBJECTS) -> Parts:
    """Make every part; if one refuses or fails, all processes are ended.

    Args:
        recipe: of the run.
        run_dir: a folder that all nodes see: logs of the processes go there, and a model that a function makes.
        objects: what was given as a Python object instead of a string of the recipe.

    Raises:
        ValueError: whatever a part refuses; `PlacementError` and `ClusterError` come before any weights are loaded.
        ClusterError: also a rank or an engine that died, or was too slow, while it started.
    """
    placement = plan_placement(recipe)
    check_colocation(recipe)
    inputs = read_inputs(recipe, objects)
    skeleton = read_skeleton(
        recipe.policy,
        seed=recipe.seed,
        key="policy.model_name",
        padded_vocabulary=recipe.policy.padded_vocabulary,
        folder=run_dir / "initial_model",
        objects=objects,
    )
    tokenized = tokenize(recipe, inputs, model=skeleton.model, tokenizer=skeleton.tokenizer)
    reward_pairs = tokenize_reward_pairs(recipe, inputs, tokenized, model=skeleton.model)
    validation = tokenize_validation(recipe, inputs, tokenized, model=skeleton.model)
    teacher_skeleton = None
    if recipe.distill is not None:
        named, key, folder = recipe.distill.teacher, "distill.teacher.model_name", run_dir / "initial_teacher"
        teacher_skeleton = read_skeleton(named, seed=recipe.seed, key=key, padded_vocabulary=True, folder=folder)
        check_teacher(named, student=skeleton.tokenizer, teacher=teacher_skeleton.tokenizer)
    spec = TrainerSpec(
        policy=recipe.policy,
        model_name=skeleton.name,
        seed=recipe.seed,
        num_ranks=len(placement.ranks),
        threads=recipe.cluster.cpus_per_rank if recipe.cpu_threads is None else recipe.cpu_threads,
        profiler=recipe.logger.profiler,
        profile_folder=str(RunDirectory(run_dir.absolute()).profile),
    )
    events = EventQueue()
    with _refused_by_ray():
        runtime = RayRuntime.start(recipe.cluster, placement, run_dir=run_dir)
    started: "StartedEngines | None" = None
    gpus: list[tuple[str, int]] = []
    try:
        if recipe.cluster.address is not None or placement.num_nodes > 1:  # else preflight has looked at this machine
            gpus = refuse_small_nodes(runtime, recipe, skeleton.model)
        policy = start_trainers(runtime, placement, spec)
        started = StartedEngines(policy=cast("TrainingBackend", policy))  # its methods are the rows of POLICY_METHODS
        if recipe.generates:
            started = start_engines(
                runtime,
                recipe,
                policy,
                model_name=skeleton.name,
                stop_token_ids=tokenized.chat.stop_token_ids,
                pad_token_id=pad_token_id(skeleton.tokenizer, tokenized.chat.stop_token_ids),
                on_event=events.add,
            )
        teacher = None
        if recipe.distill is not None and teacher_skeleton is not None:
            load_teacher: Any = started.policy.load_teacher  # type: ignore[attr-defined]
            teacher = load_teacher(
                teacher_skeleton.name,
                training={
                    "optimizer": recipe.distill.optimizer,
                    "num_steps": recipe.distill.max_num_steps,
                    "temperature": recipe.policy.generation.temperature,
                },
                revision=teacher_skeleton.revision,
                trust_remote_code=recipe.distill.teacher.trust_remote_code,
            )
        runtime.write_processes()
    except BaseException as error:  # Ctrl-C, too: no process may be left
        try:
            closing(inputs.environment, None if started is None else started.engine, runtime)()
        except Exception as second:  # noqa: BLE001 - the user must see the first one
            error.add_note(f"and not closed cleanly: {second}")
        if isinstance(error, RemoteError) and not isinstance(error, ValueError):
            raise ClusterError(str(error)) from error  # nothing was trained, so it is a refusal
        with _refused_by_ray():
            raise
    return Parts(
        policy=started.policy,
        selection=inputs.selection,
        engine=RunEngine(started.engine, seeds=CallSeeds(recipe.seed), enter_generating=started.enter_generating),
        weight_sync=started.weight_sync,
        weight_bytes=bytes_of(recipe.policy, skeleton.model),
        environment=inputs.environment,
        teacher=teacher,
        companions=Companions(load=cast("Any", started.policy).load_companion),
        data=tokenized,
        reward_pairs=reward_pairs,
        validation=validation,
        tokenizer=skeleton.tokenizer,
        placement=runtime.explain(),
        skeleton=without_weights(skeleton.model),
        gpus=gpus,
        close=closing(inputs.environment, started.engine, started.policy, runtime),
        events=events,
        figures=lambda: {
            **(started.engine.metrics() if isinstance(started.engine, RayEngine) else {}),
            **policy.figures(),
        },
        reached=(lambda _, __: None) if recipe.logger.profiler is None else policy.reached,
    )


def refuse_small_nodes(
    runtime: RayRuntime, recipe: Recipe, model: nn.Module, *, measure: MeasureNode = measure_node
) -> list[tuple[str, int]]:
    """Ask the nodes for their memory before anything is loaded; return name and bytes of each GPU of the run.

    Args:
        runtime: that has reserved them.
        recipe: of the run.
        model: the policy; its weights are not looked at.
        measure: as in `RayRuntime.measure_nodes`.

    Raises:
        NodeMemoryError: one has certainly not enough.
    """
    nodes = runtime.measure_nodes(measure)
    gpus = [node.of(there.gpus) if there.gpus else [] for node, there in zip(nodes, runtime.nodes, strict=True)]
    known = KnownModel(
        name=recipe.policy.model_name,
        parameters=sum(each.numel() for each in model.parameters()),
        adapters=adapters_of(recipe.policy, without_weights(model)),
    )
    check_nodes(recipe, model=known, placement=runtime.placement, nodes=nodes, gpus=gpus)
    return [gpu for of_node in gpus for gpu in of_node]


@contextmanager
def _refused_by_ray() -> Iterator[None]:
    """Raise what Ray raises in a form of its own (bare exceptions, RPC errors) as a `ClusterError`.

    Nothing is trained yet, so it is a refusal; an error that was not raised within Ray's code passes.
    """
    try:
        yield
    except Exception as error:
        frames = [*traceback.walk_tb(error.__traceback__)]
        by_ray = bool(frames) and str(frames[-1][0].f_globals.get("__name__", "")).partition(".")[0] == "ray"
        if is_refusal(error) or not (by_ray or type(error).__module__.partition(".")[0] == "ray"):
            raise
        said = " ".join(str(error).split())
        raise ClusterError(
            f"Ray failed while the run was being started: {type(error).__name__}: {said[:600]}. Start it again; if it "
            f"stays so, raise cluster.start_timeout_s, or look into Ray's own logs"
        ) from error


class StartedEngines(NamedTuple):
    """The engines, and the policy as it is used beside them."""

    policy: TrainingBackend
    """The policy; it frees shared devices for the engines, and takes them back."""
    engine: RayEngine | NoEngine = NoEngine()
    enter_generating: Callable[[], None] | None = None
    """Must be called before `engine` generates, where it shares devices; `RunEngine` does it."""
    weight_sync: CountedWeightSync = NoWeightSync()


def start_engines(
    runtime: RayRuntime,
    recipe: Recipe,
    policy: RayPolicy,
    *,
    model_name: str,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    on_event: OnEvent,
) -> StartedEngines:
    """Start the recipe's engines in their places, without weights, and connect them with the policy.

    `model_name` is a folder that all nodes see, or a hub id. `on_event` is called when an engine dies.

    Raises:
        ValueError: what an engine or the recipe's combination refuses.
        RemoteError: an engine did not start.
    """
    placement = runtime.placement
    moves = placement.colocated and placement.device == "cuda"
    spec = engine_spec(
        recipe,
        model_name=model_name,
        stop_token_ids=stop_token_ids,
        pad_token_id=pad_token_id,
        dtypes=policy.dtypes(),
        sleeps=moves,
        executor=executor_of(placement),
    )

    def start_actor(index: int) -> Actor:
        place = placement.engines[index]
        return runtime.start_actor(
            role="engine",
            index=index,
            node=place.node,
            slots=place.slots_on(place.node),
            threads=THREADS,
            ranks=place.slots if placement.spans_nodes else (),
        )

    engines = EnginePool(
        spec=spec,
        start_actor=start_actor,
        hosts=[runtime.nodes[place.node].ip for place in placement.engines],
        max_restarts=recipe.policy.generation.max_restarts,
        start_timeout_s=recipe.cluster.start_timeout_s,
        call_timeout_s=recipe.cluster.call_timeout_s,
        hang_timeout_s=recipe.cluster.hang_timeout_s,
        on_event=on_event,
        on_change=runtime.write_processes,
    )
    sync = RayWeightSync(
        policy,
        engines,
        recipe.policy.refit,
        one_node=len(runtime.nodes) == 1,
    )
    used_policy: Any = policy
    enter_generating: Callable[[], None] | None = None
    if placement.colocated:
        colocation = Colocation(cast("TrainingBackend", policy), engines, moves=moves)
        colocation.make_room()
        used_policy = ColocatedModel(policy, colocation, offload_references=moves)
        enter_generating = partial(colocation.enter, "generating")
        sync.enter_refitting, sync.healing = partial(colocation.enter, "refitting"), colocation.healing
    engines.start()
    return StartedEngines(
        policy=cast("TrainingBackend", used_policy),  # its methods are the rows of POLICY_METHODS
        engine=RayEngine(engines),
        enter_generating=enter_generating,
        weight_sync=sync,
    )


def executor_of(placement: Placement) -> Literal["mp", "ray"] | None:
    """How vLLM starts the ranks of an engine; None where it has one.

    Left to itself it would take Ray's executor in every actor of a placement group, whose bundles must then have one
    GPU each. All engines are made alike, so one on several nodes decides for all.
    """
    if placement.spans_nodes:
        return "ray"
    return "mp" if any(len(place.slots) > 1 for place in placement.engines) else None

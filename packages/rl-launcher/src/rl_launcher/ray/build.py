"""The parts of a run on Ray: what is cheap is refused first; then the cluster, the ranks and the engines start.

This process, the driver, loads no weights and needs no GPU. It holds the data, the tokenizer, the judge and the loops.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rl_launcher.inputs import Inputs, TokenizedData, closing, read_inputs, tokenize
from rl_launcher.load_model import check_teacher
from rl_launcher.ray.cluster import ClusterError, RayRuntime
from rl_launcher.ray.colocation import check_turns
from rl_launcher.ray.failures import RemoteError
from rl_launcher.ray.placement import Placement, plan_placement
from rl_launcher.ray.policy import Outline, outline_of, start_trainers
from rl_launcher.ray.start_engines import Served, serve
from rl_launcher.ray.training_worker import TrainerSpec
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe
from rl_launcher.seeding import SeededEngine
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import RunDirectory
from rl_observe.health import EventQueue

__all__ = ["build_on_ray"]


def build_on_ray(recipe: Recipe, *, run_dir: Path, objects: Objects = NO_OBJECTS) -> Parts:
    """Make every part; where one refuses or fails, no process is left.

    Args:
        recipe: of the run.
        run_dir: a folder that all machines see: logs of the processes go there, and a model that a function makes.

    Raises:
        ValueError: whatever a part refuses; `PlacementError` and `ClusterError` come before any weights are loaded.
        ClusterError: also a rank or an engine that died, or was too slow, while it started.
    """
    placement = plan_placement(recipe)
    check_turns(recipe)
    inputs = read_inputs(recipe, objects)
    outline = outline_of(
        recipe.policy,
        seed=recipe.seed,
        key="policy.model_name",
        padded_vocabulary=recipe.policy.padded_vocabulary,
        folder=run_dir / "initial_model",
        objects=objects,
    )
    tokenized = tokenize(recipe, inputs, model=outline.model, tokenizer=outline.tokenizer)
    teacher = _teacher_outline(recipe, outline, folder=run_dir / "initial_teacher")
    events = EventQueue()
    runtime = RayRuntime.start(recipe.cluster, placement, run_dir=run_dir)
    served: Served | None = None
    try:
        policy = start_trainers(runtime, placement, _trainer_spec(recipe, outline, placement, run_dir=run_dir))
        served = serve(
            runtime,
            recipe,
            policy,
            model_name=outline.name,
            stop_token_ids=tokenized.chat.stop_token_ids,
            pad_token_id=tokenized.pad_token_id,
            on_event=events.add,
        )
        taught = _load_teacher(recipe, served, teacher)
        runtime.write_processes()
    except BaseException as error:  # a person's Ctrl-C, too: no process may be left
        try:
            closing(inputs.environment, None if served is None else served.engine, runtime)()
        except Exception as second:  # noqa: BLE001 - the first is what the user must hear
            error.add_note(f"and not closed cleanly: {second}")
        if isinstance(error, RemoteError) and not isinstance(error, ValueError):
            raise ClusterError(str(error)) from error  # nothing was trained, so it is a refusal
        raise
    return _parts(
        recipe,
        inputs,
        tokenized,
        served=served,
        runtime=runtime,
        outline=outline,
        teacher=taught,
        events=events,
        reached=_quiet if recipe.logger.profiler is None else policy.reached,
    )


def _parts(
    recipe: Recipe,
    inputs: Inputs,
    tokenized: TokenizedData,
    *,
    served: Served,
    runtime: RayRuntime,
    outline: Outline,
    teacher: Any,
    events: EventQueue,
    reached: Callable[[str, int], None],
) -> Parts:
    engine: Any = served.engine  # the engines as one, or those that take turns
    return Parts(
        policy=served.policy,
        selection=inputs.selection,
        engine=SeededEngine(served.engine, seed=recipe.seed),
        weight_sync=served.weight_sync,
        environment=inputs.environment,
        teacher=teacher,
        chat=tokenized.chat,
        tokenizer=outline.tokenizer,
        prompts=tokenized.prompts,
        held_out=tokenized.held_out,
        unasked=tokenized.unasked,
        demonstrations=tokenized.demonstrations,
        held_out_demonstrations=tokenized.held_out_demonstrations,
        pairs=tokenized.pairs,
        skipped=tokenized.skipped,
        placement=runtime.explain(),
        close=closing(inputs.environment, served.engine, served.policy, runtime),
        events=events,
        figures=engine.metrics,
        reached=reached,
    )


def _quiet(_: str, __: int) -> None:
    """Nobody records anything."""


def _trainer_spec(recipe: Recipe, outline: Outline, placement: Placement, *, run_dir: Path) -> TrainerSpec:
    return TrainerSpec(
        policy=recipe.policy,
        model_name=outline.name,
        seed=recipe.seed,
        num_ranks=len(placement.ranks),
        threads=recipe.cluster.cpus_per_rank if recipe.cpu_threads is None else recipe.cpu_threads,
        profiler=recipe.logger.profiler,
        profile_folder=str(RunDirectory(run_dir.absolute()).profile),
    )


def _teacher_outline(recipe: Recipe, policy: Outline, *, folder: Path) -> Outline | None:
    if recipe.distill is None:
        return None
    config = recipe.distill.teacher
    key = "distill.teacher.model_name"
    outline = outline_of(config, seed=recipe.seed, key=key, padded_vocabulary=True, folder=folder)
    check_teacher(config, student=policy.tokenizer, teacher=outline.tokenizer)
    return outline


def _load_teacher(recipe: Recipe, served: Served, outline: Outline | None) -> Any:
    if recipe.distill is None or outline is None:
        return None
    policy: Any = served.policy  # the ranks', or that which takes turns with the engines
    return policy.load_teacher(
        outline.name,
        training={
            "optimizer": recipe.distill.optimizer,
            "num_steps": recipe.distill.max_num_steps,
            "temperature": recipe.policy.generation.temperature,
        },
        revision=outline.revision,
        trust_remote_code=recipe.distill.teacher.trust_remote_code,
    )

"""The parts of a run on Ray: refuse what is cheap to check, then start the cluster, the ranks and the engines.

This process, the driver, loads no weights and needs no GPU. It has the data, the tokenizer, the environment and the
training loops.
"""

from pathlib import Path
from typing import Any

from rl_generation.seeding import CallSeeds
from rl_launcher.engine_middleware import RunEngine
from rl_launcher.inputs import closing, read_inputs, tokenize
from rl_launcher.load_model import check_teacher, pad_token_id
from rl_launcher.ray.cluster import ClusterError, RayRuntime
from rl_launcher.ray.colocation import check_colocation
from rl_launcher.ray.model_skeleton import ModelSkeleton, read_skeleton
from rl_launcher.ray.placement import plan_placement
from rl_launcher.ray.policy import start_trainers
from rl_launcher.ray.start_engines import StartedEngines, start_engines
from rl_launcher.ray.training_worker import TrainerSpec
from rl_launcher.ray.worker_failures import RemoteError
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import RunDirectory
from rl_observe.health import EventQueue


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
    teacher_skeleton = _teacher_skeleton(recipe, skeleton, folder=run_dir / "initial_teacher")
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
    runtime = RayRuntime.start(recipe.cluster, placement, run_dir=run_dir)
    started: StartedEngines | None = None
    try:
        policy = start_trainers(runtime, placement, spec)
        started = start_engines(
            runtime,
            recipe,
            policy,
            model_name=skeleton.name,
            stop_token_ids=tokenized.chat.stop_token_ids,
            pad_token_id=pad_token_id(skeleton.tokenizer, tokenized.chat.stop_token_ids),
            on_event=events.add,
        )
        teacher = _load_teacher(recipe, started.policy, teacher_skeleton)
        runtime.write_processes()
    except BaseException as error:  # Ctrl-C, too: no process may be left
        try:
            closing(inputs.environment, None if started is None else started.engine, runtime)()
        except Exception as second:  # noqa: BLE001 - the user must see the first one
            error.add_note(f"and not closed cleanly: {second}")
        if isinstance(error, RemoteError) and not isinstance(error, ValueError):
            raise ClusterError(str(error)) from error  # nothing was trained, so it is a refusal
        raise
    return Parts(
        policy=started.policy,
        selection=inputs.selection,
        engine=RunEngine(started.engine, seeds=CallSeeds(recipe.seed), enter_generating=started.enter_generating),
        weight_sync=started.weight_sync,
        environment=inputs.environment,
        teacher=teacher,
        chat=tokenized.chat,
        tokenizer=skeleton.tokenizer,
        prompts=tokenized.prompts,
        held_out=tokenized.held_out,
        unasked=tokenized.held_out_too_long,
        demonstrations=tokenized.demonstrations,
        held_out_demonstrations=tokenized.held_out_demonstrations,
        pairs=tokenized.pairs,
        skipped=tokenized.skipped,
        placement=runtime.explain(),
        close=closing(inputs.environment, started.engine, started.policy, runtime),
        events=events,
        figures=started.engine.metrics,
        reached=(lambda _, __: None) if recipe.logger.profiler is None else policy.reached,
    )


def _teacher_skeleton(recipe: Recipe, policy: ModelSkeleton, *, folder: Path) -> ModelSkeleton | None:
    if recipe.distill is None:
        return None
    config = recipe.distill.teacher
    key = "distill.teacher.model_name"
    teacher = read_skeleton(config, seed=recipe.seed, key=key, padded_vocabulary=True, folder=folder)
    check_teacher(config, student=policy.tokenizer, teacher=teacher.tokenizer)
    return teacher


def _load_teacher(recipe: Recipe, policy: Any, teacher: ModelSkeleton | None) -> Any:
    if recipe.distill is None or teacher is None:
        return None
    return policy.load_teacher(
        teacher.name,
        training={
            "optimizer": recipe.distill.optimizer,
            "num_steps": recipe.distill.max_num_steps,
            "temperature": recipe.policy.generation.temperature,
        },
        revision=teacher.revision,
        trust_remote_code=recipe.distill.teacher.trust_remote_code,
    )

"""The parts of a run, from a recipe: policy, engine, refit, environment, data. Nothing runs yet.

What can be refused cheaply is refused first: the reward and the data are read before any model is loaded. Here they are
made in this process; on Ray, `rl_launcher.ray.build` makes them.
"""

import copy
from dataclasses import asdict
from pathlib import Path

from rl_generation import Sampling
from rl_generation.seeding import CallSeeds
from rl_launcher.engine_middleware import RunEngine
from rl_launcher.engines import dtypes_of, engine_spec, make_in_process
from rl_launcher.inputs import closing, read_inputs, tokenize
from rl_launcher.load_model import load_policy, load_teacher, named_by_key
from rl_launcher.run_parts import Parts
from rl_launcher.schema import GenerationConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_launcher.weight_sync import WeightSync, weight_source
from rl_refit import Refit

__all__ = ["build", "sampling"]


def build(recipe: Recipe, *, run_dir: Path | None = None, objects: Objects = NO_OBJECTS) -> Parts:
    """Make every part, or refuse with the one reason.

    Args:
        recipe: of the run.
        run_dir: where its processes write; None takes the recipe's.
        objects: what was given as a Python object instead of a string of the recipe.

    Raises:
        ValueError: whatever a part refuses: see `ModelError`, `PlanError`, `DataError`, `ImportStringError`.
    """
    if recipe.cluster.runtime == "ray":
        from rl_launcher.ray.build import build_on_ray

        return build_on_ray(recipe, run_dir=Path(recipe.run_dir) if run_dir is None else run_dir, objects=objects)
    return _build_in_process(recipe, objects)


def _build_in_process(recipe: Recipe, objects: Objects) -> Parts:
    inputs = read_inputs(recipe, objects)
    model, tokenizer = load_policy(recipe.policy, seed=recipe.seed, objects=objects)
    tokenized = tokenize(recipe, inputs, model=model, tokenizer=tokenizer)
    teacher = load_teacher(recipe, selection=inputs.selection, tokenizer=tokenizer)
    own = copy.deepcopy(model)  # the policy takes the model over, and the engine has weights of its own
    with named_by_key():
        policy = inputs.selection.make(model, seed=recipe.seed)
    spec = engine_spec(
        recipe,
        model_name=recipe.policy.model_name,
        stop_token_ids=tokenized.chat.stop_token_ids,
        pad_token_id=tokenized.pad_token_id,
        dtypes=dtypes_of(policy.shards()),
    )
    made = make_in_process(spec, model=own)
    refit = Refit(weight_source(policy), made.sink, **asdict(recipe.policy.refit))
    return Parts(
        policy=policy,
        selection=inputs.selection,
        engine=RunEngine(made.engine, seeds=CallSeeds(recipe.seed)),
        weight_sync=WeightSync(refit, merge=None if inputs.selection.adapters is None else policy.shards),
        environment=inputs.environment,
        teacher=teacher,
        chat=tokenized.chat,
        tokenizer=tokenizer,
        prompts=tokenized.prompts,
        held_out=tokenized.held_out,
        unasked=tokenized.unasked,
        demonstrations=tokenized.demonstrations,
        held_out_demonstrations=tokenized.held_out_demonstrations,
        pairs=tokenized.pairs,
        skipped=tokenized.skipped,
        placement="everything is in this process",
        close=closing(inputs.environment, made, teacher, policy),
    )


def sampling(config: GenerationConfig, *, greedy: bool = False, seed: int | None = None) -> Sampling:
    """How the engine chooses tokens: as in training, or the likeliest ones."""
    temperature = 0.0 if greedy else config.temperature
    return Sampling(max_new_tokens=config.max_new_tokens, temperature=temperature, seed=seed)

"""Make the parts of a run from a recipe: policy, engine, refit, environment, data. Nothing is trained yet.

What can be refused cheaply is refused first: the reward and the data are read before any model is loaded. This file
makes the parts in this process; `rl_launcher.ray.build` makes them on Ray.
"""

import copy
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rl_backends import BackendSelection
from rl_backends.backend import Backend
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import pad_token_id
from rl_generation.engine import RequestEngine
from rl_generation.seeding import CallSeeds
from rl_launcher.build.companions import Companions
from rl_launcher.build.engines import dtypes_of, engine_spec, make_in_process, weight_source
from rl_launcher.build.inputs import closing, read_inputs, tokenize, tokenize_reward_pairs, tokenize_validation
from rl_launcher.build.models import bytes_of, load_policy, load_teacher, named_by_key
from rl_launcher.build.parts import NoEngine, NoWeightSync, Parts, RunEngine
from rl_launcher.build.remote_engines import RemoteWeightSync, ServedEngines, describe_remote, read_shared_token
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, refuse_missing_objects
from rl_observe.health import EventQueue
from rl_refit import CountedRefit, Refit
from rl_refit.refit import CountedWeightSync


def build(recipe: Recipe, *, run_dir: Path | None = None, objects: Objects = NO_OBJECTS) -> Parts:
    """Make every part, or refuse with one reason.

    Args:
        recipe: of the run.
        run_dir: where the processes of the run write; None takes the recipe's.
        objects: Python objects instead of what the recipe names as strings.

    Raises:
        ValueError: what a part refuses: `ModelError`, `PlanError`, `DataError`, `ImportStringError` or `Refusal`.
    """
    refuse_missing_objects(recipe, objects, remedy="rl_launcher.train(recipe, {})")
    if recipe.cluster.runtime == "ray":
        from rl_launcher.ray.build import build_on_ray

        return build_on_ray(recipe, run_dir=Path(recipe.run_dir) if run_dir is None else run_dir, objects=objects)
    # Cheap: the backend is installed, rewards can be imported, rows can be read and have the columns they need.
    inputs = read_inputs(recipe, objects)
    remote, token = recipe.policy.generation.remote, read_shared_token(recipe)

    # The models and their tokens.
    model, tokenizer = load_policy(recipe.policy, seed=recipe.seed, objects=objects)
    tokenized = tokenize(recipe, inputs, model=model, tokenizer=tokenizer)
    reward_pairs = tokenize_reward_pairs(recipe, inputs, tokenized, model=model)
    validation = tokenize_validation(recipe, inputs, tokenized, model=model)
    teacher = load_teacher(recipe, selection=inputs.selection, tokenizer=tokenizer)
    weight_bytes = bytes_of(recipe.policy, model)
    # The policy takes `model` over, and the engine has weights of its own.
    skeleton = without_weights(model)
    engine_model = copy.deepcopy(model) if recipe.has_local_engine else None
    with named_by_key(recipe.policy):
        policy = inputs.selection.make(model, seed=recipe.seed)

    # The engine, and the way of the policy's weights into it, where responses are sampled.
    engine: RequestEngine = NoEngine()
    weight_sync: CountedWeightSync = NoWeightSync()
    made: Any = None
    events, adapts = EventQueue(), inputs.selection.adapters is not None  # shards are merged copies then, made anew
    with ExitStack() as unfinished:
        unfinished.callback(policy.close)
        if remote is not None and token is not None:
            ending = tokenized.chat.stop_token_ids
            engine = served = ServedEngines(remote, tokenizer=tokenizer, stop_token_ids=ending)
            weight_sync = made = RemoteWeightSync(
                policy, remote, recipe.policy.refit, token=token, refreshes=adapts, engines=served, events=events
            )
        elif recipe.generates:
            spec = engine_spec(
                recipe,
                model_name=recipe.policy.model_name,
                stop_token_ids=tokenized.chat.stop_token_ids,
                pad_token_id=pad_token_id(tokenizer, tokenized.chat.stop_token_ids),
                dtypes=dtypes_of(policy.shards()),
            )
            made = make_in_process(spec, model=engine_model, tokenizer=tokenizer)
            refit = Refit(weight_source(policy), made.sink, **asdict(recipe.policy.refit))
            engine, weight_sync = made.engine, CountedRefit(refit, refresh=policy.shards if adapts else None)
        unfinished.pop_all()
    companions = Companions(load=partial(_load_companion, inputs.selection))
    return Parts(
        policy=policy,
        selection=inputs.selection,
        engine=RunEngine(engine, seeds=CallSeeds(recipe.seed)),
        weight_sync=weight_sync,
        weight_bytes=weight_bytes,
        environment=inputs.environment,
        teacher=teacher,
        companions=companions,
        data=tokenized,
        reward_pairs=reward_pairs,
        validation=validation,
        tokenizer=tokenizer,
        skeleton=skeleton,
        placement="everything is in this process" if remote is None else describe_remote(remote),
        close=closing(inputs.environment, engine if remote else None, made, teacher, companions, policy),
        events=events,
    )


def _load_companion(selection: BackendSelection, folder: Path, **options: Any) -> Backend:
    return selection.without_adapters().from_pretrained(str(folder), head="sequence_classification", **options)

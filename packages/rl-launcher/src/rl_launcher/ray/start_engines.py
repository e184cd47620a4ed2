"""The engines of a recipe on Ray, with the way of weights into them: made, started, and tied to the policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl_generation import TrainingEngineSpec
from rl_launcher.engines import engine_spec
from rl_launcher.ray.cluster import RayRuntime
from rl_launcher.ray.colocation import TurnEngine, TurnPolicy, Turns, TurnSync, check_turns
from rl_launcher.ray.engine_pool import RayEngine
from rl_launcher.ray.engines import EngineGroup, EngineLimits, OnEvent, quiet
from rl_launcher.ray.policy import RayPolicy
from rl_launcher.ray.refit import RayWeightSync
from rl_launcher.ray.remote_calls import Actor
from rl_launcher.run_parts import ServingEngine, TrainedPolicy, WeightSync
from rl_launcher.schema import Recipe

__all__ = ["Served", "serve"]

THREADS = 64
"""Methods of an engine's actor at once: callers that wait for their turn, and looks at whether it lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a run uses in the place of the policy, and what it samples from."""

    policy: TrainedPolicy
    """The policy, which takes turns with the engines where they share devices."""

    engine: ServingEngine
    """All engines as one."""

    weight_sync: WeightSync
    """From the one into the other."""


def serve(
    runtime: RayRuntime,
    recipe: Recipe,
    policy: RayPolicy,
    *,
    model_name: str,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    on_event: OnEvent | None = None,
) -> Served:
    """Start the recipe's engines in their places, without weights.

    Args:
        runtime: The cluster, with its placement.
        recipe: The run's.
        policy: The trainer's ranks, loaded.
        model_name: A folder that all machines see, or a hub id.
        stop_token_ids: Tokens that end an answer.
        pad_token_id: Any token.
        on_event: Told of engines that die, with the reaction.

    Raises:
        ValueError: what an engine or the recipe's combination refuses.
        RemoteError: an engine did not start.
    """
    check_turns(recipe)
    placement = runtime.placement
    moves = placement.colocated and placement.device == "cuda"
    spec = engine_spec(
        recipe,
        model_name=model_name,
        stop_token_ids=stop_token_ids,
        pad_token_id=pad_token_id,
        dtypes=policy.dtypes(),
        sleeps=moves,
    )
    engines = _engines(runtime, recipe, spec, on_event=on_event or quiet)
    hosts = [runtime.nodes[place.node].ip for place in placement.ranks]
    if not placement.colocated:
        engines.start()
        sync = RayWeightSync(policy, engines, recipe.policy.refit, policy_hosts=hosts)
        return Served(policy=policy, engine=RayEngine(engines), weight_sync=sync)
    movable: Any = policy
    turns = Turns(movable, engines, moves=moves)
    turns.begin()
    engines.start()
    sync = RayWeightSync(policy, engines, recipe.policy.refit, policy_hosts=hosts, healing=turns.healing)
    return Served(
        policy=TurnPolicy(policy, turns, offload_reference=moves),
        engine=TurnEngine(RayEngine(engines), turns),
        weight_sync=TurnSync(sync, turns),
    )


def _engines(runtime: RayRuntime, recipe: Recipe, spec: TrainingEngineSpec, *, on_event: OnEvent) -> EngineGroup:
    places = runtime.placement.engines

    def start_actor(index: int) -> Actor:
        place = places[index]
        return runtime.start_actor(role="engine", index=index, node=place.node, slots=place.slots, threads=THREADS)

    return EngineGroup(
        spec=spec,
        start_actor=start_actor,
        hosts=[runtime.nodes[place.node].ip for place in places],
        limits=EngineLimits(
            max_restarts=recipe.policy.generation.max_restarts,
            start_timeout_s=recipe.cluster.start_timeout_s,
            call_timeout_s=recipe.cluster.call_timeout_s,
        ),
        on_event=on_event,
        on_change=runtime.write_processes,
    )

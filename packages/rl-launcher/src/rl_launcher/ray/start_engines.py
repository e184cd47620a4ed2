"""Starts a recipe's engines on Ray, and connects them with the policy: refits, and colocation if they share devices."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rl_launcher.engines import engine_spec
from rl_launcher.ray.cluster import RayRuntime
from rl_launcher.ray.colocation import ColocatedModel, Colocation, check_colocation
from rl_launcher.ray.dispatch import RayEngine
from rl_launcher.ray.engine_pool import EngineLimits, EnginePool, OnEvent, ignore_event
from rl_launcher.ray.policy import RayPolicy
from rl_launcher.ray.refit import RayWeightSync
from rl_launcher.ray.remote_calls import Actor
from rl_launcher.run_parts import TrainedPolicy, WeightSync
from rl_launcher.schema import Recipe

THREADS = 64
"""Methods of an engine's actor that run at the same time: calls that wait in line, and checks whether it is alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedEngines:
    """The engines, and the policy as it is used beside them."""

    policy: TrainedPolicy
    """The policy; it frees shared devices for the engines, and takes them back."""
    engine: RayEngine
    """All engines as one."""
    enter_generating: Callable[[], None] | None
    """Must be called before `engine` generates, where it shares devices; `RunEngine` does it."""
    weight_sync: WeightSync
    """From the policy into the engines."""


def start_engines(
    runtime: RayRuntime,
    recipe: Recipe,
    policy: RayPolicy,
    *,
    model_name: str,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    on_event: OnEvent = ignore_event,
) -> StartedEngines:
    """Start the recipe's engines in their places, without weights.

    Args:
        runtime: the cluster, with its placement.
        recipe: of the run.
        policy: the trainer's ranks, loaded.
        model_name: a folder that all nodes see, or a hub id.
        stop_token_ids: tokens that end a response.
        pad_token_id: any token.
        on_event: called when an engine dies, with the reaction.

    Raises:
        ValueError: what an engine or the recipe's combination refuses.
        RemoteError: an engine did not start.
    """
    check_colocation(recipe)
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

    def start_actor(index: int) -> Actor:
        place = placement.engines[index]
        return runtime.start_actor(role="engine", index=index, node=place.node, slots=place.slots, threads=THREADS)

    engines = EnginePool(
        spec=spec,
        start_actor=start_actor,
        hosts=[runtime.nodes[place.node].ip for place in placement.engines],
        limits=EngineLimits(
            max_restarts=recipe.policy.generation.max_restarts,
            start_timeout_s=recipe.cluster.start_timeout_s,
            call_timeout_s=recipe.cluster.call_timeout_s,
        ),
        on_event=on_event,
        on_change=runtime.write_processes,
    )
    hosts = [runtime.nodes[place.node].ip for place in placement.ranks]
    used_policy: Any = policy
    enter_generating: Callable[[], None] | None = None
    if placement.colocated:
        colocation = Colocation(policy, engines, moves=moves)
        colocation.make_room()
        used_policy = ColocatedModel(policy, colocation, offload_references=moves)
        enter_generating = lambda: colocation.enter("generating")  # noqa: E731 - one line of glue
        sync = RayWeightSync(
            policy,
            engines,
            recipe.policy.refit,
            policy_hosts=hosts,
            enter_refitting=lambda: colocation.enter("refitting"),
            healing=colocation.healing,
        )
    else:
        sync = RayWeightSync(policy, engines, recipe.policy.refit, policy_hosts=hosts)
    engines.start()
    return StartedEngines(
        policy=cast("TrainedPolicy", used_policy),  # its methods are the rows of POLICY_METHODS
        engine=RayEngine(engines),
        enter_generating=enter_generating,
        weight_sync=sync,
    )

"""Middleware between a training loop and its engine, composed in one place.

The order matters, from the outermost layer to the engine:

    gated       asynchronous GRPO: a call waits while a refit needs the engine for itself
    timed       each call is a span in its thread's lane of the trace; waiting at the gate is not part of it
    seeded      a call without a seed gets the next seed of the run
    colocated   where trainer and engine share devices, the engine is woken and the policy offloaded

`RunEngine` is the engine that a run's parts hold; `RunEngine.collecting` adds the first two layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from rl_algorithms.background_collection import GatedEngine
from rl_algorithms.contracts import Engine
from rl_algorithms.replay import ReplayBuffer
from rl_generation import Rollout, Sampling
from rl_generation.seeding import CallSeeds
from rl_observe import SpanLog

__all__ = ["Middleware", "RunEngine", "ServingEngine", "colocated", "compose", "gated", "seeded", "timed"]

Middleware = Callable[[Engine[Sampling]], Engine[Sampling]]


class ServingEngine(Protocol):
    """The engine that responds to prompts: one of rl_generation, or several of them on Ray."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """One rollout a prompt, in order; `sampling` for all of them, or one each."""

    def explain(self) -> str:
        """Which engine it is, and with which options."""

    def close(self) -> None:
        """Free its memory and end its processes."""


class RunEngine:
    """The engine of a run behind its middleware. As safe to call from several threads as the engine is.

    Args:
        engine: what generates.
        seeds: of its calls.
        enter_generating: wakes an engine that shares devices with the trainer; None for one that does not.
    """

    def __init__(
        self, engine: ServingEngine, *, seeds: CallSeeds, enter_generating: Callable[[], None] | None = None
    ) -> None:
        self._engine, self.seeds, self._enter_generating = engine, seeds, enter_generating
        self._always = [seeded(seeds), *([] if enter_generating is None else [colocated(enter_generating)])]
        self._composed = compose(engine, self._always)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sequence[Rollout]:
        """One rollout per prompt and sample, in the order of the prompts."""
        rollouts: Any = self._composed.generate(prompts, sampling)
        return list(rollouts)

    def collecting(self, buffer: ReplayBuffer, spans: SpanLog) -> GatedEngine[Sampling]:
        """The same engine for the threads that fill `buffer` while the policy trains."""
        engine: Any = compose(self._engine, [gated(buffer), timed(spans), *self._always])
        gate: GatedEngine[Sampling] = engine  # the outermost layer
        return gate

    def reseeded(self, seed: int, *, first_call: int) -> "RunEngine":
        """The same engine with seeds of its own, so that an evaluation does not change what is trained on."""
        return RunEngine(self._engine, seeds=CallSeeds(seed, first_call), enter_generating=self._enter_generating)

    def explain(self) -> str:
        """Which engine it is, and with which options."""
        return self._engine.explain()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()


def compose(engine: Engine[Sampling], middleware: Sequence[Middleware]) -> Engine[Sampling]:
    """The engine behind `middleware`, of which the first is the outermost."""
    for layer in reversed(middleware):
        engine = layer(engine)
    return engine


def gated(buffer: ReplayBuffer) -> Middleware:
    """A call waits while a refit has the engine alone, and ends once `buffer` is over; see `GatedEngine`."""
    return lambda engine: GatedEngine(engine, buffer=buffer)


def timed(spans: SpanLog) -> Middleware:
    """Each call is a span `generate` in the lane of its thread."""
    return lambda engine: _Layer(spans.timed("generate", engine.generate))


def seeded(seeds: CallSeeds) -> Middleware:
    """Sampled calls without a seed get the next of `seeds`; greedy calls and seeds of the caller pass unchanged."""

    def layer(engine: Engine[Sampling]) -> Engine[Sampling]:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
            if sampling.seed is None and sampling.temperature > 0:
                sampling = replace(sampling, seed=seeds.take())
            return engine.generate(prompts, sampling)

        return _Layer(generate)

    return layer


def colocated(enter_generating: Callable[[], None]) -> Middleware:
    """The engine is awake and the policy offloaded before each call; see `rl_launcher.ray.colocation`."""

    def layer(engine: Engine[Sampling]) -> Engine[Sampling]:
        def generate(prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
            enter_generating()
            return engine.generate(prompts, sampling)

        return _Layer(generate)

    return layer


@dataclass(frozen=True, slots=True)
class _Layer:
    call: Callable[[Sequence[Sequence[int]], Sampling], Any]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Any:
        return self.call(prompts, sampling)

"""The parts of a run, with the same few methods in this process and on Ray.

The loops of `rl_algorithms` need less than this (`rl_algorithms.contracts`); what is added here starts, saves and ends.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from rl_algorithms.background_collection import GatedEngine, GatedRequestEngine
from rl_algorithms.chat import Prompt
from rl_algorithms.contracts import Teacher
from rl_algorithms.environments.counted_environment import Judge
from rl_algorithms.replay import ReplayBuffer
from rl_algorithms.tokenized_data import PreferenceExamples, TokenizedData
from rl_backends import BackendSelection
from rl_backends.backend import TrainingBackend
from rl_generation import Rollout, Sampling
from rl_generation.seeding import SeededEngine
from rl_launcher.build.companions import Companions
from rl_observe import SpanLog
from rl_observe.health import EventQueue
from rl_refit import RefitReport
from rl_refit.refit import CountedWeightSync


class RunEngine(SeededEngine):
    """The engine of a run: calls get the run's seeds, and where it shares devices with the trainer, it is woken."""

    def collecting(self, buffer: ReplayBuffer, spans: SpanLog) -> GatedEngine[Sampling]:
        """The same engine for the threads that fill `buffer` while the policy trains.

        A call or request first waits at the gate while a refit needs the engine for itself. It is then a span in its
        thread's lane of the trace, of which waiting at the gate is no part; requests that overlap are one span.
        """
        return GatedRequestEngine(_Timed(self, spans), buffer=buffer)


class _Timed:
    """An engine whose calls and requests are spans of the thread that made them."""

    def __init__(self, engine: RunEngine, spans: SpanLog) -> None:
        self._engine, self._spans = engine, spans
        self.generate: Callable[[Sequence[Sequence[int]], Sampling], Sequence[Rollout]] = spans.timed(
            "generate", engine.generate
        )
        self._lock = threading.Lock()
        self._under_way: dict[str, tuple[int, float]] = {}
        """How many requests each lane has, and when the first of them began."""

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """As the engine's."""
        lane = threading.current_thread().name
        with self._lock:
            count, start_s = self._under_way.get(lane, (0, 0.0))
            self._under_way[lane] = (count + 1, start_s if count else self._spans.now())
        try:
            future = self._engine.submit(prompt, sampling, seed=seed)
        except BaseException:
            self._end(lane)
            raise
        future.add_done_callback(lambda _: self._end(lane))
        return future

    def _end(self, lane: str) -> None:
        with self._lock:
            count, start_s = self._under_way.pop(lane)
            if count > 1:
                self._under_way[lane] = (count - 1, start_s)
        if count == 1:
            self._spans.write("generate", lane=lane, start_s=start_s, end_s=self._spans.now())


NO_ENGINE = "nothing in this recipe samples responses, so the run holds no engine (evaluation.samples=4 asks for one)"


class NoEngine:
    """In the place of the engine in a run that samples nothing; see `Recipe.generates`."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """Refuse."""
        raise RuntimeError(NO_ENGINE)

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Refuse."""
        raise RuntimeError(NO_ENGINE)

    def explain(self) -> str:
        """Why there is none."""
        return NO_ENGINE

    def close(self) -> None:
        """There is nothing to close."""


class NoWeightSync:
    """In the place of the refits of such a run."""

    count = 0
    last: RefitReport | None = None

    def __call__(self, *, version: int) -> RefitReport:
        """Refuse."""
        raise RuntimeError(NO_ENGINE)

    def metrics(self) -> dict[str, float]:
        """Nothing was transferred."""
        return {}

    def explain(self) -> str:
        """Why nothing is transferred."""
        return NO_ENGINE


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a run is made of."""

    policy: TrainingBackend
    selection: BackendSelection
    """Which backend trains, and why."""
    engine: RunEngine
    """What samples responses; it refuses to where `Recipe.generates` is false."""
    weight_sync: CountedWeightSync
    """What gives it the policy's weights; likewise."""
    weight_bytes: int
    """Of the policy's weights, all ranks together."""
    environment: Judge
    teacher: Teacher | None
    """The teacher to distil from; None without such a stage."""
    companions: Companions
    """The reward model and the critic, once their stages have begun."""
    data: TokenizedData
    """Prompts, demonstrations, pairs or labelled responses, and what is held out of them."""
    reward_pairs: PreferenceExamples | None
    """What the reward model learns from; None without such a stage."""
    validation: Mapping[str, list[Prompt]]
    """The prompts of `evaluation.sets`, by name."""
    tokenizer: Any
    placement: str
    """Which process holds what, in words."""
    skeleton: Any
    """The policy on the meta device, as it was before it was sharded or given adapters."""
    gpus: Sequence[tuple[str, int]] = ()
    """Name and bytes of each GPU of the run, where nodes were asked for them."""
    close: Callable[[], None]
    """End every process and free what the parts hold; a second call does nothing."""
    events: EventQueue = field(default_factory=EventQueue)
    """What happens to the parts, as an engine that is restarted, for the recorder to report."""
    figures: Callable[[], dict[str, float]] = dict
    """What the parts count, as engines that died, for the log."""
    reached: Callable[[str, int], None] = lambda _, __: None
    """Called when a step of a stage is done, and with 0 at its start: for profilers in other processes."""

    @property
    def judge(self) -> Judge:
        """What scores the responses that are learned from: the recipe's reward model, or else `environment`."""
        return self.companions.judge or self.environment

    @property
    def reward_errors(self) -> int:
        """Responses that could not be scored so far."""
        judge = self.companions.judge
        return self.environment.errors + (0 if judge is None else judge.errors)

    @property
    def versions(self) -> list[int]:
        """Optimizer steps that the weights of the policy have seen, and those of each model trained beside it."""
        return [self.policy.version, *(model.version for model in self.companions.trained.values())]

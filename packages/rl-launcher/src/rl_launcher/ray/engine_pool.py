"""Several engines on Ray used as one: prompts are dispatched to all of them, rollouts returned in order.

    an even share of three quarters of the work for each engine, the longest prompts dealt first, to whoever has least
    the rest in ever smaller pieces, each for whoever is done first

Nobody knows how long an answer becomes: the first part keeps batches full, the second makes up for what was misjudged
and for engines that are slower. Equal prompts that stand side by side, a group's, stay together, so that their engine
prefills them once.

Every prompt is given its seed before it is dealt, so no answer depends on which engine gave it, on how many there are,
or on one that died. What a dead engine owed is asked of the others, or of its successor once that has weights.
"""

import itertools
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_generation import Rollout, Sampling
from rl_generation.requests import make_requests
from rl_launcher.ray.engine_worker import Answers
from rl_launcher.ray.engines import EngineDiedError, EngineGroup, RunningEngine
from rl_launcher.ray.failures import RemoteDiedError

__all__ = ["RayEngine", "deal"]

DEALT_FIRST = 0.75
"""Part of the work that is dealt at once. More leaves less to even out, less breaks batches up."""


def deal(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], *, num_engines: int) -> list[tuple[int, ...]]:
    """Chunks of prompts' places, in the order in which engines take them: each prompt in one of them.

    The cost of a prompt is its length and the most that may be answered.

    >>> [len(chunk) for chunk in deal([[1, n] for n in range(16)], [Sampling(max_new_tokens=8)] * 16, num_engines=2)]
    [6, 6, 1, 1, 1, 1]
    """
    if not prompts:
        return []
    if num_engines == 1:
        return [tuple(range(len(prompts)))]
    groups = [
        tuple(places) for _, places in itertools.groupby(range(len(prompts)), key=lambda place: tuple(prompts[place]))
    ]

    def cost(group: tuple[int, ...]) -> int:
        return sum(len(prompts[place]) + samplings[place].max_new_tokens * samplings[place].n for place in group)

    longest_first = sorted(groups, key=lambda group: (-cost(group), group))
    shares, rest = _shares(longest_first, [cost(group) for group in longest_first], num_engines)
    return [share for share in shares if share] + list(_smaller_and_smaller(rest, num_engines))


def _shares(
    groups: Sequence[tuple[int, ...]], costs: Sequence[int], num_engines: int
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """A share for each engine, and what is left."""
    limit = DEALT_FIRST * sum(costs) / num_engines
    shares: list[list[int]] = [[] for _ in range(num_engines)]
    loads = [0] * num_engines
    for number, (group, cost) in enumerate(zip(groups, costs, strict=True)):
        least = loads.index(min(loads))
        if loads[least] and loads[least] + cost > limit:
            return [tuple(sorted(share)) for share in shares], list(groups[number:])
        shares[least] += group
        loads[least] += cost
    return [tuple(sorted(share)) for share in shares], []


def _smaller_and_smaller(groups: list[tuple[int, ...]], num_engines: int) -> list[tuple[int, ...]]:
    chunks = []
    while groups:
        size = max(1, len(groups) // (2 * num_engines))
        taken, groups = groups[:size], groups[size:]
        chunks.append(tuple(sorted(itertools.chain.from_iterable(taken))))
    return chunks


class RayEngine:
    """A `ServingEngine` over the engines of a group. Any number of threads may call it."""

    def __init__(self, engines: EngineGroup) -> None:
        self.engines = engines
        """One by one."""
        self._lock = threading.Lock()
        self._retried = 0
        self._speed = 0.0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Answer each prompt `n` times; all answers to prompt 0 come first, and so on.

        Where all engines have died, waits for one that has weights again, as long as one call may take.

        Raises:
            PromptError: A request cannot be served; none was begun.
            Refusal: No refit has been committed yet.
            EngineDiedError: Engines died more often than the recipe allows.
            RemoteError: An engine failed, or has not answered in time.
        """
        if not prompts:
            return []
        began = time.monotonic()
        samplings = sampling.spread(len(prompts)) if isinstance(sampling, Sampling) else list(sampling)
        # Refused here, where prompts have the caller's numbers, and not those of a chunk.
        make_requests(prompts, samplings, self.engines.require_weights())
        call = _Call(
            prompts=[tuple(prompt) for prompt in prompts],
            samplings=samplings,
            waiting=deque(deal(prompts, samplings, num_engines=len(self.engines.hosts))),
        )
        _Asking(self.engines, call).run()
        rollouts = [rollout for place in range(len(prompts)) for rollout in call.answers[place]]
        seconds = time.monotonic() - began
        with self._lock:
            self._retried += call.retried
            self._speed = sum(len(rollout.tokens) for rollout in rollouts) / max(seconds, 1e-9)
        return rollouts

    def metrics(self) -> dict[str, float]:
        """For the log: deaths made good, prompts asked again, and tokens a second of the latest call."""
        with self._lock:
            return {
                "engine_restarts": float(self.engines.restarts),
                "retried_prompts": float(self._retried),
                "engine_tokens_per_s": self._speed,
            }

    def explain(self) -> str:
        """How many there are, what each is, and what becomes of one that dies."""
        engines, limits = self.engines.all(), self.engines.limits
        lines = [
            f"{len(engines)} x {self.engines.spec.explain()}",
            f"an engine that dies is started again and refitted, {limits.max_restarts} times in the run",
        ]
        lines += engines[0].birth.text.splitlines() if engines and engines[0].birth is not None else []
        return "\n".join(lines)

    def close(self) -> None:
        """End all engines."""
        self.engines.close()


@dataclass(kw_only=True, eq=False)
class _Call:
    """What one call of `generate` has asked, and been told. Guarded by the group's condition."""

    prompts: list[tuple[int, ...]]
    samplings: list[Sampling]
    waiting: deque[tuple[int, ...]]
    """Chunks that nobody has taken."""

    answers: dict[int, list[Rollout]] = field(default_factory=dict)
    """By the place of the prompt."""

    asked: set[int] = field(default_factory=set)
    """Numbers of the threads at work, by the engine that each asks."""

    retried: int = 0
    """Prompts that were asked again."""

    error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.answers) == len(self.prompts)


@dataclass(frozen=True, slots=True)
class _Asking:
    """One call: a thread for each engine, which takes chunks until there are none."""

    engines: EngineGroup
    call: _Call

    def run(self) -> None:
        """Return when every prompt has its answers.

        Raises:
            What ended it.
        """
        changed, call = self.engines.changed, self.call
        with changed:
            while not call.over:
                serving = self.engines.serving()
                for engine in serving:
                    if call.waiting and id(engine) not in call.asked:
                        call.asked.add(id(engine))
                        threading.Thread(target=self._ask, args=(engine,), name=f"asking {engine}", daemon=True).start()
                heard = self._wait_for_news(serving)
                if not heard and not call.asked:  # whoever is asked has a deadline of its own
                    raise EngineDiedError(self._late())
        if call.error is not None:
            raise call.error

    def _wait_for_news(self, serving: tuple[RunningEngine, ...]) -> bool:
        limit_s = self.engines.limits.call_timeout_s
        return self.engines.changed.wait_for(lambda: self._news(serving), timeout=limit_s)

    def _news(self, serving: tuple[RunningEngine, ...]) -> bool:
        call, now = self.call, self.engines.serving()
        idle = any(id(engine) not in call.asked for engine in now)
        return call.over or now != serving or bool(call.waiting and idle)

    def _ask(self, engine: RunningEngine) -> None:
        changed, call = self.engines.changed, self.call
        try:
            while True:
                with changed:
                    if call.over or not call.waiting or engine.state != "serving":
                        return
                    chunk = call.waiting.popleft()
                if not self._answered(engine, chunk):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            with changed:
                call.error = call.error or error
        finally:
            with changed:
                call.asked.discard(id(engine))
                changed.notify_all()

    def _answered(self, engine: RunningEngine, chunk: tuple[int, ...]) -> bool:
        """Have `engine` answer a chunk; False where it died, and what it owed waits again."""
        call = self.call
        try:
            said: Answers = engine.process().call(
                "generate",
                [call.prompts[place] for place in chunk],
                [call.samplings[place] for place in chunk],
                timeout_s=self.engines.limits.call_timeout_s,
            )
        except RemoteDiedError as error:
            died: Any = error
            said = Answers(rollouts=(), died=error.how)
        else:
            died = said.died
        owed = self._take(chunk, said)
        if said.died is None:
            return True
        self.engines.lost(engine, died, owed=f"{len(owed)} prompts that it owed are asked again")
        return False

    def _take(self, chunk: tuple[int, ...], said: Answers) -> tuple[int, ...]:
        """Keep the prompts that are answered in full; return the others, which wait again."""
        by_place: dict[int, list[Rollout]] = {}
        for rollout in said.rollouts:
            place = chunk[rollout.prompt_index]
            by_place.setdefault(place, []).append(replace(rollout, prompt_index=place))
        call = self.call
        whole = {place: mine for place, mine in by_place.items() if len(mine) == call.samplings[place].n}
        owed = tuple(place for place in chunk if place not in whole)
        with self.engines.changed:
            call.answers.update(whole)
            if owed:
                call.waiting.appendleft(owed)
                call.retried += len(owed)
            self.engines.changed.notify_all()
        return owed

    def _late(self) -> str:
        states = ", ".join(f"engine {engine.index} is {engine.state}" for engine in self.engines.all())
        return (
            f"{len(self.call.prompts) - len(self.call.answers)} prompts have no answers within "
            f"cluster.call_timeout_s={self.engines.limits.call_timeout_s:g}: {states}"
        )

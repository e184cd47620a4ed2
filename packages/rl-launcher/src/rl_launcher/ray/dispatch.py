"""Dispatch of prompts to several engines on Ray, which are used as one; rollouts return in the order of the prompts.

Prompts get their seeds before they are dispatched, so no response depends on which engine generated it, on how many
there are, or on one that died. The unfinished prompts of a dead engine go to the others, or to its replacement once
that has weights.
"""

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from rl_generation import Rollout, Sampling
from rl_generation.requests import make_requests
from rl_launcher.ray.engine_pool import EngineDiedError, EnginePool, RunningEngine
from rl_launcher.ray.engine_worker import GenerateReply
from rl_launcher.ray.load_balance import split_prompts
from rl_launcher.ray.requests import RequestDispatch
from rl_launcher.ray.worker_failures import RemoteDiedError


class RayEngine:
    """A `RequestEngine` over the engines of a pool. May be called from any number of threads."""

    def __init__(self, engines: EnginePool) -> None:
        self.engines = engines
        """One by one."""
        self._requests = RequestDispatch(engines)
        self._lock = threading.Lock()
        self._retried = 0

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> list[Rollout]:
        """Generate `n` responses for each prompt; all rollouts of prompt 0 come first, and so on.

        If all engines have died, it waits for one that has weights again, as long as one call may take.

        Raises:
            PromptError: a request is invalid; none was begun.
            EngineDiedError: engines died more often than the recipe allows.
            RemoteError: an engine failed, or did not answer in time.
        """
        if not prompts:
            return []
        began = time.monotonic()
        samplings = sampling.spread(len(prompts)) if isinstance(sampling, Sampling) else list(sampling)
        # Checked here, where errors name a prompt by the caller's number and not by that within a chunk.
        make_requests(prompts, samplings, self.engines.require_weights())
        call = _Dispatch(
            engines=self.engines,
            prompts=[tuple(prompt) for prompt in prompts],
            samplings=samplings,
            waiting=deque(split_prompts(prompts, samplings, num_engines=len(self.engines.hosts))),
        )
        call.run()
        rollouts = [rollout for place in range(len(prompts)) for rollout in call.rollouts[place]]
        seconds = time.monotonic() - began
        with self._lock:
            self._retried += call.retried
            self._requests.tokens_per_s = sum(len(rollout.tokens) for rollout in rollouts) / max(seconds, 1e-9)
        return rollouts

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt beside whatever is under way; from any thread.

        The future raises PromptError where the request is invalid, and otherwise what `generate` raises.
        """
        return self._requests.submit(prompt, sampling, seed=seed)

    def metrics(self) -> dict[str, float]:
        """For the log: engines that were replaced, prompts that were sent again, and tokens/s lately."""
        with self._lock:
            return {
                "engine_restarts": float(self.engines.restarts),
                "retried_prompts": float(self._retried + self._requests.retried),
                "engine_tokens_per_s": self._requests.tokens_per_s,
            }

    def explain(self) -> str:
        """How many engines there are, what each is, and what happens when one dies."""
        engines = self.engines.all()
        lines = [
            f"{len(engines)} x {self.engines.spec.explain()}",
            f"an engine that dies is restarted and refitted, at most {self.engines.max_restarts} times in the run",
        ]
        lines += engines[0].info().text.splitlines() if engines and engines[0].started is not None else []
        return "\n".join(lines)

    def close(self) -> None:
        """End all engines."""
        self.engines.close()


@dataclass(kw_only=True, eq=False)
class _Dispatch:
    """One call of `generate`: a thread for each engine takes chunks until there are none. Guarded by `changed`."""

    engines: EnginePool
    prompts: list[tuple[int, ...]]
    samplings: list[Sampling]
    waiting: deque[tuple[int, ...]]
    """Chunks that no engine has taken."""
    rollouts: dict[int, list[Rollout]] = field(default_factory=dict)
    """Those of a finished prompt, by its place."""
    active: set[int] = field(default_factory=set)
    """The ids of engines that a thread is calling."""
    retried: int = 0
    """Prompts that were sent again."""
    error: BaseException | None = None

    @property
    def over(self) -> bool:
        return self.error is not None or len(self.rollouts) == len(self.prompts)

    def run(self) -> None:
        """Return when every prompt has its rollouts, or raise what prevented it."""
        changed, limit_s = self.engines.changed, self.engines.call_timeout_s
        with changed:
            while not self.over:
                serving = self.engines.serving()
                for engine in serving:
                    if self.waiting and id(engine) not in self.active:
                        self.active.add(id(engine))
                        threading.Thread(
                            target=self._feed, args=(engine,), name=f"dispatch to {engine}", daemon=True
                        ).start()
                changed_in_time = changed.wait_for(partial(self._has_news, serving), timeout=limit_s)
                if not changed_in_time and not self.active:  # an active engine has a deadline of its own
                    states = ", ".join(f"engine {engine.index} is {engine.state}" for engine in self.engines.all())
                    raise EngineDiedError(
                        f"{len(self.prompts) - len(self.rollouts)} prompts got no response within "
                        f"cluster.call_timeout_s={limit_s:g}: {states}"
                    )
        if self.error is not None:
            raise self.error

    def _has_news(self, before: tuple[RunningEngine, ...]) -> bool:
        now = self.engines.serving()
        idle = any(id(engine) not in self.active for engine in now)
        return self.over or now != before or bool(self.waiting and idle)

    def _feed(self, engine: RunningEngine) -> None:
        """Send `engine` one chunk after another, until none is left or it dies."""
        changed = self.engines.changed
        try:
            while True:
                with changed:
                    if self.over or not self.waiting or engine.state != "serving":
                        return
                    chunk = self.waiting.popleft()
                if not self._generate(engine, chunk):
                    return
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            with changed:
                self.error = self.error or error
        finally:
            with changed:
                self.active.discard(id(engine))
                changed.notify_all()

    def _generate(self, engine: RunningEngine, chunk: tuple[int, ...]) -> bool:
        """Have `engine` generate a chunk; False if it died, and its unfinished prompts wait again."""
        try:
            reply: GenerateReply = self.engines.await_reply(
                engine,
                engine.process().submit(
                    "generate",
                    [self.prompts[place] for place in chunk],
                    [self.samplings[place] for place in chunk],
                ),
            )
            why: Any = reply.died
        except RemoteDiedError as error:
            why, reply = error, GenerateReply(rollouts=(), died=error.how)
        unfinished = self._keep_finished(chunk, reply)
        if reply.died is None:
            return True
        self.engines.lost(engine, why, owed=f"its {len(unfinished)} unfinished prompts are sent again")
        return False

    def _keep_finished(self, chunk: tuple[int, ...], reply: GenerateReply) -> tuple[int, ...]:
        """Keep the prompts that have all their rollouts; return the others, which wait again."""
        by_place: dict[int, list[Rollout]] = {}
        for rollout in reply.rollouts:
            place = chunk[rollout.prompt_index]
            by_place.setdefault(place, []).append(replace(rollout, prompt_index=place))
        finished = {place: mine for place, mine in by_place.items() if len(mine) == self.samplings[place].n}
        unfinished = tuple(place for place in chunk if place not in finished)
        with self.engines.changed:
            self.rollouts.update(finished)
            if unfinished:
                self.waiting.appendleft(unfinished)
                self.retried += len(unfinished)
            self.engines.changed.notify_all()
        return unfinished

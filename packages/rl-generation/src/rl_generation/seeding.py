"""Seeds for the sampling calls of a run, so that it can be repeated and resumed."""

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace

from rl_generation.engine import RequestEngine
from rl_generation.requests import Sampling
from rl_generation.rollout import Rollout


class CallSeeds:
    """The seeds of a run's sampling calls: each follows from the run's seed and how many calls came before.

    Each prompt of a call then gets its own seed from the call's (`Sampling.spread`). A response therefore depends on
    the run's seed, the number of the call and the place of the prompt in it, and neither on the engine that generated
    it nor on earlier calls. A resumed run needs to know `calls` only.
    """

    def __init__(self, seed: int, calls: int = 0) -> None:
        self._seed = seed
        self.calls = calls
        """How many calls got a seed so far."""
        self._lock = threading.Lock()

    def take(self) -> int:
        """The seed of the next call, from 0 to below 2**62."""
        with self._lock:
            digest = hashlib.blake2b(f"{self._seed}/{self.calls}".encode(), digest_size=8).digest()
            self.calls += 1
            return int.from_bytes(digest, "big") >> 2


class SeededEngine:
    """An engine whose sampled calls get the seeds of a run; as safe to call from several threads as the engine inside.

    Args:
        engine: what generates.
        seeds: of its calls.
        enter_generating: called before each call; wakes an engine that shares devices with a trainer.
    """

    def __init__(
        self, engine: RequestEngine, *, seeds: CallSeeds, enter_generating: Callable[[], None] | None = None
    ) -> None:
        self._engine, self.seeds = engine, seeds
        self._enter_generating = enter_generating or (lambda: None)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sequence[Rollout]:
        """One rollout per prompt and sample, in the order of the prompts."""
        if sampling.seed is None and sampling.temperature > 0:  # greedy calls and seeds of the caller are not counted
            sampling = replace(sampling, seed=self.seeds.take())
        self._enter_generating()
        return list(self._engine.generate(prompts, sampling))

    def submit(self, prompt: Sequence[int], sampling: Sampling, *, seed: int) -> "Future[Rollout]":
        """Begin to answer one prompt, with the seed of its own request, which is no call of the run."""
        self._enter_generating()
        return self._engine.submit(prompt, sampling, seed=seed)

    def generate_seeded(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int]
    ) -> Sequence[Rollout]:
        """What `submit` answers to each prompt with its own seed, as one batch, which is no call of the run either."""
        self._enter_generating()
        return list(self._engine.generate(prompts, [sampling.for_request(seed) for seed in seeds]))

    def reseeded(self, seed: int, *, first_call: int) -> "SeededEngine":
        """The same engine with seeds of its own, so that an evaluation does not change what is trained on."""
        return SeededEngine(self._engine, seeds=CallSeeds(seed, first_call), enter_generating=self._enter_generating)

    def explain(self) -> str:
        """Which engine it is, and with which options."""
        return self._engine.explain()

    def close(self) -> None:
        """Close the engine."""
        self._engine.close()

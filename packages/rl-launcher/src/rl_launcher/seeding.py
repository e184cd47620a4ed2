"""Seeds for what is sampled, so that a run can be repeated and gone on with, whatever engines answer.

    seed of a call = hash(the run's seed, how many calls came before)

Each prompt of a call then has a seed of its own (`Sampling.spread`), so that an answer depends on the run's seed, the
number of the call and the prompt's place in it: not on which engine gave it, nor on what another was given before. A
run that goes on needs to know one number.
"""

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import replace

from rl_generation import Rollout, Sampling
from rl_launcher.run_parts import ServingEngine

__all__ = ["SeededEngine", "seed_of_call"]


def seed_of_call(seed: int, call: int) -> int:
    """The seed of the run's call number `call`, from 0 to below 2**62.

    >>> seed_of_call(0, 0) != seed_of_call(0, 1) != seed_of_call(1, 0)
    True
    """
    digest = hashlib.blake2b(f"{seed}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


class SeededEngine:
    """An engine whose calls without a seed are given one. As safe to call from several threads as the engine is."""

    def __init__(self, engine: ServingEngine, *, seed: int, calls: int = 0) -> None:
        self.inner, self._seed = engine, seed
        self.calls = calls
        """How many calls were given a seed so far."""
        self._lock = threading.Lock()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> Sequence[Rollout]:
        """As the engine's; greedy answers and calls with a seed of their own are handed on as they are."""
        if sampling.seed is None and sampling.temperature > 0:
            sampling = replace(sampling, seed=seed_of_call(self._seed, self._take_number()))
        return self.inner.generate(prompts, sampling)

    def explain(self) -> str:
        """What the engine says of itself."""
        return self.inner.explain()

    def close(self) -> None:
        """End the engine."""
        self.inner.close()

    def _take_number(self) -> int:
        with self._lock:
            self.calls += 1
            return self.calls - 1

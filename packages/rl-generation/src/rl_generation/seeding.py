"""Seeds for the sampling calls of a run, so that it can be repeated and resumed."""

import hashlib
import threading

__all__ = ["CallSeeds", "seed_of_call"]


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
        """The seed of the next call."""
        with self._lock:
            self.calls += 1
            return seed_of_call(self._seed, self.calls - 1)


def seed_of_call(seed: int, call: int) -> int:
    """The seed of call number `call` of a run, from 0 to below 2**62.

    >>> seed_of_call(0, 0) != seed_of_call(0, 1) != seed_of_call(1, 0)
    True
    """
    digest = hashlib.blake2b(f"{seed}/{call}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2

"""Seeds for the starts of episodes: one number made of several. Knows no environment.

Sums and products of a seed and a place collide (seed 0 at step 1 is seed 1 at step 0), and runs with neighbouring seeds
would then see each other's episodes. A hash of all numbers does not.
"""

import hashlib

__all__ = ["episode_seed"]


def episode_seed(seed: int, *place: int) -> int:
    """A seed in [0, 2^31) made of the run's `seed` and a place in it, as (batch,) or (batch, prompt).

    The same numbers always give the same seed, in any process; other numbers, or as many in another order, another one
    but for a chance of 2^-31.
    """
    numbers = ",".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(numbers.encode()).digest()[:4], "big") >> 1

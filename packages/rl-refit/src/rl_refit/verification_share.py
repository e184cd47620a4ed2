"""How much of a refit is digested, from what digests and moves have cost so far.

Knows seconds only. What it chooses changes a report, never a result.
"""

from __future__ import annotations

import math
from typing import final

from rl_refit.config import Verify
from rl_refit.sampling import Sample

__all__ = ["VerificationShare"]

COST = 0.25
"""Digests may take this share of the seconds that the move takes."""

FREE_S = 0.005
"""Digests that take less are never thinned out: nobody would notice what that saves."""

SAMPLED = 16
LARGEST_STRIDE = 64


@final
class VerificationShare:
    """Chooses the sample of each refit; all parties use the one that the leader chose."""

    def __init__(self, verify: Verify) -> None:
        self._verify = verify
        self._stride = {"auto": 1, "full": 1, "sampled": SAMPLED, "off": 0}[verify]

    def sample(self, refit: int) -> Sample:
        """The sample of refit number `refit`."""
        return Sample(stride=self._stride, phase=refit if self._stride > 1 else 0)

    def learn(self, seconds: dict[str, float]) -> None:
        """Take note of a refit's seconds by phase: "transfer", "verify", "commit", and "confirm", a part of commit."""
        if self._verify != "auto":
            return
        digests = (seconds["verify"] + seconds.get("confirm", 0.0)) * self._stride
        moves = seconds["transfer"] + seconds["commit"] - seconds.get("confirm", 0.0)
        needed = digests / max(COST * moves, FREE_S)
        self._stride = min(LARGEST_STRIDE, 2 ** max(0, math.ceil(math.log2(max(needed, 1.0)))))

"""What the ranks of a sink hold, told to the sources before each refit, through the store of the rendezvous.

Knows names of versions, and no weights.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from rl_refit.errors import PeerError
from rl_refit.stores import Store
from rl_refit.transports.base import PATIENCE_S, Watch

__all__ = ["Bases"]

_SHORTEST_PAUSE_S = 1e-4


@dataclass(frozen=True, slots=True)
class _Declaration:
    refit: int
    within_reach: tuple[str, ...]


@final
class Bases:
    """One key for each pair of a sink rank and a source rank, written anew in every refit.

    Args:
        store: That all parties share.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def declare(self, sink_rank: int, source_rank: int, *, refit: int, within_reach: tuple[str, ...]) -> None:
        """Say which versions a sink rank can take deltas against.

        Raises:
            PeerError: The store is out of reach.
        """
        try:
            self._store.set(_key(sink_rank, source_rank), json.dumps({"refit": refit, "bases": within_reach}))
        except RuntimeError as error:
            raise _lost(error) from error

    def common(
        self, mine: tuple[str, ...], sink_ranks: Iterable[int], *, source_rank: int, refit: int, watch: Watch
    ) -> str | None:
        """The first of `mine` that every one of `sink_ranks` can take a delta against; None where there is none.

        Raises:
            DeadlineError: A sink rank does not say.
            PeerError: The store is out of reach.
        """
        theirs = [self._wait(rank, source_rank, refit=refit, watch=watch) for rank in sink_ranks]
        return next((name for name in mine if all(name in bases for bases in theirs)), None)

    def _wait(self, sink_rank: int, source_rank: int, *, refit: int, watch: Watch) -> tuple[str, ...]:
        watch.at(peer=f"sink {sink_rank}")
        pause_s = _SHORTEST_PAUSE_S
        while True:
            said = self._read(_key(sink_rank, source_rank))
            if said is not None and said.refit == refit:
                return said.within_reach
            watch.check()
            time.sleep(min(pause_s, PATIENCE_S))
            pause_s *= 2

    def _read(self, key: str) -> _Declaration | None:
        try:
            if not self._store.check([key]):
                return None
            plain = json.loads(self._store.get(key))
        except RuntimeError as error:
            raise _lost(error) from error
        return _Declaration(plain["refit"], tuple(plain["bases"]))


def _key(sink_rank: int, source_rank: int) -> str:
    return f"bases/{sink_rank}/{source_rank}"


def _lost(error: RuntimeError) -> PeerError:
    return PeerError(f"the store of the rendezvous is out of reach: {str(error).splitlines()[0]}")

"""Which ranks share a host, as far as a plan cares. Bandwidths belong to the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Topology"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The node of each rank of both sides. Nodes are any strings, such as host names; equal ones are one node."""

    source_nodes: tuple[str, ...]
    """Node of source rank 0, 1, 2, …"""

    sink_nodes: tuple[str, ...]
    """Node of sink rank 0, 1, 2, …"""

    def check(self, *, source_ranks: Iterable[int], sink_ranks: Iterable[int]) -> None:
        """Pass where every rank has a node.

        Raises:
            ValueError: A rank has none; names it.
        """
        for side, nodes, ranks in (("source", self.source_nodes, source_ranks), ("sink", self.sink_nodes, sink_ranks)):
            last = max(ranks, default=-1)
            if last >= len(nodes):
                raise ValueError(f"the topology names nodes for {len(nodes)} {side} ranks, and there is a rank {last}")

"""From a source to a sink of the same process: no slot and no wire between them.

Knows one rank on each side. Where the source's tensors stay as they
are until the refit is over, the sink keeps them until its commit: one copy in all.
"""

from __future__ import annotations

from typing import final

from rl_refit.errors import RefitError
from rl_refit.schedule import Routing
from rl_refit.transports.base import Channel, Inbox, Outbox
from rl_refit.watch import Watch

__all__ = ["InProcess"]


@final
class InProcess:
    """Hands the source's tensors to the sink. A `Transport`."""

    name = "in process"
    routing: Routing = "unicast"
    bounded = False

    def open(self, channel: Channel, watch: Watch) -> None:
        """Refuse what is not in this process."""
        source, sink = channel.schedule.plan.source.ranks, channel.schedule.plan.sink.ranks
        if len(source) > 1 or len(sink) > 1:
            raise RefitError(
                f"the in-process transport moves weights between one rank and one engine; the source spans ranks "
                f"{list(source)} and the sink ranks {list(sink)}; give Refit a transport and a rendezvous",
                phase="prepare",
            )
        self._streams = channel.schedule.streams

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Stage every piece, with a look at the deadline after each."""
        assert outbox is not None
        assert inbox is not None
        for stream in self._streams:
            for _, piece, tensor in outbox.pieces(stream):
                inbox.put(piece.region, tensor, stays=outbox.stays)
                watch.check()

    def finish(self) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is open."""

    @property
    def extra_bytes(self) -> int:
        """None."""
        return 0

"""What the transports over torch.distributed have in common: seats, groups, slots, and one failure for all.

A process group with messages under way cannot be used again: a transfer that fails breaks the transport, and the next
one says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from torch import Tensor
from torch.distributed import ProcessGroup

from rl_refit.errors import RefitError
from rl_refit.transports.base import Channel, Watch
from rl_refit.transports.groups import Address, Group, backend_for, open_groups, user_group
from rl_refit.transports.seating import Seating, take_seats
from rl_refit.transports.wire import Task, Traffic, Wire

__all__ = ["Session", "connect"]

Members = Callable[[Seating], Mapping[str, tuple[int, ...]]]
Greet = Callable[[Mapping[str, Group]], object]


@final
@dataclass
class Session:
    """What lies between `open` and `close` in one process."""

    channel: Channel
    seating: Seating | None
    """None where this process takes part in no stream."""

    groups: Mapping[str, Group]
    wire: Wire = field(init=False)
    traffic: Traffic = field(default_factory=Traffic)
    slots: list[tuple[Tensor, ...]] = field(default_factory=list)
    broken: str | None = None

    def __post_init__(self) -> None:
        self.wire = Wire({id(group): group for group in self.groups.values()}.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return sum(slot.nbytes for ring in self.slots for slot in ring)

    def run(self, tasks: list[Task], watch: Watch) -> None:
        """Run one transfer.

        Raises:
            RefitError: One failed before; or what the tasks raise.
        """
        if self.broken is not None:
            raise RefitError(
                f"this transport is broken since a transfer failed ({self.broken}): a process group with messages "
                f"under way cannot be used again; make a new Refit",
                phase="transfer",
            )
        self.traffic = Traffic()
        try:
            self.wire.run(tasks, watch)
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise

    def finish(self) -> None:
        """After a failure, close the connections: not before all know why, since peers would take it for a death."""
        if self.broken is not None:
            self.close()

    def close(self) -> None:
        """Close the connections and free the slots."""
        self.wire.close()
        self.groups = {}
        self.slots.clear()


def connect(
    channel: Channel,
    watch: Watch,
    *,
    group: ProcessGroup | None,
    address: Address,
    members: Members,
    greet: Greet,
) -> Session:
    """Agree on the seats, and make the groups that `members` names for them, or use the user's for each of them.

    Raises:
        RefitError: See `take_seats`, `open_groups` and `user_group`.
    """
    backend_for(channel.device)
    seating = take_seats(channel, watch, group_rank=None if group is None else group.rank())
    if seating is None or set(seating.processes.values()) == {seating.own}:
        return Session(channel, seating, {})
    wanted = members(seating)
    if group is not None:
        shared = user_group(group, channel, seating)
        return Session(channel, seating, dict.fromkeys(wanted, shared))
    groups = open_groups(wanted, channel, seating, address=address, watch=watch, greet=greet)
    return Session(channel, seating, groups)

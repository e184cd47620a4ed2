"""Messages under way in process groups: followed without ever waiting where nobody looks at the watch.

torch's gloo has two habits that shape this file: a send or receive never says that it is completed unless somebody
waits for it, so each line of messages is waited for by a thread of its own; and a wait that times out breaks every
connection of its group, which is how `close` ends what would otherwise stay under way. NCCL's works say when they are
completed, and are asked.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import final

import torch
from torch import Tensor
from torch.distributed import Work

from rl_refit.buckets import ALIGNMENT, Bucket, size_of
from rl_refit.errors import PeerError, RefitError
from rl_refit.transports.base import PATIENCE_S, Watch
from rl_refit.transports.groups import Group

__all__ = [
    "HEADER_BYTES",
    "Message",
    "Numbers",
    "Task",
    "Traffic",
    "Wire",
    "check_header",
    "payload_of",
    "slots_of",
    "write_header",
]

HEADER_BYTES = ALIGNMENT
"""Bytes before the first piece of every bucket on a wire; they keep the pieces aligned."""

GRACE_S = 0.25
"""How long the reason for a lost connection may take to be reported by the party that closed it."""

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 2e-3
_MAGIC = 0x524C_5245_4649_5431
_FIELDS = ("refit", "stream", "bucket", "bytes")


@dataclass(slots=True)
class Traffic:
    """What one process moved in its last transfer, in bytes of weights."""

    received: int = 0
    """From other processes."""

    sent: int = 0
    """To other processes, as a source."""

    relayed: int = 0
    """To other processes, as a sink that hands on what it received."""

    copied: int = 0
    """From this process's own source to its own sink, without a wire."""

    overhead: int = 0
    """What was received beside weights: headers, and the gaps that align pieces."""

    def count_received(self, bucket: Bucket) -> None:
        """Count a bucket that has arrived over a wire."""
        nbytes = payload_of(bucket)
        self.received += nbytes
        self.overhead += HEADER_BYTES + size_of(bucket) - nbytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """A bucket under way."""

    bucket: int
    peer: str
    """The party at the other end, or those that are waited for."""

    shared: bool
    """Whether all of the group take part, so that any of them may be the one that is lost."""

    group: Group
    work: Work | None
    """None where it could not even begin."""

    ended: threading.Event = field(default_factory=threading.Event)
    errors: list[BaseException] = field(default_factory=list)


Numbers = tuple[int, int, int, int]
"""Of a bucket: refit, stream, bucket, bytes."""

Task = Generator[Message, None, None]
"""Goes on until it cannot before a message has ended, and yields that message."""


@final
class Wire:
    """All messages of one process."""

    def __init__(self, groups: Iterable[Group]) -> None:
        self.groups = tuple(groups)
        self._news = threading.Event()
        self._lines: dict[str, SimpleQueue[Message | None]] = {}
        self._under_way: set[Message] = set()

    def begin(
        self,
        begin: Callable[[], Work],
        *,
        group: Group,
        line: str,
        numbers: Numbers,
        peer: str,
        shared: bool = False,
    ) -> Message:
        """Begin a message and look after it; those of one line are waited for in the order in which they began.

        Args:
            begin: Called at once.
            group: Over which it goes.
            line: "send", "relay" or "receive".
            numbers: Of its bucket.
            peer: The party at the other end.
            shared: Whether all of the group take part.
        """
        try:
            message = Message(bucket=numbers[2], peer=peer, shared=shared, group=group, work=begin())
        except RuntimeError as error:  # gloo knows already that the connection is broken
            message = Message(bucket=numbers[2], peer=peer, shared=shared, group=group, work=None, errors=[error])
            message.ended.set()
            return message
        self._under_way.add(message)
        if group.waits:
            if line not in self._lines:
                self._lines[line] = SimpleQueue()
                arguments = (self._lines[line], self._news)
                threading.Thread(target=_wait_for, args=arguments, daemon=True, name=f"rl-refit {line}").start()
            self._lines[line].put(message)
        return message

    def until(self, message: Message, watch: Watch) -> Task:
        """Yield until `message` has ended.

        Raises:
            PeerError: The connection is lost, and within a moment nobody reports why.
        """
        while not _has_ended(message):
            yield message
        if message.errors:
            raise self._lost(message, watch)
        self._under_way.discard(message)

    def until_all(self, messages: Iterable[Message], watch: Watch) -> Task:
        """Yield until all of them have ended.

        Raises:
            PeerError: As for `until`.
        """
        for message in messages:
            yield from self.until(message, watch)

    def run(self, tasks: list[Task], watch: Watch) -> None:
        """Run tasks in turns until all are through; looks at the watch whenever none can go on."""
        pause, before = _SHORTEST_PAUSE_S, None
        while tasks:
            self._news.clear()
            steps = [(task, next(task, None)) for task in tasks]
            tasks = [task for task, message in steps if message is not None]
            waiting = [message for _, message in steps if message is not None]
            if not waiting:
                return
            watch.at(bucket=waiting[0].bucket, peer=waiting[0].peer)
            watch.check()
            if waiting[0].group.waits:
                self._news.wait(PATIENCE_S)
            else:
                pause = min(2 * pause, _LONGEST_PAUSE_S) if waiting[0] is before else _SHORTEST_PAUSE_S
                before = waiting[0]
                time.sleep(pause)

    def close(self) -> None:
        """End every message that is under way, and the groups; waits for nobody."""
        for group in self.groups:
            stuck = any(message.group is group for message in self._under_way if not _has_ended(message))
            group.close(stuck=stuck)
        for line in self._lines.values():
            line.put(None)
        self._lines.clear()
        self._under_way.clear()
        self.groups = ()

    def _lost(self, message: Message, watch: Watch) -> RefitError:
        peer = (" and ".join(message.group.lost()) if message.shared else "") or message.peer
        watch.at(bucket=message.bucket, peer=peer)
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            watch.check()
            time.sleep(PATIENCE_S)
        watch.check()
        reason = str(message.errors[0]).split(". This is typically")[0].split("] ", 1)[-1]
        return PeerError(
            f"lost the connection to {peer} at bucket {message.bucket} ({reason}): "
            f"it is dead, or gave up without a reason",
            phase=watch.phase_name,
            bucket=message.bucket,
            peer=peer,
        )


def _wait_for(line: SimpleQueue[Message | None], news: threading.Event) -> None:
    """What each line's thread does; it holds nothing while it has nothing to wait for."""
    while (message := line.get()) is not None:
        assert message.work is not None
        try:
            message.work.wait()
        except RuntimeError as error:
            message.errors.append(error)
        message.ended.set()
        news.set()
        del message


def _has_ended(message: Message) -> bool:
    if message.group.waits or message.ended.is_set():
        return message.ended.is_set()
    assert message.work is not None
    if message.work.is_completed():
        try:
            message.work.wait()  # it is over: this lets go of the tensor, and raises what went wrong
        except RuntimeError as error:
            message.errors.append(error)
        message.ended.set()
    return message.ended.is_set()


def payload_of(bucket: Bucket) -> int:
    """Bytes of weights in a bucket."""
    return sum(piece.nbytes for piece in bucket)


def slots_of(nbytes: int, count: int, device: torch.device) -> tuple[Tensor, ...]:
    """`count` slots, each for a header and `nbytes` of a bucket, in one allocation; none for nothing."""
    size = HEADER_BYTES + -(-nbytes // ALIGNMENT) * ALIGNMENT
    if not nbytes or not count:
        return ()
    return torch.empty(count * size, dtype=torch.uint8, device=device).view(count, size).unbind()


def write_header(slot: Tensor, numbers: Numbers) -> None:
    """Write refit, stream, bucket and bytes into the head of `slot`."""
    header = torch.tensor([_MAGIC, *numbers], dtype=torch.int64)
    slot[: header.nbytes].view(torch.int64).copy_(header)


def check_header(slot: Tensor, numbers: Numbers, peer: str) -> None:
    """Hold the header of a received slot against the refit, stream, bucket and bytes that are due.

    Raises:
        RefitError: It is another bucket's, so that one was dropped, duplicated or overtaken.
    """
    magic, *found = slot[: 8 * (1 + len(_FIELDS))].view(torch.int64).tolist()
    if magic == _MAGIC and tuple(found) == numbers:
        return
    got = _describe(found) if magic == _MAGIC else "no header at all"
    raise RefitError(
        f"expected {_describe(numbers)} from {peer}, got {got}: "
        f"a bucket was dropped, duplicated or reordered on the way",
        phase="transfer",
        bucket=numbers[2],
        peer=peer,
    )


def _describe(numbers: Iterable[int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in zip(_FIELDS, numbers, strict=True))

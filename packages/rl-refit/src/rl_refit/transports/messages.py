"""Messages between processes that map no memory of each other: one process group of torch.distributed for all of them.

The group belongs to the refit alone and is made from the backend's own class over the store of the rendezvous, so that
trainer and engine, which are worlds of their own, need no world in common. Gloo listens on loopback unless it is told a
host, and moves memory of the host; NCCL moves GPU memory over one communicator, made at once.

Two habits of gloo shape this file: a send or receive never says that it is completed unless somebody waits for it, so
that a thread waits for those of each kind; and a wait that times out breaks every connection of its group, which is how
`close` ends what would otherwise stay under way. NCCL's works say when they are completed, and are asked.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Literal, final

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Work  # type: ignore[attr-defined]

from rl_refit import gpu
from rl_refit.buckets import ALIGNMENT
from rl_refit.errors import PeerError, RefitError
from rl_refit.stores import in_thread
from rl_refit.transports.base import PATIENCE_S, Channel, Numbers, Watch
from rl_refit.transports.peers import Peer, Peers

__all__ = ["HEADER_BYTES", "Group", "Message", "MessageKind", "check_header", "connect", "write_header"]

HEADER_BYTES = ALIGNMENT
"""Bytes before the first piece of every slot; they keep the pieces aligned."""

MessageKind = Literal["send", "relay", "receive"]
"""What is relayed is not waited for behind what a process sends of its own."""

_MAGIC = 0x524C_5245_4649_5431
_TAGS = 2**30


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Message:
    """A slot under way, to or from a peer."""

    bucket: int
    peer: str
    work: Work | None
    """None where it could not even begin."""

    done: Future[None] = field(default_factory=Future)


@final
class Group:
    """The process group, as one process uses it.

    Args:
        backend: `ProcessGroupGloo` or `ProcessGroupNCCL`.
        ranks: Process → its rank in the backend.
        peers: Who is who.
        device: Of the slots.
        news: Written to whenever a message has ended.
    """

    def __init__(
        self, backend: Any, ranks: dict[int, int], peers: Peers, *, device: torch.device, news: socket.socket
    ) -> None:
        self.backend = backend
        self.is_ordered = device.type == "cuda"
        """Whether messages are told apart by their order alone, as NCCL's are, and not by tags: all processes then
        begin them in the order of the schedule."""
        self._ranks, self._peers, self._news = ranks, peers, news
        self._queues: dict[str, SimpleQueue[Message | None]] = {}
        self._under_way: set[Message] = set()

    def start(self, operation: str, slot: Tensor, rank: int, *, tag: int) -> Work | None:
        """Call the backend. NCCL, outside of a group of calls, would make a communicator of its own for each pair."""
        call = getattr(self.backend, operation)
        if not self.is_ordered:
            work: Work | None = call([slot], rank, tag % _TAGS)
            return work
        self.backend._start_coalescing()  # noqa: SLF001  (as torch's batch_isend_irecv)
        call([slot], rank, 0)
        ended: Work | None = self.backend._end_coalescing()  # noqa: SLF001
        return ended

    def begin(self, kind: MessageKind, slot: Tensor, peer: Peer, *, bucket: int, tag: int) -> Message:
        """Begin to send `slot`, or receive into it: gloo takes shorter messages, and a longer one ends the process."""
        try:
            work = self.start("recv" if kind == "receive" else "send", slot, self._ranks[peer[0]], tag=tag)
            message = Message(bucket=bucket, peer=peer[1], work=work)
        except RuntimeError as error:  # gloo knows already that the connection is broken
            message = Message(bucket=bucket, peer=peer[1], work=None)
            message.done.set_exception(error)
            return message
        self._under_way.add(message)
        if not self.is_ordered:
            if kind not in self._queues:
                self._queues[kind] = SimpleQueue()
                arguments = (self._queues[kind], self._news)
                threading.Thread(target=_wait_for, args=arguments, daemon=True, name=f"rl-refit {kind}").start()
            self._queues[kind].put(message)
        return message

    def has_ended(self, message: Message, watch: Watch) -> bool:
        """Whether `message` has ended.

        Raises:
            PeerError: The connection is lost, and within a moment nobody reports why.
        """
        if self.is_ordered and message.work is not None and not message.done.done() and message.work.is_completed():
            _finish(message)
        if not message.done.done():
            return False
        if (error := message.done.exception()) is not None:
            watch.at(bucket=message.bucket)
            watch.await_reason(message.peer)
            reason = str(error).split(". This is typically")[0].split("] ", 1)[-1]
            raise PeerError(
                f"lost the connection to {message.peer} at bucket {message.bucket} ({reason}): "
                f"it is dead, or gave up without a reason",
                phase=watch.phase_name,
                bucket=message.bucket,
                peer=message.peer,
            )
        self._under_way.discard(message)
        return True

    def close(self) -> None:
        """End every message that is under way, and the group; waits for nobody."""
        stuck = any(not message.done.done() for message in self._under_way)
        if self.is_ordered:
            failed = stuck or any(message.done.exception() for message in self._under_way)
            (self.backend.abort if failed else self.backend.shutdown)()
        elif stuck:
            for rank in self._ranks.values():
                if rank != self._ranks[self._peers.own]:
                    with contextlib.suppress(RuntimeError):  # it is meant to time out: see above
                        scratch = torch.empty(1, dtype=torch.uint8)
                        self.backend.recv([scratch], rank, _TAGS).wait(timedelta(milliseconds=1))
        for queue in self._queues.values():
            queue.put(None)
        self._queues.clear()
        self._under_way.clear()


def _wait_for(queue: SimpleQueue[Message | None], news: socket.socket) -> None:
    """What the thread of one kind of messages does; it holds nothing while it has nothing to wait for."""
    while (message := queue.get()) is not None:
        _finish(message)
        with contextlib.suppress(OSError):  # full, so that whoever waits wakes up anyway; or closed
            news.send(b"!")
        del message


def _finish(message: Message) -> None:
    assert message.work is not None
    try:
        message.work.wait()  # of NCCL it is over: this lets go of the tensor, and raises what went wrong
    except RuntimeError as error:
        message.done.set_exception(error)
    else:
        message.done.set_result(None)


def connect(
    pairs: Iterable[tuple[int, int]],
    peers: Peers,
    channel: Channel,
    *,
    watch: Watch,
    host: str | None,
    news: socket.socket,
) -> Group | None:
    """Make the group of all processes in `pairs`, and connect each pair; None for a process that is in none.

    Args:
        pairs: Who sends to whom, the same in every process.
        peers: Who is who.
        channel: The store and the device.
        watch: Looked at while connections are made.
        host: Where gloo listens; loopback, which ends at this machine, where that is None.
        news: See `Group`.

    Raises:
        PeerError: A process cannot be reached.
        RefitError: What `watch.check` raises.
    """
    pairs = tuple(dict.fromkeys(pairs))
    ranks = {process: rank for rank, process in enumerate(sorted({process for pair in pairs for process in pair}))}
    if peers.own not in ranks:
        return None
    assert channel.store is not None
    store: Any = channel.store
    store = PrefixStore("messages", store.clone())  # a store serves one thread at a time
    device = channel.device if peers.on_gpus else torch.device("cpu")
    timeout = timedelta(seconds=watch.deadline_s)

    def make() -> Group:
        place = (store, ranks[peers.own], len(ranks))
        gpu.use(device)
        if device.type == "cuda":
            backend = gpu.communicator(place, 2 * timeout, device)
        else:
            backend = _gloo(place, timeout, host)
        group = Group(backend, ranks, peers, device=device, news=news)
        scratch = gpu.empty(ALIGNMENT, device)
        for sender, receiver in pairs:  # in one order, so that nobody waits in a circle
            if peers.own in (sender, receiver):
                other = ranks[receiver if peers.own == sender else sender]
                work = group.start("send" if peers.own == sender else "recv", scratch, other, tag=_TAGS - 1)
                if work is not None:
                    work.wait()
        gpu.synchronize(device, watch.deadline_s)
        return group

    connecting = in_thread(make, name="connect")  # it waits as it likes, and is left to itself if the watch raises
    while not wait([connecting], PATIENCE_S).done:
        watch.check()
    try:
        return connecting.result()
    except Exception as error:
        watch.check()
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise PeerError(f"cannot connect the parties of the refit: {reason}", phase=watch.phase_name) from error


def _gloo(place: tuple[PrefixStore, int, int], timeout: timedelta, host: str | None) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its stubs lack the options
    options = gloo._Options()  # noqa: SLF001  (as all below: what init_process_group itself uses)
    options._timeout = timeout  # noqa: SLF001
    options._devices = [gloo.create_device(hostname=host or "127.0.0.1")]  # noqa: SLF001
    return gloo(*place, options)


# -- The header of a slot --------------------------------------------------------------------------------------------


def write_header(slot: Tensor, numbers: Numbers) -> None:
    """Write into the head of `slot` which bucket it is."""
    header = torch.tensor([_MAGIC, *numbers], dtype=torch.int64)
    slot[: header.nbytes].view(torch.int64).copy_(header)


def check_header(slot: Tensor, due: Numbers, peer: str) -> None:
    """Compare the header of a received slot with the bucket that is due.

    Raises:
        RefitError: It is another bucket's, so that one was dropped, duplicated or overtaken.
    """
    magic, *numbers = slot[: 8 * (1 + len(due))].view(torch.int64).tolist()
    if magic == _MAGIC and tuple(numbers) == due:
        return
    got = Numbers(*numbers) if magic == _MAGIC else "no header at all"
    raise RefitError(
        f"expected {due} from {peer}, got {got}: a bucket was dropped, duplicated or reordered on the way",
        phase="transfer",
        bucket=due.bucket,
        peer=peer,
    )

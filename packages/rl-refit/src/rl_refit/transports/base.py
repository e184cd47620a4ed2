"""What a transport is asked to do, and what it is given to do it with.

A transport moves the buckets of a schedule: it takes pieces from an `Outbox`, in the order of each stream, and gives
them to an `Inbox`. It decides nothing, and compares nothing but what its own wire may confuse, such as the order of
buckets: plan, digests, commit and abort belong to the transaction. A process may be a rank of the source, of the sink,
or of both at once.

Nothing in a refit waits without a look at the `Watch` at least every `PATIENCE_S` seconds; that ends every wait with an
error that names the cause, instead of a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import NamedTuple, Protocol, TypeVar, final, runtime_checkable

import torch
from torch import Tensor

from rl_refit.buckets import Bucket, Piece
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.errors import DeadlineError, RefitError
from rl_refit.layout import Region
from rl_refit.schedule import Schedule, Stream
from rl_refit.stores import Store

__all__ = ["PATIENCE_S", "Channel", "Inbox", "Numbers", "Outbox", "Transport", "Watch", "slot_view"]

_T = TypeVar("_T")

PATIENCE_S = 0.05
"""Longest wait, in seconds, between two looks at the watch."""

_REASON_GRACE_S = 0.25
"""How long the reason for a closed connection may take to be reported by the party that closed it."""


class Numbers(NamedTuple):
    """Which bucket of which refit something on the wire is, as both ends count, and its bytes."""

    refit: int
    stream: int
    bucket: int
    nbytes: int

    def __str__(self) -> str:
        return f"refit {self.refit}, stream {self.stream}, bucket {self.bucket}, bytes {self.nbytes}"


@final
class Watch:
    """The clock and the state of one refit at one party.

    Args:
        deadline_s: Seconds that each phase may take.
        look_around: Called by `check`, at most every `PATIENCE_S`: raises what another party reports, or its death.
    """

    def __init__(self, *, deadline_s: float, look_around: Callable[[], None] | None = None) -> None:
        self.deadline_s = deadline_s
        self.phase_name = "prepare"
        self.bucket: int | None = None
        self.tensor: str | None = None
        self.peer: str | None = None
        self.seconds: dict[str, float] = {}
        self._look_around = look_around
        self._looked = self._began = monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and give it a deadline of its own."""
        self.phase_name, self._began = name, monotonic()
        self.bucket = self.tensor = self.peer = None
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + monotonic() - self._began

    def at(self, *, bucket: int | None = None, tensor: str | None = None, peer: str | None = None) -> None:
        """Note what is being done, for errors: the bucket, the tensor, and the party that is waited for."""
        self.bucket, self.tensor, self.peer = bucket, tensor, peer

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline of the phase; 0 when it has passed."""
        return max(0.0, self._began + self.deadline_s - monotonic())

    def check(self) -> None:
        """Pass while the phase is within its deadline and no party has given up or died.

        Raises:
            DeadlineError: The phase takes too long; names phase, bucket, tensor and peer.
            RefitError: What `look_around` found.
        """
        now = monotonic()
        if self._look_around is not None and now - self._looked >= PATIENCE_S:
            self._looked = now
            self._look_around()
        if now - self._began > self.deadline_s:
            raise DeadlineError(
                f"{self.where()}: {now - self._began:.3f} s so far, and a phase may take deadline_s={self.deadline_s}",
                phase=self.phase_name,
                bucket=self.bucket,
                peer=self.peer,
                seconds=now - self._began,
            )

    def until(self, look: Callable[[], _T | None], *, longest_nap_s: float = 2e-3) -> _T:
        """What `look` finds, as soon as that is something.

        Raises:
            RefitError: As `check`, before each pause.
        """
        nap_s = 5e-5
        while (found := look()) is None:
            self.check()
            sleep(nap_s)
            nap_s = min(1.2 * nap_s, longest_nap_s)
        return found

    def await_reason(self, peer: str) -> None:
        """The connection to `peer` is broken: for a moment, look whether somebody says why, and raise that."""
        self.peer = peer
        until = monotonic() + _REASON_GRACE_S
        while monotonic() < until:
            self.check()
            sleep(PATIENCE_S)
        self.check()

    def where(self) -> str:
        """Phase, bucket, tensor and peer, as far as there is one."""
        parts = [f"phase {self.phase_name}"]
        parts += [] if self.bucket is None else [f"bucket {self.bucket}"]
        parts += [] if self.tensor is None else [f"tensor {self.tensor!r}"]
        parts += [] if self.peer is None else [f"waiting for {self.peer}"]
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Channel:
    """What all refits through a transport have in common, agreed upon by all parties before the first."""

    schedule: Schedule
    """The streams, cut as the transport's `bounded` says."""

    source_rank: int | None
    """This process's rank of the source; None where it has none."""

    sink_rank: int | None
    """This process's rank of the sink; None where it has none."""

    slots: int
    """Buckets that a bounded transport may hold at once."""

    device: torch.device
    """Where this process's tensors are."""

    store: Store | None
    """For addresses and handles: a namespace of its own in the store of the rendezvous. None in one process."""


@runtime_checkable
class Transport(Protocol):
    """One way of bytes. All parties of a refit construct the same one, with the same arguments."""

    name: str
    """The same at all parties, and compared by them."""

    @property
    def medium(self) -> str:
        """What carries the bytes of this process, for reports: "shared memory and gloo"; known once it is open."""

    bounded: bool
    """Whether streams are cut into buckets; otherwise each is one, as large as it needs."""

    def open(self, channel: Channel, watch: Watch) -> None:
        """Allocate and connect, once, before the first transfer. All parties call it at the same time."""

    def transfer(self, outbox: Outbox | None, inbox: Inbox | None, watch: Watch) -> None:
        """Move every bucket of this process's streams. All parties call it at the same time.

        Looks at `watch.check()` between buckets and, while it waits, at least every `PATIENCE_S`; notes with
        `watch.at` what it does. On any exception the transport must be able to serve a new transfer, or raise a
        `RefitError` that says why it cannot.
        """

    def finish(self) -> None:
        """The transaction is closed: memory that was given to the sink with `stays=True` may be reused."""

    def close(self) -> None:
        """Free everything; may be called twice, and after a failed `open`."""

    @property
    def extra_bytes(self) -> int:
        """Bytes that this process holds for transfers, beside the tensors of source and sink."""


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece of a stream and where it lies in the source's box."""

    bucket: int
    piece: Piece
    box: Region
    index: tuple[slice, ...]


@final
@dataclass
class Outbox:
    """The source's side of one refit: the pieces of a stream as views of the source's own tensors."""

    source: WeightSource
    schedule: Schedule
    watch: Watch
    refit: int
    """Number of this refit, counted from 1 by every party alike; failed ones count."""

    stays: bool = field(init=False)
    """Whether the source's tensors stay as they are until the refit is over, and not just until the next one."""

    _cuts: dict[int, tuple[_Cut, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.stays = bool(getattr(self.source, "tensors_stay", False))

    def pieces(self, stream: Stream) -> Iterator[tuple[int, Piece, Tensor]]:
        """Each piece of `stream` in order: the number of its bucket, the piece, and a tensor of its shape and dtype.

        The tensor is the source's, perhaps not contiguous, and stays until the next one is asked for.

        Raises:
            RefitError: The source yields other tensors than its manifest promises.
        """
        cuts = self._cuts.get(stream.number) or self._cut(stream)
        self._cuts[stream.number] = cuts
        shards, dtypes = self.source.shards(dict.fromkeys(cut.box.name for cut in cuts)), self.schedule.dtypes
        shard: tuple[Region, Tensor] | None = None
        for cut in cuts:
            self.watch.check()
            while shard is None or shard[0] != cut.box:
                shard = next(shards, None)
                if shard is None:
                    raise RefitError(
                        f"the source does not yield {cut.box}, which its manifest promises", tensor=cut.box.name
                    )
                region, tensor = shard
                self.watch.tensor = region.name
                dtype = dtypes[region.name]
                if tensor.shape != region.shape or tensor.dtype != dtype:
                    raise RefitError(
                        f"the source yields {region} as {list(tensor.shape)} in {tensor.dtype}, where its manifest has "
                        f"{dtype}",
                        tensor=region.name,
                    )
            yield cut.bucket, cut.piece, shard[1] if cut.piece.region == cut.box else shard[1][cut.index]

    def _cut(self, stream: Stream) -> tuple[_Cut, ...]:
        boxes: dict[str, tuple[Region, ...]] = {}
        cuts: list[_Cut] = []
        for number, bucket in enumerate(stream.buckets):
            for piece in bucket:
                name = piece.region.name
                if name not in boxes:
                    boxes[name] = self.schedule.plan.source.by_name[name].regions_on(stream.source_rank)
                box = next(box for box in boxes[name] if box.intersect(piece.region) == piece.region)
                cuts.append(_Cut(number, piece, box, piece.region.index_within(box)))
        return tuple(cuts)


@final
@dataclass
class Inbox:
    """The sink's side of one refit: hands pieces to the sink. A route goes to ranks that need all of it."""

    sink: WeightSink
    schedule: Schedule
    watch: Watch
    refit: int
    """Number of this refit, counted from 1 by every party alike; failed ones count."""

    def deliver(self, bucket: Bucket, slot: Tensor, *, stays: bool = False) -> None:
        """Stage `bucket`, whose bytes are in `slot`, uint8 [at least the bucket's bytes].

        `stays` promises that the slot is not written before the transport's `finish`.
        """
        for piece in bucket:
            self.put(piece.region, slot_view(slot, piece, self.schedule.dtypes[piece.region.name]), stays=stays)

    def put(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Stage `region`, given as `tensor` of its shape."""
        self.watch.tensor = region.name
        self.sink.stage(region, tensor, stays=stays)


def slot_view(slot: Tensor, piece: Piece, dtype: torch.dtype) -> Tensor:
    """The place of `piece` in the bytes `slot`, uint8 [at least its end], as `dtype` and in the shape of the piece."""
    return slot[piece.start : piece.start + piece.nbytes].view(dtype).view(piece.region.shape)

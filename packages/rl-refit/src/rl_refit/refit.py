"""`Refit`: prepare, transfer, verify, commit; or abort with the old weights intact.

    PREPARE    the manifests are those that were planned, the version is new; all parties agree before a byte moves
    TRANSFER   the transport moves the buckets of this party's streams
    VERIFY     the digest of what a sink has staged is the digest that the sources give of what they sent to it
    COMMIT     one decision is made for all; sinks make the staged weights theirs, and are digested again

`Refit` plans, numbers the refits and aborts; `Party` runs the four phases; `RefitReport` says what they did. In one
process there is no control, and the same phases run without it.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NoReturn, TypeVar, final

from rl_refit import gpu
from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Boxes, Digest, Sample, choose_sample
from rl_refit.engine import Driver, EngineSink
from rl_refit.errors import (
    DeadlineError,
    DigestError,
    PeerError,
    PoisonedError,
    RefitError,
    error_from_message,
    error_to_message,
)
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan
from rl_refit.rendezvous import Rendezvous
from rl_refit.schedule import Schedule, Stream, make_schedule
from rl_refit.transaction.agreement import Agreement, agree, agree_in_process
from rl_refit.transaction.control import COMMIT, Control
from rl_refit.transaction.shared import digest_source
from rl_refit.transaction.sides import Sides, check_engine, check_sides, device_of
from rl_refit.transports.base import Channel, Inbox, InProcess, Outbox, Transport, Watch

__all__ = ["Refit", "RefitReport"]

_DEFAULTS = RefitConfig()
_T = TypeVar("_T")

_FAREWELL_S = 1.0  # who hosts the store waits so long for the others to hear why a refit was given up
LONGEST_NAP_S = 5e-3
"""Longest pause, in seconds, between two looks for the next refit while a sink waits for it."""

_CLOSED = "this Refit is closed; make a new one"


@final
class Refit:
    """Brings the weights of `source` into `sink` whenever it is called.

    In one process it needs both. Over several, every rank of the trainer makes one with its `source`, every rank of the
    engine one with its `sink`, a process that is both one with both, and all give the same transport and a rendezvous:
    then the trainer's ranks call it, and the engine's `receive`.

    Args:
        source: Where fresh weights come from: this process's rank of it.
        sink: Where they go: this process's rank of it.
        transport: The way of the bytes between processes; a `SlotStream` unless it is given. None in one process.
        rendezvous: Who takes part; left out in one process.
        bucket_bytes: See `RefitConfig`, as for the arguments that follow.
        buckets: Slots of the ring.
        deadline_s: Seconds a phase may take.
        verify: How much is digested: "full", "sampled", "off". The leader's choice holds for all.

    Raises:
        ValueError: An argument is out of range, or source, sink, transport and rendezvous do not go together.
    """

    def __init__(
        self,
        source: WeightSource | None = None,
        sink: WeightSink | EngineSink | None = None,
        transport: Transport | None = None,
        *,
        rendezvous: Rendezvous | None = None,
        bucket_bytes: int = _DEFAULTS.bucket_bytes,
        buckets: int = _DEFAULTS.buckets,
        deadline_s: float = _DEFAULTS.deadline_s,
        verify: Verify = _DEFAULTS.verify,
    ) -> None:
        self._config = RefitConfig(bucket_bytes=bucket_bytes, buckets=buckets, deadline_s=deadline_s, verify=verify)
        if transport is None and (rendezvous is not None or isinstance(sink, EngineSink)):
            transport = _slot_stream()
        self._interrupted: BaseException | None = None
        self._engine: Driver | None = None
        """Of an engine whose workers are sinks of their own; this process's source then is a party by itself."""
        self._inner: Refit | None = None
        self._given_source, self._given_transport = source, transport
        if isinstance(sink, EngineSink):
            check_engine(source, transport, rendezvous)
            stream: Any = transport  # a SlotStream, as was checked
            self._engine = sink.drive(rendezvous, config=asdict(self._config), transport=stream.options)
            self._closed, self._busy = False, threading.Lock()
            weakref.finalize(self, self._engine.let_go).atexit = False
            return
        check_sides(Sides(source, sink), transport, rendezvous)
        self._sides = Sides(source, sink)
        self._transport: Transport = transport or InProcess()
        self._rendezvous = rendezvous
        self._control = None if rendezvous is None else Control(rendezvous)
        self._party: Party | None = None
        self._refits = 0
        self._closed = False
        self._busy = threading.Lock()
        self._digests: dict[tuple[int, int], tuple[int, str | None]] = {}
        self._look_also: Callable[[], None] = lambda: None
        """Raises what whoever made this Refit has found out, such as a death; called wherever this one waits."""

    @property
    def plan(self) -> RefitPlan:
        """What a call will move. Made at the first look or the first call; over several processes all must ask for it.

        Raises:
            CoverageError: Source and sink do not hold the same tensors.
            RefitError: One of them cannot take part.
        """
        if self._engine is not None:
            inner = self._source_refit()
            known = inner._party is not None  # noqa: SLF001  (another of this class)
            return inner.plan if known else self._drive(lambda: inner.plan, ends=False)
        return (self._party or self._plan()).agreement.plan

    def explain(self) -> str:
        """The plan as text, with the buckets of this refit."""
        return self.plan.explain(
            bucket_bytes=self._config.bucket_bytes if getattr(self._given_transport, "bounded", False) else None
        )

    def __call__(self, version: int) -> RefitReport:
        """Bring the source's present weights into the sink as `version`, the number of optimizer steps they have seen.

        Whatever is raised, the refit has been aborted at all parties before: up to and including verify every sink
        keeps its old weights, bit for bit, and its old version, or is poisoned where it writes in place. What a source
        or sink raises comes through as it is, with a note of phase, bucket and tensor; at the other parties an error of
        the same kind says which of them gave up, where, and why.

        Raises:
            RefitError: `version` is no integer ≥ 0 or not newer than the sink's, or a side broke its promises.
            CoverageError: The two sides do not hold the same tensors.
            DeadlineError: A phase took longer than `deadline_s`.
            DigestError: What was staged, or serves after the commit, is not what the source gave.
            PeerError: A party is dead, silent, or out of reach.
            AbortedError: A party gave up for a reason of its own.
        """
        if self._given_source is None:
            raise RefitError("this process has no source of weights; wait for a refit with receive()")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise RefitError(f"a version is a number of optimizer steps, an int ≥ 0; got version={version!r}")
        return self._run(version)

    def receive(self, *, timeout_s: float | None = None) -> RefitReport:
        """Wait for the trainer to call its `Refit`, and take part; for a process that has a sink alone.

        Args:
            timeout_s: Seconds to wait for the refit to begin; None waits as long as the trainer lives.

        Raises:
            DeadlineError: None began within `timeout_s`; the sink is as it was.
            RefitError: As for a call.
        """
        if self._given_source is not None or (self._engine is None and self._control is None):
            raise RefitError("this process has a source of weights, which gives the version: call refit(version=…)")
        return self._run(None, timeout_s=math.inf if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Free what the transport holds, and leave; others that still wait for this process are told."""
        self._closed = True
        if self._engine is not None:
            if self._inner is not None:
                self._inner.close()
            self._engine.close()
            return
        self._transport.close()
        if self._control is not None:
            self._control.close()

    def _source_refit(self) -> Refit:
        """This process's own source as a party beside the workers of its engine."""
        assert self._engine is not None
        if self._given_source is None:
            raise RefitError("the driver of an engine carries no weights, and has no plan: ask the trainer's Refit")
        if self._inner is None:
            meeting = self._engine.source_rendezvous()
            self._inner = Refit(
                self._given_source, transport=self._given_transport, rendezvous=meeting, **asdict(self._config)
            )
            weakref.finalize(self, self._inner.close).atexit = False
        return self._inner

    def _drive(self, run: Callable[[], _T], *, ends: bool) -> _T:
        """What `run` returns, a call of the inner Refit, while the engine is driven."""
        assert self._engine is not None
        inner = self._source_refit()
        inner._interrupted = None  # noqa: SLF001  (another of this class)
        return self._engine.refit(run, lambda error: setattr(inner, "_interrupted", error), ends=ends)

    def _run_engine(self, version: int | None, *, timeout_s: float) -> RefitReport:
        assert self._engine is not None
        if version is None:
            said = self._engine.receive(timeout_s)
            report = said[0]["report"]
            report = RefitReport(**{**report, "kept": tuple(report["kept"])})
        else:
            inner = self._source_refit()
            report = self._drive(lambda: inner(version=version), ends=True)
            said = self._engine.reports
        unreadable = tuple(dict.fromkeys(name for each in said for name in each["report"]["unreadable"]))
        return replace(report, unreadable=unreadable)

    def _run(self, version: int | None, *, timeout_s: float = math.inf) -> RefitReport:
        """One refit: to `version`, or without one to that of the trainer, which begins within `timeout_s`."""
        if self._closed:
            raise RefitError(_CLOSED)
        if not self._busy.acquire(blocking=False):
            raise RefitError(
                "another thread is in this Refit; a thread that waits in receive() cannot be cancelled from outside: "
                "give it a timeout_s, or close the Refit"
            )
        try:
            if self._engine is not None:
                return self._run_engine(version, timeout_s=timeout_s)

            # The first refit plans, and opens the transport. Planning over several processes is announced as a refit
            # of its own, hence a second wait.
            if version is None and self._control is not None:
                patience = self._watch(timeout_s)
                self._await_begin(self._control, patience)
                if self._party is None:
                    self._plan()
                    self._await_begin(self._control, patience)
            party = self._party or self._plan(version)

            watch = self._watch()
            try:
                with watch.phase("prepare"):
                    self._refits += 1
                    refit, sample = self._refits, party.sample(self._config.verify, self._refits)
                    if self._control is not None:  # the leader's version, sample and count hold for all
                        version, sample = self._begin(self._control, version, sample, watch=watch)
                        refit = self._control.refit
                assert version is not None
                for box in (party.outbox, party.inbox):
                    if box is not None:
                        box.watch, box.refit = watch, refit
                digest, unreadable = party.run(version, sample, watch)
            except BaseException as error:
                self._abort(error, version, watch)
                raise
            self._transport.finish()
            if self._control is not None:
                with contextlib.suppress(PeerError):  # all have committed, and know it
                    self._control.over()

            # The last version of which the same bytes were digested, where they have not changed since.
            chosen = sample.stride, sample.phase % max(1, sample.stride)
            before, self._digests[chosen] = self._digests.get(chosen), (version, digest)
            plan = party.agreement.plan
            return RefitReport(
                version=version,
                transport=self._transport.medium,
                tensors=sum(meta.travels for meta in plan.sink.tensors),
                bytes=plan.total_bytes,
                buckets=party.num_buckets,
                seconds={name: seconds for name, seconds in watch.seconds.items() if name != "confirm"},
                verified={0: "nothing", 1: "every byte"}.get(sample.stride, f"1/{sample.stride} of the chunks"),
                uncompared=party.uncompared(sample),
                digest=digest,
                same_as=before[0] if before is not None and digest is not None and before[1] == digest else None,
                kept=tuple(m.name for m in plan.sink.tensors if m.feeding != "fed" and m.name in plan.source.by_name),
                unreadable=unreadable,
                manifest_hash=plan.source.hash(),
                extra_bytes=self._transport.extra_bytes,
            )
        finally:
            self._busy.release()

    def _await_begin(self, control: Control, watch: Watch) -> None:
        try:
            control.meet(watch)
            watch.at(peer=control.rendezvous.leader)
            nap_s = 2e-4
            while not control.next_has_begun():
                watch.check()
                time.sleep(nap_s)
                nap_s = min(1.1 * nap_s, LONGEST_NAP_S)
        except DeadlineError as late:
            raise DeadlineError(
                f"no refit began within timeout_s={watch.deadline_s:g}; the sink is as it was, without {late.peer}",
                phase="prepare",
                peer=late.peer,
                seconds=late.seconds,
            ) from None
        except RefitError as error:
            if self._closed:  # a store that is closed on this side is no news
                raise RefitError(_CLOSED) from None
            _annotate(error, None, watch)
            raise

    def _watch(self, deadline_s: float | None = None) -> Watch:
        deadline_s = self._config.deadline_s if deadline_s is None else deadline_s
        return Watch(deadline_s=deadline_s, look_around=self.look_around)

    def look_around(self) -> None:
        """Pass while this Refit is open and no party has given up, left or died; raise what happened otherwise."""
        if self._interrupted is not None:
            raise RefitError(f"interrupted: {type(self._interrupted).__name__}") from self._interrupted
        if self._closed:
            raise RefitError(_CLOSED)
        self._look_also()
        if self._control is not None:
            self._control.look_around()

    def _begin(self, control: Control, version: int | None, sample: Sample, *, watch: Watch) -> tuple[int, Sample]:
        """Number the refit at all parties, and agree on its version and sample."""
        message = {"version": version, "stride": sample.stride, "phase": sample.phase}
        said = control.begin(message if control.rendezvous.leads else None, watch)
        if "version" not in said:
            raise RefitError(
                f"{control.rendezvous.leader} plans anew, and this party has planned before; all make a new "
                f"Refit, of another name"
            )
        if version is not None and said["version"] != version:
            raise RefitError(
                f"{' and '.join(control.rendezvous.mine)} is called with version {version}, and "
                f"{control.rendezvous.leader} with {said['version']}: all ranks of a trainer give the same"
            )
        return said["version"], Sample(stride=said["stride"], phase=said["phase"])

    def _plan(self, version: int | None = None) -> Party:
        """Agree on a plan, cut it into buckets, and open the transport; once."""
        watch = self._watch()
        try:
            settings: dict[str, Any] = {"transport": self._transport.name}
            if self._transport.bounded:
                settings |= {"bucket_bytes": self._config.bucket_bytes, "buckets": self._config.buckets}
            if self._control is None:
                agreement = agree_in_process(self._sides)
            else:
                agreement = agree(self._control, self._sides, settings=settings, watch=watch)
            schedule = make_schedule(
                agreement.plan,
                bucket_bytes=self._config.bucket_bytes if self._transport.bounded else None,
            )
            meeting = self._rendezvous
            in_process = (*agreement.plan.source.ranks, 0)[0], (*agreement.plan.sink.ranks, 0)[0]
            source_rank, sink_rank = in_process if meeting is None else (meeting.source_rank, meeting.sink_rank)
            channel = Channel(
                schedule=schedule,
                source_rank=source_rank,
                sink_rank=sink_rank,
                slots=self._config.buckets,
                device=device_of(self._sides),
                store=None if self._control is None else self._control.namespace(f"transport/{self._control.refit}"),
            )
            self._transport.open(channel, watch)
            if self._control is not None:
                self._control.agree("opened", watch)
                self._control.over()
            outbox = inbox = None
            if self._sides.source is not None:
                outbox = Outbox(self._sides.source, schedule, watch, refit=0)
            if self._sides.sink is not None:
                inbox = Inbox(self._sides.sink, schedule, sink_rank or 0, watch, refit=0)
            boxes: dict[tuple[int, int], list[tuple[Region, int]]] = {}
            for sender, receivers in agreement.plan.ways:
                mine = [receiver for receiver in receivers if sender == source_rank or receiver == sink_rank]
                for route in agreement.plan.routes_of((sender, receivers)) if mine else ():
                    itemsize = agreement.plan.sink.by_name[route.region.name].torch_dtype.itemsize
                    for receiver in mine:
                        boxes.setdefault((sender, receiver), []).append((route.region, itemsize))
            self._party = Party(
                sides=self._sides,
                agreement=agreement,
                transport=self._transport,
                outbox=outbox,
                inbox=inbox,
                control=self._control,
                schedule=schedule,
                source_rank=source_rank,
                sink_rank=sink_rank,
                boxes={pair: Boxes(boxes[pair]) for pair in sorted(boxes)},
            )
        except BaseException as error:
            self._abort(error, version, watch)
            raise
        return self._party

    def _abort(self, error: BaseException, version: int | None, watch: Watch) -> None:
        """Have all parties abort, and this one first of all."""
        try:
            decision = self._tell_others(error, watch)
            if self._party is not None:
                self._party.give_up(error, decision, watch)
        finally:  # also when somebody presses Ctrl-C twice
            if self._sides.sink is not None:
                self._sides.sink.abort()
            if self._party is not None:
                self._transport.finish()
            else:
                self._transport.close()
            _annotate(error, version, watch)

    def _tell_others(self, error: BaseException, watch: Watch) -> Any:
        """What is decided for all; None where that cannot be known."""
        if self._control is None or not self._control.under_way:
            return None
        try:
            decision = self._control.decide(_abort_message(error, self._control, watch))
        except RefitError as lost:
            error.add_note(f"the others could not be told: {lost}")
            return None
        with contextlib.suppress(PeerError):
            self._control.over()
            self._control.see_off(_FAREWELL_S)
        return decision


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitReport:
    """A refit that was committed, as one of its parties saw it."""

    version: int
    """Number of optimizer steps that the weights have seen."""

    transport: str
    """The way that the bytes took."""

    tensors: int
    """Tensors fed; those tied to one of them are not counted."""

    bytes: int
    """Bytes that arrived, at all ranks of the sink together."""

    buckets: int
    """Buckets that this process sends or receives."""

    seconds: Mapping[str, float]
    """Seconds by phase: prepare, transfer, verify, commit."""

    verified: str
    """What was digested on both sides: "every byte", "1/16 of the chunks", "nothing"."""

    uncompared: float
    """The share of the bytes that this process sends or receives of which no digest was compared: 0 to 1."""

    digest: str | None
    """Of all that was digested, at all sinks, in hex; equal at every party. None where nothing was."""

    same_as: int | None
    """An earlier version of which the very same bytes were digested; None where they have changed. A policy that trains
    and does not change here is not the one that is sent: the source may be a copy of it, or a LoRA's base."""

    kept: tuple[str, ...]
    """Tensors that the source has and the sink keeps as they are, since they were declared constant or derived."""

    unreadable: tuple[str, ...]
    """Tensors of this process's sink that were verified when staged, and cannot be read back from the engine."""

    manifest_hash: str
    """`Manifest.hash()` of the source."""

    extra_bytes: int
    """Bytes that the transport holds in this process. What the sink stages comes on top."""

    @property
    def total_seconds(self) -> float:
        """Seconds of all phases."""
        return sum(self.seconds.values())

    def metrics(self) -> dict[str, float]:
        """For a log: bytes, seconds, and 1 if digests of both sides were compared, else 0."""
        return {
            "refit_bytes": float(self.bytes),
            "refit_s": sum(self.seconds.values()),
            "refit_verified": float(self.digest is not None),
        }

    def explain(self) -> str:
        """One line for people."""
        phases = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())
        digest = "" if self.digest is None else f", digest {self.digest[:12]}"
        rest = f" ({100 * self.uncompared:.0f} % not compared)" if self.uncompared else ""
        notes = [f"the same bytes as version {self.same_as}"] if self.same_as is not None else []
        notes += [f"{len(self.kept)} tensors kept as they are"] if self.kept else []
        notes += [f"{len(self.unreadable)} tensors not readable in the engine"] if self.unreadable else []
        return (
            f"version {self.version}: {self.tensors} tensors, {self.bytes:,} bytes {self.transport}, "
            f"{1e3 * self.total_seconds:.1f} ms ({phases}), verified {self.verified}{rest}{digest}"
            + "".join(f", {note}" for note in notes)
        )


@final
@dataclass
class Party:
    """This process in every refit of one agreement."""

    sides: Sides
    agreement: Agreement
    transport: Transport
    outbox: Outbox | None
    inbox: Inbox | None
    control: Control | None
    schedule: Schedule
    source_rank: int | None
    sink_rank: int | None
    boxes: dict[tuple[int, int], Boxes]
    """By (source rank, sink rank), ascending: the boxes that the one routes to the other, where either is this one."""
    _voted: bool = False
    """Whether others may commit by this party's leave, and do not know yet what became of its own commit."""
    _whole: bool = False
    """Whether this party has done its own commit."""

    @cached_property
    def num_buckets(self) -> int:
        """Buckets that this process sends or receives."""
        own = dict[int, Stream]()
        if self.source_rank is not None:
            own |= {stream.number: stream for stream in self.schedule.of_source(self.source_rank)}
        if self.sink_rank is not None:
            own |= {stream.number: stream for stream in self.schedule.of_sink(self.sink_rank)}
        return sum(len(stream.buckets) for stream in own.values())

    def run(self, version: int, sample: Sample, watch: Watch) -> tuple[str | None, tuple[str, ...]]:
        """All phases. Whatever is raised, the caller aborts.

        Returns:
            One digest of all that was verified at all sinks, None where nothing was; and the tensors of this process's
            sink that cannot be read back after the commit.

        Raises:
            RefitError: Of any kind; see `Refit`.
        """
        self._voted = self._whole = False
        with watch.phase("prepare"):
            self._prepare(version, watch)
        with watch.phase("transfer"):
            if self.sides.source is not None:
                gpu.synchronize(
                    device_of(self.sides), watch.remaining_s
                )  # an optimizer may have stepped in another thread's stream
            self.transport.transfer(self.outbox, self.inbox, watch)
            watch.check()
        with watch.phase("verify"):
            verified = self._verify(sample, watch)
            if self.sides.sink is not None:
                self.sides.sink.ready(version)
        with watch.phase("commit"):
            if self.control is not None:
                self._decide(version, watch)
            return self._commit(version, verified, sample=sample, watch=watch)

    def sample(self, verify: Verify, refit: int) -> Sample:
        """What is digested at refit number `refit`, if this party is the leader; the same for all."""
        plan = self.agreement.plan
        largest = max([plan.bytes_received(rank) for rank in plan.sink.ranks], default=0)
        return choose_sample(verify, refit=refit, largest_bytes=largest)

    def uncompared(self, sample: Sample) -> float:
        """The share of this process's bytes of which no digest is compared."""
        total = sum(boxes.nbytes for boxes in self.boxes.values())
        return 0.0 if not total else 1.0 - sum(boxes.nbytes_of(sample) for boxes in self.boxes.values()) / total

    def _prepare(self, version: int, watch: Watch) -> None:
        """See that nothing has changed since the plan was made, and wait until all parties are at this version."""
        planned = self.agreement
        if self.sides.source is not None:
            own = self.sides.source.manifest()
            if own is not planned.source:
                _require_unchanged("source", planned=planned.source, now=own, rank=self.source_rank)
        if self.sides.sink is not None:
            coverage = self.sides.sink.prepare(planned.plan.source)
            if coverage.manifest_hash != planned.plan.source.hash():
                raise RefitError(
                    f"the sides disagree on the manifest: the source's hash is {planned.plan.source.hash()}, "
                    f"the sink answers {coverage.manifest_hash}"
                )
            if coverage.sink is not planned.sink:
                _require_unchanged("sink", planned=planned.sink, now=coverage.sink, rank=self.sink_rank)
            if coverage.version is not None and version <= coverage.version:
                raise RefitError(
                    f"version {version} is not newer than the sink's {coverage.version}; "
                    f"a version is the number of optimizer steps that the weights have seen, never a count of calls; "
                    f"where a trainer went back, each engine says so with sink.rewind({version})"
                )
        watch.check()
        if self.control is not None:
            said = self.control.gather("prepared", dict.fromkeys(self.control.rendezvous.mine, version), watch)
            for party, other in (said or {}).items():
                if other != version:
                    leader = self.control.rendezvous.leader
                    raise RefitError(f"{party} is at version {other}, and {leader} at {version}")
            self.control.announce("prepared", None if said is None else version, watch)

    def _verify(self, sample: Sample, watch: Watch) -> dict[int, tuple[tuple[Region, ...], Digest]]:
        """By source rank, the regions and digests that this process's sink has staged; empty without a sink."""
        routed = {pair: regions for pair, boxes in self.boxes.items() if (regions := sample.of(boxes))}

        # Digest what this process's source routes to each sink rank, and tell it.
        given: dict[int, Digest] = {}
        same: dict[tuple[Region, ...], Digest] = {}  # replicas of a sink are sent the same
        for (source_rank, sink_rank), regions in routed.items():
            if self.sides.source is not None and source_rank == self.source_rank:
                if regions not in same:
                    same[regions] = digest_source(self.sides.source, regions, watch)
                given[sink_rank] = same[regions]
                if self.control is not None and sink_rank != self.sink_rank:
                    self.control.post(f"digest/{source_rank}/{sink_rank}", dict(same[regions].tensors))

        # Compare with what this process's sink has staged.
        verified: dict[int, tuple[tuple[Region, ...], Digest]] = {}
        for (source_rank, sink_rank), regions in routed.items():
            if self.sides.sink is not None and sink_rank == self.sink_rank:
                staged = self.sides.sink.digest(regions)
                if source_rank == self.source_rank:
                    sent = given[sink_rank]
                else:
                    assert self.control is not None
                    key, peer = f"digest/{source_rank}/{sink_rank}", f"source {source_rank}"
                    sent = Digest(self.control.read(key, watch, peer=peer))
                if staged != sent:
                    _refuse_difference(sent, staged, where="staged", source_rank=source_rank)
                verified[source_rank] = regions, sent
                watch.check()
        return verified

    def _commit(
        self, version: int, verified: dict[int, tuple[tuple[Region, ...], Digest]], *, sample: Sample, watch: Watch
    ) -> tuple[str | None, tuple[str, ...]]:
        """Commit here, compare what the sink now serves, hear that all have committed, and make one digest of all.

        Raises:
            PoisonedError: A sink failed to; says which.
        """
        sink, unreadable = self.sides.sink, dict[str, None]()
        if sink is not None:
            sink.commit(version)
            began = time.monotonic()
            try:
                for source_rank, (regions, sent) in verified.items():
                    resident = sink.digest(regions)
                    missing = [name for name in sent.tensors if name not in resident.tensors]
                    unreadable |= dict.fromkeys(missing)
                    readable = Digest({name: value for name, value in sent.tensors.items() if name not in missing})
                    if resident != readable:
                        where = "in the engine after the commit"
                        _refuse_difference(readable, resident, where=where, source_rank=source_rank)
            except BaseException as error:
                sink.poison(f"the weights could not be confirmed after the commit: {type(error).__name__}: {error}")
                raise
            watch.seconds["confirm"] = time.monotonic() - began
            if self.control is not None and (sample.stride != 1 or unreadable):
                self._require_held(self.control, sink)
        self._whole = True
        digest = Digest({f"{rank}": sent.hex for rank, (_, sent) in verified.items()}).hex if verified else None
        if self.control is not None:
            digest = self._say_committed({"digest": digest}, watch)
        return digest, tuple(unreadable)

    def _decide(self, version: int, watch: Watch) -> None:
        """Have the decision made: commit, once all have verified.

        Raises:
            RefitError: Another party made it abort.
            PeerError: It cannot be learnt; a rank of a sink of several is poisoned, since its peers may have committed.
        """
        if self.control is None:
            return
        watch.check()
        self._voted = True
        self.control.gather("verified", dict.fromkeys(self.control.rendezvous.mine, version), watch)
        if self.control.rendezvous.leads:
            decision = self.control.decide(COMMIT)
        else:
            decision = self._learn_decision(watch)
        if decision != COMMIT:
            self._voted = False
            raise error_from_message(decision)

    def _learn_decision(self, watch: Watch) -> Any:
        assert self.control is not None
        try:
            return self.control.decision(watch)
        except RefitError as silence:
            # Whoever proposes first decides for all: after this either nobody commits, or everybody does.
            return self.control.decide(_abort_message(silence, self.control, watch))

    def give_up(self, error: BaseException, decision: object, watch: Watch) -> None:
        """After any error: where others commit, or may, and this party has not, tell them, and trust nothing here.

        Args:
            error: Why this party gives up.
            decision: What holds for all; None where the store is gone, and the decision with it.
            watch: Says where it was.
        """
        in_doubt, self._voted = self._voted and decision in (None, COMMIT), False
        if self.control is None or not in_doubt:
            return
        message = _abort_message(error, self.control, watch)
        sink = self.sides.sink
        torn = sink is not None and not self._whole
        if sink is not None and torn and len(self.agreement.plan.sink.ranks) > 1:
            others = "other ranks have committed" if decision == COMMIT else "other ranks may have committed"
            sink.poison(f"this rank gave up in {watch.where()}, and {others}: {_text(message)}")
            error.add_note(f"this rank of the sink is poisoned until a refit succeeds, since {others}")
        if decision == COMMIT:
            with contextlib.suppress(PeerError):
                self._say_given_up(message, torn=torn)

    def _say_given_up(self, message: dict[str, Any], *, torn: bool) -> None:
        assert self.control is not None
        rendezvous, text = self.control.rendezvous, _text(message)
        if rendezvous.leads:
            blamed = rendezvous.mine[-1] if torn else message.get("about") or rendezvous.leader
            self.control.post("committed/all", {"failed": {blamed: text}, "digest": None})
            return
        for party in rendezvous.mine:
            failed = torn and party.startswith("sink")
            self.control.post(f"committed/{party}", {"failed": text} if failed else {"digest": None})

    def _require_held(self, control: Control, sink: WeightSink) -> None:
        """See that the sources waited for this sink's commit, where not every byte was confirmed after it.

        The sink may have copied from memory that they train in.
        """
        if control.is_said("committed/all"):
            reason = "the others gave this refit up while this rank still committed, and may have changed its source"
            sink.poison(reason)
            raise PoisonedError(f"{reason}; refit again before using the weights", phase="commit")

    def _say_committed(self, value: dict[str, Any], watch: Watch) -> str | None:
        assert self.control is not None
        said = self.control.gather("committed", dict.fromkeys(self.control.rendezvous.mine, value), watch)
        answer: dict[str, Any] | None = None
        if said is not None:
            failed = {party: other["failed"] for party, other in said.items() if "failed" in other}
            hexes = {party: other.get("digest") for party, other in said.items() if party.startswith("sink")}
            answer = {"failed": failed, "digest": Digest(hexes).hex if all(hexes.values()) else None}
        answer = self.control.announce("committed", answer, watch)
        self._voted = False
        if answer["failed"]:
            lines = "".join(f"\n  {party}: {text}" for party, text in answer["failed"].items())
            if self.sides.sink is not None and not self._is_a_replica():
                self.sides.sink.poison(f"this rank has committed, and not all that it needs came through:{lines}")
            elif self.sides.sink is not None:
                self.sides.sink.repeat()
            raise RefitError(
                f"not all parties came through their commit, which the others have done; refit all again before using "
                f"any of these, or ranks that share a model with them:{lines}",
                phase="commit",
                peer=next(iter(answer["failed"])),
            )
        self.control.complete()
        digest: str | None = answer["digest"]
        return digest

    def _is_a_replica(self) -> bool:
        """Whether this rank of the sink holds all of every tensor, and so can be used whatever others have."""
        sink = self.agreement.plan.sink
        return self.sink_rank is not None and all(
            sum(box.numel for box in meta.regions_on(self.sink_rank)) == math.prod(meta.shape) for meta in sink.tensors
        )


def _slot_stream() -> Transport:
    from rl_refit.transports.stream import SlotStream

    return SlotStream()


def _text(message: dict[str, Any]) -> str:
    return f"{message['kind']}: {message['text']}"


def _abort_message(error: BaseException, control: Control, watch: Watch) -> dict[str, Any]:
    """The decision that a party proposes when it fails."""
    return error_to_message(error, party=" and ".join(control.rendezvous.mine), where=watch.where())


def _require_unchanged(side: str, *, planned: Manifest | None, now: Manifest, rank: int | None) -> None:
    assert planned is not None
    if now is planned or now.hash() == planned.hash():
        return
    now = now if rank is None else now.on_rank(rank)
    if now.hash() == planned.hash():
        return
    changed = sorted({meta.name for meta in set(planned.tensors) ^ set(now.tensors)}) or ["their order"]
    raise RefitError(
        f"the manifest of the {side} is not the one that was planned: {planned.hash()[:12]} then, {now.hash()[:12]} "
        f"now; changed: {', '.join(changed)}; make a new Refit"
    )


def _refuse_difference(sent: Digest, found: Digest, *, where: str, source_rank: int) -> NoReturn:
    differing = sent.differing(found)
    lines = (f"\n  {name}: {sent.tensors.get(name)} sent, {found.tensors.get(name)} found" for name in differing)
    raise DigestError(
        f"{len(differing)} tensors are not {where} as source {source_rank} sent them:{''.join(lines)}",
        tensors=differing,
    )


def _annotate(error: BaseException, version: int | None, watch: Watch) -> None:
    if isinstance(error, RefitError):
        error.phase = error.phase or watch.phase_name
        error.tensor = error.tensor or watch.tensor
        error.bucket = watch.bucket if error.bucket is None else error.bucket
        error.peer = error.peer or watch.peer
    outcome = "the commit had begun, so ask the sink whether it is poisoned"
    if watch.phase_name != "commit":
        outcome = "the old weights and the old version are intact, unless the sink writes in place, and is poisoned"
    wanted = "" if version is None else f" to version {version!r}"
    error.add_note(f"refit{wanted} aborted in {watch.where()}: {outcome}")

"""`Refit`: prepare, transfer, verify, commit; or abort with the old weights intact.

    PREPARE    the manifests are those that were planned, the version is new; all say so before a byte moves
    TRANSFER   the transport moves the buckets of this party's streams
    VERIFY     digest of what a sink has staged == digest that the sources give of the boxes they routed to it
    COMMIT     the decision is made once for all; sinks make the staged weights theirs, and digest these again

Knows no wire. In one process there is no control, and the same phases run without it.

Knows plain numbers only.

The public face of `rl_refit.transaction`. Knows neither models nor engines nor wires: any `WeightSource`, `WeightSink`
and `Transport`. Not safe to call from two threads at once.

Knows no weights. A version is a number of optimizer steps, so it only grows; but one that turns out to be of no use,
here or at another rank of the sink, may be committed once more.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Boxes, Digest, Sample, VerificationShare, combine_digests, digest_tensor
from rl_refit.errors import DeadlineError, DigestError, PeerError, PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan
from rl_refit.rendezvous import Rendezvous
from rl_refit.schedule import Schedule, make_schedule
from rl_refit.transaction.agreement import Agreement, agree, agree_in_process
from rl_refit.transaction.control import COMMIT, Control
from rl_refit.transaction.messages import error_from_message, error_to_message
from rl_refit.transaction.sides import Sides, check_sides, device_of
from rl_refit.transports.base import Channel, Inbox, InProcess, Outbox, Transport, Watch

__all__ = ["CommittedVersion", "Outcome", "Party", "Refit", "RefitReport", "abort_message"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a refit came to, for the report."""

    digest: str | None
    """One value for all that was verified at all sinks; None where nothing was."""

    unreadable: tuple[str, ...]
    """Tensors of this process's sink that cannot be read back after the commit."""


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
    _boxes: dict[tuple[int, int], Boxes] = field(default_factory=dict)
    _voted: bool = False
    """Whether others may commit by this party's leave, and do not know yet what became of its own commit."""
    _whole: bool = False
    """Whether this party has done its own commit."""

    def run(self, version: int, sample: Sample, watch: Watch) -> Outcome:
        """All phases. Whatever is raised, the caller aborts.

        Raises:
            RefitError: Of any kind; see `Refit`.
        """
        self._voted = self._whole = False
        with watch.phase("prepare"):
            self._prepare(version, watch)
        with watch.phase("transfer"):
            self.transport.transfer(self.outbox, self.inbox, watch)
            watch.check()
        with watch.phase("verify"):
            expected = self._verify(sample, watch)
        with watch.phase("commit"):
            self._decide(version, watch)
            return self._commit(version, expected, sample=sample, watch=watch)

    def _prepare(self, version: int, watch: Watch) -> None:
        if self.sides.source is not None:
            own = self.sides.source.manifest()
            _require_unchanged("source", planned=self.agreement.source, now=own, rank=self.source_rank)
        if self.sides.sink is not None:
            coverage = self.sides.sink.prepare(self.agreement.plan.source)
            if coverage.manifest_hash != self.agreement.plan.source.hash():
                raise RefitError(
                    f"the sides disagree on the manifest: the source's hash is {self.agreement.plan.source.hash()}, "
                    f"the sink answers {coverage.manifest_hash}"
                )
            _require_unchanged("sink", planned=self.agreement.sink, now=coverage.sink, rank=self.sink_rank)
            if coverage.version is not None and version <= coverage.version:
                raise RefitError(
                    f"version {version} is not newer than the sink's {coverage.version}; "
                    f"a version is the number of optimizer steps that the weights have seen, never a count of calls; "
                    f"a trainer that went back makes a new sink"
                )
        self._barrier("prepared", watch, version)

    def _barrier(self, step: str, watch: Watch, value: object = None) -> None:
        """Wait until all parties are here, with the same value."""
        watch.check()
        if self.control is None:
            return
        said = self.control.gather(step, dict.fromkeys(self.control.rendezvous.mine, value), watch)
        for party, other in (said or {}).items():
            if other != value:
                raise RefitError(f"{party} is at version {other}, and {self.control.rendezvous.leader} at {value}")
        self.control.announce(step, None if said is None else value, watch)

    def _verify(self, sample: Sample, watch: Watch) -> dict[int, Digest]:
        """By source rank, the digests that this process's sink was found to have; empty without a sink."""
        given = self._give_digests(sample, watch)
        if self.sides.sink is None:
            return {}
        verified: dict[int, Digest] = {}
        for source_rank, regions in self._regions_to(self.sink_rank, sample).items():
            staged = self.sides.sink.digest(regions)
            sent = given.get((source_rank, self.sink_rank))
            if sent is None:
                assert self.control is not None
                key, peer = f"digest/{source_rank}/{self.sink_rank}", f"source {source_rank}"
                sent = Digest(self.control.read(key, watch, peer=peer))
            _compare(sent, staged, where="staged", source_rank=source_rank)
            verified[source_rank] = sent
            watch.check()
        return verified

    def _give_digests(self, sample: Sample, watch: Watch) -> dict[tuple[int, int | None], Digest]:
        """Digest what this process's source routes to each sink rank, and tell it."""
        if self.sides.source is None:
            return {}
        given: dict[tuple[int, int | None], Digest] = {}
        same: dict[tuple[Region, ...], Digest] = {}  # replicas of a sink are sent the same
        for sink_rank in self.agreement.plan.sink.ranks:
            regions = self._regions(self.source_rank, sink_rank, sample)
            if regions:
                digest = same[regions] = same.get(regions) or self._digest_source(regions, watch)
                given[self.source_rank or 0, sink_rank] = digest
                if self.control is not None and sink_rank != self.sink_rank:
                    self.control.post(f"digest/{self.source_rank}/{sink_rank}", dict(digest.tensors))
        return given

    def _digest_source(self, regions: tuple[Region, ...], watch: Watch) -> Digest:
        assert self.sides.source is not None
        by_name: dict[str, list[Region]] = {}
        for region in regions:
            by_name.setdefault(region.name, []).append(region)
        digests: dict[Region, str | None] = {}
        for box, tensor in self.sides.source.shards(by_name):
            watch.check()
            for region in by_name[box.name]:
                if box == region:
                    digests[region] = digest_tensor(tensor)
                elif box.intersect(region) == region:
                    digests[region] = digest_tensor(tensor[region.index_within(box)])
        return combine_digests(regions, digests)

    def _regions_to(self, sink_rank: int | None, sample: Sample) -> dict[int, tuple[Region, ...]]:
        """What each source rank routes to a sink rank, as far as it is digested."""
        to_sink = {rank: self._regions(rank, sink_rank, sample) for rank in self.agreement.plan.source.ranks}
        return {rank: regions for rank, regions in to_sink.items() if regions}

    def _regions(self, source_rank: int | None, sink_rank: int | None, sample: Sample) -> tuple[Region, ...]:
        assert source_rank is not None
        assert sink_rank is not None
        if not self._boxes:
            self._boxes = _boxes_by_pair(self.agreement.plan)
        return sample.of(self._boxes.get((source_rank, sink_rank), Boxes()))

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
            return self.control.decide(abort_message(silence, self.control, watch))

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
        message = abort_message(error, self.control, watch)
        sink = self.sides.sink
        torn = sink is not None and not self._whole
        if sink is not None and torn and len(self.agreement.plan.sink.ranks) > 1:
            others = "other ranks have committed" if decision == COMMIT else "other ranks may have committed"
            _poison(sink, f"this rank gave up in {watch.where()}, and {others}: {_text(message)}")
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

    def _commit(self, version: int, expected: dict[int, Digest], *, sample: Sample, watch: Watch) -> Outcome:
        """Commit here, hear that all have, and make one digest of all.

        Raises:
            PoisonedError: A sink failed to; says which.
        """
        unreadable: tuple[str, ...] = ()
        if self.sides.sink is not None:
            self.sides.sink.commit(version)
            with watch.part("confirm"):
                unreadable = self._confirm(expected, sample)
            self._require_held(sample, unreadable)
        self._whole = True
        own = Digest({f"{rank}": digest.hex for rank, digest in expected.items()}).hex if expected else None
        if self.control is None:
            return Outcome(digest=own, unreadable=unreadable)
        return Outcome(digest=self._say_committed({"digest": own}, watch), unreadable=unreadable)

    def _require_held(self, sample: Sample, unreadable: tuple[str, ...]) -> None:
        """See that the sources waited for this sink's commit: it may have copied from memory that they train in."""
        proved = sample.stride == 1 and not unreadable
        if self.control is None or proved or not self.control.is_said("committed/all"):
            return
        assert self.sides.sink is not None
        reason = "the others gave this refit up while this rank still committed, and may have changed its source"
        _poison(self.sides.sink, reason)
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
                _poison(self.sides.sink, f"this rank has committed, and not all that it needs came through:{lines}")
            elif self.sides.sink is not None and hasattr(self.sides.sink, "repeat"):
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

    def _confirm(self, expected: dict[int, Digest], sample: Sample) -> tuple[str, ...]:
        """Compare the weights that the sink now serves; return what cannot be read back."""
        sink, unreadable = self.sides.sink, dict[str, None]()
        assert sink is not None
        if getattr(sink, "verifies_only", False):
            return ()
        try:
            for source_rank, regions in self._regions_to(self.sink_rank, sample).items():
                sent, resident = expected[source_rank], sink.digest(regions)
                missing = [name for name in sent.tensors if name not in resident.tensors]
                unreadable |= dict.fromkeys(missing)
                readable = Digest({name: value for name, value in sent.tensors.items() if name not in missing})
                _compare(readable, resident, where="in the engine after the commit", source_rank=source_rank)
        except BaseException as error:
            _poison(sink, f"the weights could not be confirmed after the commit: {type(error).__name__}: {error}")
            raise
        return tuple(unreadable)


def _text(message: dict[str, Any]) -> str:
    return f"{message['kind']}: {message['text']}"


def abort_message(error: BaseException, control: Control, watch: Watch) -> dict[str, Any]:
    """The decision that a party proposes when it fails."""
    return error_to_message(error, party=" and ".join(control.rendezvous.mine), where=watch.where())


def _poison(sink: WeightSink, reason: str) -> None:
    poison = getattr(sink, "poison", None)  # a sink that cannot be told so must be watched by its owner
    if poison is not None:
        poison(reason)


def _boxes_by_pair(plan: RefitPlan) -> dict[tuple[int, int], Boxes]:
    boxes: dict[tuple[int, int], list[tuple[Region, int]]] = {}
    for route in plan.routes:
        itemsize = plan.sink.by_name[route.region.name].torch_dtype.itemsize
        for sink_rank in route.sink_ranks:
            boxes.setdefault((route.source_rank, sink_rank), []).append((route.region, itemsize))
    return {pair: Boxes(between) for pair, between in boxes.items()}


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


def _compare(sent: Digest, found: Digest, *, where: str, source_rank: int) -> None:
    differing = sent.differing(found)
    if differing:
        lines = (f"\n  {name}: {sent.tensors.get(name)} sent, {found.tensors.get(name)} found" for name in differing)
        raise DigestError(
            f"{len(differing)} tensors are not {where} as source {source_rank} sent them:{''.join(lines)}",
            tensors=differing,
        )


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
    """Buckets of all streams."""

    seconds: Mapping[str, float]
    """Seconds by phase: prepare, transfer, verify, commit."""

    verified: str
    """What was digested on both sides: "every byte", "1/8 of the chunks", "nothing"."""

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

    def explain(self) -> str:
        """One line for people."""
        phases = ", ".join(f"{name} {1e3 * seconds:.1f}" for name, seconds in self.seconds.items())
        digest = "" if self.digest is None else f", digest {self.digest[:12]}"
        notes = [f"the same bytes as version {self.same_as}"] if self.same_as is not None else []
        notes += [f"{len(self.kept)} tensors kept as they are"] if self.kept else []
        notes += [f"{len(self.unreadable)} tensors not readable in the engine"] if self.unreadable else []
        return (
            f"version {self.version}: {self.tensors} tensors, {self.bytes:,} bytes {self.transport}, "
            f"{1e3 * self.total_seconds:.1f} ms ({phases}), verified {self.verified}{digest}"
            + "".join(f", {note}" for note in notes)
        )


_DEFAULTS = RefitConfig()

_FAREWELL_S = 1.0  # who hosts the store waits so long for the others to hear why a refit was given up
LONGEST_NAP_S = 5e-3
"""Between two looks for the next refit, of a sink that waits for it: what a refit may begin late."""


@final
class Refit:
    """Brings the weights of `source` into `sink` whenever it is called.

    In one process it needs both. Over several, every rank of the trainer makes one with its `source`, every rank of the
    engine one with its `sink`, a process that is both one with both, and all give the same transport and a rendezvous:
    then the trainer's ranks call it, and the engine's `receive`.

    Args:
        source: Where fresh weights come from: this process's rank of it.
        sink: Where they go: this process's rank of it.
        transport: The way of the bytes between processes; left out in one process.
        rendezvous: Who takes part; left out in one process.
        bucket_bytes: See `RefitConfig`, as for the arguments that follow.
        buckets: Slots of the ring.
        deadline_s: Seconds a phase may take.
        verify: How much is digested: "auto", "full", "sampled", "off". The leader's choice holds for all.

    Raises:
        ValueError: An argument is out of range, or source, sink, transport and rendezvous do not go together.
    """

    def __init__(
        self,
        source: WeightSource | None = None,
        sink: WeightSink | None = None,
        transport: Transport | None = None,
        *,
        rendezvous: Rendezvous | None = None,
        bucket_bytes: int = _DEFAULTS.bucket_bytes,
        buckets: int = _DEFAULTS.buckets,
        deadline_s: float = _DEFAULTS.deadline_s,
        verify: Verify = _DEFAULTS.verify,
    ) -> None:
        self._config = RefitConfig(bucket_bytes=bucket_bytes, buckets=buckets, deadline_s=deadline_s, verify=verify)
        check_sides(Sides(source, sink), transport, rendezvous)
        self._sides = Sides(source, sink)
        self._transport: Transport = transport or InProcess()
        self._rendezvous = rendezvous
        self._control = None if rendezvous is None else Control(rendezvous)
        self._share = VerificationShare(verify)
        self._party: Party | None = None
        self._refits = 0
        self._closed = False
        self._busy = threading.Lock()
        self._digests: dict[tuple[int, int], tuple[int, str | None]] = {}

    @property
    def plan(self) -> RefitPlan:
        """What a call will move. Made at the first look or the first call; over several processes all must ask for it.

        Raises:
            CoverageError: Source and sink do not hold the same tensors.
            RefitError: One of them cannot take part.
        """
        return self._agreed(self._watch()).agreement.plan

    def explain(self) -> str:
        """The plan as text, with the buckets of this refit."""
        return self.plan.explain(bucket_bytes=self._config.bucket_bytes if self._transport.bounded else None)

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
        if self._sides.source is None:
            raise RefitError("this process has no source of weights; wait for a refit with receive()")
        if not isinstance(version, int) or isinstance(version, bool) or version < 0:
            raise RefitError(f"a version is a number of optimizer steps, an int ≥ 0; got version={version!r}")
        with self._alone():
            return self._take_part(version)

    def receive(self, *, timeout_s: float | None = None) -> RefitReport:
        """Wait for the trainer to call its `Refit`, and take part; for a process that has a sink alone.

        Args:
            timeout_s: Seconds to wait for the refit to begin; None waits as long as the trainer lives.

        Raises:
            DeadlineError: None began within `timeout_s`; the sink is as it was.
            RefitError: As for a call.
        """
        if self._sides.source is not None or self._control is None:
            raise RefitError("this process has a source of weights, which gives the version: call refit(version=…)")
        with self._alone():
            watch = self._watch(math.inf if timeout_s is None else timeout_s)
            self._await_begin(self._control, watch)
            if self._party is None:
                self._agreed(self._watch())
                self._await_begin(self._control, watch)
            return self._take_part(None)

    def close(self) -> None:
        """Free what the transport holds, and leave; others that still wait for this process are told."""
        self._closed = True
        self._transport.close()
        if self._control is not None:
            self._control.close()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        self._require_open()
        if not self._busy.acquire(blocking=False):
            raise RefitError(
                "another thread is in this Refit; a thread that waits in receive() cannot be cancelled from outside: "
                "give it a timeout_s, or close the Refit"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _look_around(self) -> None:
        self._require_open()
        if self._control is not None:
            self._control.look_around()

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
            self._require_open()  # a store that is closed on this side is no news
            _annotate(error, None, watch)
            raise

    def _take_part(self, version: int | None) -> RefitReport:
        party = self._agreed(self._watch(), version)
        watch = self._watch()
        try:
            with watch.phase("prepare"):
                version, sample = self._begin(version, watch)
            for box in (party.outbox, party.inbox):
                if box is not None:
                    box.watch, box.version, box.refit = watch, version, self._number
            outcome = party.run(version, sample, watch)
        except BaseException as error:
            self._abort(error, version, watch)
            raise
        self._transport.finish()
        if self._control is not None:
            with contextlib.suppress(PeerError):  # all have committed, and know it
                self._control.over()
        self._share.learn(watch.seconds)
        return self._report(party, version, sample=sample, outcome=outcome, watch=watch)

    def _begin(self, version: int | None, watch: Watch) -> tuple[int, Sample]:
        """Number the refit, and agree on its version and sample."""
        self._refits += 1
        sample = self._share.sample(self._refits)
        if self._control is None:
            assert version is not None
            return version, sample
        message = {"version": version, "stride": sample.stride, "phase": sample.phase}
        said = self._control.begin(message if self._control.rendezvous.leads else None, watch)
        if "version" not in said:
            raise RefitError(
                f"{self._control.rendezvous.leader} plans anew, and this party has planned before; all make a new "
                f"Refit, of another name"
            )
        if version is not None and said["version"] != version:
            raise RefitError(
                f"{' and '.join(self._control.rendezvous.mine)} is called with version {version}, and "
                f"{self._control.rendezvous.leader} with {said['version']}: all ranks of a trainer give the same"
            )
        return said["version"], Sample(stride=said["stride"], phase=said["phase"])

    def _agreed(self, watch: Watch, version: int | None = None) -> Party:
        """Plan the first time, and open the transport."""
        if self._party is None:
            watch.phase_name = "prepare"
            try:
                self._party = self._make_party(watch)
            except BaseException as error:
                self._abort(error, version, watch)
                raise
        return self._party

    def _make_party(self, watch: Watch) -> Party:
        settings = self._settings()
        if self._control is None:
            agreement = agree_in_process(self._sides)
        else:
            agreement = agree(self._control, self._sides, settings=settings, watch=watch)
        schedule = make_schedule(
            agreement.plan,
            routing=self._transport.routing,
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
            store=None if self._control is None else self._control.namespace(f"transport/{self._number}"),
        )
        self._transport.open(channel, watch)
        if self._control is not None:
            self._control.agree("opened", watch)
            self._control.over()
        outbox = inbox = None
        if self._sides.source is not None:
            outbox = Outbox(self._sides.source, schedule, watch, version=0, refit=0)
        if self._sides.sink is not None:
            inbox = Inbox(self._sides.sink, schedule, sink_rank or 0, watch, version=0, refit=0)
        return Party(
            sides=self._sides,
            agreement=agreement,
            transport=self._transport,
            outbox=outbox,
            inbox=inbox,
            control=self._control,
            schedule=schedule,
            source_rank=source_rank,
            sink_rank=sink_rank,
        )

    @property
    def _number(self) -> int:
        """Of this refit, the same at all parties."""
        return self._refits if self._control is None else self._control.refit

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {"transport": self._transport.name}
        if self._transport.bounded:
            settings |= {"bucket_bytes": self._config.bucket_bytes, "buckets": self._config.buckets}
        return settings

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
            decision = self._control.decide(abort_message(error, self._control, watch))
        except RefitError as lost:
            error.add_note(f"the others could not be told: {lost}")
            return None
        with contextlib.suppress(PeerError):
            self._control.over()
            self._control.see_off(_FAREWELL_S)
        return decision

    def _report(self, party: Party, version: int, *, sample: Sample, outcome: Outcome, watch: Watch) -> RefitReport:
        plan = party.agreement.plan
        schedule = party.schedule
        return RefitReport(
            version=version,
            transport=self._transport.name,
            tensors=sum(meta.travels for meta in plan.sink.tensors),
            bytes=sum(route.nbytes * len(route.sink_ranks) for route in plan.routes),
            buckets=schedule.num_buckets,
            seconds={name: seconds for name, seconds in watch.seconds.items() if name != "confirm"},
            verified=sample.text,
            digest=outcome.digest,
            same_as=self._same_as(version, sample, outcome.digest),
            kept=tuple(m.name for m in plan.sink.tensors if m.feeding != "fed" and m.name in plan.source.by_name),
            unreadable=outcome.unreadable,
            manifest_hash=plan.source.hash(),
            extra_bytes=self._transport.extra_bytes,
        )

    def _same_as(self, version: int, sample: Sample, digest: str | None) -> int | None:
        """The last version of which the same bytes were digested, where they have not changed since."""
        chosen = sample.stride, sample.phase % max(1, sample.stride)
        before = self._digests.get(chosen)
        self._digests[chosen] = version, digest
        return before[0] if before is not None and digest is not None and before[1] == digest else None

    def _require_open(self) -> None:
        if self._closed:
            raise RefitError("this Refit is closed; make a new one")

    def _watch(self, deadline_s: float | None = None) -> Watch:
        deadline_s = self._config.deadline_s if deadline_s is None else deadline_s
        return Watch(deadline_s=deadline_s, look_around=self._look_around)


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


@final
class CommittedVersion:
    """None before the first commit."""

    def __init__(self) -> None:
        self.value: int | None = None
        """The version last committed."""
        self._before: int | None = None
        self._again = False

    @property
    def floor(self) -> int | None:
        """What the next version must be newer than."""
        return self._before if self._again else self.value

    def begin(self) -> None:
        """A transaction opens: to withdraw is to go back to what holds now."""
        self._before = self.floor

    def require_newer(self, version: int) -> None:
        """Pass if `version` may be committed.

        Raises:
            RefitError: It is not newer than `floor`.
        """
        if self.floor is not None and version <= self.floor:
            raise RefitError(
                f"version {version} is not newer than the committed {self.floor}; a version counts optimizer steps",
                phase="commit",
            )

    def commit(self, version: int) -> None:
        """From now on it is `version`."""
        self._before, self.value, self._again = self.floor, version, False

    def withdraw(self) -> None:
        """What was committed last does not count."""
        self.value, self._again = self._before, False

    def repeat(self) -> None:
        """What was committed last counts, and may be committed once more."""
        self._again = True

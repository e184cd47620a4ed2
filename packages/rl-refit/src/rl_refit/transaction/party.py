"""One refit at one party: prepare, transfer, verify, commit; or abort, with the old weights as they were.

    PREPARE    the manifests are those that were planned, the version is new; all say so before a byte moves
    TRANSFER   the transport moves the buckets of this party's streams
    VERIFY     digest of what a sink has staged == digest that the sources give of the boxes they routed to it
    COMMIT     the decision is made once for all; sinks make the staged weights theirs, and digest these again

Knows no wire. In one process there is no control, and the same phases run without it.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any, final

from rl_refit.contracts import WeightSink
from rl_refit.digest import Boxes, Digest, Sample, combine_digests, digest_tensor
from rl_refit.errors import DigestError, PeerError, PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan
from rl_refit.schedule import Schedule
from rl_refit.transaction.agreement import Agreement
from rl_refit.transaction.control import COMMIT, Control
from rl_refit.transaction.messages import error_from_message, error_to_message
from rl_refit.transaction.sides import Sides
from rl_refit.transports.base import Inbox, Outbox, Transport
from rl_refit.watch import Watch

__all__ = ["Outcome", "Party", "abort_message"]


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

"""One process in the refits of one plan: it plans with the others, once, and goes through four phases with them.

    PREPARE    the manifests are those that were planned, the version is new; all parties agree before a byte moves
    TRANSFER   the transport moves the buckets of this party's streams
    VERIFY     the digest of what a sink has staged is the digest that the sources give of what they sent to it
    COMMIT     one decision is made for all; sinks make the staged weights theirs, and are digested again

In one process there is no control, and the same phases run without it. Over several, every rank posts what it holds,
the leader merges it, and everybody makes the same plan from the same two manifests, and compares its hash. Names travel
then, and never again: later refits compare hashes.
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any, NoReturn, final

import torch

from rl_refit import gpu
from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Boxes, Digest, Sample, choose_sample
from rl_refit.errors import DigestError, PeerError, PoisonedError, RefitError, error_from_message
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, merge_manifests
from rl_refit.plan import RefitPlan, Topology, plan_refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.schedule import make_schedule
from rl_refit.transaction.control import COMMIT, Control
from rl_refit.transaction.shared import SharedSource, digest_source
from rl_refit.transports.base import Channel, Inbox, Outbox, Transport, Watch

__all__ = ["Party", "annotate"]

_FAREWELL_S = 1.0  # who hosts the store waits so long for the others to hear why a refit was given up


@final
class Party:
    """This process in every refit of one plan.

    Args:
        source: This process's rank of the source.
        sink: Its rank of the sink.
        transport: Not open yet.
        control: Where it meets the others; None in one process.
    """

    plan: RefitPlan
    source_rank: int | None
    sink_rank: int | None
    outbox: Outbox | None
    inbox: Inbox | None
    num_buckets: int
    """Buckets that this process sends or receives."""

    boxes: dict[tuple[int, int], Boxes]
    """By (source rank, sink rank), ascending: the boxes that the one routes to the other, where either is this one."""

    def __init__(
        self,
        source: WeightSource | None,
        sink: WeightSink | None,
        *,
        transport: Transport,
        control: Control | None,
    ) -> None:
        self.source, self.sink, self.transport, self.control = source, sink, transport, control
        self.is_planned = False
        self._held: dict[str, Manifest] = {}
        """This process's own part of the planned manifests, by side."""
        self._voted = False
        """Whether others may commit by this party's leave, and do not know yet what became of its own commit."""
        self._whole = False
        """Whether this party has done its own commit."""

    @property
    def device(self) -> torch.device:
        """Where this process's tensors are."""
        side = self.source if self.sink is None else self.sink
        return torch.device("cpu" if side is None else side.device)

    # -- The plan -----------------------------------------------------------------------------------------------------

    def agree(self, config: RefitConfig, watch: Watch) -> None:
        """Agree on a plan with all parties, cut it into buckets, and open the transport.

        Raises:
            CoverageError: Source and sink do not hold the same tensors.
            RefitError: Parties differ in their settings, or ranks of one side contradict one another.
        """
        # In one process nothing is cut: the sink takes the source's own tensors.
        bucket_bytes = config.bucket_bytes if self.transport.bounded and self.control is not None else None
        if self.control is None:
            assert self.source is not None
            self._held["source"] = self.source.manifest()
            self._held["sink"] = self._ask_sink(self._held["source"])
            self.plan = plan_refit(self._held["source"], self._held["sink"])
            sources, sinks = self.plan.source.ranks, self.plan.sink.ranks
            if len(sources) > 1 or len(sinks) > 1:
                raise RefitError(
                    f"a Refit of one process moves weights between one rank and one engine; the source spans ranks "
                    f"{list(sources)} and the sink ranks {list(sinks)}; give all parties a rendezvous",
                    phase="prepare",
                )
            self.source_rank, self.sink_rank = (*sources, 0)[0], (*sinks, 0)[0]  # whatever they call themselves
        else:
            settings: dict[str, Any] = {"transport": self.transport.name}
            settings |= {"bucket_bytes": bucket_bytes, "buckets": config.buckets} if bucket_bytes else {}
            self._plan_with_others(self.control, settings, watch)
        schedule = make_schedule(self.plan, bucket_bytes=bucket_bytes)
        channel = Channel(
            schedule=schedule,
            source_rank=self.source_rank,
            sink_rank=self.sink_rank,
            slots=config.buckets,
            device=self.device,
            store=None if self.control is None else self.control.store.namespace(f"transport/{self.control.refit}"),
        )
        self.transport.open(channel, watch)
        if self.control is not None:
            if (decision := self.control.agree("opened", watch)) != COMMIT:
                raise error_from_message(decision)
            self.control.over()
        self.outbox = None if self.source is None else Outbox(self.source, schedule, watch, refit=0)
        self.inbox = None if self.sink is None else Inbox(self.sink, schedule, watch, refit=0)
        mine = schedule.of(source_rank=self.source_rank, sink_rank=self.sink_rank)
        self.num_buckets = sum(len(stream.buckets) for stream in mine)
        boxes: dict[tuple[int, int], list[tuple[Region, int]]] = {}
        for stream in mine:
            for route in self.plan.routes_of((stream.source_rank, stream.sink_ranks)):
                itemsize = self.plan.sink.by_name[route.region.name].torch_dtype.itemsize
                for receiver in stream.sink_ranks:
                    if stream.source_rank == self.source_rank or receiver == self.sink_rank:
                        boxes.setdefault((stream.source_rank, receiver), []).append((route.region, itemsize))
        self.boxes = {pair: Boxes(boxes[pair]) for pair in sorted(boxes)}
        self.is_planned = True

    def _plan_with_others(self, control: Control, settings: dict[str, Any], watch: Watch) -> None:
        meeting = control.rendezvous
        self.source_rank, self.sink_rank = meeting.source_rank, meeting.sink_rank
        control.meet(watch)
        said = control.begin({"settings": settings} if meeting.leads else None, watch)
        mine = " and ".join(meeting.mine)
        if "settings" not in said:
            raise RefitError(f"{meeting.leader} has planned without this party; all make a new Refit, of another name")
        if said["settings"] != settings:
            differing = {key: value for key, value in settings.items() if value != said["settings"].get(key)}
            differences = (f"{key} {value!r}, not {said['settings'].get(key)!r}" for key, value in differing.items())
            raise RefitError(f"{mine} has other settings than {meeting.leader}: {', '.join(differences)}", peer=mine)
        if self.source is not None:
            self._held["source"] = _own(self.source.manifest(), meeting.source_rank, meeting)
        source = _merge(control, "source", self._held.get("source"), watch=watch)
        if self.sink is not None:
            self._held["sink"] = _own(self._ask_sink(source), meeting.sink_rank, meeting)
        sink = _merge(control, "sink", self._held.get("sink"), watch=watch)
        hosts = {party: process["host"] for party, process in control.processes.items()}
        topology = Topology(
            source_nodes=tuple(hosts[f"source {rank}"] for rank in range(meeting.num_sources)),
            sink_nodes=tuple(hosts[f"sink {rank}"] for rank in range(meeting.num_sinks)),
        )
        make = self.source.plan if isinstance(self.source, SharedSource) else plan_refit
        self.plan = make(source, sink, topology)
        planned = control.announce("plan", self.plan.hash(), watch)
        if planned != self.plan.hash():
            raise RefitError(
                f"{mine} has made another plan than {meeting.leader}, {self.plan.hash()} and not {planned}; they run "
                f"different releases of rl-refit or torch"
            )

    def _ask_sink(self, source: Manifest) -> Manifest:
        assert self.sink is not None
        try:
            return self.sink.prepare(source).sink
        finally:
            self.sink.abort()

    # -- The phases ---------------------------------------------------------------------------------------------------

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
            if self.source is not None:
                # An optimizer may have stepped in another thread's stream.
                gpu.synchronize(self.device, watch.remaining_s)
            self.transport.transfer(self.outbox, self.inbox, watch)
            watch.check()
        with watch.phase("verify"):
            verified = self._verify(sample, watch)
            if self.sink is not None:
                self.sink.ready(version)
        with watch.phase("commit"):
            if self.control is not None:
                watch.check()
                self._voted = True
                if (decision := self.control.agree("verified", watch)) != COMMIT:
                    self._voted = False
                    raise error_from_message(decision)
            return self._commit(version, verified, sample=sample, watch=watch)

    def sample(self, verify: Verify, refit: int) -> Sample:
        """What is digested at refit number `refit`, if this party is the leader; the same for all."""
        largest = max(map(self.plan.bytes_received, self.plan.sink.ranks), default=0)
        return choose_sample(verify, refit=refit, largest_bytes=largest)

    def uncompared(self, sample: Sample) -> float:
        """The share of this process's bytes of which no digest is compared."""
        total = sum(boxes.nbytes for boxes in self.boxes.values())
        return 0.0 if not total else 1.0 - sum(boxes.nbytes_of(sample) for boxes in self.boxes.values()) / total

    def _prepare(self, version: int, watch: Watch) -> None:
        """See that nothing has changed since the plan was made, and wait until all parties are at this version."""
        source = self.plan.source
        if self.source is not None:
            self._require_unchanged("source", self.source.manifest(), rank=self.source_rank)
        if self.sink is not None:
            coverage = self.sink.prepare(source)
            if coverage.manifest_hash != source.hash():
                raise RefitError(
                    f"the sides disagree on the manifest: the source's hash is {source.hash()}, "
                    f"the sink answers {coverage.manifest_hash}"
                )
            self._require_unchanged("sink", coverage.sink, rank=self.sink_rank)
            if coverage.version is not None and version <= coverage.version:
                raise RefitError(
                    f"version {version} is not newer than the sink's {coverage.version}; "
                    f"a version is the number of optimizer steps that the weights have seen, never a count of calls; "
                    f"where a trainer went back, each engine says so with sink.rewind({version})"
                )
        watch.check()
        if self.control is not None:
            self.control.gather("prepared", version, watch)
            self.control.announce("prepared", version, watch)

    def _require_unchanged(self, side: str, now: Manifest, *, rank: int | None) -> None:
        planned = self._held[side]
        if now is planned or now.hash() == planned.hash():
            return
        now = now if rank is None else now.on_rank(rank)
        if now.hash() == planned.hash():
            return
        changed = sorted({meta.name for meta in set(planned.tensors) ^ set(now.tensors)}) or ["their order"]
        raise RefitError(
            f"the manifest of the {side} is not the one that was planned: {planned.hash()[:12]} then, "
            f"{now.hash()[:12]} now; changed: {', '.join(changed)}; make a new Refit"
        )

    def _verify(self, sample: Sample, watch: Watch) -> dict[int, tuple[tuple[Region, ...], Digest]]:
        """By source rank, the regions and digests that this process's sink has staged; empty without a sink."""
        routed = {pair: regions for pair, boxes in self.boxes.items() if (regions := sample.of(boxes))}

        # Digest what this process's source routes to each sink rank, and tell it.
        given: dict[int, Digest] = {}
        same: dict[tuple[Region, ...], Digest] = {}  # replicas of a sink are sent the same
        for (source_rank, sink_rank), regions in routed.items():
            if self.source is not None and source_rank == self.source_rank:
                if regions not in same:
                    same[regions] = digest_source(self.source, regions, watch)
                given[sink_rank] = same[regions]
                if self.control is not None and sink_rank != self.sink_rank:
                    self.control.post(f"digest/{source_rank}/{sink_rank}", dict(same[regions].tensors))

        # Compare with what this process's sink has staged.
        verified: dict[int, tuple[tuple[Region, ...], Digest]] = {}
        for (source_rank, sink_rank), regions in routed.items():
            if self.sink is not None and sink_rank == self.sink_rank:
                staged = self.sink.digest(regions)
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
        sink, unreadable = self.sink, dict[str, None]()
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
            # Where not every byte was confirmed, the sink may have copied from memory in which the sources train.
            not_confirmed = sample.stride != 1 or unreadable
            if self.control is not None and not_confirmed and self.control.is_said("committed/all"):
                reason = (
                    "the others gave this refit up while this rank still committed, and may have changed its source"
                )
                sink.poison(reason)
                raise PoisonedError(f"{reason}; refit again before using the weights", phase="commit")
        self._whole = True
        digest = Digest({f"{rank}": sent.hex for rank, (_, sent) in verified.items()}).hex if verified else None
        if self.control is not None:
            digest = self._say_committed(self.control, digest, watch)
        return digest, tuple(unreadable)

    def _say_committed(self, control: Control, digest: str | None, watch: Watch) -> str | None:
        """Say that this party has committed, and hear that all have, and one digest of what all have verified."""
        said = control.gather("committed", {"digest": digest}, watch)
        answer: dict[str, Any] | None = None
        if said is not None:
            failed = {party: other["failed"] for party, other in said.items() if "failed" in other}
            hexes = {party: other.get("digest") for party, other in said.items() if party.startswith("sink")}
            answer = {"failed": failed, "digest": Digest(hexes).hex if all(hexes.values()) else None}
        answer = control.announce("committed", answer, watch)
        self._voted = False
        if answer["failed"]:
            lines = "".join(f"\n  {party}: {text}" for party, text in answer["failed"].items())
            if self.sink is not None and not self._is_a_replica():
                self.sink.poison(f"this rank has committed, and not all that it needs came through:{lines}")
            elif self.sink is not None:
                self.sink.repeat()
            raise RefitError(
                f"not all parties came through their commit, which the others have done; refit all again before using "
                f"any of these, or ranks that share a model with them:{lines}",
                phase="commit",
                peer=next(iter(answer["failed"])),
            )
        control.complete()
        of_all: str | None = answer["digest"]
        return of_all

    def _is_a_replica(self) -> bool:
        """Whether this rank of the sink holds all of every tensor, and so can be used whatever others have."""
        rank, tensors = self.sink_rank, self.plan.sink.tensors
        return rank is not None and all(
            sum(box.numel for box in meta.regions_on(rank)) == math.prod(meta.shape) for meta in tensors
        )

    # -- Giving up ----------------------------------------------------------------------------------------------------

    def abort(self, error: BaseException, version: int | None, watch: Watch) -> None:
        """After any error: have all parties abort, and this one first of all.

        Where others commit, or may, and this party has not, tell them, and trust nothing here.
        """
        try:
            decision = self._tell_others(error, watch)
            in_doubt, self._voted = self._voted and decision in (None, COMMIT), False
            if self.control is not None and in_doubt:
                self._doubt(self.control, error, decision, watch=watch)
        finally:  # also when somebody presses Ctrl-C twice
            if self.sink is not None:
                self.sink.abort()
            if self.is_planned:
                self.transport.finish()
            else:
                self.transport.close()
            annotate(error, version, watch)

    def _tell_others(self, error: BaseException, watch: Watch) -> Any:
        """What is decided for all; None where that cannot be known."""
        if self.control is None or not self.control.under_way:
            return None
        try:
            decision = self.control.decide(self.control.abort_message(error, watch))
        except RefitError as lost:
            error.add_note(f"the others could not be told: {lost}")
            return None
        with contextlib.suppress(PeerError):
            self.control.over()
            self.control.see_off(_FAREWELL_S)
        return decision

    def _doubt(self, control: Control, error: BaseException, decision: object, *, watch: Watch) -> None:
        """What others committed, or may have, this party has not: poison what is torn by that, and tell them.

        Without a decision the store is gone, and the decision with it.
        """
        message, meeting = control.abort_message(error, watch), control.rendezvous
        text = f"{message['kind']}: {message['text']}"
        torn = self.sink is not None and not self._whole
        if self.sink is not None and torn and len(self.plan.sink.ranks) > 1:
            others = "other ranks have committed" if decision == COMMIT else "other ranks may have committed"
            self.sink.poison(f"this rank gave up in {watch.where()}, and {others}: {text}")
            error.add_note(f"this rank of the sink is poisoned until a refit succeeds, since {others}")
        if decision != COMMIT:
            return
        with contextlib.suppress(PeerError):
            if meeting.leads:
                blamed = meeting.mine[-1] if torn else message.get("peer") or meeting.leader
                control.post("committed/all", {"failed": {blamed: text}, "digest": None})
                return
            for party in meeting.mine:
                failed = torn and party.startswith("sink")
                control.post(f"committed/{party}", {"failed": text} if failed else {"digest": None})


def _own(manifest: Manifest, rank: int | None, rendezvous: Rendezvous) -> Manifest:
    """A rank's manifest in the numbers of its side."""
    assert rank is not None
    manifest = manifest.on_rank(rank)
    if rank not in manifest.ranks and manifest.tensors:
        raise RefitError(
            f"{' and '.join(rendezvous.mine)} has tensors on ranks {list(manifest.ranks)}, and rank {rank} is none "
            f"of them; number the ranks of a side as its torch.distributed ranks",
            phase="prepare",
        )
    return manifest


def _merge(control: Control, side: str, mine: Manifest | None, *, watch: Watch) -> Manifest:
    """One side's manifest: its ranks post theirs, the leader merges them, all read the result."""
    rendezvous = control.rendezvous
    if mine is not None:
        rank = rendezvous.source_rank if side == "source" else rendezvous.sink_rank
        control.post(f"manifest/{side} {rank}", mine.to_json())
    merged = None
    if rendezvous.leads:
        ranks = [party for party in rendezvous.parties if party.startswith(side)]
        said = {party: control.read(f"manifest/{party}", watch, peer=party) for party in ranks}
        read = {text: Manifest.from_json(text) for text in said.values()}  # most ranks say the same
        merged = merge_manifests([read[said[party]] for party in ranks])
    text = control.announce(f"manifest/{side}", None if merged is None else merged.to_json(), watch)
    return merged or Manifest.from_json(text)


def _refuse_difference(sent: Digest, found: Digest, *, where: str, source_rank: int) -> NoReturn:
    differing = sent.differing(found)
    lines = (f"\n  {name}: {sent.tensors.get(name)} sent, {found.tensors.get(name)} found" for name in differing)
    raise DigestError(
        f"{len(differing)} tensors are not {where} as source {source_rank} sent them:{''.join(lines)}",
        tensors=differing,
    )


def annotate(error: BaseException, version: int | None, watch: Watch) -> None:
    """Say in `error` where it happened, and what became of the weights."""
    if isinstance(error, RefitError):
        error.phase = error.phase or watch.phase_name
        error.tensor = error.tensor or watch.tensor
        error.bucket = watch.bucket if error.bucket is None else error.bucket
        error.peer = error.peer or watch.peer
    outcome = "the commit had begun, so ask the sink whether it is poisoned"
    if watch.phase_name != "commit":
        outcome = "the old weights and the old version are intact"
    wanted = "" if version is None else f" to version {version!r}"
    error.add_note(f"refit{wanted} aborted in {watch.where()}: {outcome}")

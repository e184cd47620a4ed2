"""`Refit`: prepare, transfer, verify, commit; or abort with the old weights intact.

`Refit` is what a caller holds: it numbers the refits, waits for them and reports. The four phases are those of
`rl_refit.transaction.party`; an engine whose workers are sinks of their own is driven by `rl_refit.engine`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, final

from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Sample
from rl_refit.engine import Driver, EngineSink
from rl_refit.errors import DeadlineError, PeerError, RefitError
from rl_refit.plan import RefitPlan
from rl_refit.rendezvous import Rendezvous
from rl_refit.transaction.control import Control
from rl_refit.transaction.party import Party, annotate
from rl_refit.transports.base import Transport, Watch
from rl_refit.transports.stream import SlotStream

if TYPE_CHECKING:
    from rl_refit.replicas import ReplicasReport

__all__ = ["LONGEST_NAP_S", "CountedRefit", "CountedWeightSync", "Refit", "RefitReport", "require_version"]

_DEFAULTS = RefitConfig()
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
        self.interruption: BaseException | None = None
        """Why whoever made this Refit, such as an engine's driver, ends what it does, wherever it waits."""
        self.look_also: Callable[[], None] = lambda: None
        """Raises what whoever made this Refit has found out, such as a death; called wherever this one waits."""
        _check_sides(source, sink, transport=transport, rendezvous=rendezvous)
        if transport is None:
            transport = SlotStream()
            if rendezvous is None:  # who closes a Refit of one process?
                weakref.finalize(self, transport.close)
        self._source, self._transport = source, transport
        self._engine: Driver | None = None
        """Of an engine whose workers are sinks of their own; this process's source then is a party by itself."""
        self.begun = 0
        """Refits that have begun here: where this is the leader, it chooses what of the next one is sampled."""
        self._closed, self._busy = False, threading.Lock()
        self._digests: dict[tuple[int, int], tuple[int, str | None]] = {}
        if isinstance(sink, EngineSink):
            self._engine = Driver(sink, source, transport=transport, rendezvous=rendezvous, config=self._config)
            weakref.finalize(self, self._engine.let_go).atexit = False
            return
        self._control = None if rendezvous is None else Control(rendezvous)
        self._party = Party(source, sink, transport=transport, control=self._control)

    @property
    def plan(self) -> RefitPlan:
        """What a call will move. Made at the first look or the first call; over several processes all must ask for it.

        Raises:
            CoverageError: Source and sink do not hold the same tensors.
            RefitError: One of them cannot take part.
        """
        if self._engine is not None:
            return self._engine.plan()
        if not self._party.is_planned:
            self._plan()
        return self._party.plan

    @property
    def is_planned(self) -> bool:
        """Whether all parties have planned together, in a call or a look at `plan`."""
        return self._party.is_planned

    def explain(self) -> str:
        """The plan as text, with the buckets of this refit."""
        return self.plan.explain(bucket_bytes=self._config.bucket_bytes if self._transport.bounded else None)

    def __call__(self, version: int) -> RefitReport:
        """Bring the source's present weights into the sink as `version`, the number of optimizer steps they have seen.

        Whatever is raised, the refit has been aborted at all parties before: up to and including verify every sink
        keeps its old weights, bit for bit, and its old version. What a source
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
        if self._source is None:
            raise RefitError("this process has no source of weights; wait for a refit with receive()")
        require_version(version)
        return self._run(version)

    def receive(self, *, timeout_s: float | None = None) -> RefitReport:
        """Wait for the trainer to call its `Refit`, and take part; for a process that has a sink alone.

        Args:
            timeout_s: Seconds to wait for the refit to begin; None waits as long as the trainer lives.

        Raises:
            DeadlineError: None began within `timeout_s`; the sink is as it was.
            RefitError: As for a call.
        """
        if self._source is not None or (self._engine is None and self._control is None):
            raise RefitError("this process has a source of weights, which gives the version: call refit(version=…)")
        return self._run(None, timeout_s=math.inf if timeout_s is None else timeout_s)

    def close(self) -> None:
        """Free what the transport holds, and leave; others that still wait for this process are told."""
        self._closed = True
        if self._engine is not None:
            self._engine.close()
            return
        self._party.transport.close()
        if self._control is not None:
            self._control.close()

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
                return self._engine.receive(timeout_s) if version is None else self._engine.refit(version)

            # The first refit plans, and opens the transport. Planning over several processes is announced as a refit
            # of its own, hence a second wait.
            party = self._party
            if version is None and self._control is not None:
                patience = self._watch(timeout_s)
                self._await_begin(self._control, patience)
                if not party.is_planned:
                    self._plan()
                    self._await_begin(self._control, patience)
            if not party.is_planned:
                self._plan(version)

            watch = self._watch()
            try:
                with watch.phase("prepare"):
                    self.begun += 1
                    refit, sample = self.begun, party.sample(self._config.verify, self.begun)
                    if self._control is not None:  # the leader's version, sample and count hold for all
                        version, sample = self._begin(self._control, version, sample, watch=watch)
                        refit = self._control.refit
                assert version is not None
                for box in (party.outbox, party.inbox):
                    if box is not None:
                        box.watch, box.refit = watch, refit
                digest, unreadable = party.run(version, sample, watch)
            except BaseException as error:
                party.abort(error, version, watch)
                raise
            party.transport.finish()
            if self._control is not None:
                with contextlib.suppress(PeerError):  # all have committed, and know it
                    self._control.over()

            # The last version of which the same bytes were digested, where they have not changed since.
            chosen = sample.stride, sample.phase % max(1, sample.stride)
            before, self._digests[chosen] = self._digests.get(chosen), (version, digest)
            plan = party.plan
            return RefitReport(
                version=version,
                transport=party.transport.medium,
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
                extra_bytes=party.transport.extra_bytes,
            )
        finally:
            self._busy.release()

    def _await_begin(self, control: Control, watch: Watch) -> None:
        try:
            control.meet(watch)
            control.await_next(watch, longest_nap_s=LONGEST_NAP_S)
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
            annotate(error, None, watch)
            raise

    def _watch(self, deadline_s: float | None = None) -> Watch:
        deadline_s = self._config.deadline_s if deadline_s is None else deadline_s
        return Watch(deadline_s=deadline_s, look_around=self.look_around)

    def look_around(self) -> None:
        """Pass while this Refit is open and no party has given up, left or died; raise what happened otherwise."""
        if self.interruption is not None:
            raise RefitError(f"interrupted: {type(self.interruption).__name__}") from self.interruption
        if self._closed:
            raise RefitError(_CLOSED)
        self.look_also()
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

    def _plan(self, version: int | None = None) -> None:
        watch = self._watch()
        try:
            self._party.agree(self._config, watch)
        except BaseException as error:
            self._party.abort(error, version, watch)
            raise


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


# -- For a training loop, which gives the version alone ---------------------------------------------------------------


class CountedWeightSync(Protocol):
    """Transfers new weights into an engine and counts what it did: a `CountedRefit`, or one over several processes."""

    count: int
    """Verified and committed refits."""

    @property
    def last(self) -> RefitReport | ReplicasReport | None:
        """The report of the latest one; of several replicas, what it did to all of them."""

    def __call__(self, *, version: int) -> RefitReport | ReplicasReport:
        """Transfer, verify and commit."""

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, for the log."""

    def explain(self) -> str:
        """What each refit transfers."""


class CountedRefit:
    """A refit that a loop calls after its optimizer steps.

    Args:
        refit: What moves the weights.
        refresh: Called before each refit; brings the source's memory up to date where it is not the trainer's own, such
            as merged adapters.
    """

    def __init__(self, refit: Refit, *, refresh: Callable[[], object] | None = None) -> None:
        self._refit, self._refresh = refit, refresh
        self.count = 0
        """Refits that were committed; a run that resumes sets it."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit the weights as of `version` optimizer steps.

        Raises:
            RefitError: As of `Refit`; nothing is counted then.
        """
        if self._refresh is not None:
            self._refresh()
        self.last = self._refit(version)
        self.count += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """`RefitReport.metrics` of the latest refit; empty before the first."""
        return {} if self.last is None else self.last.metrics()

    def explain(self) -> str:
        """What each refit will move."""
        return self._refit.explain()


def require_version(version: object) -> None:
    """Pass if `version` is an int ≥ 0."""
    if not isinstance(version, int) or isinstance(version, bool) or version < 0:
        raise RefitError(f"a version is a number of optimizer steps, an int ≥ 0; got version={version!r}")


# -- What goes together ----------------------------------------------------------------------------------------------


def _check_sides(
    source: WeightSource | None,
    sink: WeightSink | EngineSink | None,
    *,
    transport: Transport | None,
    rendezvous: Rendezvous | None,
) -> None:
    """Pass if what a caller gave goes together.

    Raises:
        TypeError: Something is of another kind than it should be.
        ValueError: Something is missing, or too much.
    """
    kinds = {"source": (source, WeightSource), "sink": (sink, WeightSink), "transport": (transport, Transport)}
    for name, (given, kind) in kinds.items():
        if isinstance(given, type):
            raise TypeError(f"{name} is the class {given.__name__}; write {given.__name__}(…)")
        if given is None or isinstance(given, EngineSink):
            continue
        # Not `isinstance`: from Python 3.12 on it does not see what a wrapper hands on by `__getattr__`.
        wanted = [each for each in (*kind.__annotations__, *vars(kind)) if not each.startswith("_")]
        if missing := [each for each in wanted if not hasattr(given, each)]:
            # Of what has none of them, such as a module, the list would say less than its class.
            named = f" ({', '.join(missing)})" if len(missing) < len(wanted) else ""
            raise TypeError(
                f"{name} is a {type(given).__name__}, which has not the methods of {kind.__name__}{named}; a module "
                f"goes into ModuleSource or ModuleSink, a mapping of tensors into StateDictSource"
            )
    if rendezvous is not None and not isinstance(rendezvous, Rendezvous):
        raise TypeError(f"rendezvous is a {type(rendezvous).__name__}; write Rendezvous(address, num_sources=…, …)")
    if isinstance(sink, EngineSink):
        if transport is not None and not isinstance(transport, SlotStream):
            raise TypeError(f"the workers of an engine take a SlotStream; got {type(transport).__name__}")
        if rendezvous is None and source is None:
            raise ValueError("an engine needs a source of this process, or a rendezvous with one of another")
        if rendezvous is not None and rendezvous.sink_rank is None:
            raise ValueError("the sink_rank of the rendezvous is that of the engine's first worker; got None")
    elif rendezvous is None and (transport is not None or source is None or sink is None):
        raise ValueError(
            "without a rendezvous a Refit works in one process: give it a source and a sink, and no transport; "
            "over several processes give all parties a rendezvous"
        )
    if rendezvous is None:
        return
    for side, given, rank in (("source", source, rendezvous.source_rank), ("sink", sink, rendezvous.sink_rank)):
        if (given is None) != (rank is None):
            raise ValueError(f"the rendezvous says {side}_rank={rank}, and the {side} given is {given!r}")

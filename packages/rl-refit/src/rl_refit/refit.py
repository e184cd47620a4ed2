"""`Refit`: prepare, transfer, verify, commit; or abort with the old weights intact.

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
from collections.abc import Iterator
from typing import Any, final

from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import Sample, VerificationShare
from rl_refit.errors import DeadlineError, PeerError, RefitError
from rl_refit.plan import RefitPlan
from rl_refit.rendezvous import Rendezvous
from rl_refit.report import RefitReport
from rl_refit.schedule import make_schedule
from rl_refit.transaction.agreement import agree, agree_in_process
from rl_refit.transaction.control import Control
from rl_refit.transaction.party import Outcome, Party, abort_message
from rl_refit.transaction.sides import Sides, check_sides, device_of
from rl_refit.transports.base import Channel, Inbox, Outbox, Transport
from rl_refit.transports.in_process import InProcess
from rl_refit.watch import Watch

__all__ = ["CommittedVersion", "Refit"]

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

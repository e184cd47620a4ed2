"""Engines that come and go: each replica of an engine is a transaction of its own, under a name that it keeps.

    Replicas    every rank of the trainer has one; `replicas(version=step)` refits all that have joined
    Replica     every rank of an engine has one; `replica.receive()` takes part

They find one another in a store at the trainer's address, hosted by source 0. There, replicas join with a name, the
address at which they are refitted, and the version that they have; and there the trainer invites them:

    log/0, log/1, …        who has joined, in order; written by rank 0 of each replica
    invited/3              the latest refit for whoever joined as number 3
    dropped/3              why number 3 takes part in no more refits; it may join again, under its name
    holders                the version last committed, and which replicas can give it to newcomers
    version/3              what number 3 has been given by another replica since it joined
    requests/<id>/0, …     newcomers that ask that replica for its weights, at addresses of theirs
    answer/<session>       whether it gives them, or the newcomer has changed its mind

Each refit of a replica is a `Refit` between the ranks of the trainer and those of the replica alone, in the store that
the replica hosts, so that a replica that loses its trainer still learns what was decided. All replicas are refitted at
the same time, in a thread each. What goes wrong for one is its own: it is dropped, and the others commit. Whoever was
dropped and lives, or was started anew, joins again, and so there is one way into a refit.
"""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, cast, final

from rl_refit import gpu
from rl_refit.config import RefitConfig, Verify
from rl_refit.contracts import WeightSource
from rl_refit.errors import DeadlineError, PeerError, RefitError, error_from_message, error_to_message
from rl_refit.refit import LONGEST_NAP_S, Refit, RefitReport, require_version
from rl_refit.rendezvous import Rendezvous
from rl_refit.replica import TRAINER_NAME, host_and_port
from rl_refit.stores import BoundedStore, in_thread
from rl_refit.transaction.control import COMMIT, Control
from rl_refit.transaction.liveness import LEFT, Peers
from rl_refit.transaction.shared import SharedSource
from rl_refit.transports.base import PATIENCE_S, Transport, Watch
from rl_refit.transports.stream import SlotStream

__all__ = ["Replicas", "ReplicasReport"]

_DEFAULTS = RefitConfig()
_MOMENT_S = 0.01
_REJOIN_S = 2.0
"""How long a call waits for replicas that failed and live to join again, which they do at once if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasReport:
    """What a refit of all replicas did. The same at every rank of the trainer, but for `refits`."""

    version: int
    """Number of optimizer steps that the weights have seen."""

    versions: Mapping[str, int | None]
    """The version that each replica now has, by name; None where that is not known, and `failures` says why."""

    failures: Mapping[str, str]
    """Why a replica that had joined has not committed `version`. It takes part again as soon as it has joined again."""

    rewound: Mapping[str, int]
    """The versions that replicas gave up for this one, since `rollback` was given: `version`, or newer ones."""

    refits: Mapping[str, RefitReport]
    """Of the replicas that committed now, as this rank of the trainer saw it."""

    total_seconds: float
    """From the call to its end."""

    @property
    def bytes(self) -> int:
        """Bytes that arrived, at all replicas that committed now together."""
        return sum(report.bytes for report in self.refits.values())

    @property
    def tensors(self) -> int:
        """Tensors fed to each of them."""
        return max((report.tensors for report in self.refits.values()), default=0)

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds by phase, of the replica that took longest for it: they are refitted at the same time."""
        phases = dict.fromkeys(phase for report in self.refits.values() for phase in report.seconds)
        return {phase: max(report.seconds[phase] for report in self.refits.values()) for phase in phases}

    @property
    def verified(self) -> str:
        """What was digested on both sides; where a replica's first refit was compared in full, both are said."""
        return " or ".join(dict.fromkeys(report.verified for report in self.refits.values())) or "nothing"

    @property
    def digest(self) -> str | None:
        """Of all that was digested for the first of `refits`, in hex; None where nothing was."""
        return next((report.digest for report in self.refits.values()), None)

    def metrics(self) -> dict[str, float]:
        """For a log: bytes and seconds, whether all digests were compared, and how many replicas have the version."""
        return {
            "refit_bytes": float(self.bytes),
            "refit_s": self.total_seconds,
            "refit_verified": float(all(report.digest is not None for report in self.refits.values())),
            "refit_replicas": float(sum(version == self.version for version in self.versions.values())),
            "refit_replicas_failed": float(len(self.failures)),
        }

    def explain(self) -> str:
        """A line for each replica, for people."""
        lines = [f"version {self.version} in {1e3 * self.total_seconds:.1f} ms:"]
        for name, version in self.versions.items():
            if name in self.failures:
                lines.append(f"  {name} failed, and its version is not known: {self.failures[name]}")
            elif name in self.refits:
                before = f" (it had version {self.rewound[name]})" if name in self.rewound else ""
                lines.append(f"  {name}{before}: {self.refits[name].explain()}")
            else:
                lines.append(f"  {name} has version {version} already")
        return "\n".join(lines)


@dataclass(slots=True, kw_only=True)
class _Member:
    """A replica that has joined, as source 0 knows it."""

    number: int
    """Of its entry in the log."""
    name: str
    address: str
    num_ranks: int
    version: int | None
    gives: bool
    """Whether it can give its weights to others."""
    process: dict[str, Any]
    identity: str
    """Of the `Replica`: the same whenever that joins again."""
    party: str
    """Under which it shows signs of life."""
    peers: Peers
    """Looks after its rank 0."""


@final
class Replicas:
    """Brings the weights of `source` into every replica of an engine that has joined, whenever it is called.

    Every rank of the trainer makes one. Replicas are refitted at the same time, each by a transaction of its own: one
    that dies, stops or refuses is dropped and reported, and the others commit.

    Args:
        source: Where fresh weights come from: this rank's part. Several threads iterate over it, in turns.
        address: "tcp://host:port" at which replicas find the trainer; source 0 hosts a store there. A trainer that is
            started anew takes the same address, and living replicas join it by themselves. Whoever reaches it can make
            engines take other weights: keep it on loopback, or on a network of your own.
        num_sources: Ranks of the trainer.
        source_rank: This process's.
        at_least: How many replicas must commit. A call waits for as many to join, and raises where fewer commit.
        transport: Makes the way of the bytes, anew for each replica; the same at both sides. A `SlotStream` by default.
        liveness_s: Seconds without a sign of life after which a replica, or a rank of the trainer, counts as dead; on
            one host a dead process is seen at once.
        name: Of these replicas, where one address serves several models; the replicas give the same.
        bucket_bytes: See `RefitConfig`, as for the arguments that follow.
        buckets: Slots of each ring.
        deadline_s: Seconds that a phase may take, and that `at_least` replicas may take to join.
        verify: How much is digested: "full", "sampled", "off".

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        source: WeightSource,
        *,
        address: str,
        num_sources: int = 1,
        source_rank: int = 0,
        at_least: int = 1,
        transport: Callable[[], Transport] = SlotStream,
        liveness_s: float = 30.0,
        name: str = TRAINER_NAME,
        bucket_bytes: int = _DEFAULTS.bucket_bytes,
        buckets: int = _DEFAULTS.buckets,
        deadline_s: float = _DEFAULTS.deadline_s,
        verify: Verify = _DEFAULTS.verify,
    ) -> None:
        self._config = RefitConfig(bucket_bytes=bucket_bytes, buckets=buckets, deadline_s=deadline_s, verify=verify)
        if not isinstance(source, WeightSource):
            raise TypeError(f"source is a {type(source).__name__}; a module goes into ModuleSource")
        if at_least < 1:
            raise ValueError(f"at_least must be at least 1; got at_least={at_least}")
        host_and_port(address)
        self._meeting = Rendezvous(
            address,
            num_sources=num_sources,
            num_sinks=1,
            source_rank=source_rank,
            hosts=source_rank == 0,
            liveness_s=liveness_s,
            name=name,
        )
        self._meeting.num_sinks = 0  # here the ranks of the trainer meet alone, to call and to report together
        self._source, self._transport, self._at_least = SharedSource(source), transport, at_least
        self._control = Control(self._meeting)
        self._run_id = uuid.uuid4().hex[:8]
        self._members: dict[str, _Member] = {}
        self._failed: dict[str, tuple[_Member, str]] = {}
        """Those that failed, and have not joined again yet."""
        self._invited: Sequence[dict[str, Any]] = ()
        """Those that are being refitted."""
        self._log_read = 0
        self._sessions: dict[int, Refit] = {}
        """This rank's end of the refits of one replica, by its number."""
        self._calls = 0
        self._sent: int | None = None
        """The version that the source had at the last call, of which it was digested."""
        self._went_back = False
        """Whether replicas may have a newer version than they should, which they missed to give up."""
        self._busy = threading.Lock()
        self._closed = False
        self.version: int | None = None
        """The version last committed by any replica through this object; None before the first."""
        if source_rank == 0:
            self._control.introduce()  # from now on replicas can join

    def __call__(self, version: int, *, rollback: bool = False) -> ReplicasReport:
        """Bring the source's present weights into all replicas as `version`, the number of optimizer steps seen.

        All ranks of the trainer call it. Replicas that join while it works take part in the next.

        Args:
            version: Newer than what any replica has.
            rollback: Whether replicas with this version or a newer one take it too: for a trainer that went back to an
                older checkpoint, or resumes and brings once more what they have.

        Raises:
            RefitError: `version` is not newer than what some replica has, which is named, and `rollback` is false:
                nothing was touched. Or fewer than `at_least` replicas committed: the error of one of them, with notes
                of all.
            DeadlineError: Fewer than `at_least` replicas have joined within `deadline_s`.
            PeerError: Another rank of the trainer is dead or silent.
        """
        require_version(version)
        return self._run(
            lambda watch: self._call(version, watch, rollback=rollback), {"version": version, "rewind": rollback}
        )

    def catch_up(self) -> ReplicasReport:
        """Bring the version last committed to the replicas that lack it: to newcomers, and to those that had failed.

        All ranks of the trainer call it, while the source still has the weights of that version, which is checked by
        what was digested of them. Others are left alone.

        Raises:
            RefitError: Nothing was committed yet; or the source has changed since, and nothing was touched: newcomers
                get the next version. Otherwise as for a call.
        """
        return self._run(self._catch_up, {"unchanged": True})

    def joined(self) -> dict[str, int | None]:
        """At source 0: who has joined, lives, and takes part in the next refit, each with the version that it has."""
        if not self._meeting.leads:
            raise RefitError("source 0 knows who has joined; the other ranks of the trainer learn it in each report")
        with self._turn():
            self._look_for_members()
            return {name: member.version for name, member in self._members.items()}

    def close(self) -> None:
        """Leave; replicas keep what they have, and wait for the next trainer at this address."""
        if self._closed:
            return
        self._closed = True
        self._close_sessions(self._sessions)
        self._control.close()
        # The store ends with the last that refers to it, and the next trainer of this process may take its address.
        self._members, self._failed = {}, {}
        self._control.forget()
        self._meeting.forget()

    # -- One call -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        if self._closed:
            raise RefitError("these Replicas are closed; make new ones")
        if not self._busy.acquire(blocking=False):
            raise RefitError("another thread refits these replicas; wait for it")
        try:
            yield
        finally:
            self._busy.release()

    def _watch(self, deadline_s: float | None = None) -> Watch:
        return Watch(
            deadline_s=self._config.deadline_s if deadline_s is None else deadline_s,
            look_around=self._control.look_around,
        )

    def _run(self, prepare: Callable[[Watch], dict[str, Any]], called: dict[str, Any]) -> ReplicasReport:
        """One call: source 0 says who is refitted to what, each rank does its part, and all hear what came of it.

        Args:
            prepare: What source 0 says; raises where it refuses.
            called: What all ranks must be called with.
        """
        with self._turn():
            control, mine, began = self._control, self._meeting.mine[0], time.monotonic()
            # Whoever waits for source 0 has more patience than source 0 has for replicas that are to join.
            watch = self._watch((1 if self._meeting.leads else 2) * self._config.deadline_s)
            try:
                control.meet(watch)
                message, refusal = None, None
                if self._meeting.leads:
                    try:
                        message = prepare(watch)
                    except RefitError as error:
                        refusal = error
                        message = {"refused": error_to_message(error, party="source 0", where="phase prepare")}
                said = control.begin(message, watch)
                if "refused" in said:
                    self._end(COMMIT)
                    raise refusal or error_from_message(said["refused"])  # noqa: TRY301
                if any(said[key] != value for key, value in called.items()):
                    theirs = {key: said[key] for key in called}
                    raise RefitError(f"{mine} is called with {called}, and source 0 with {theirs}")  # noqa: TRY301
                report, failed = self._refit(said, began)
            except BaseException as error:
                with contextlib.suppress(RefitError):  # the trainer's own store is gone, or source 0
                    if control.under_way:
                        self._end(error_to_message(error, party=mine, where=watch.where()))
                    for each in self._invited:
                        self._close_sessions([each["number"]])
                        if self._meeting.leads:
                            self._drop(each["name"], each["number"], f"{type(error).__name__}: {error}", failed=True)
                raise
            done = sum(version == report.version for version in report.versions.values())
            if done < self._at_least:
                summary = f"{done} replicas have version {report.version}, and at_least={self._at_least} must"
                why = next(iter(failed.values())) if failed else PeerError(summary)
                why.add_note(f"{summary}; {report.explain()}")
                raise why
            return report

    def _end(self, decision: object) -> None:
        """Let the other ranks of the trainer go, or have them give up too."""
        decided = self._control.decide(decision)
        self._control.complete()
        self._control.over()
        if decision == COMMIT and decided != COMMIT:
            raise error_from_message(decided)

    def _call(self, version: int, watch: Watch, *, rollback: bool) -> dict[str, Any]:
        died = self._await_members(watch)
        ahead = {
            name: member.version
            for name, member in sorted(self._members.items())
            if member.version is not None and member.version >= version
        }
        if ahead and not rollback:
            have = ", ".join(f"{name} has {its}" for name, its in ahead.items())
            what = (
                "call catch_up() to bring it to the replicas that lack it"
                if version == self.version
                else f"a trainer that went back to version {version} says so, with rollback=True, and all replicas "
                f"take its weights; or resume from a newer checkpoint, or restart a replica that is another trainer's"
            )
            raise RefitError(
                f"version {version} is not newer than what replicas have: {have}; nothing was touched; a version is "
                f"the number of optimizer steps that the weights have seen, never a count of calls; {what}"
            )
        return self._invite(self._members.values(), version, died, rewind=rollback)

    def _catch_up(self, watch: Watch) -> dict[str, Any]:
        if self.version is None:
            raise RefitError("no replica has committed anything yet: there is nothing to catch up with; refit first")
        if self._sent != self.version:
            raise RefitError(
                f"the source was to be version {self._sent} since version {self.version} was committed, and no replica "
                f"committed that: call again with version={self._sent}"
            )
        died = self._look_for_members()
        lacking = [member for member in self._members.values() if member.version != self.version]
        return self._invite(lacking, self.version, died, rewind=self._went_back, unchanged=True)

    def _invite(
        self, members: Collection[_Member], version: int, died: dict[str, str], *, rewind: bool, unchanged: bool = False
    ) -> dict[str, Any]:
        """What source 0 says: `members` are to have `version`."""
        told = ("number", "name", "address", "num_ranks", "version")
        return {
            "version": version,
            "rewind": rewind,
            "unchanged": unchanged,
            "invited": [
                {key: getattr(each, key) for key in told} | {"session": f"{self._run_id} {each.name} #{each.number}"}
                for each in members
            ],
            "died": died,
            "others": {
                name: [each.number, each.version] for name, each in self._members.items() if each not in members
            },
        }

    def _refit(self, said: dict[str, Any], began: float) -> tuple[ReplicasReport, dict[str, BaseException]]:
        """This rank's part of a call, and what all ranks together say of it; and the errors, by name."""
        control, version, invited = self._control, said["version"], said["invited"]
        living = {each["number"] for each in invited} | {number for number, _ in said["others"].values()}
        self._close_sessions(self._sessions.keys() - living)
        watch = self._watch()
        if not said["unchanged"]:
            self._source.digests.clear()
            self._sent, self._went_back = version, self._went_back or said["rewind"]
        elif invited:
            changed = control.gather("changed", self._source.changed(watch), watch)
            names = sorted({name for each in (changed or {}).values() for name in each})
            if names := control.announce("changed", names, watch):
                self._end(COMMIT)
                raise RefitError(
                    f"the source has changed since version {version} was committed ({names[0]} and {len(names) - 1} "
                    f"other tensors): it has seen unfinished training, so newcomers get the next version",
                    tensor=names[0],
                )
        self._invited = invited
        if self._meeting.leads:
            if said["rewind"]:  # or one that has gone back would take the newer version from one that has not yet
                self._name_holders(version, [])
            common = {"call": control.refit, "num_sources": self._meeting.num_sources}
            common |= {"version": version, "rewind": said["rewind"]}
            for each in invited:
                control.store.write(f"invited/{each['number']}", {**common, "session": each["session"]})
        self._calls += 1
        results = self._refit_at_once(invited, version)

        # One rank's failure is the replica's, for all: none goes on with a session that another has closed.
        errors = {
            number: error_to_message(error, party=self._meeting.mine[0])
            for number, error in results.items()
            if isinstance(error, BaseException)
        }
        watch = self._watch(4 * self._config.deadline_s)  # other ranks may be in other phases
        reported = control.gather("ended", errors, watch)
        merged: dict[str, Any] = {}
        for each in (reported or {}).values():
            merged = {**each, **merged}  # what source 0 says comes first
        merged = control.announce("ended", {str(number): error for number, error in merged.items()}, watch)
        self._end(COMMIT)
        self._invited = ()
        failed: dict[str, BaseException] = {}
        failures, committed = dict[str, str](said["died"]), list[dict[str, Any]]()
        for each in invited:
            name, number = each["name"], each["number"]
            if (message := merged.get(f"{number}")) is None:
                committed.append(each)
                self.version = version
                if name in self._members:
                    self._members[name].version = version
                    self._control.store.delete_key(f"version/{number}")  # older, if there is one
                continue
            failures[name] = f"{message['kind']}: {message['text']}"
            own = results.get(number)
            failed[name] = own if isinstance(own, BaseException) else error_from_message(message)
            self._close_sessions([number])
            if self._meeting.leads:
                self._drop(name, number, failures[name], failed=True)
        if self._meeting.leads and committed:
            holders = [each for each in self._members.values() if each.gives and each.version == version]
            self._name_holders(version, holders)
        versions = {name: known for name, (_, known) in said["others"].items()}
        versions |= {each["name"]: version for each in committed} | dict.fromkeys(failures)
        return (
            ReplicasReport(
                version=version,
                versions=dict(sorted(versions.items())),
                failures=failures,
                rewound={
                    each["name"]: each["version"]
                    for each in committed
                    if each["version"] is not None and each["version"] >= version
                },
                refits={each["name"]: cast("RefitReport", results[each["number"]]) for each in committed},
                total_seconds=time.monotonic() - began,
            ),
            failed,
        )

    # -- Who takes part -----------------------------------------------------------------------------------------------

    def _await_members(self, watch: Watch) -> dict[str, str]:
        """At source 0: wait until `at_least` replicas are there; why those that are not any more are gone."""
        died, until = self._look_for_members(), time.monotonic() + _REJOIN_S
        while len(self._members) < self._at_least or (self._failed and time.monotonic() < until):
            try:
                watch.check()
            except DeadlineError as late:
                gone = "".join(f"; {name}: {why}" for name, why in died.items())
                raise DeadlineError(
                    f"{len(self._members)} replicas have joined within deadline_s={self._config.deadline_s:g}, and "
                    f"at_least={self._at_least} are to{gone}; start engines with Replica(…, "
                    f"trainer={self._meeting.address!r})",
                    phase="prepare",
                    seconds=late.seconds,
                ) from None
            time.sleep(LONGEST_NAP_S)
            died |= self._look_for_members()
        out = {name: f"it has not joined again since it failed: {why}" for name, (_, why) in self._failed.items()}
        return {name: why for name, why in {**died, **out}.items() if name not in self._members}

    def _look_for_members(self) -> dict[str, str]:
        """At source 0: read who has joined, and see who left or died; why, for those that died."""
        store = self._control.store
        while (entry := store.read(f"log/{self._log_read}")) is not None:
            self._add_member(store, self._log_read, entry)
            self._log_read += 1
        died: dict[str, str] = {}
        for name, member in tuple(self._members.items()):
            if (given := store.read(f"version/{member.number}")) is not None:
                member.version = given
                store.delete_key(f"version/{member.number}")
            if (gone := self._gone(member)) is not None:
                self._drop(name, member.number, gone)
                if gone != LEFT:
                    died[name] = gone
        self._failed = {
            name: (member, why)
            for name, (member, why) in self._failed.items()
            if name not in self._members and self._gone(member) is None
        }
        return died

    def _gone(self, member: _Member) -> str | None:
        """Why a replica is not there any more; None if it is."""
        if self._control.store.get(f"alive/{member.party}").decode() == LEFT:
            return LEFT
        try:
            member.peers.check()
        except PeerError as error:
            return f"PeerError: {error}"
        return None

    def _add_member(self, store: BoundedStore, number: int, entry: dict[str, Any]) -> None:
        before = self._members.get(entry["name"])
        if before is not None:
            taken = before.identity != entry["identity"]
            why = f"process {entry['process']['pid']} on {entry['process']['host'].split()[0]} has taken its name"
            self._drop(entry["name"], before.number, why if taken else "it joined again", taken=taken)
        party, process = entry["party"], {**entry["process"], "name": f"replica {entry['name']}"}
        peers = Peers(store, {party: process}, listen_to=[party], liveness_s=self._meeting.liveness_s)
        self._members[entry["name"]] = _Member(number=number, peers=peers, **entry)

    def _drop(self, name: str, number: int, why: str, *, taken: bool = False, failed: bool = False) -> None:
        member = self._members.get(name)
        if member is not None and member.number == number:
            del self._members[name]
            if failed:
                self._failed[name] = member, why
        self._control.store.write(f"dropped/{number}", {"why": why, "taken": taken})

    def _name_holders(self, version: int, holders: Sequence[_Member]) -> None:
        """Tell newcomers who can give them which version."""
        wanted = ("name", "identity", "num_ranks", "process")
        places = [{key: getattr(each, key) for key in wanted} for each in holders]
        self._control.store.write("holders", {"version": version, "replicas": places})

    # -- The refits ---------------------------------------------------------------------------------------------------

    def _refit_at_once(self, invited: Sequence[dict[str, Any]], version: int) -> dict[int, RefitReport | BaseException]:
        """Refit each replica in a thread of its own; whoever is found dead meanwhile is given up.

        Returns:
            By number of the replica, what this rank saw of its refit, or what went wrong.

        Raises:
            BaseException: Ctrl-C, or a rank of the trainer is gone: when no thread reads the source any more.
        """

        def work(refit: Refit) -> RefitReport:
            gpu.use(self._source.device)
            return refit(version)

        sessions = {each["number"]: self._session(each) for each in invited}
        for refit in sessions.values():
            if refit.begun:  # from the second on the number of the call, so that what is sent to all is digested once
                refit.begun = self._calls
        working = {number: in_thread(partial(work, refit), name="replica") for number, refit in sessions.items()}
        members = {each["number"]: self._members[each["name"]] for each in invited} if self._meeting.leads else {}
        dead: dict[int, PeerError] = {}
        interruption: BaseException | None = None
        while True:
            try:
                if not wait(working.values(), PATIENCE_S).not_done:
                    break
                self._control.look_around()
                for number in members.keys() - dead.keys():
                    try:
                        if not working[number].done():
                            members[number].peers.check()
                    except PeerError as error:
                        dead[number] = sessions[number].interruption = error
            except BaseException as error:  # noqa: BLE001  (raised below)
                interruption = interruption or error
                for refit in sessions.values():
                    refit.interruption = interruption

        results: dict[int, RefitReport | BaseException] = {}
        for number, each in working.items():
            failure = each.exception()
            results[number] = (
                each.result() if failure is None else dead.get(number) or _death_of(members.get(number)) or failure
            )
        if interruption is not None:
            self._close_sessions(self._sessions)
            if any(isinstance(result, RefitReport) for result in results.values()):
                self.version = version
            raise interruption
        return results

    def _session(self, invited: Mapping[str, Any]) -> Refit:
        number = invited["number"]
        if number not in self._sessions:
            meeting = self._meeting
            rendezvous = Rendezvous(
                invited["address"],
                num_sources=meeting.num_sources,
                num_sinks=invited["num_ranks"],
                source_rank=meeting.source_rank,
                hosts=False,
                timeout_s=min(meeting.liveness_s, self._config.deadline_s),
                liveness_s=meeting.liveness_s,
                name=invited["session"],
            )
            rendezvous.host = f"replica {invited['name']}"
            self._sessions[number] = Refit(
                self._source, transport=self._transport(), rendezvous=rendezvous, **asdict(self._config)
            )
        return self._sessions[number]

    def _close_sessions(self, numbers: Iterable[int]) -> None:
        for refit in [self._sessions.pop(number) for number in [*numbers] if number in self._sessions]:
            with contextlib.suppress(RefitError):  # its store is gone with it
                refit.close()


def _death_of(member: _Member | None) -> PeerError | None:
    """That a replica of this host is dead: a better reason than what failed for it. Its connections end just before."""
    if member is None:
        return None
    for _ in range(10):
        try:
            member.peers.check()
        except PeerError as death:
            return death
        time.sleep(_MOMENT_S)
    return None

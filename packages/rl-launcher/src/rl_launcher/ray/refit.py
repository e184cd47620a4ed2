"""Refits from the ranks of a trainer into engines on Ray: verified, or the old weights stay.

The parties meet once, and again whenever an engine was replaced. If an engine dies before or during a refit, it is
replaced and all repeat the refit; if a rank of the trainer dies, the refit ends with its error.

An engine that dies between refits is refitted at once, alone, if the policy is idle and unchanged since the last
commit, as in a synchronous loop that samples. Otherwise it waits for the next refit.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from rl_launcher.ray.cluster import LOOPBACK
from rl_launcher.ray.engine_pool import EnginePool, RunningEngine
from rl_launcher.ray.policy import RayPolicy
from rl_launcher.ray.remote_calls import Pending
from rl_launcher.ray.worker_failures import RemoteDiedError, RemoteError
from rl_refit import RefitConfig, RefitError, RefitReport
from rl_refit.parties import Parties


class RayWeightSync:
    """A `WeightSync` from the trainer's ranks to all engines of a pool; `one_node` tells whether all are on one."""

    def __init__(self, policy: RayPolicy, engines: EnginePool, config: RefitConfig, *, one_node: bool) -> None:
        self._policy, self._engines, self._config, self._one_node = policy, engines, config, one_node
        self.enter_refitting: Callable[[], None] = lambda: None
        """Brings the weights of both sides onto devices that they share; called before each refit."""
        self.healing: Callable[[], AbstractContextManager[None]] = nullcontext
        """Entered while an engine is refitted between refits: brings the policy's weights onto its devices."""
        self._refitting = threading.Lock()
        self._names = (f"refit-{number}" for number in itertools.count(1))
        self._joined: tuple[RunningEngine, ...] = ()
        self._committed: int | None = None
        self._num_repeated, self._repeating = 0, False
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""
        engines.healer = self._heal

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit on every engine, including those that had to be replaced.

        Raises:
            TrainerDiedError: a rank of the trainer is gone.
            EngineDiedError: engines died more often than the recipe allows.
            RefitError: it was refused or aborted for another reason; the engines keep the old weights.
        """
        self.enter_refitting()  # before the lock: it may wait for a replaced engine, whose healer tries the lock
        with self._refitting:
            while True:
                engines = self._engines.settled()
                report = self._attempt(engines, version) if self._join(engines) else None
                if report is not None:
                    break
            self._committed, self.last, self._repeating = version, report, False
            self.count += 1
            self._engines.serve(engines)
            return report

    def metrics(self) -> dict[str, float]:
        """Of the latest refit, and how many had to be repeated, for the log."""
        return {} if self.last is None else {**self.last.metrics(), "refits_repeated": float(self._num_repeated)}

    def explain(self) -> str:
        """Who sends to whom, and by which way."""
        return self._parties(self._engines.all(), port=0, name="refit").explain()

    # -- One refit ----------------------------------------------------------------------------------------------------

    def _attempt(self, engines: Sequence[RunningEngine], version: int) -> RefitReport | None:
        """The leader's report; None if an engine died, and all must repeat it."""
        for engine in engines if self._repeating else ():  # some may have committed what others have not
            with suppress(RemoteDiedError):  # noticed again below
                engine.process().call("repeat", version, timeout_s=self._engines.call_timeout_s)
        deadline_s = self._config.deadline_s
        pendings = [(engine, engine.process().submit("receive", deadline_s)) for engine in engines]
        aborted: RefitError | None = None
        try:
            report: RefitReport = self._policy.refit(version)
        except RefitError as error:
            self._joined, aborted = (), error
        except BaseException:
            self._joined = ()
            raise
        died = self._await_receivers(pendings)
        if aborted is not None and not died:
            raise aborted
        if not died:
            return report
        self._joined = ()
        self._num_repeated += 1
        self._repeating = True
        why = "an engine died after the trainer had committed" if aborted is None else str(aborted).splitlines()[0]
        self._engines.on_event(
            "refit_repeated", f"the refit to version {version} was aborted: {why}", "repeated with a new engine"
        )
        return None

    def _await_receivers(self, pendings: Sequence[tuple[RunningEngine, Pending]]) -> bool:
        """Wait until every engine has left the refit; return whether any of them is gone.

        Raises:
            RefitError: one is alive, and did not commit what the trainer did.
        """
        died, refused = False, None
        deadline = time.monotonic() + self._config.deadline_s
        for engine, pending in pendings:
            try:
                pending.result(timeout_s=max(1.0, deadline - time.monotonic()))
            except RemoteDiedError as error:
                self._engines.lost(engine, error, owed="the refit is repeated")
                died = True
            except RemoteError as error:
                if self._engines.is_dead(engine):
                    died = True
                else:
                    refused = refused or error
        if refused is not None and not died:
            self._joined = ()
            raise refused
        return died

    def _join(self, engines: Sequence[RunningEngine]) -> bool:
        """Have all engines alive and in one parties with the ranks; False if one is found dead."""
        limit_s = self._engines.call_timeout_s
        checks = [(engine, engine.process().submit("alive")) for engine in engines]
        dead = False
        for engine, pending in checks:
            try:
                why = pending.result(timeout_s=limit_s)
            except RemoteDiedError as error:
                why = error
            if why is not None:
                self._engines.lost(engine, why, owed="the refit waits for its replacement")
                dead = True
        if dead:
            return False
        if tuple(engines) == self._joined:
            return True
        self._joined = ()
        engine = engines[0]
        try:
            port = engine.process().free_port()
            parties = self._parties(engines, port=port, name=next(self._names))
            for number, engine in enumerate(engines):
                engine.process().call("join_refit", parties, number, timeout_s=limit_s)
        except RemoteDiedError as error:
            self._engines.lost(engine, error, owed="the refit waits for its replacement")
            return False
        self._policy.join_refit(parties)
        self._joined = tuple(engines)
        return True

    def _parties(self, engines: Sequence[RunningEngine], *, port: int, name: str) -> Parties:
        host = LOOPBACK if self._one_node else engines[0].host
        return Parties(
            address=f"tcp://{host}:{port}",
            name=name,
            num_sources=self._policy.num_ranks,
            engine_ranks=tuple(1 if each.started is None else each.started.sink_ranks for each in engines),
            one_node=self._one_node,
            config=self._config,
        )

    # -- Between refits -----------------------------------------------------------------------------------------------

    def _heal(self, engine: RunningEngine) -> None:
        """Bring the committed weights to a replaced engine, if the policy still has them and is idle."""
        if not self._refitting.acquire(blocking=False):
            return  # a refit is running, and includes it
        try:
            healed = self._refit_alone(engine)
        except RefitError as error:
            self._report_waiting(engine, str(error).splitlines()[0])
        except Exception as error:  # noqa: BLE001 - this is a thread of its own: the loop's next call must raise it
            self._engines.fail(error)
        else:
            if healed:
                self._engines.serve([engine])
                message = f"{engine} has the weights of version {self._committed}"
                self._engines.on_event("engine_healed", message, "it serves")
            elif self._committed is not None:
                self._report_waiting(engine, "the policy is busy, or has changed since the last commit")
        finally:
            self._refitting.release()

    def _refit_alone(self, engine: RunningEngine) -> bool:
        """Whether it could be done: the policy must be idle, at the version that the other engines serve."""
        policy = self._policy
        if self._committed is None or not policy.lock.acquire(blocking=False):
            return False
        try:
            if policy.version != self._committed:
                return False
            with self.healing():
                return self._join([engine]) and self._attempt([engine], self._committed) is not None
        finally:
            self._joined = ()
            policy.lock.release()

    def _report_waiting(self, engine: RunningEngine, why: str) -> None:
        self._engines.on_event("engine_waits", f"{engine} has no weights yet: {why}", "the next refit brings them")

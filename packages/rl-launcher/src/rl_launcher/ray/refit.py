"""New weights from the ranks of a trainer into engines that are actors: verified, or the old ones stay.

Knows no models and no prompts. Who takes part meets once, and again whenever an engine was replaced. An engine that
dies before or in a refit is replaced, and the refit done once more, by all; a rank of the trainer that dies ends it.

An engine that dies between refits is refitted at once, alone with the trainer, where the policy still has the weights
that were committed and nobody uses it: a synchronous loop that samples. Otherwise it waits for the next refit.
"""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

from rl_launcher.ray.engines import LOOPBACK, EngineGroup, RunningEngine
from rl_launcher.ray.failures import RemoteDiedError, RemoteError
from rl_launcher.ray.refit_rendezvous import RefitMeeting, way_between
from rl_launcher.ray.remote_calls import Pending
from rl_refit import RefitConfig, RefitError, RefitReport

__all__ = ["RayWeightSync", "RefittingPolicy"]


class RefittingPolicy(Protocol):
    """What a refit asks of a trainer's ranks; see `rl_launcher.ray.policy.RayPolicy`."""

    version: int
    lock: Any
    """Held by every call, an RLock."""

    @property
    def num_ranks(self) -> int:
        """How many there are."""

    def make_refit(self, meeting: RefitMeeting) -> None:
        """Have every rank take part in the refits of `meeting` from now on."""

    def refit(self, version: int) -> RefitReport:
        """Have every rank send its weights; return the report of the first."""


class RayWeightSync:
    """A `WeightSync` from a trainer's ranks to all engines of a group.

    Args:
        policy: The trainer's ranks.
        engines: Started.
        config: The recipe's.
        policy_hosts: Addresses of the machines that the ranks are on.
        healing: Entered while an engine is refitted between refits: brings the policy's weights to its devices.
    """

    def __init__(
        self,
        policy: RefittingPolicy,
        engines: EngineGroup,
        config: RefitConfig,
        *,
        policy_hosts: Sequence[str],
        healing: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._policy, self._engines, self._config = policy, engines, config
        self._one_node = len({*policy_hosts, *engines.hosts}) == 1
        self._healing = healing
        self._turn = threading.Lock()
        self._epochs = itertools.count(1)
        self._met: tuple[RunningEngine, ...] = ()
        self._committed: int | None = None
        self._aborted = 0
        self._again = False
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""
        engines.healer = self._heal

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit at every engine, those included that had to be replaced.

        Raises:
            TrainerDiedError: A rank of the trainer is gone.
            EngineDiedError: Engines died more often than the recipe allows.
            RefitError: It was refused or given up for another reason; the old weights serve on.
        """
        with self._turn:
            while True:
                engines = self._engines.settled()
                report = self._attempt(engines, version) if self._gather(engines) else None
                if report is not None:
                    break
            self._committed, self.last, self._again = version, report, False
            self.count += 1
            self._engines.serve(engines)
            return report

    def metrics(self) -> dict[str, float]:
        """Of the latest refit, and how many had to be done again, for the log."""
        if self.last is None:
            return {}
        return {**self.last.metrics(), "refits_repeated": float(self._aborted)}

    def explain(self) -> str:
        """Who sends to whom, and by which way."""
        return self._meeting(self._engines.all(), port=0, name="refit").explain()

    # -- One refit -------------------------------------------------------------------------------------------------

    def _attempt(self, engines: Sequence[RunningEngine], version: int) -> RefitReport | None:
        """The leader's report; None where an engine died, and it must be done again."""
        for engine in engines if self._again else ():  # some may have committed what others have not
            with suppress(RemoteDiedError):  # seen again below
                engine.process().call("repeat", version, timeout_s=self._engines.limits.call_timeout_s)
        pending = self._begin_receiving(engines)
        try:
            report = self._policy.refit(version)
        except RefitError as error:
            self._met = ()
            if not self._mourn(pending):
                raise
            self._tell(version, error)
            return None
        except BaseException:
            self._met = ()
            raise
        if self._mourn(pending):
            self._met = ()
            self._tell(version, None)
            return None
        return report

    def _begin_receiving(self, engines: Sequence[RunningEngine]) -> list[tuple[RunningEngine, Pending]]:
        timeout_s = self._config.deadline_s
        return [(engine, engine.process().submit("receive", timeout_s)) for engine in engines]

    def _mourn(self, pending: Sequence[tuple[RunningEngine, Pending]]) -> bool:
        """Wait until every engine has left the refit; whether any of them is gone.

        Raises:
            RefitError: one is alive, and did not commit what the trainer did.
        """
        died, refused = False, None
        deadline = time.monotonic() + self._config.deadline_s
        for engine, each in pending:
            try:
                each.result(timeout_s=max(1.0, deadline - time.monotonic()))
            except RemoteDiedError as error:
                self._engines.lost(engine, error, owed="the refit is done again")
                died = True
            except RemoteError as error:
                if self._engines.failed(engine):
                    died = True
                else:
                    refused = refused or error
        if refused is not None and not died:
            self._met = ()
            raise refused
        return died

    def _tell(self, version: int, error: BaseException | None) -> None:
        self._aborted += 1
        self._again = True
        why = "an engine died after the trainer's last word" if error is None else str(error).splitlines()[0]
        self._engines.on_event(
            "refit_repeated", f"the refit to version {version} was given up: {why}", "done again with a new engine"
        )

    # -- Who meets -------------------------------------------------------------------------------------------------

    def _gather(self, engines: Sequence[RunningEngine]) -> bool:
        """Have all be there, and in the same meeting; False where one is found dead."""
        asked = [(engine, engine.process().submit("alive")) for engine in engines]
        found = [self._is_alive(engine, each) for engine, each in asked]
        if not all(found):
            return False
        return tuple(engines) == self._met or self._meet(engines)

    def _is_alive(self, engine: RunningEngine, pending: Pending) -> bool:
        try:
            why = pending.result(timeout_s=self._engines.limits.call_timeout_s)
        except RemoteDiedError as error:
            why = error
        if why is not None:
            self._engines.lost(engine, why, owed="the refit waits for its successor")
        return why is None

    def _meet(self, engines: Sequence[RunningEngine]) -> bool:
        """Have all make a new `Refit`, under a name that no earlier one had; False where an engine died."""
        self._met = ()
        limit_s = self._engines.limits.call_timeout_s
        current = engines[0]
        try:
            port = current.process().free_port()
            meeting = self._meeting(engines, port=port, name=f"refit-{next(self._epochs)}")
            for rank, current in enumerate(engines):
                current.process().call("meet", meeting, rank, timeout_s=limit_s)
        except RemoteDiedError as error:
            self._engines.lost(current, error, owed="the refit waits for its successor")
            return False
        self._policy.make_refit(meeting)
        self._met = tuple(engines)
        return True

    def _meeting(self, engines: Sequence[RunningEngine], *, port: int, name: str) -> RefitMeeting:
        sink_device = engines[0].born().sink_device if engines[0].birth is not None else "cpu"
        source_device = self._engines.spec.device
        way = way_between(one_node=self._one_node, source_device=source_device, sink_device=sink_device)
        host = LOOPBACK if self._one_node else engines[0].host
        return RefitMeeting(
            address=f"tcp://{host}:{port}",
            name=name,
            num_sources=self._policy.num_ranks,
            num_sinks=len(engines),
            way=way,
            through_host=way == "point_to_point" and source_device != sink_device,
            one_node=self._one_node,
            config=self._config,
        )

    # -- Between refits --------------------------------------------------------------------------------------------

    def _heal(self, engine: RunningEngine) -> None:
        """Bring the committed weights to an engine that replaces one, where the policy has them and is free now."""
        if not self._turn.acquire(blocking=False):
            return  # a refit is under way, and takes it along
        try:
            healed = self._heal_now(engine)
        except RefitError as error:
            self._waits(engine, str(error).splitlines()[0])
        except Exception as error:  # noqa: BLE001 - in a thread of its own: the next call of the loop must raise it
            self._engines.fail(error)
        else:
            if healed:
                self._engines.serve([engine])
                message = f"{engine} has the weights of version {self._committed}"
                self._engines.on_event("engine_healed", message, "it serves")
            elif self._committed is not None:
                self._waits(engine, "the policy is at work, or has moved on from what was committed")
        finally:
            self._turn.release()

    def _heal_now(self, engine: RunningEngine) -> bool:
        """Whether it could be done; for this the weights must stand still, and be those that others serve."""
        policy = self._policy
        if self._committed is None or not policy.lock.acquire(blocking=False):
            return False
        try:
            if policy.version != self._committed:
                return False
            with self._healing():
                return self._gather([engine]) and self._attempt([engine], self._committed) is not None
        finally:
            self._met = ()
            policy.lock.release()

    def _waits(self, engine: RunningEngine, why: str) -> None:
        self._engines.on_event("engine_waits", f"{engine} has no weights yet: {why}", "the next refit brings them")

"""The policy on Ray: one process per rank, driven as if it were one backend in this process."""

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rl_backends.backend import TrainingBackend
from rl_backends.batching.dealing import DealtRows, RowDealing, in_order
from rl_backends.checkpoints.folders import probe_file, require_shared
from rl_launcher.ray.cluster import Place, RayRuntime
from rl_launcher.ray.placement import Placement
from rl_launcher.ray.remote_calls import Actor, Pending, gather
from rl_launcher.ray.remote_methods import POLICY_METHODS, RemoteCall, RemoteMethod, Reply, packed, unpacked
from rl_launcher.ray.training_worker import POLICY, TrainerSpec, TrainingWorker
from rl_launcher.ray.worker_failures import RemoteError, RemoteTimeoutError


class RayPolicy:
    """A `TrainingBackend` over Ray actors that hold one rank each. Its methods are the rows of `POLICY_METHODS`.

    May be called from several threads; calls run one at a time. An exception of a rank is raised here as an instance of
    the same class, with the rank, its node, its process and its traceback. When a rank dies or does not answer, all of
    them are killed, so that none waits forever in a collective.
    """

    def __init__(self, runtime: RayRuntime, actors: Sequence[Actor]) -> None:
        self._runtime, self._actors = runtime, tuple(actors)
        self._numbers = itertools.count(POLICY + 1)
        self._forgotten: list[int] = []
        self._version, self._set_version = 0, False
        self._learning_rate: float | None = None
        self._others: dict[int, tuple[int, float | None]] = {}
        self._measured: dict[int, Any] = {}
        self._refit_used_bytes: int | None = None
        self._dealing: dict[int, list[RowDealing]] = {}
        self._interrupted: list[Pending] | None = None
        self._ended: RemoteError | None = None
        self._closed = False
        self.lock = threading.RLock()
        """Held during a call."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the table."""
        if name not in POLICY_METHODS:
            raise AttributeError(f"a policy on Ray has no method {name!r}; it has {', '.join(POLICY_METHODS)}")
        return functools.partial(self.call, POLICY_METHODS[name], POLICY)

    def call(self, method: RemoteMethod, model: int, /, *arguments: Any, **options: Any) -> Any:
        """Call a method of the table on all ranks, of model number `model`, and return what its row says.

        Raises:
            RemoteError: a rank failed, died or did not answer in time.
        """
        if method.name == TrainingBackend.metrics.__name__ and options == {"memory": False} and not arguments:
            return self._measured.get(model)  # the last step brought them along
        ranks = range(len(self._actors))
        sent, answers = [arguments] * len(ranks), tuple(ranks)
        dealt: list[DealtRows[Any]] = []
        readers: tuple[int, ...] | None = None
        match method.sends:
            case "batch":
                dealing = self._row_dealing(model)
                asks_ids = options.get("output") == "logp_of_token_ids"
                dealt = dealing[0].deal(arguments[0], with_token_ids=asks_ids)
                references = [self._runtime.put(packed(each)) for each in dealt]
                sent = [(references[each.rank], *arguments[1:]) for each in dealing]
                # Of the ranks that were given the same rows, the first one.
                answers = readers = tuple(
                    next(rank for rank in ranks if dealing[rank].rank == each.rank) for each in dealt
                )
            case "folder":
                sent = [(str(Path(arguments[0]).absolute()), *arguments[1:])] * len(ranks)
        match method.returns:
            case "rank 0":
                answers = (0,)
            case "nothing" | "frozen model" | "trained model":
                answers = ()
        with self.lock:
            forgotten = tuple(self._forgotten)
            call = RemoteCall(
                method=method.name,
                model=model,
                result=next(self._numbers) if method.returns.endswith("model") else None,
                version=self._version if self._set_version else None,
                forgotten=forgotten,
                answers=answers,
                readers=readers,
            )
            replies = self._on_all_ranks(method, lambda rank, actor: actor.submit("run", call, *sent[rank], **options))
            self._set_version, self._interrupted = False, None
            del self._forgotten[: len(forgotten)]
            for each in arguments:
                if hasattr(each, "kept"):  # an observed loss: every rank's copy has kept columns of its own rows
                    # Several are copied together by whoever reads them; one alone may be handed on as it is.
                    number = sum(len(reply.kept) for reply in replies)
                    each.kept.extend(unpacked(kept, writable=number == 1) for reply in replies for kept in reply.kept)
            first = replies[0]
            if first.measured is not None:
                self._measured[model] = first.measured
            if method.name == "refit":
                self._refit_used_bytes = first.device_used_bytes
            if model == POLICY:
                self._version, self._learning_rate = first.version, first.learning_rate
            else:
                self._others[model] = first.version, first.learning_rate
        match method.returns:
            case "rank 0":
                return unpacked(first.value)
            case "rows":
                return in_order(dealt, [unpacked(replies[rank].value, writable=False) for rank in answers])
            case "each rank":
                return [unpacked(reply.value) for reply in replies]
            case "merged":
                return {name: value for reply in replies for name, value in unpacked(reply.value).items()}
            case "frozen model" | "trained model":
                assert call.result is not None
                handle = RayModel(self, call.result, trained=method.returns == "trained model")
                # The ranks learn of it with the next call: a finalizer may run anywhere, so it makes no call itself.
                handle.forget = weakref.finalize(handle, self._forgotten.append, call.result)
                return handle
        return None

    def figures(self) -> dict[str, float]:
        """For the log: what all processes held of rank 0's GPU at the end of the last refit."""
        used = self._refit_used_bytes
        return {} if used is None else {"memory_device_bytes/refitting": float(used)}

    def _row_dealing(self, model: int) -> list[RowDealing]:
        """Of each rank, for the batches of a model; the ranks are asked once."""
        if model not in self._dealing:
            self._dealing[model] = self.call(POLICY_METHODS["row_dealing"], model)
        return self._dealing[model]

    def _on_all_ranks(self, method: RemoteMethod, submit: Callable[[int, Actor], Pending]) -> list[Reply]:
        if self._ended is not None:
            raise self._ended
        if self._closed:
            raise RuntimeError("the policy was closed")
        pendings: list[Pending] = []
        try:
            for rank, actor in enumerate(self._actors):
                pendings.append(submit(rank, actor))
                pendings[-1].call, pendings[-1].key = method.name, f"cluster.{method.limit}"
            limit_s = getattr(self._runtime.config, method.limit)
            replies: list[Reply] = gather(
                pendings, timeout_s=limit_s, grace_s=method.grace_s, hang_s=self._runtime.config.hang_timeout_s
            )
        except BaseException as error:
            # A call that failed or was interrupted may have changed the version on the ranks all the same.
            self._interrupted = pendings
            if isinstance(error, RemoteError) and not error.all_returned:
                self._ended = error  # the others wait for the rank that is lost
                for actor in self._actors:
                    actor.kill_on_its_node() if isinstance(error, RemoteTimeoutError) else actor.kill()
            raise
        return replies

    def state_of(self, model: int) -> tuple[int, float | None]:
        """Version and learning rate of a model beside the policy, as of its last call."""
        return self._others.get(model, (0, None))

    @property
    def num_ranks(self) -> int:
        """Ranks of the trainer."""
        return len(self._actors)

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen.

        After an interrupted call the ranks are queried, unless one is still busy: then it is the last known version.
        """
        if self._interrupted is not None and self._ended is None and not self._closed and not self._busy():
            self.report()
        return self._version

    @version.setter
    def version(self, version: int) -> None:
        self._version, self._set_version = version, True

    @property
    def learning_rate(self) -> float:
        """Of the next step, after `start_training`."""
        if self._learning_rate is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return self._learning_rate

    def close(self) -> None:
        """End the ranks. A second time does nothing."""
        with self.lock:
            if self._closed:
                return
            self._closed = True
            if self._ended is None and not self._busy():
                # All at the same time: leaving the process group is a collective.
                pendings = [actor.submit("close") for actor in self._actors]
                with contextlib.suppress(RemoteError):  # they are killed in any case
                    gather(pendings, timeout_s=10.0, stacks_s=0.0)
            for actor in self._actors:
                actor.kill()

    def _busy(self) -> bool:
        """Whether ranks are still at an interrupted call: one may hang, and would not answer another."""
        return not all(pending.done() for pending in self._interrupted or ())


class RayModel:
    """A model on the ranks beside the policy: a reference, a teacher, a reward model or a critic.

    Its memory is freed when it is closed, or when this handle is gone.
    """

    forget: Callable[[], object]
    """Have the ranks free the model with their next call; once is enough."""

    def __init__(self, policy: RayPolicy, number: int, *, trained: bool) -> None:
        self._policy, self.number, self._trained = policy, number, trained

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """A method of the table that such a model has."""
        method = POLICY_METHODS.get(name)
        if method is None or method.of not in ({"trained", "any"} if self._trained else {"any"}):
            kind = "trained" if self._trained else "frozen"
            raise AttributeError(f"a {kind} model on Ray has no method {name!r}")
        return functools.partial(self._policy.call, method, self.number)

    @property
    def version(self) -> int:
        """Optimizer steps that its weights have seen."""
        return self._policy.state_of(self.number)[0]

    @property
    def learning_rate(self) -> float:
        """Of the next step, after `start_training`."""
        rate = self._policy.state_of(self.number)[1]
        if rate is None:
            raise RuntimeError("there is no optimizer yet; call start_training(optimizer, num_steps=...) first")
        return rate

    def close(self) -> None:
        """Free it. A second time does nothing."""
        self.forget()


def start_trainers(runtime: RayRuntime, placement: Placement, spec: TrainerSpec) -> RayPolicy:
    """Start every rank, and have all of them load the model together.

    Raises:
        ClusterError: a process did not start.
        ValueError: a rank does not see the run directory, which checkpoints are written to.
        RemoteError: a rank failed, died or was too slow while it loaded; also an instance of what it raised.
    """
    timeout_s = runtime.config.start_timeout_s
    places: list[Place] = [("trainer", place.rank, place.node, (place.slot,)) for place in placement.ranks]
    actors = runtime.start_actors(places, sees="all")
    gather(
        [
            actor.submit_make(
                TrainingWorker,
                spec,
                rank=place.rank,
                local_rank=place.slot,
                num_local_ranks=len(placement.ranks_on(place.node)),
                ip=actor.ip,
            )
            for actor, place in zip(actors, placement.ranks, strict=True)
        ],
        timeout_s=timeout_s,
    )
    with probe_file(runtime.run_dir) as (path, token):
        require_shared(runtime.run_dir, who_sees(actors, path, token, timeout_s=timeout_s))
    port = actors[0].call("host_store", timeout_s=timeout_s)
    loading = [actor.submit("load", (actors[0].ip, port)) for actor in actors]
    for pending in loading:
        pending.key = "cluster.start_timeout_s"
    gather(loading, timeout_s=timeout_s)
    return RayPolicy(runtime, actors)


def who_sees(actors: Sequence[Actor], path: str, token: str, *, timeout_s: float = 60.0) -> dict[str, bool]:
    """Which actor can read a file that contains `token`, by the name of its process; see `probe_file`."""
    seen = gather([actor.submit("sees", path, token) for actor in actors], timeout_s=timeout_s)
    return {str(actor.who): each for actor, each in zip(actors, seen, strict=True)}

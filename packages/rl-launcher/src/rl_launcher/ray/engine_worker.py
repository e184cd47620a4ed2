"""One engine in a Ray actor: makes it, generates with it, and refits it.

Ray calls the worker from many threads. A synchronous engine is called, refitted and put to sleep by one thread, in the
order of arrival, so that no refit falls into a call of `generate`. A refit also waits for requests of `begin` that are
under way, and later ones wait for it. An asynchronous engine takes care of that itself.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from rl_generation import EngineDeadError, Rollout, SampleTimeoutError, Sampling, TrainingEngineSpec
from rl_generation.requests import Limits
from rl_generation.vllm.processes import ChildProcess
from rl_launcher.build.engines import make_engine
from rl_launcher.errors import Refusal
from rl_launcher.ray.worker_failures import Failure
from rl_refit import Refit, RefitError, RefitReport
from rl_refit.parties import Parties

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the driver knows of an engine that has started."""

    processes: tuple[ChildProcess, ...]
    """Those that the engine started besides the actor: they may survive an actor that is killed."""
    limits: Limits
    sink_ranks: int
    """How many ranks of a refit's sink it is: its workers."""
    text: str
    """The engine's own `explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateReply:
    """The result of a `generate`."""

    rollouts: tuple[Rollout, ...]
    """All of them, or those that had finished when the engine died."""
    died: str | None = None
    """Why, if a process of the engine died and the actor lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A request that is begun here and collected later."""

    number: int
    """What its caller calls it."""
    prompt: tuple[int, ...]
    sampling: Sampling
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    """What has become of some of them."""

    rollouts: dict[int, Rollout]
    failures: dict[int, Failure]
    """Why others have no rollout."""
    died: str | None = None
    """Why, if a process of the engine died and the actor lives; then all that are not in `rollouts` are lost."""


class EngineWorker:
    """An engine of rl_generation behind a few methods that cross processes.

    `host` is the address of this node that the trainer's ranks reach. `leftovers` are processes of an engine that died
    here before; they are killed first.
    """

    def __init__(self, spec: TrainingEngineSpec, *, host: str, leftovers: Sequence[ChildProcess] = ()) -> None:
        for process in leftovers:
            process.kill()
        self._spec, self._host = spec, host
        self._thread = None if spec.asynchronous else ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._made = self._in_order(lambda: make_engine(spec))
        self._refit: Refit | None = None
        self._calls, self._counting = 0, threading.Lock()
        # Requests of `begin`: those under way, those that a refit keeps waiting, and those that are done.
        self._changed = threading.Condition()
        self._under_way: dict[int, Future[Rollout]] = {}
        self._held: list[Begun] | None = None
        self._done: dict[int, Future[Rollout]] = {}
        pids = getattr(self._made.engine, "process_ids", ())
        self._processes = tuple(map(ChildProcess.of, pids))

    def info(self) -> EngineInfo:
        """What it is and where; the first call of an actor that has started."""
        engine: Any = self._made.engine
        return EngineInfo(
            processes=self._processes,
            limits=engine.limits,
            sink_ranks=getattr(self._made.sink, "num_ranks", 1),
            text=engine.explain(),
        )

    def generate(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> GenerateReply:
        """Generate for each prompt with its own Sampling; raises what the engine refuses."""
        with self._counting:
            self._calls += 1
        try:
            rollouts = self._in_order(lambda: self._made.engine.generate(prompts, samplings))
            return GenerateReply(rollouts=tuple(rollouts))
        except EngineDeadError as error:
            return GenerateReply(rollouts=error.rollouts, died=str(error))
        except SampleTimeoutError as error:  # it cannot be pickled
            raise Refusal(str(error)) from None
        finally:
            with self._counting:
                self._calls -= 1

    def begin(self, requests: Sequence[Begun]) -> None:
        """Begin to answer some requests beside those under way; `collect` returns what becomes of them."""
        with self._changed:
            if self._held is not None:
                self._held.extend(requests)
                return
            futures = {
                each.number: self._made.engine.submit(each.prompt, each.sampling, seed=each.seed) for each in requests
            }
            self._under_way.update(futures)
        for number, future in futures.items():
            future.add_done_callback(lambda _, number=number: self._note_done(number))

    def collect(self, wait_s: float) -> Collected:
        """What has become of requests since the last call; waits until there is something, as long as `wait_s`."""
        with self._changed:
            self._changed.wait_for(lambda: self._done, timeout=wait_s)
            done, self._done = self._done, {}
        rollouts: dict[int, Rollout] = {}
        failures: dict[int, Failure] = {}
        died = None
        for number, future in done.items():
            if future.cancelled():
                continue
            error = future.exception()
            if error is None:
                rollouts[number] = future.result()
            elif isinstance(error, EngineDeadError):
                died = str(error)
            else:
                failures[number] = Failure.of(error)
        return Collected(rollouts=rollouts, failures=failures, died=died)

    def cancel(self, numbers: Sequence[int]) -> None:
        """Abort requests; they are not collected."""
        with self._changed:
            if self._held is not None:
                self._held = [each for each in self._held if each.number not in numbers]
            futures = [self._under_way[number] for number in numbers if number in self._under_way]
        for future in futures:
            future.cancel()

    def join_refit(self, parties: Parties, number: int) -> None:
        """Take part in the refits of `parties` from now on, as its engine `number`."""
        self._between_requests(self._close_refit)
        self._refit = parties.sink_refit(self._made.sink, engine=number, host=self._host)

    def receive(self, timeout_s: float) -> RefitReport:
        """Take part in the next refit, which must begin within `timeout_s`; a RefitError says why it was aborted."""
        if (refit := self._refit) is None:
            raise RefitError("this engine has no refit yet; call join_refit() before receive()")
        return self._between_requests(lambda: refit.receive(timeout_s=timeout_s))

    def repeat(self, version: int) -> None:
        """Accept `version` once more if it is committed here already: other engines did not finish it."""
        sink: Any = self._made.sink
        if sink.version == version:
            self._in_order(sink.repeat)

    def version(self) -> int | None:
        """The committed version, or None before the first commit."""
        sink: Any = self._made.sink  # what `make_engine` makes has it, beyond the protocol
        committed: int | None = sink.version
        return committed

    def sleep(self) -> None:
        """Free the device's memory; the weights stay in host memory. On a CPU only the cache is freed."""
        if self._spec.vllm is None:
            self._between_requests(self._made.engine.close)  # frees the cache; the engine can be used afterwards
        elif self._spec.device == "cuda":
            self._between_requests(lambda: self._made.engine.sleep(level=1))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the device's memory again: "weights", "kv_cache", or both."""
        if self._spec.vllm is not None and self._spec.device == "cuda":
            self._in_order(lambda: self._made.engine.wake_up(tags=tags))

    def metrics(self) -> dict[str, float]:
        """Totals since it was started."""
        now = self._made.engine.metrics()
        names = ("generated_tokens", "prompt_tokens", "cached_prompt_tokens", "preemptions")
        return {name: float(getattr(now, name)) for name in names}

    def busy(self) -> bool:
        """Whether something is being generated."""
        return self._calls > 0 or bool(self._under_way)

    def alive(self) -> str | None:
        """None if all of its processes are running, otherwise which one is not."""
        for process in self._processes:
            if not process.alive():
                return f"its process {process.pid} is gone"
            if process.stopped():
                return f"its process {process.pid} is stopped, and would never answer"
        return None

    def close(self) -> None:
        """End the engine and all of its processes."""
        self._in_order(self._close_refit)
        self._in_order(self._made.close)

    def _close_refit(self) -> None:
        refit, self._refit = self._refit, None
        if refit is not None:
            with suppress(RefitError):  # the store may have died with another party
                refit.close()

    def _note_done(self, number: int) -> None:
        with self._changed:
            self._done[number] = self._under_way.pop(number)
            self._changed.notify_all()

    def _between_requests(self, call: Callable[[], T]) -> T:
        """Call it in order; of a synchronous engine, while no request of `begin` is under way."""
        if self._thread is None:
            return call()
        with self._changed:
            self._changed.wait_for(lambda: self._held is None)  # another such call
            self._held = []
            self._changed.wait_for(lambda: not self._under_way)
        try:
            return self._in_order(call)
        finally:
            with self._changed:
                held, self._held = self._held, None
                self._changed.notify_all()
            self.begin(held)

    def _in_order(self, call: Callable[[], T]) -> T:
        return call() if self._thread is None else self._thread.submit(call).result()

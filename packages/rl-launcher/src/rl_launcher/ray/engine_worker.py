"""One engine in an actor of its own: makes it, answers with it, and takes new weights in.

Knows nothing of other engines, and of Ray only that many threads call it. An engine that answers one caller at a time
is called, refitted and put to sleep by one thread, in the order of arrival: so no refit comes in the middle of a call.
An asynchronous one takes care of that itself.
"""

import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rl_generation import EngineDeadError, Rollout, SampleTimeoutError, Sampling, TrainingEngineSpec
from rl_generation.requests import Limits
from rl_launcher.engines import make_engine
from rl_launcher.errors import Refusal
from rl_launcher.ray.refit_rendezvous import RefitMeeting
from rl_refit import Refit, RefitError, RefitReport

__all__ = ["Answers", "Birth", "EngineWorker", "Process", "end_process"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """A process of a node, told from a later one of the same id."""

    pid: int
    started: str
    """In ticks since boot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Birth:
    """What an engine says of itself once it is there."""

    processes: tuple[Process, ...]
    """Those that the engine started besides: they may outlive an actor that is killed."""

    limits: Limits
    """What it can be asked for."""

    sink_device: str
    """Where new weights are staged."""

    text: str
    """The engine's own `explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What came of a call."""

    rollouts: tuple[Rollout, ...]
    """All of them, or those that had finished when the engine died."""

    died: str | None = None
    """Why, where a process of the engine died, and the actor lives."""


class EngineWorker:
    """An engine of rl_generation behind a few methods that cross processes.

    Args:
        spec: What the engine is made of.
        host: Address of this machine that the trainer's ranks reach.
        leftovers: Processes of an engine that died here before; they are ended first.

    Raises:
        ValueError: whatever the engine refuses.
    """

    def __init__(self, spec: TrainingEngineSpec, *, host: str, leftovers: Sequence[Process] = ()) -> None:
        for process in leftovers:
            end_process(process)
        self._spec, self._host = spec, host
        self._turns = None if spec.asynchronous else ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._made = self._in_turn(lambda: make_engine(spec))
        self._refit: Refit | None = None
        self._calls, self._counting = 0, threading.Lock()
        ids = getattr(self._made.engine, "process_ids", ())
        self._processes = tuple(Process(pid=pid, started=_started(pid) or "") for pid in ids)

    def born(self) -> Birth:
        """What it is and where; the first answer of an actor that has started."""
        engine: Any = self._made.engine
        return Birth(
            processes=self._processes,
            limits=engine.limits,
            sink_device=str(getattr(self._made.sink, "device", "cpu")).split(":")[0],
            text=engine.explain(),
        )

    def generate(self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Answers:
        """Answer each prompt as its own Sampling says.

        Raises:
            Refusal: Samples were not done in time.
            ValueError: whatever the engine refuses.
        """
        with self._counting:
            self._calls += 1
        try:
            return Answers(rollouts=tuple(self._in_turn(lambda: self._made.engine.generate(prompts, samplings))))
        except EngineDeadError as error:
            return Answers(rollouts=error.rollouts, died=str(error))
        except SampleTimeoutError as error:  # which does not cross processes
            raise Refusal(str(error)) from None
        finally:
            with self._counting:
                self._calls -= 1

    # -- New weights -----------------------------------------------------------------------------------------------

    def meet(self, meeting: RefitMeeting, rank: int) -> None:
        """Take part in the refits of `meeting` from now on, as its engine number `rank`."""
        old, self._refit = self._refit, None
        if old is not None:
            with suppress(RefitError):  # a store that went with a party that died
                old.close()
        self._refit = meeting.sink_refit(self._made.sink, rank=rank, host=self._host)

    def receive(self, timeout_s: float) -> RefitReport:
        """Take part in the next refit, which must begin within `timeout_s`.

        Raises:
            RefitError: It was given up.
        """
        refit = self._refit
        if refit is None:
            raise RefitError("this engine has met nobody: meet() comes before receive()")
        return self._in_turn(lambda: refit.receive(timeout_s=timeout_s))

    def repeat(self, version: int) -> None:
        """Take `version` once more where it was committed already: others did not come through with it."""
        sink: Any = self._made.sink
        if sink.version == version:
            self._in_turn(sink.repeat)

    def version(self) -> int | None:
        """The version last committed."""
        committed: int | None = self._made.sink.version  # type: ignore[attr-defined]
        return committed

    # -- Taking turns with a trainer -------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Give the device's memory away; the weights stay in the host's. On a CPU nothing but the cache is freed."""
        if self._spec.vllm is None:
            self._in_turn(self._made.engine.close)  # gives the cache back; the engine goes on afterwards
        elif self._spec.device == "cuda":
            self._in_turn(lambda: self._made.engine.sleep(level=1))

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the memory back: of "weights", of "kv_cache", or of both."""
        if self._spec.vllm is not None and self._spec.device == "cuda":
            self._in_turn(lambda: self._made.engine.wake_up(tags=tags))

    # -- Life ------------------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """What it has done since it was started."""
        now = self._made.engine.metrics()
        return {
            "generated_tokens": float(now.generated_tokens),
            "prompt_tokens": float(now.prompt_tokens),
            "cached_prompt_tokens": float(now.cached_prompt_tokens),
            "preemptions": float(now.preemptions),
        }

    def busy(self) -> bool:
        """Whether it answers somebody, or somebody waits for his turn."""
        return self._calls > 0

    def alive(self) -> str | None:
        """None where all of its processes are there, otherwise which one is not."""
        for process in self._processes:
            if _started(process.pid) != process.started:
                return f"its process {process.pid} is gone"
        return None

    def close(self) -> None:
        """End the engine with all of its processes."""
        if self._refit is not None:
            with suppress(RefitError):  # others may have gone before
                self._refit.close()
        self._in_turn(self._made.close)

    def _in_turn(self, call: Callable[[], T]) -> T:
        return call() if self._turns is None else self._turns.submit(call).result()


def _started(pid: int) -> str | None:
    """When a process started; None where there is none, or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def end_process(process: Process) -> None:
    """Kill a process of this machine, if it is still the same."""
    if process.started and _started(process.pid) == process.started:
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.kill(process.pid, signal.SIGKILL)

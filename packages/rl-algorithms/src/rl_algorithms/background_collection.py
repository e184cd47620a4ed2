"""Threads that collect rollouts while the caller trains.

`Collectors` keep a replay buffer filled, some groups a call. `Gate` lets either many calls of an engine or one refit
through: for engines that take new weights only between two calls. Nothing here outlives its caller unseen: an error in
a thread is raised where the groups are taken, and a thread that does not end is named.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from types import TracebackType
from typing import Generic, TypeVar, final

import torch

from rl_algorithms.chat import Prompt
from rl_algorithms.contracts import Engine, Environment, RequestEngine, Rollout, WeightSync, matches
from rl_algorithms.replay import Group, ReplayBuffer
from rl_algorithms.rollouts import Rollouts, episode_seed
from rl_algorithms.stepping import PhaseTimer, bring_weights

__all__ = ["Collectors", "Gate", "GatedEngine", "GatedRequestEngine", "PromptsByTicket", "StoppedError", "gated"]

SamplingT = TypeVar("SamplingT")


@final
class Gate:
    """Many at once, or one alone. Who wants to be alone waits for those inside, and nobody enters before."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside, self._closed = 0, False

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Be inside with others; waits while somebody is, or wants to be, alone."""
        with self._changed:
            self._changed.wait_for(lambda: not self._closed)
            self._inside += 1
        try:
            yield
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    @contextmanager
    def alone(self, *, timeout_s: float) -> Iterator[None]:
        """Be inside alone. One thread may ask for it.

        Raises:
            TimeoutError: somebody stayed inside for too long.
        """
        with self._changed:
            self._closed = True
        try:
            with self._changed:
                if not self._changed.wait_for(lambda: not self._inside, timeout_s):
                    raise TimeoutError(
                        f"new weights have waited {timeout_s} s for {self._inside} calls of the engine's generate to "
                        f"end; sample fewer groups in a call, or wait longer"
                    )
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class StoppedError(Exception):
    """The buffer is closed and the rollouts being collected will be discarded. Ends a collector; never leaves it."""


class GatedEngine(Generic[SamplingT]):
    """What collectors call: an engine behind a gate; in a conversation of several turns, each turn by itself.

    A judge that asks the policy's own engine must go through the same gate, or a refit would come in the middle of what
    it judges: make one with the buffer that `train` is given, and give it to the judge and, as its engine, to `train`.

    Args:
        engine: that is behind it.
        buffer: when it is over, no call begins any more.
    """

    def __init__(self, engine: Engine[SamplingT], *, buffer: ReplayBuffer) -> None:
        self._engine, self.buffer, self._gate = engine, buffer, Gate()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingT) -> Sequence[Rollout]:
        """As the engine's.

        Raises:
            StoppedError: the buffer is over.
        """
        with self._gate.shared():
            if self.buffer.over:
                raise StoppedError
            return self._engine.generate(prompts, sampling)

    def begin_request(self, submit: Callable[[], Future[Rollout]]) -> Future[Rollout]:
        """Begin one request; the gate counts it as inside until its future is done.

        Raises:
            StoppedError: the buffer is over.
        """
        with ExitStack() as inside:
            inside.enter_context(self._gate.shared())
            if self.buffer.over:
                raise StoppedError
            future = submit()
            leaving = inside.pop_all()
        future.add_done_callback(lambda _: leaving.close())
        return future

    @contextmanager
    def alone(self, timer: PhaseTimer, *, timeout_s: float) -> Iterator[None]:
        """Have the engine for oneself; waiting for the calls under way counts as `drain`. An error ends collecting.

        Raises:
            TimeoutError: a call lasted for too long.
        """
        with ExitStack() as inside:
            with timer.phase("drain"):
                inside.enter_context(self._gate.alone(timeout_s=timeout_s))
            try:
                yield
            except BaseException:
                self.buffer.close()  # before the gate opens: who waits there must not begin another call
                raise


@final
class GatedRequestEngine(GatedEngine[SamplingT]):
    """A `GatedEngine` over one that takes one request at a time: each is inside by itself, from submit to its end."""

    def __init__(self, engine: RequestEngine[SamplingT], *, buffer: ReplayBuffer) -> None:
        super().__init__(engine, buffer=buffer)
        self._requests = engine

    def submit(self, prompt: Sequence[int], sampling: SamplingT, *, seed: int) -> Future[Rollout]:
        """As the engine's.

        Raises:
            StoppedError: the buffer is over.
        """
        return self.begin_request(lambda: self._requests.submit(prompt, sampling, seed=seed))


def gated(
    engine: Engine[SamplingT], *, buffer: ReplayBuffer, environment: Environment | None
) -> GatedEngine[SamplingT]:
    """The engine behind a gate: its own, if it is given with one, so that others may ask it through the same.

    Args:
        engine: that collectors call.
        buffer: that they fill.
        environment: which must not ask the engine behind the gate's back; None for one that may.

    Raises:
        ValueError: the gate is another buffer's, or a judge of the environment asks the engine without it.
    """
    if isinstance(engine, GatedEngine):
        if engine.buffer is not buffer:
            raise ValueError("this GatedEngine was made with another buffer; make it with the one that train is given")
        return engine
    if environment is not None and _asks(environment, engine):
        raise ValueError(
            "the environment asks the policy's engine, and new weights would come in the middle of what it judges; "
            "make buffer = make_buffer(config) and one GatedEngine(engine, buffer=buffer), and give the latter to the "
            "judge and, with the buffer, to train; or take weights='in_flight'"
        )
    if matches(engine, RequestEngine):
        return GatedRequestEngine(engine, buffer=buffer)
    return GatedEngine(engine, buffer=buffer)


def _asks(thing: object, engine: object, depth: int = 5) -> bool:
    """Whether an environment, or one that it is made of, holds the engine: as far as attributes can tell."""
    if isinstance(thing, Mapping):
        inside = list(thing.values())
    elif isinstance(thing, list | tuple):
        inside = list(thing)
    elif matches(thing, Environment):
        inside = [getattr(thing, each.name) for each in fields(thing)] if is_dataclass(thing) else []
        inside += getattr(thing, "__dict__", {}).values()
    else:
        return False
    return any(part is engine or (depth > 0 and _asks(part, engine, depth - 1)) for part in inside)


@final
class PromptsByTicket:
    """Prompts by their place in the order of the run, drawn when first asked for and kept until forgotten.

    Args:
        batches: of prompts, in order.
        first: the ticket of the first of them.
        size: of each batch.
    """

    def __init__(self, batches: Iterator[list[Prompt]], *, first: int, size: int) -> None:
        self._batches, self._next, self._size = batches, first, size
        self._drawn: dict[int, Prompt] = {}
        self._lock = threading.Lock()

    def get(self, tickets: Sequence[int]) -> list[Prompt]:
        """The prompts of these tickets.

        Raises:
            ValueError: there are not so many, one was forgotten or came before the first, or a batch has another size.
        """
        with self._lock:
            while self._next <= max(tickets):
                batch = next(self._batches, None)
                if batch is None:
                    raise ValueError(
                        f"the prompts ended before number {max(tickets)} of the run (counted from 0), which is asked "
                        f"for; give batches that do not end, as rl_algorithms.data.batches does"
                    )
                if len(batch) != self._size:
                    raise ValueError(
                        f"prompts gave a batch of {len(batch)}, and the configuration says num_prompts={self._size}; "
                        f"make batches of that size, or say theirs"
                    )
                self._drawn.update(enumerate(batch, start=self._next))
                self._next += len(batch)
            missing = [ticket for ticket in tickets if ticket not in self._drawn]
            if missing:
                raise ValueError(f"prompts {missing} of the run are not there; begin at the buffer's oldest_ticket")
            return [self._drawn[ticket] for ticket in tickets]

    def forget(self, before: int) -> None:
        """Keep no prompt whose ticket is before this one."""
        with self._lock:
            self._drawn = {ticket: prompt for ticket, prompt in self._drawn.items() if ticket >= before}


@final
class Collectors:
    """Threads that sample groups for `buffer`, from entering to leaving the `with` block.

    Args:
        collect: what each thread calls: `collect(prompts, seeds=, timer=)`, whose group i answers prompt i.
        prompts: batches of them, from that on in which the buffer's oldest ticket is.
        buffer: what they fill.
        num_prompts: in each batch.
        num_threads: how many call `collect` at once.
        groups_per_call: prompts in each call at most.
        stop_timeout_s: how long leaving waits for the calls under way.
        version: of the engine's weights.
        seed: of the run; each prompt's episodes are given one that depends on it and the prompt's ticket.

    Raises:
        RuntimeError: on leaving, where a thread did not end in time; a note on the error that it left by, if any.
    """

    def __init__(
        self,
        collect: Callable[..., Rollouts],
        prompts: Iterator[list[Prompt]],
        *,
        buffer: ReplayBuffer,
        num_prompts: int,
        num_threads: int,
        groups_per_call: int,
        stop_timeout_s: float,
        version: int,
        seed: int,
    ) -> None:
        self._collect, self._buffer, self._seed = collect, buffer, seed
        first = buffer.oldest_ticket // num_prompts * num_prompts
        self._prompts = PromptsByTicket(prompts, first=first, size=num_prompts)
        self._groups_per_call, self._stop_timeout_s = groups_per_call, stop_timeout_s
        self._versions = (version, version)
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        # Daemons: a call that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"collector {index}", daemon=True) for index in range(num_threads)
        ]

    def __enter__(self) -> "Collectors":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: TracebackType | None) -> None:
        self._buffer.close()
        deadline = time.monotonic() + self._stop_timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        alive = [thread.name for thread in self._threads if thread.is_alive()]
        if not alive:
            return
        problem = (
            f"{', '.join(alive)} did not end within {self._stop_timeout_s} s, and still uses the engine: "
            f"end the engine, or the process"
        )
        if error is None or isinstance(error, GeneratorExit):
            raise RuntimeError(problem)
        error.add_note(problem)

    def refit(self, weight_sync: WeightSync, *, version: int, timer: PhaseTimer) -> None:
        """Bring the weights of `version` into the engine; until they are there, answers may be of either.

        Raises:
            ValueError: the engine committed another version.
        """
        self._versions = (self._versions[0], version)
        bring_weights(weight_sync, version=version, timer=timer)
        self._versions = (version, version)

    def finish(self) -> None:
        """Free the places of the groups that were taken, and forget the prompts that nobody asks for any more."""
        self._buffer.finish()
        self._prompts.forget(self._buffer.oldest_ticket)

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap, over all threads, as `collector_s/<phase>`; `wait` is for a place."""
        with self._lock:
            seconds, self._seconds = self._seconds, {}
        return seconds

    def _run(self) -> None:
        try:
            while tickets := self._reserve():
                committed, timer = self._versions[0], PhaseTimer()
                seeds = [
                    episode_seed(self._seed, ticket, 0) for ticket in tickets
                ]  # whatever else is sampled in this call
                rollouts = self._collect(self._prompts.get(tickets), seeds=seeds, timer=timer)
                self._count(timer)
                for ticket, group in zip(tickets, _split(rollouts, len(tickets)), strict=True):
                    self._buffer.put(Group(ticket=ticket, version=self._oldest(group, committed), rollouts=group))
        except StoppedError:
            return
        except BaseException as error:  # noqa: BLE001 - raised again by take, in the trainer's thread
            self._buffer.fail(error)

    def _reserve(self) -> tuple[int, ...]:
        timer = PhaseTimer()
        with timer.phase("wait"):
            tickets = self._buffer.reserve(self._groups_per_call)
        self._count(timer)
        return tickets

    def _count(self, timer: PhaseTimer) -> None:
        with self._lock:
            for name, seconds in timer.lap().items():
                phase = name.replace("phase_s", "collector_s")
                self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def _oldest(self, group: Rollouts, committed: int) -> int:
        versions = group.versions[group.response]
        if not len(versions):
            return committed
        oldest, newest = int(versions.min()), int(versions.max())
        if oldest < committed or newest > self._versions[1]:
            raise ValueError(
                f"the engine says that versions {oldest} to {newest} sampled an answer that was begun after "
                f"weight_sync had brought version {committed}, the newest being {self._versions[1]}: weight_sync and "
                f"the versions of the engine's rollouts must speak of the same optimizer steps"
            )
        return oldest


def _split(rollouts: Rollouts, num_groups: int) -> list[Rollouts]:
    groups = sorted(set(rollouts.groups.tolist()))
    if len(groups) != num_groups:
        raise ValueError(f"{num_groups} prompts were asked, and the rollouts are of {len(groups)} groups")
    return [rollouts.take(torch.nonzero(rollouts.groups == group)[:, 0]) for group in groups]

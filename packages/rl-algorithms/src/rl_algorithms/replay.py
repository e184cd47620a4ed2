"""The replay buffer between threads that sample and one that trains.

A prompt is known by its ticket, its place in the order of the run. A ticket takes a place in the buffer before anything
is sampled for it and leaves it when its group was trained on:

    reserve -> sampled -> put -> held -> take -> trained on -> finish
                                  '-- too old: dropped, and its prompt asked again

    places taken = sampled + held + trained on <= capacity                 (AReaL's admission rule, arXiv:2505.24298)

So what samples waits before it samples and never after it, and no rollout ages at a closed door. Groups are handed out
oldest weights first, and by ticket among equals. With a capacity of (k + 1) n places for steps on n groups, whatever is
not overtaken while it is sampled is trained on at most k batches after the weights that it began with; `take` drops
the rest, and never hands out what is older than asked for.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, final

import torch

from rl_algorithms.rollouts import Rollouts

__all__ = ["Group", "ReplayBuffer", "Taken", "checked_buffer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All rollouts of one prompt."""

    ticket: int
    """Which prompt of the run, counted from 0."""

    version: int
    """Of the oldest weights that sampled any of its tokens."""

    rollouts: Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What `take` hands out."""

    groups: tuple[Group, ...]
    """Oldest first."""

    dropped: tuple[int, ...]
    """Tickets of the groups that had become too old since the last time."""


@final
class ReplayBuffer:
    """Groups of rollouts that wait to be trained on. Every method may be called from any thread.

    Args:
        capacity: groups that may be under way at most: being sampled, held, and trained on.
        max_staleness: versions that a group's oldest token may be behind the weights that train on it.
        num_groups: groups that are trained on in the whole run, after which no ticket is given; None for no end.
        first_ticket: what the first prompt is called; those before it count as trained on.
        ask_again: whether the prompt of a group that became too old is given out again; else the next one is.

    Raises:
        ValueError: a capacity below 1, or a staleness below 0.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_staleness: int,
        num_groups: int | None = None,
        first_ticket: int = 0,
        ask_again: bool = True,
    ) -> None:
        if capacity < 1 or max_staleness < 0:
            raise ValueError(f"capacity={capacity} must be >= 1, and max_staleness={max_staleness} >= 0")
        self.capacity, self.max_staleness, self.num_groups = capacity, max_staleness, num_groups
        self.ask_again = ask_again
        self._changed = threading.Condition()
        self._next, self._finished = first_ticket, first_ticket
        self._again: deque[int] = deque()  # tickets that were given before, and have no group
        self._sampled: set[int] = set()
        self._held: dict[int, Group] = {}
        self._taken: dict[int, Group] = {}
        self._error: BaseException | None = None
        self._closed = False

    def __len__(self) -> int:
        """How many groups are held."""
        with self._changed:
            return len(self._held)

    @property
    def places(self) -> int:
        """How many more groups may be begun now."""
        with self._changed:
            return self._places()

    @property
    def finished(self) -> int:
        """How many groups of the run were trained on."""
        with self._changed:
            return self._finished

    @property
    def over(self) -> bool:
        """Whether it was closed, or who samples has died."""
        with self._changed:
            return self._over()

    @property
    def oldest_ticket(self) -> int:
        """No prompt before this one is asked for any more, also by a run that goes on from here."""
        with self._changed:
            return min((self._next, *self._again, *self._sampled, *self._held, *self._taken))

    # -- For who samples -----------------------------------------------------------------------------------------------

    def reserve(self, most: int = 1) -> tuple[int, ...]:
        """Wait for places; return the tickets to sample for next, at most `most`. None once the buffer is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._over() or self._places() > 0)
            if self._over():
                return ()
            tickets = tuple(self._ticket() for _ in range(min(most, self._places())))
            self._sampled.update(tickets)
            return tickets

    def put(self, group: Group) -> None:
        """Hand in a group whose ticket was reserved; never waits. A buffer that is closed forgets it.

        Raises:
            ValueError: its ticket was not reserved, or its group was handed in already.
        """
        with self._changed:
            if group.ticket not in self._sampled:
                raise ValueError(f"ticket {group.ticket} is not being sampled: reserve it first, and put it once")
            if not self._over():
                self._sampled.remove(group.ticket)
                self._held[group.ticket] = group
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Say that what samples has died of `error`; `take` raises the first one, with its own traceback."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    # -- For who trains ------------------------------------------------------------------------------------------------

    def take(self, num_groups: int, *, version: int, timeout_s: float) -> Taken:
        """Wait for `num_groups` groups that are young enough; they keep their places until `finish`.

        Args:
            num_groups: how many.
            version: of the weights at the last step on them; a group that is further behind than allowed is dropped.
            timeout_s: how long to wait at most.

        Raises:
            BaseException: the first one that `fail` was told of.
            TimeoutError: not enough of them came in time.
            RuntimeError: the buffer is closed, or the groups taken before are not finished.
            ValueError: more groups than the capacity, or than are left of the run.
        """
        deadline, dropped = time.monotonic() + timeout_s, list[int]()
        with self._changed:
            self._refuse(num_groups)
            while True:
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise RuntimeError("the replay buffer is closed, and holds no more groups for anyone")
                dropped += self._drop(version - self.max_staleness)
                if len(self._held) >= num_groups:
                    return Taken(groups=self._pick(num_groups), dropped=tuple(dropped))
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise TimeoutError(
                        f"{num_groups} groups were wanted, and after timeout_s={timeout_s} there are "
                        f"{len(self._held)}; {len(self._sampled)} are being sampled and {len(dropped)} were too old. "
                        f"Look at the engine, or wait longer"
                    )

    def finish(self) -> None:
        """Free the places of the groups that were taken: they were trained on, and the engine has the new weights."""
        with self._changed:
            self._finished += len(self._taken)
            self._taken.clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Let go whoever waits: `reserve` gives no more tickets, `take` raises. It can be called again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # -- For a run that goes on later ----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Tensors, numbers, text, lists and dicts, as `torch.save` and `torch.load(weights_only=True)` take them.

        Groups that were taken and not finished count as held; tickets whose group is being sampled are given anew.
        """
        with self._changed:
            groups = [
                {"ticket": group.ticket, "version": group.version, "rollouts": _to_plain(group.rollouts)}
                for group in (*self._taken.values(), *self._held.values())
            ]
            again = sorted({*self._again, *self._sampled})
            return {"next_ticket": self._next, "finished": self._finished, "again": again, "groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, before anything is reserved.

        Raises:
            ValueError: something was reserved already, or more groups are held than there are places.
        """
        with self._changed:
            if self._sampled or self._held or self._taken:
                raise ValueError("this replay buffer is in use; load the state into a new one")
            if len(state["groups"]) > self.capacity:
                raise ValueError(
                    f"the state holds {len(state['groups'])} groups, and this buffer has capacity={self.capacity}; "
                    f"go on with the staleness that the run was begun with, or without the state"
                )
            self._next, self._finished = state["next_ticket"], state["finished"]
            self._again = deque(state["again"])
            self._held = {
                item["ticket"]: Group(
                    ticket=item["ticket"], version=item["version"], rollouts=_from_plain(item["rollouts"])
                )
                for item in state["groups"]
            }

    # -- With the lock held --------------------------------------------------------------------------------------------

    def _over(self) -> bool:
        return self._closed or self._error is not None

    def _places(self) -> int:
        under_way = len(self._sampled) + len(self._held) + len(self._taken)
        left = self.capacity if self.num_groups is None else min(self.capacity, self.num_groups - self._finished)
        return left - under_way

    def _ticket(self) -> int:
        if self._again:
            return self._again.popleft()
        self._next += 1
        return self._next - 1

    def _refuse(self, num_groups: int) -> None:
        if self._taken:
            raise RuntimeError(f"the {len(self._taken)} groups taken before are not finished: call finish() after them")
        left = self.capacity if self.num_groups is None else self.num_groups - self._finished
        if num_groups > min(self.capacity, left):
            raise ValueError(
                f"{num_groups} groups can never be taken at once: capacity={self.capacity}, and num_groups="
                f"{self.num_groups} of which {self._finished} are trained on"
            )

    def _drop(self, oldest: int) -> list[int]:
        stale = [ticket for ticket, group in self._held.items() if group.version < oldest]
        for ticket in stale:
            del self._held[ticket]
        if self.ask_again:
            self._again.extend(stale)
        if stale:
            self._changed.notify_all()
        return stale

    def _pick(self, num_groups: int) -> tuple[Group, ...]:
        groups = sorted(self._held.values(), key=lambda group: (group.version, group.ticket))[:num_groups]
        for group in groups:
            self._taken[group.ticket] = self._held.pop(group.ticket)
        return tuple(groups)


def checked_buffer(buffer: ReplayBuffer | None, *, wanted: ReplayBuffer) -> ReplayBuffer:
    """The buffer, or `wanted` where there is none; one that another run was planned with is refused.

    Raises:
        ValueError: naming all in which it differs from `wanted`, an unused one.
    """
    names = ("capacity", "max_staleness", "num_groups", "ask_again", "finished")
    if buffer is None:
        return wanted
    if wrong := [name for name in names if getattr(buffer, name) != getattr(wanted, name)]:
        said = ", ".join(f"{name}={getattr(buffer, name)} and not {getattr(wanted, name)}" for name in wrong)
        raise ValueError(
            f"the buffer has {said}, as the configuration and steps_taken make it (finished counts groups trained on); "
            f"make it with make_buffer, and load the state of the run that goes on"
        )
    return buffer


def _to_plain(rollouts: Rollouts) -> dict[str, Any]:
    values = {field.name: getattr(rollouts, field.name) for field in fields(rollouts)}
    kept = (torch.Tensor, type(None))
    return {name: value if isinstance(value, kept) else _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else list(value)


def _from_plain(values: Mapping[str, Any]) -> Rollouts:
    restored: Any = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return Rollouts(**restored)

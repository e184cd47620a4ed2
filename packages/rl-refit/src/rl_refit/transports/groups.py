"""Process groups of torch.distributed that belong to a refit alone: neither side's default group is touched.

The groups are made from the backends' own classes over the store of the rendezvous, so that trainer and engine, which
are worlds of their own, need no world in common. Or the user passes a group that has all of them in it.

Gloo listens on loopback unless it is told a host or an interface, and moves CPU tensors; NCCL moves CUDA tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroup,
    Work,
)

from rl_refit.errors import PeerError, RefitError
from rl_refit.transports.base import PATIENCE_S, Channel, Watch
from rl_refit.transports.seating import Seating

__all__ = ["Address", "Group", "backend_for", "open_groups", "user_group"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
_NOBODYS_TAG = 2**30
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where gloo listens; both None means loopback, which ends at this machine."""

    host: str | None = None
    interface: str | None = None

    def __post_init__(self) -> None:
        if self.host is not None and self.interface is not None:
            raise ValueError(f"give a host or an interface, not both; got {self.host!r} and {self.interface!r}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Group:
    """Some of the processes, and torch's backend between them."""

    backend: Any
    """`ProcessGroupGloo` or `ProcessGroupNCCL`."""

    ranks: Mapping[int, int]
    """Process → its rank in the backend."""

    seating: Seating
    device: torch.device
    ours: bool
    """Whether it was made here, and not by the user."""

    @property
    def waits(self) -> bool:
        """Whether `Work.wait` waits until the work has ended, as gloo's does, and not just on a CUDA stream."""
        return self.device.type != "cuda"

    def send(self, message: Tensor, process: int, tag: int) -> Work:
        """Begin to send the bytes of `message`."""
        return self._work(self.backend.send([message], self.ranks[process], tag))

    def receive(self, message: Tensor, process: int, tag: int) -> Work:
        """Begin to receive into `message`; gloo takes shorter messages, and ends the process at a longer one."""
        return self._work(self.backend.recv([message], self.ranks[process], tag))

    def lost(self) -> list[str]:
        """The parties whose connections are known to be broken; gloo alone can tell."""
        return [name for name, rank in self._others() if self.waits and self._is_broken(rank)]

    def close(self, *, stuck: bool) -> None:
        """End what is under way, where something is `stuck`; a group made here cannot be used again."""
        if stuck and self.waits:
            for _, rank in self._others():
                with contextlib.suppress(RuntimeError):  # it is meant to time out: see rl_refit.transports.wire
                    self.backend.recv([self._scratch()], rank, _NOBODYS_TAG).wait(timedelta(milliseconds=1))
        elif stuck:
            self.backend.abort()
        elif self.ours and not self.waits:
            self.backend.shutdown()

    def _others(self) -> list[tuple[str, int]]:
        return [(self.seating.name_of(p), rank) for p, rank in self.ranks.items() if p != self.seating.own]

    def _is_broken(self, rank: int) -> bool:
        try:
            self.backend.send([self._scratch()], rank, _NOBODYS_TAG)
        except RuntimeError:
            return True
        return False

    def _scratch(self) -> Tensor:
        return torch.empty(1, dtype=torch.uint8, device=self.device)

    @staticmethod
    def _work(work: Work | None) -> Work:
        assert work is not None
        return work


def backend_for(device: torch.device) -> str:
    """The backend that moves tensors of `device`: "gloo" or "nccl".

    Raises:
        RefitError: Neither moves tensors of such a device.
    """
    if device.type not in _BACKENDS:
        raise RefitError(f"process groups move tensors on {' and '.join(_BACKENDS)}; got device={str(device)!r}")
    return _BACKENDS[device.type]


def user_group(group: ProcessGroup, channel: Channel, seating: Seating) -> Group:
    """The backend for the channel's device of a group that the user made.

    Raises:
        RefitError: It is of another kind.
    """
    backend = group._get_backend(channel.device)  # noqa: SLF001  (torch names no other way)
    wanted = backend_for(channel.device)
    if backend.name() != wanted:
        raise RefitError(f"tensors on {channel.device} travel over {wanted}; the group given has {backend.name()!r}")
    ranks = {process: process for process in sorted(set(seating.processes.values()))}
    return Group(backend=backend, ranks=ranks, seating=seating, device=channel.device, ours=False)


def open_groups(
    members: Mapping[str, tuple[int, ...]],
    channel: Channel,
    seating: Seating,
    *,
    address: Address,
    watch: Watch,
    greet: Callable[[Mapping[str, Group]], object],
) -> dict[str, Group]:
    """Make the groups in which this process is a member, and let `greet` exchange a first message over each.

    All processes name the same groups in the same order: then none waits for another in a circle.

    Args:
        members: Name of each group → its processes, the same everywhere.
        channel: The device, and the store.
        seating: Who is who.
        address: Where gloo listens.
        watch: Looked at while connections are made.
        greet: Called where it may wait.

    Raises:
        PeerError: A process cannot be reached.
        RefitError: What `watch.check` raises.
    """
    assert channel.store is not None
    store: Any = channel.store
    store = store.clone()  # a store serves one thread at a time
    timeout = timedelta(seconds=watch.deadline_s)
    nccl = backend_for(channel.device) == "nccl"

    def make() -> dict[str, Group]:
        groups: dict[str, Group] = {}
        for name, processes in members.items():
            if seating.own not in processes:
                continue
            ranks = {process: rank for rank, process in enumerate(processes)}
            place = (PrefixStore(name, store), ranks[seating.own], len(ranks))
            backend = _nccl(place, 2 * timeout) if nccl else _gloo(place, timeout, address)
            groups[name] = Group(backend=backend, ranks=ranks, seating=seating, device=channel.device, ours=True)
        with torch.cuda.device(channel.device) if nccl else contextlib.nullcontext():
            greet(groups)
            if nccl:
                torch.cuda.synchronize()
        return groups

    return _in_background(make, watch)


def _gloo(place: tuple[PrefixStore, int, int], timeout: timedelta, address: Address) -> Any:
    from torch.distributed import ProcessGroupGloo

    gloo: Any = ProcessGroupGloo  # its stubs lack the options
    options = gloo._Options()  # noqa: SLF001  (as all below: what init_process_group itself uses)
    options._timeout = timeout  # noqa: SLF001
    if address.interface is not None:
        options._devices = [gloo.create_device(interface=address.interface)]  # noqa: SLF001
    else:
        options._devices = [gloo.create_device(hostname=address.host or "127.0.0.1")]  # noqa: SLF001
    return gloo(*place, options)


def _nccl(place: tuple[PrefixStore, int, int], timeout: timedelta) -> Any:
    """NCCL's watchdog ends the process when a work times out, so its timeout lies beyond our own deadline."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return ProcessGroupNCCL(*place, options)


def _in_background(make: Callable[[], _T], watch: Watch) -> _T:
    """What `make` returns, which waits as it likes, in a thread that is left to itself if the watch raises."""
    made: list[_T] = []
    errors: list[RuntimeError] = []
    ended = threading.Event()

    def work() -> None:
        try:
            made.append(make())
        except RuntimeError as error:  # all that torch raises about connections
            errors.append(error)
        ended.set()

    threading.Thread(target=work, daemon=True, name="rl-refit connect").start()
    while not ended.wait(PATIENCE_S):
        watch.check()
    if errors or not made:
        watch.check()
        reason = str(errors[0]).splitlines()[0] if errors else "see the error that its thread printed"
        raise PeerError(f"cannot connect the parties of the refit: {reason}", phase=watch.phase_name) from (
            errors[0] if errors else None
        )
    return made[0]

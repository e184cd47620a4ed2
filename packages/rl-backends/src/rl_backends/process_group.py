"""The process group of a run: torchrun's ranks, or this process alone; and how long it lives.

Backends share it, whoever comes first: each joins it and leaves it. One of a lone process is destroyed by the last to
leave. One of several ranks stays until the process ends, for the next backend: ranks that destroyed it and met again at
the same store would find the keys of the first time there, and would wait for peers that are gone. One that the user
has made is theirs to destroy.

Ranks that another launcher has started, such as Ray, meet with `host_store` and `meet_at`. torch's own rendezvous
listens on every address of a node; here the store listens only on the one that the ranks use.
"""

import atexit
import functools
import gc
import os
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakSet

import torch
import torch.distributed as dist

from rl_backends.rank_agreement import forget_process_group, gather_text, host_group, once_per_process_group

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
GLOO_SETTLES_S = 0.1
"""How long a rank waits before Python ends, so that gloo's threads have freed the tensors of the last collective. One
that did so later would abort the process (torch 2.13, where a mesh keeps its groups and their threads)."""

SIOCGIFADDR = 0x8915
"""Linux's ioctl number for an interface's address."""


@dataclass(slots=True, eq=False)
class _OwnGroup:
    """A process group that was made here, and who has joined it; whoever is garbage has left."""

    world: dist.ProcessGroup | None
    device: str
    alone: bool
    members: "WeakSet[Membership]" = field(default_factory=WeakSet)


_own: _OwnGroup | None = None


class Membership:
    """A place in the process group, from `join_process_group` until `leave`."""

    def __init__(self, own: _OwnGroup | None) -> None:
        self._own = own
        self.left = False
        """Whether it was given up."""
        if own is not None:
            own.members.add(self)

    def leave(self, *, collect: bool = True) -> None:
        """Give the place up; the last to do so destroys the process group of a lone process. Once is enough.

        collect: look for garbage among the others first, which takes a while.
        """
        own, self._own, self.left = self._own, None, True
        if own is not None:
            own.members.discard(self)
            if own.alone:
                if own.members and collect:
                    gc.collect()  # models are cycles
                if not own.members:
                    _destroy(own)


def join_process_group(device: str, *, timeout_s: float) -> Membership:
    """A place among the ranks that `torchrun` has started, or in a group of one, with no socket to the outside.

    Args:
        device: "cuda" joins by NCCL too; tensors of the host go by gloo in any case.
        timeout_s: how long a rank waits for another before it gives up; of the first to join.

    Raises:
        ValueError: "cuda" is asked for, and absent, or somebody who does without has made the process group; or it is
            not known which GPU is this rank's, or another rank has the same.
    """
    global _own  # noqa: PLW0603 - a process has one
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                "device='cuda' was asked for, and torch sees no GPU here; choose device='cpu' (in a recipe, "
                "policy.dtensor_cfg.device or policy.megatron_cfg.device)"
            )
        choose_gpu()
    if not dist.is_initialized():
        backend, timeout = BACKENDS[device], timedelta(seconds=timeout_s)
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
        _own = _OwnGroup(world=dist.group.WORLD, device=device, alone=dist.get_world_size() == 1)
        if not _own.alone:
            atexit.register(_destroy, _own)  # NCCL warns of a group that was not destroyed
    if dist.get_world_size() > 1:
        _settle_at_exit()
    if _own is not None and _own.world is not dist.group.WORLD:
        _own = None  # the user has destroyed it, and made another
    if _own is not None and device == "cuda" and _own.device != "cuda":
        after = "close() that one first" if _own.alone else "several ranks keep theirs, so use another process for it"
        raise ValueError(
            f"device='cuda' was asked for, and the process group was made for a backend of device={_own.device!r}, "
            f"without NCCL: {after}"
        )
    if device == "cuda":
        index = torch.cuda.current_device()
        gpu = f"GPU {index} of {socket.gethostname()} ({torch.cuda.get_device_properties(index).uuid})"
        once_per_process_group("one GPU a rank", lambda: require_gpu_of_its_own(gpu))
    return Membership(_own)


def choose_gpu() -> None:
    """Make this rank's GPU the current device: that of LOCAL_RANK, or the only one that it sees.

    A process that is no rank of several keeps the device that it has, as one does whose user has set another than 0.

    Raises:
        ValueError: LOCAL_RANK is missing or no number of a GPU here, and several GPUs are seen.
    """
    num_ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    num_gpus, local_rank = torch.cuda.device_count(), os.environ.get("LOCAL_RANK")
    if num_ranks == 1 or num_gpus == 1 or torch.cuda.current_device() != 0:
        return
    if local_rank is None and dist.is_initialized():
        return  # the user's process group, and maybe the user's device 0; shared GPUs are found once ranks can speak
    if local_rank is None:
        raise ValueError(
            f"this is one of {num_ranks} ranks, which see {num_gpus} GPUs each, and LOCAL_RANK does not tell which GPU "
            f"is this rank's: start the ranks with torchrun, or set LOCAL_RANK (it is SLURM_LOCALID under srun, and "
            f"OMPI_COMM_WORLD_LOCAL_RANK under mpirun)"
        )
    if int(local_rank) >= num_gpus:
        raise ValueError(
            f"LOCAL_RANK={local_rank}, and this rank sees {num_gpus} GPUs, numbered from 0: start at most {num_gpus} "
            f"ranks on this node, or make more GPUs visible (CUDA_VISIBLE_DEVICES)"
        )
    torch.cuda.set_device(int(local_rank))


def require_gpu_of_its_own(gpu: str) -> None:
    """Refuse one `gpu` for two ranks, before NCCL is used, which would wait or fail; every rank must call it.

    Raises:
        ValueError: on every rank; it names the GPU and the ranks.
    """
    if dist.get_world_size() == 1:
        return
    ranks_of: dict[str, list[int]] = {}
    for rank, each in enumerate(gather_text(gpu, group=host_group())):
        ranks_of.setdefault(each, []).append(rank)
    if shared := {each: ranks for each, ranks in ranks_of.items() if len(ranks) > 1}:
        told = "; ".join(f"ranks {', '.join(map(str, ranks))} have {each}" for each, ranks in shared.items())
        raise ValueError(
            f"each rank needs a GPU of its own: {told}. Start the ranks with torchrun, or call "
            f"torch.cuda.set_device(local rank) before the process group is made"
        )


def _destroy(own: _OwnGroup) -> None:
    global _own  # noqa: PLW0603
    if _own is own:
        _own = None
    if dist.is_initialized() and own.world is dist.group.WORLD:
        dist.destroy_process_group()
        forget_process_group()


@functools.cache
def _settle_at_exit() -> None:
    """Wait `GLOO_SETTLES_S` before Python ends: once, however many process groups there were, dry runs' among them."""
    atexit.register(time.sleep, GLOO_SETTLES_S)


# ---- Ranks that another launcher started.


def host_store(ip: str, *, num_ranks: int, timeout_s: float) -> tuple[Any, int]:
    """Serve the store on a free port of `ip`; return it and the port. For rank 0."""
    server = socket.create_server((ip, 0))
    port = server.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        ip,
        port,
        num_ranks,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=server.detach(),
    )
    return store, port


def meet_at(
    address: tuple[str, int],
    *,
    store: Any,
    rank: int,
    num_ranks: int,
    local_rank: int,
    num_local_ranks: int,
    device: Literal["cpu", "cuda"],
    timeout_s: float,
) -> None:
    """Make this process a rank. A collective of all ranks; `store` is rank 0's, the others connect to `address`.

    `local_rank` counts the ranks of this node, of which there are `num_local_ranks`; other nodes may have other numbers
    of them. The environment variables are set that torchrun sets.
    """
    ip, port = address
    ranks = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": num_local_ranks}
    os.environ.update({name: str(value) for name, value in {**ranks, "MASTER_ADDR": ip, "MASTER_PORT": port}.items()})
    if ip == "127.0.0.1":  # one node: its ranks need not be reached from outside
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    else:
        own_ip = ""
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # finds the route; a datagram socket sends nothing
            own_ip = str(probe.getsockname()[0])
        if interface := interface_of(own_ip):
            # Gloo uses what the host name resolves to, which on many machines is loopback; NCCL finds an interface.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(ip, port, num_ranks, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    if device == "cuda":
        choose_gpu()  # by LOCAL_RANK, set above
    dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def interface_of(ip: str) -> str | None:
    """The network interface of this node whose first address is `ip`; None if there is none, or it is not Linux."""
    if sys.platform != "linux":
        return None
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == ip:
                return name
    return None

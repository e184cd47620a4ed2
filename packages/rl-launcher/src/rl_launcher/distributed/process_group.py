"""How the ranks of a trainer meet: torch's process group over a store that rank 0 serves. Knows no model.

torch's own way listens on every address of the machine; here the store listens on the one that the others use.
"""

import fcntl
import os
import socket
import struct
import sys
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

__all__ = ["host_store", "interface_of", "join"]

SIOCGIFADDR = 0x8915
"""Of Linux: an interface's address."""


def host_store(ip: str, *, num_ranks: int, timeout_s: float) -> tuple[Any, int]:
    """Serve the store on a free port of `ip`, by rank 0; return it and the port."""
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


def join(
    address: tuple[str, int],
    *,
    store: Any,
    rank: int,
    num_ranks: int,
    local_rank: int,
    device: Literal["cpu", "cuda"],
    timeout_s: float,
) -> None:
    """Make this process a rank.

    Args:
        address: of the store.
        store: rank 0's; None for the others, which connect to it.
        rank: this one.
        num_ranks: all.
        local_rank: which of the machine's GPUs is its own.
        device: "cuda" joins by NCCL too.
        timeout_s: how long a rank waits for another in a collective.
    """
    ip, port = address
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "MASTER_ADDR": ip, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    if ip == "127.0.0.1":  # one machine: nobody else needs to reach its ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif interface := interface_of(_address_towards(address)):
        # Gloo takes what the host's own name means, which on many machines is loopback; NCCL looks by itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(ip, port, num_ranks, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def interface_of(ip: str) -> str | None:
    """The network interface of this machine whose first address is `ip`; None where there is none, or nobody tells."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(asking.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def _address_towards(address: tuple[str, int]) -> str:
    """This machine's address as the other end of a connection to `address` sees it; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(address)
        except OSError:
            return ""
        return str(asking.getsockname()[0])

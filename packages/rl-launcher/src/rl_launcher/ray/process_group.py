"""torch's process group over the ranks of a trainer.

torch's own rendezvous listens on every address of the node; here the store listens only on the one that the ranks use.
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

SIOCGIFADDR = 0x8915
"""Linux's ioctl number for an interface's address."""


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
    """Make this process a rank. A collective of all ranks.

    Args:
        address: of the store.
        store: rank 0's; None for the others, which connect to it.
        rank: this one.
        num_ranks: all.
        local_rank: which of the node's GPUs is its own.
        device: "cuda" joins by NCCL too.
        timeout_s: how long a rank waits for another in a collective.
    """
    ip, port = address
    names = {"RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_RANK": local_rank, "MASTER_ADDR": ip, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    if ip == "127.0.0.1":  # one node: its ranks need not be reached from outside
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    elif interface := interface_of(_own_address_towards(address)):
        # Gloo uses what the host name resolves to, which on many machines is loopback; NCCL finds an interface itself.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    timeout = timedelta(seconds=timeout_s)
    if store is None:
        store = dist.TCPStore(ip, port, num_ranks, is_master=False, timeout=timeout)  # type: ignore[attr-defined]
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)


def interface_of(ip: str) -> str | None:
    """The network interface of this node whose first address is `ip`; None if there is none, or it is not Linux."""
    if sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(reply[20:24]) == ip:
                return name
    return None


def _own_address_towards(address: tuple[str, int]) -> str:
    """This node's address on the route to `address`. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(address)
        except OSError:
            return ""
        return str(probe.getsockname()[0])

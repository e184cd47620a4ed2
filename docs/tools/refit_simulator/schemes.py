"""The ways to bring weights over that the simulator knows, each as a handful of properties."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["SCHEMES", "Scheme"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What a scheme moves, packs and repeats."""

    name: str
    """What `--scheme` calls it."""

    summary: str
    """One line for people."""

    routing: Literal["slices", "broadcast", "ipc"]
    """Each rank its own boxes; or every tensor whole to every rank, over the network, or on the same GPU."""

    relays: bool = False
    """Slices: whether a byte enters a node once and is handed on inside it."""

    transaction: bool = False
    """Whether it is ours: weights staged, digests compared, a commit at all or none, over one store."""

    gathers: bool = False
    """Whether the trainer makes every tensor whole before it leaves."""

    from_host: bool = False
    """Whether the weights come from pinned memory of the trainer's hosts."""

    packed: bool = True
    """Whether many tensors share a message, or a handle."""

    metadata_each_time: bool = False
    """Whether names, shapes and dtypes are sent at every refit."""

    fan_out: bool = False
    """Whether one list of arguments for all executors goes to each of them."""


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(
            name="slices",
            summary="each rank receives its boxes, a byte enters a node once, staged and committed (rl-refit)",
            routing="slices",
            relays=True,
            transaction=True,
        ),
        Scheme(
            name="slices_direct",
            summary="the same without relays: every rank pulls its boxes from the trainer",
            routing="slices",
            transaction=True,
        ),
        Scheme(
            name="slices_in_place",
            summary="boxes straight into live weights, called by a controller (nccl_reshard, NIXL, sharded_rdt)",
            routing="slices",
            relays=True,
        ),
        Scheme(
            name="broadcast",
            summary="gather on the trainer, packed broadcast of whole tensors, load_weights by name",
            routing="broadcast",
            gathers=True,
        ),
        Scheme(
            name="broadcast_unpacked",
            summary="the same with a collective for each tensor",
            routing="broadcast",
            gathers=True,
            packed=False,
        ),
        Scheme(
            name="broadcast_from_host",
            summary="packed broadcast of whole tensors from pinned host memory (checkpoint-engine)",
            routing="broadcast",
            from_host=True,
        ),
        Scheme(
            name="ipc",
            summary="gather, then packed CUDA IPC buckets to the engine on the same GPU, metadata sent ahead",
            routing="ipc",
            gathers=True,
        ),
        Scheme(
            name="ipc_metadata",
            summary="the same with metadata at every refit",
            routing="ipc",
            gathers=True,
            metadata_each_time=True,
        ),
        Scheme(
            name="ipc_fan_out",
            summary="the same with every executor's arguments sent to all executors",
            routing="ipc",
            gathers=True,
            metadata_each_time=True,
            fan_out=True,
        ),
        Scheme(
            name="ipc_handles",
            summary="the same with a handle for each tensor",
            routing="ipc",
            gathers=True,
            metadata_each_time=True,
            fan_out=True,
            packed=False,
        ),
    )
}
"""The schemes by name."""

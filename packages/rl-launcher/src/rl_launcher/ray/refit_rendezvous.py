"""Where the ranks of a trainer and the engines meet for refits, and which transport carries the weights between them.

A rendezvous is made anew, under another name, whenever one of its parties was replaced: the parties of rl_refit
identify each other by process.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, final

import torch
from torch import Tensor

from rl_refit import (
    CudaIpc,
    Manifest,
    PointToPoint,
    Refit,
    RefitConfig,
    Region,
    Rendezvous,
    SharedMemoryRing,
    WeightSink,
    WeightSource,
)
from rl_refit.transports.base import Transport

__all__ = ["HostSource", "RefitRendezvous", "TransportKind", "choose_transport"]

TransportKind = Literal["shared_memory", "cuda_ipc", "point_to_point"]
"""Rings in the host's shared memory, rings in GPU memory, or messages over gloo and NCCL."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RefitRendezvous:
    """The parties of a refit and their transport. All parties get the same; it crosses processes."""

    address: str
    """`tcp://host:port`, free on the host of engine 0, which serves it."""
    name: str
    """Of this rendezvous and of no earlier one."""
    num_sources: int
    """Ranks of the trainer."""
    num_sinks: int
    """Engines that take part."""
    transport: TransportKind
    """How the weights travel."""
    through_host: bool
    """Sources send from copies in host memory, because NCCL does not reach a sink that stages there, as vLLM's does."""
    one_node: bool
    """Nothing leaves the node, and nothing listens beyond loopback."""
    config: RefitConfig
    """The recipe's."""

    def source_refit(self, source: WeightSource, *, rank: int, host: str | None) -> Refit:
        """The refit of one rank of the trainer; it connects when it is called first.

        Args:
            source: the weights of the rank.
            rank: of the trainer.
            host: address of its node that the others reach.
        """
        return Refit(
            HostSource(source) if self.through_host else source,
            transport=self._transport(host),
            rendezvous=self._rendezvous(source_rank=rank),
            **asdict(self.config),
        )

    def sink_refit(self, sink: WeightSink, *, rank: int, host: str | None) -> Refit:
        """The refit of the `rank`th engine; the first one hosts the store."""
        return Refit(
            sink=sink,
            transport=self._transport(host),
            rendezvous=self._rendezvous(sink_rank=rank),
            **asdict(self.config),
        )

    def explain(self) -> str:
        """One line for people."""
        wire = "gloo, from copies in host memory" if self.through_host else "gloo or NCCL"
        transports = {
            "shared_memory": "through rings in the host's shared memory",
            "cuda_ipc": "through rings in GPU memory (CUDA IPC)",
            "point_to_point": f"point to point over {wire}",
        }
        ranks = f"{self.num_sources} rank{'' if self.num_sources == 1 else 's'}"
        engines = f"{self.num_sinks} engine{'' if self.num_sinks == 1 else 's'}"
        return f"from {ranks} to {engines}, {transports[self.transport]}"

    def _rendezvous(self, *, source_rank: int | None = None, sink_rank: int | None = None) -> Rendezvous:
        return Rendezvous(
            self.address,
            num_sources=self.num_sources,
            num_sinks=self.num_sinks,
            source_rank=source_rank,
            sink_rank=sink_rank,
            name=self.name,
        )

    def _transport(self, host: str | None) -> Transport:
        match self.transport:
            case "shared_memory":
                return SharedMemoryRing()
            case "cuda_ipc":
                return CudaIpc()
            case "point_to_point":
                return PointToPoint(host=None if self.one_node else host)


@final
class HostSource:
    """A `WeightSource` that yields the tensors of another as copies in host memory, one at a time."""

    device = torch.device("cpu")

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def manifest(self) -> Manifest:
        """That of the source."""
        return self._source.manifest()

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """Those of the source, copied."""
        for region, tensor in self._source.shards(names):
            yield region, tensor.to("cpu")


def choose_transport(*, one_node: bool, source_device: str, sink_device: str) -> TransportKind:
    """The shortest way: memory that both sides share if there is any, otherwise messages.

    >>> choose_transport(one_node=True, source_device="cuda", sink_device="cpu")
    'shared_memory'
    >>> choose_transport(one_node=False, source_device="cuda", sink_device="cuda")
    'point_to_point'
    """
    if not one_node:
        return "point_to_point"
    return "cuda_ipc" if source_device == sink_device == "cuda" else "shared_memory"

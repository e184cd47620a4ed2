"""The parties of a refit across processes: the ranks of a trainer, the engines, and the transport between them.

A launcher makes one `Parties`, sends it to every process, and each makes its own `Refit` from it. When a process was
replaced, it makes another one under a new name.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Literal, final

import torch
from torch import Tensor

from rl_refit.config import RefitConfig
from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.transports.base import Transport

__all__ = ["HostSource", "Parties", "TransportKind", "choose_transport"]

TransportKind = Literal["shared_memory", "cuda_ipc", "point_to_point"]
"""Rings in the host's shared memory, rings in GPU memory, or messages over gloo and NCCL."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parties:
    """Ranks and engines that refit together, and how. The same in every process; can be pickled."""

    address: str
    """`tcp://host:port`, free on the host of engine 0, which serves it."""
    name: str
    """Of these parties and of no earlier ones."""
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
    """Deadlines, verification and bucket size."""

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
                from rl_refit.transports.shared_memory import SharedMemoryRing

                return SharedMemoryRing()
            case "cuda_ipc":
                from rl_refit.transports.cuda_ipc import CudaIpc

                return CudaIpc()
            case "point_to_point":
                from rl_refit.transports.point_to_point import PointToPoint

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

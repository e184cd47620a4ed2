"""Where the ranks of a trainer and the engines meet for refits, and by which way the weights go between them.

Knows rl_refit, and neither Ray nor models. A meeting is made anew, under another name, whenever one of its parties has
been replaced: rl_refit's parties know one another by process.
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

__all__ = ["HostSource", "RefitMeeting", "Way", "way_between"]

Way = Literal["shared_memory", "cuda_ipc", "point_to_point"]
"""Rings in the host's memory, rings in the GPUs' memory, or messages over gloo and NCCL."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RefitMeeting:
    """A refit's parties and their way. The same for all of them; crosses processes."""

    address: str
    """`tcp://host:port`, free on the host of engine 0, which serves it."""

    name: str
    """Of this meeting and of no earlier one."""

    num_sources: int
    """Ranks of the trainer."""

    num_sinks: int
    """Engines that take part."""

    way: Way
    """How the weights go."""

    through_host: bool
    """Sources hand out copies in the host's memory: vLLM's sink stages there, and NCCL does not reach it."""

    one_node: bool
    """Nothing leaves the machine, and nothing listens beyond loopback."""

    config: RefitConfig
    """The recipe's."""

    def source_refit(self, source: WeightSource, *, rank: int, host: str | None) -> Refit:
        """The refit of one rank of the trainer; it connects when it is called first.

        Args:
            source: What the rank sends.
            rank: Of the trainer.
            host: This node's address, which the others reach.
        """
        if self.through_host:
            source = HostSource(source)
        return Refit(
            source,
            transport=self._transport(host),
            rendezvous=self._rendezvous(source_rank=rank),
            **asdict(self.config),
        )

    def sink_refit(self, sink: WeightSink, *, rank: int, host: str | None) -> Refit:
        """The refit of one engine, the `rank`th of the meeting; the first hosts the store."""
        return Refit(
            sink=sink,
            transport=self._transport(host),
            rendezvous=self._rendezvous(sink_rank=rank),
            **asdict(self.config),
        )

    def explain(self) -> str:
        """One line for people."""
        wire = "gloo, from copies in the host's memory" if self.through_host else "gloo or NCCL"
        ways = {
            "shared_memory": "through rings in the host's shared memory",
            "cuda_ipc": "through rings in GPU memory (CUDA IPC)",
            "point_to_point": f"point to point over {wire}",
        }
        ranks, engines = _counted(self.num_sources, "rank"), _counted(self.num_sinks, "engine")
        return f"from {ranks} to {engines}, {ways[self.way]}"

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
        if self.way == "shared_memory":
            return SharedMemoryRing()
        if self.way == "cuda_ipc":
            return CudaIpc()
        return PointToPoint(host=None if self.one_node else host)


@final
class HostSource:
    """A source whose tensors are handed out as copies in the host's memory, one at a time. A `WeightSource`.

    Args:
        source: On any device.
    """

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


def way_between(*, one_node: bool, source_device: str, sink_device: str) -> Way:
    """The shortest way: memory that both sides have in common where there is any, else messages.

    >>> way_between(one_node=True, source_device="cuda", sink_device="cpu")
    'shared_memory'
    >>> way_between(one_node=False, source_device="cuda", sink_device="cuda")
    'point_to_point'
    """
    if not one_node:
        return "point_to_point"
    return "cuda_ipc" if source_device == sink_device == "cuda" else "shared_memory"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"

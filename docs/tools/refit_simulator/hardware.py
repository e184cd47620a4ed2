"""What the machines can do at best, as their makers publish it, and how much of that software has been seen to reach.

Bandwidths are GB/s (1e9 bytes) in one direction, of one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["HARDWARE", "Hardware"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One GPU, its share of the network, and how many make a node."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    name: str
    """What `--hardware` calls it."""

    nic_gb_s: float
    """Network card, one direction: what enters or leaves a node, a GPU."""

    nvlink_gb_s: float
    """NVLink into one GPU, and as much out of it: what ranks of one node exchange."""

    hbm_gb_s: float
    """Memory of the GPU, reads and writes together: each pass over the weights costs its share."""

    pcie_gb_s: float
    """Between a GPU and its host, one direction: what staging in host memory costs."""

    gpus_per_node: int
    """GPUs that NVLink joins: inside, a byte that entered once is handed on without the network."""

    memory_gb: float
    """Memory of a GPU: what weights, banks and buckets must fit into."""

    source: str
    """Where the figures are published."""

    def __post_init__(self) -> None:
        figures = (self.nic_gb_s, self.nvlink_gb_s, self.hbm_gb_s, self.pcie_gb_s, self.memory_gb, self.gpus_per_node)
        if min(figures) <= 0:
            raise ValueError(f"every figure of {self.name!r} must be positive; got {figures}")


def _hgx(name: str, source: str, *, hbm_gb_s: float, memory_gb: float, nvlink_gb_s: float = 450.0) -> Hardware:
    """A board of eight GPUs, each with a 400 Gb/s card and a PCIe 5 ×16 slot."""
    return Hardware(
        name=name,
        nic_gb_s=50.0,
        nvlink_gb_s=nvlink_gb_s,
        hbm_gb_s=hbm_gb_s,
        pcie_gb_s=64.0,
        gpus_per_node=8,
        memory_gb=memory_gb,
        source=source,
    )


_ASSUMED_CARDS = "; one 400 Gb/s card a GPU is assumed, since boards are sold with fewer"

HARDWARE = {
    preset.name: preset
    for preset in (
        _hgx("h100", "NVIDIA H100 SXM data sheet; DGX H100 user guide", hbm_gb_s=3350.0, memory_gb=80.0),
        _hgx("h200", "NVIDIA H200 SXM data sheet; DGX H200 user guide", hbm_gb_s=4800.0, memory_gb=141.0),
        Hardware(
            name="gb200",
            nic_gb_s=50.0,
            nvlink_gb_s=900.0,
            hbm_gb_s=8000.0,
            pcie_gb_s=225.0,
            gpus_per_node=72,
            memory_gb=186.0,
            source="NVIDIA GB200 NVL72 data sheet: ConnectX-7 a GPU, 1.8 TB/s NVLink both ways, 72 GPUs on one NVLink "
            "fabric; NVLink-C2C to the host, 900 GB/s both ways for two GPUs",
        ),
        _hgx(
            "h800",
            f"H100 with NVLink cut to 400 GB/s both ways{_ASSUMED_CARDS}",
            hbm_gb_s=3350.0,
            memory_gb=80.0,
            nvlink_gb_s=200.0,
        ),
        _hgx("h20", f"NVIDIA H20 data sheet{_ASSUMED_CARDS}", hbm_gb_s=4000.0, memory_gb=96.0),
    )
}
"""The presets by name."""

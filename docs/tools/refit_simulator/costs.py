"""The one set of constants that turns bytes, tensors and parties into seconds, each with where it comes from.

Which constant was fitted on which published row is said here, and `calibration` prints how the others come out.
Bandwidths a program reaches are shares of what the makers publish; the rest is seconds of one CPU thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

__all__ = ["CALIBRATED", "Costs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What software costs."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    nic_share: float = 0.88
    """Share of a card's bandwidth that large messages reach. Published: TensorHub, arXiv 2604.09107."""

    nvlink_share: float = 0.80
    """Share of NVLink that collectives reach. Assumed; about what nccl-tests prints on an HGX board."""

    hbm_share: float = 0.90
    """Share of HBM that a copy reaches. Published: 4.3 of 4.8 TB/s on an H200."""

    pcie_share: float = 0.86
    """Share of PCIe 5 ×16 that pinned copies reach: 55 of 64 GB/s. Assumed."""

    message_s: float = 15e-6
    """From the start of a message to its first byte, a bucket. Assumed: 10 to 20 µs over NCCL or RDMA."""

    piece_s: float = 36e-6
    """One box of one tensor, cut out or put in place by a thread that launches copies. Fitted: row nccl_reshard
    Qwen3-30B. vLLM says 32 µs for its own."""

    copy_s: float = 5e-6
    """One copy on the same GPU, without finding its place: what a staged commit costs a tensor. Assumed."""

    load_tensor_s: float = 130e-6
    """One tensor through an engine's `load_weights`, by its name. Fitted: row packed broadcast DeepSeek-V3."""

    gather_tensor_s: float = 93e-6
    """One tensor gathered in full on the trainer, beyond its bytes. Fitted: gather column of the ladder's last row."""

    collective_tensor_s: float = 425e-6
    """One collective a tensor where tensors are not packed. Fitted: row unpacked broadcast DeepSeek-V3."""

    handle_s: float = 180e-6
    """Opening one CUDA IPC handle. Published with the ladder."""

    metadata_tensor_s: float = 809e-6
    """Names, shapes and dtypes of a tensor, pickled and sent at every refit. Fitted: the ladder's third row."""

    fan_out_entry_s: float = 0.753e-6
    """One entry of an argument list that is sent to all executors of an engine: tensors × ranks × executors of them.
    Fitted: the ladder's first row."""

    call_worker_s: float = 0.26e-3
    """One remote call to one worker through a single controller. Fitted: the ladder's last row."""

    store_operation_s: float = 35e-6
    """One operation on the store of our control plane, which has one thread. Measured: 34 to 43 µs, loopback, torch
    2.13.0, 2026-11-21."""

    operations_per_party: int = 28
    """Operations on the store that each party causes in a refit: six of them in each of four steps, namely its report,
    two to read it, and three to poll for the answer; and four for the beginning and the decision. Counted in
    rl_refit.transaction."""

    operations_per_pair: int = 3
    """Operations for the digests of one sender and one receiver. Counted in rl_refit.transaction."""

    delta_bytes_s: float = 2e9
    """Weights that one rank compares with their base and encodes in a second. Measured on one core with numpy."""

    def __post_init__(self) -> None:
        negative = [name for name in self.__slots__ if getattr(self, name) < 0]
        shares = [name for name in self.__slots__ if name.endswith("_share") and not 0 < getattr(self, name) <= 1]
        if negative or shares or self.delta_bytes_s == 0:
            raise ValueError(f"costs must not be negative, and shares must lie in (0, 1]; wrong: {negative + shares}")


CALIBRATED = Costs()
"""The constants of every prediction, unless the caller gives others."""

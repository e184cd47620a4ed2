"""Refits that others have measured and published, as data: what, where, when, and what we had to assume.

Seconds are those of the publication; where it gives a range, its geometric mean is compared. A row that served to fit a
constant says which. Rows that the simulator cannot express are listed too, with the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from refit_simulator.workload import Wire

__all__ = ["NOT_PREDICTED", "ROWS", "PublishedRow"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRow:
    """One published refit."""

    name: str
    seconds: tuple[float, float]
    """Lowest and highest published."""

    source: str
    date: str
    """Year, and month where it is known."""

    model: str
    hardware: str = "h100"
    train: tuple[int, str]
    """GPUs and layout of the trainer."""

    engine: tuple[int, str]
    """GPUs and layout of the engine."""

    scheme: str
    wire: Wire = "bfloat16"
    bucket_gb: float = 1.6
    num_tensors: int | None = None
    fits: str = ""
    """The constant that was fitted on this row; empty for a row held out."""

    assumed: str = ""
    """What the publication does not say, and we had to choose."""

    @property
    def colocated(self) -> bool:
        """Whether trainer and engine share GPUs."""
        return self.scheme.startswith("ipc") or self.scheme == "broadcast_from_host"

    @property
    def published_seconds(self) -> float:
        """Geometric mean of the range."""
        return math.sqrt(self.seconds[0] * self.seconds[1])


def _once(seconds: float) -> tuple[float, float]:
    return seconds, seconds


_PACKED = "NVIDIA-NeMo/RL PR 1379"
_RESHARD = "NVIDIA-NeMo/RL PR 2971"
_XFER = "NVIDIA-NeMo/RL PR 2808"
_ANY_LAYOUT = "layout (a broadcast depends on it little)"

_ladder = partial(
    PublishedRow,
    source="NeMo-RL blog on refit, discussion 1189",
    date="2025-08",
    model="deepseek-v3",
    train=(512, "ep=64,pp=8"),
    engine=(512, "tp=64"),
    bucket_gb=1342 / 175,
    num_tensors=90_000,
    assumed="8 replicas of the engine; 175 buckets (PR 1267)",
)
_dsv3 = partial(PublishedRow, model="deepseek-v3", train=(256, "ep=16,pp=16"), engine=(256, "tp=32"))
_235b = partial(PublishedRow, model="qwen3-235b-a22b", train=(256, "ep=16,pp=8,tp=4"), engine=(128, "tp=8"))
_30b = partial(PublishedRow, model="qwen3-30b-a3b")
_4b = partial(PublishedRow, model="qwen3-4b", source=_XFER, date="2026-06", scheme="slices_in_place")
_rdt = partial(
    PublishedRow,
    source="vLLM PR 43375",
    date="2026-05",
    model="qwen3-235b-a22b",
    train=(8, "fsdp=8"),
    scheme="slices_in_place",
    assumed="FSDP on the trainer",
)
_moonshot = partial(
    PublishedRow,
    source="MoonshotAI/checkpoint-engine README",
    date="2025-09",
    scheme="broadcast_from_host",
    bucket_gb=8.0,
    assumed="one 400 Gb/s card a GPU",
)
_kimi = partial(PublishedRow, model="kimi-k2", hardware="h100", wire="float8")

ROWS: tuple[PublishedRow, ...] = (
    _ladder(name="ladder 1: a handle a tensor", seconds=_once(692.5), scheme="ipc_handles", fits="fan_out_entry_s"),
    _ladder(name="ladder 2: tensors packed", seconds=_once(450.0), scheme="ipc_fan_out"),
    _ladder(name="ladder 3: own handles only", seconds=_once(120.0), scheme="ipc_metadata", fits="metadata_tensor_s"),
    _ladder(
        name="ladder 4: metadata ahead of time",
        seconds=_once(47.2),
        scheme="ipc",
        fits="gather_tensor_s, call_worker_s",
    ),
    _dsv3(
        name="unpacked broadcast DeepSeek-V3",
        seconds=_once(34.0),
        scheme="broadcast_unpacked",
        fits="collective_tensor_s",
        source=_PACKED,
        date="2025-10",
        assumed=_ANY_LAYOUT,
    ),
    _dsv3(
        name="packed broadcast DeepSeek-V3",
        seconds=_once(14.0),
        scheme="broadcast",
        fits="load_tensor_s",
        source=_PACKED,
        date="2025-10",
        assumed=_ANY_LAYOUT,
    ),
    _235b(
        name="unpacked broadcast Qwen3-235B",
        seconds=_once(13.0),
        scheme="broadcast_unpacked",
        source=_PACKED,
        date="2025-10",
        assumed=_ANY_LAYOUT,
    ),
    _235b(
        name="packed broadcast Qwen3-235B",
        seconds=_once(5.5),
        scheme="broadcast",
        source=_PACKED,
        date="2025-10",
        assumed=_ANY_LAYOUT,
    ),
    _30b(
        source=_RESHARD,
        date="2026-06",
        scheme="slices_in_place",
        name="nccl_reshard Qwen3-30B EP8 PP2 to TP8 DP2",
        seconds=(0.74, 1.00),
        train=(16, "ep=8,pp=2"),
        engine=(16, "tp=8"),
        fits="piece_s",
    ),
    _30b(
        source=_RESHARD,
        date="2026-06",
        scheme="slices_in_place",
        name="nccl_reshard Qwen3-30B EP8 PP2 to TP2 DP8",
        seconds=(1.21, 1.52),
        train=(16, "ep=8,pp=2"),
        engine=(16, "tp=2"),
    ),
    _30b(
        source=_RESHARD,
        date="2026-06",
        scheme="slices_in_place",
        name="nccl_reshard Qwen3-30B EP4 TP2 PP2 to TP4 DP4",
        seconds=(0.74, 1.17),
        train=(16, "ep=4,tp=2,pp=2"),
        engine=(16, "tp=4"),
    ),
    _dsv3(
        name="nccl_reshard DeepSeek-V3", seconds=(2.39, 2.83), source=_RESHARD, date="2026-06", scheme="slices_in_place"
    ),
    _dsv3(
        name="nccl_reshard DeepSeek-V3 on GB200",
        seconds=(1.93, 2.59),
        hardware="gb200",
        source=_RESHARD,
        date="2026-06",
        scheme="slices_in_place",
    ),
    _4b(name="nccl_xfer Qwen3-4B DP8 to TP8", seconds=(0.07, 0.08), train=(8, "replicated"), engine=(8, "tp=8")),
    _4b(
        name="nccl_xfer Qwen3-4B TP2 PP2 DP2 to TP4 DP2",
        seconds=_once(0.13),
        train=(8, "tp=2,pp=2"),
        engine=(8, "tp=4"),
    ),
    _30b(
        source=_XFER,
        date="2026-06",
        scheme="slices_in_place",
        name="nccl_xfer Qwen3-30B EP8 PP2 to TP8 DP2",
        seconds=(0.50, 0.51),
        train=(16, "ep=8,pp=2"),
        engine=(16, "tp=8"),
    ),
    _30b(
        source=_XFER,
        date="2026-06",
        scheme="slices_in_place",
        name="nccl_xfer Qwen3-30B EP4 TP2 DP2 to TP4 DP4",
        seconds=(0.54, 0.67),
        train=(16, "ep=4,tp=2"),
        engine=(16, "tp=4"),
    ),
    _235b(name="nccl_xfer Qwen3-235B", seconds=(4.56, 4.85), source=_XFER, date="2026-06", scheme="slices_in_place"),
    _dsv3(name="nccl_xfer DeepSeek-V3", seconds=(7.65, 9.94), source=_XFER, date="2026-06", scheme="slices_in_place"),
    PublishedRow(
        name="NIXL DeepSeek-V3",
        seconds=_once(9.25),
        source="NeMo-RL checkpoint-engine guide",
        date="2026",
        model="deepseek-v3",
        train=(256, "ep=16,pp=16"),
        engine=(32, "tp=32"),
        scheme="slices_in_place",
        assumed="layout of the trainer",
    ),
    _rdt(name="sharded_rdt Qwen3-235B to EP8", seconds=(2.7, 3.3), engine=(8, "ep=8")),
    _rdt(name="sharded_rdt Qwen3-235B to TP8", seconds=_once(6.1), engine=(8, "tp=8")),
    PublishedRow(
        name="verl NCCL Qwen3-30B",
        seconds=_once(7.0),
        source="verl checkpoint_engine README",
        date="2026",
        model="qwen3-30b-a3b",
        train=(16, "fsdp=16"),
        engine=(16, "tp=4"),
        scheme="broadcast",
        assumed="16 of 32 GPUs on each side, layouts",
    ),
    PublishedRow(
        name="slime Qwen3-30B, a handle a tensor",
        seconds=_once(60.0),
        source="hebiao064 blog",
        date="2025",
        model="qwen3-30b-a3b",
        train=(8, "ep=8"),
        engine=(8, "tp=8"),
        scheme="ipc_handles",
        assumed="8 GPUs, layouts",
    ),
    PublishedRow(
        name="slime Qwen3-30B, packed",
        seconds=_once(7.0),
        source="hebiao064 blog",
        date="2025",
        model="qwen3-30b-a3b",
        train=(8, "ep=8"),
        engine=(8, "tp=8"),
        scheme="ipc",
        assumed="8 GPUs, layouts, metadata ahead",
    ),
    _moonshot(
        name="checkpoint-engine Qwen3-235B, 8 H800",
        seconds=_once(6.22),
        model="qwen3-235b-a22b",
        hardware="h800",
        train=(8, "fsdp=8"),
        engine=(8, "tp=8"),
    ),
    _moonshot(
        name="checkpoint-engine DeepSeek-V3.1 FP8, 16 H20",
        seconds=_once(10.19),
        model="deepseek-v3",
        hardware="h20",
        wire="float8",
        train=(16, "fsdp=16"),
        engine=(16, "tp=16"),
    ),
    _moonshot(
        name="checkpoint-engine Kimi-K2 FP8, 16 H20",
        seconds=_once(14.36),
        model="kimi-k2",
        hardware="h20",
        wire="float8",
        train=(16, "fsdp=16"),
        engine=(16, "tp=16"),
    ),
    _moonshot(
        name="checkpoint-engine Kimi-K2 FP8, 256 H20",
        seconds=_once(16.04),
        model="kimi-k2",
        hardware="h20",
        wire="float8",
        train=(256, "fsdp=256"),
        engine=(256, "tp=16"),
    ),
    _kimi(
        name="miles Kimi-K2 FP8",
        seconds=_once(7.2),
        source="LMSYS blog on miles P2P",
        date="2026-04",
        train=(64, "ep=8,pp=8"),
        engine=(32, "tp=32"),
        scheme="slices_in_place",
        assumed="64 and 32 GPUs, layouts",
    ),
    _kimi(
        name="Perplexity Kimi-K2 FP8, 256 to 128",
        seconds=(1.2, 1.3),
        source="Perplexity Research blog; arXiv 2510.27656",
        date="2025-09",
        train=(256, "ep=32,pp=8"),
        engine=(128, "ep=128"),
        scheme="slices_in_place",
        assumed="layouts; its FSDP trainer gathers and quantises first, which is not modelled",
    ),
    PublishedRow(
        name="Perplexity Qwen3-235B, 128 to 32",
        seconds=_once(2.0),
        source="arXiv 2510.27656",
        date="2025-10",
        model="qwen3-235b-a22b",
        train=(128, "ep=16,pp=8"),
        engine=(32, "ep=32"),
        scheme="slices_in_place",
        assumed="layouts, bfloat16; its FSDP trainer gathers first, which is not modelled",
    ),
)
"""Every row that is predicted."""

NOT_PREDICTED = (
    (
        "NVIDIA-NeMo/RL PR 449, ~30B on 16 nodes: 18 to 7 s, 430 to 50 s",
        "tensor parallelism of the engine is not published",
    ),
    ("NVIDIA-NeMo/RL PRs 634 and 638, 420 to 120 to 55 s", "stations of the ladder, which has them"),
    ("NVIDIA-NeMo/RL PR 1264, Qwen3-32B twice as fast", "a ratio without seconds"),
    (
        "NVIDIA-NeMo/RL PR 2971, Qwen3.5-397B 1.97 to 2.17 s; nano-v3, super-v3",
        "no exact tensor list of the model here",
    ),
    ("NVIDIA-NeMo/RL PRs 2971 and 3294, FP8 and MXFP8", "quantisation in the loader is not modelled"),
    ("NVIDIA-NeMo/RL PR 3166, nvshmem 95 s and growing", "a fault, not a cost"),
    ("NVIDIA-NeMo/RL PR 2293, 8B 25 s through CPU memory", "pickling is not modelled"),
    (
        "NeMo-RL sparse delta, 247 GB at 3 %: 20.2 s",
        "no exact tensor list of the model here; see the crossover of deltas",
    ),
)
"""Published rows that are not predicted, and why."""

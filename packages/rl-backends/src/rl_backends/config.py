"""What the configurations of both backends have in common."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_backends.choices import check_choices, check_finite, out_of_bounds, refuse
from rl_backends.lora.config import LoraConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig:
    """The fields that `Backend` reads; a backend adds how ranks share the model."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model lives. It is stated, never guessed; `cuda` without a GPU is refused."""

    precision: Literal["float32", "bfloat16"] = "float32"
    """What the forward and backward passes compute in. Weights are float32 on DTensor, and in this dtype on Megatron,
    whose optimizer keeps float32 masters; gradients and optimizer state are float32 on both."""

    sequence_parallel: bool = False
    """Under tensor parallelism, cut what lies between blocks along the sequence too: less memory for activations."""

    context_parallel_size: int = 1
    """Ranks that share the tokens of each row, for rows too long for one; of packed rows each rank has its share."""

    lora_cfg: LoraConfig | None = None
    """Train low-rank adapters and freeze the rest; None trains all weights. Engines get merged weights either way. On
    Megatron they need plain torch's layers (`transformer_impl: local`)."""

    micro_batch_size: int = 64
    """Most rows in one forward and backward pass on one rank. Smaller takes less memory."""

    micro_batch_tokens: int | None = None
    """Most tokens in one pass of the ranks that share its rows, padding included (dynamic batching); None bounds by
    rows alone. A single unit of rows that is larger is refused."""

    sequence_packing: bool = False
    """Lay rows one after the other without padding, in one sequence that attention cannot see across."""

    peak_flops_per_s: float | None = None
    """What one device could compute a second, for the utilisation that metrics report. None looks up the data sheet
    of a GPU; a CPU has none."""

    timeout_s: float = 600.0
    """Seconds that a rank waits for another in a collective before it gives up with an error; there, what the first
    backend of the process was given counts for all. Also for one that still writes its part of a checkpoint."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_finite(self)
        sizes = "context_parallel_size micro_batch_size micro_batch_tokens"
        refuse([*out_of_bounds(self, {">= 1": sizes, "> 0": "peak_flops_per_s timeout_s"}), *self._problems()])

    def _problems(self) -> Iterator[str]:
        """One sentence for each thing that a backend refuses of its own fields."""
        yield from ()

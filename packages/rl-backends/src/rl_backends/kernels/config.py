"""Which kernel computes what. None of it changes a result beyond the rounding of its dtype."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_backends.choices import check_choices


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig:
    """A choice that cannot run is refused by name, with the reason and the remedy; nothing else runs in its place."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    attention: Literal["auto", "sdpa", "flex", "varlen", "flash"] = "auto"
    """`auto`: for packed rows `varlen` on a GPU in bfloat16 where it computes what the model asks for, else `flex` on a
    GPU and `sdpa` on a CPU; for padded rows the attention that the model was loaded with. `sdpa` runs anywhere, capped
    scores and sinks included; `flex` (all of it) needs a GPU; `varlen` and `flash` (the package flash-attn) need a GPU,
    bfloat16 and packed rows, and know no sinks."""

    loss: Literal["torch", "liger", "verl"] = "torch"
    """What computes log-probabilities and entropies from hidden states and the lm_head, without whole logits. `liger`
    (liger-kernel) and `verl` need a GPU and know no soft-capped logits."""

    loss_chunk_size: int | None = None
    """Tokens whose logits exist at one time, under `loss: torch`. None: an eighth of them, at least 256, at most 1024
    and at most 256 MiB of logits."""

    norm: Literal["torch", "liger", "hub"] = "torch"
    """RMS norms: the model's own code, liger-kernel, or the kernel that transformers names on the Hub, which is
    downloaded and run as compiled code."""

    rope: Literal["torch", "liger", "hub"] = "torch"
    """Rotary position embeddings of queries and keys."""

    mlp: Literal["torch", "liger", "hub"] = "torch"
    """The product of the gate's activation and the up-projection in MLPs, SwiGLU or GeGLU."""

    float8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Matrix products of linear layers in 8 bits, scaled dynamically, by this recipe of torchao; weights, gradients and
    optimizer state stay float32. Needs a GPU of compute capability 8.9 (Ada, Hopper) or newer."""

    float8_emulate: bool = False
    """Round to 8 bits, and multiply in the dtype of computation: the numbers of `float8` on any device, and slower."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.loss_chunk_size is not None and self.loss_chunk_size < 1:
            raise ValueError(f"kernels.loss_chunk_size={self.loss_chunk_size} must be >= 1, or None")
        if self.loss_chunk_size is not None and self.loss != "torch":
            raise ValueError(
                f"kernels.loss_chunk_size={self.loss_chunk_size} has no effect on kernels.loss={self.loss!r}, which "
                f"chooses its own: leave it out, or choose loss='torch'"
            )
        if self.float8_emulate and self.float8 is None:
            raise ValueError("kernels.float8_emulate=True needs kernels.float8, which it emulates")

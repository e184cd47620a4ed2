"""What a user may choose of low-rank adapters."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from rl_backends.choices import check_choices, check_finite


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """LoRA (arXiv:2106.09685): y = W x + scaling * B A x, where W is frozen and A [rank, in] and B [out, rank] train.

    There is no dropout: the backend never runs in training mode, since dropout would make two functions of one model.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}
    __aliases__: ClassVar[dict[str, str]] = {"dim": "rank"}  # NeMo-RL's

    rank: int = 16
    """Rows of A and columns of B. More can learn more, and takes memory and bytes of refit in proportion."""

    alpha: int = 32
    """`scaling` is alpha / rank, or alpha / sqrt(rank) with `use_rslora`: how far a step of B moves the output."""

    target_modules: str | tuple[str, ...] = "all-linear"
    """`all-linear`: every linear layer of the decoder layers, but for experts and what routes to them. Or the ends of
    dotted names, whose tokens may hold `*`: `q_proj`, `self_attn.*_proj`, `layers.1*.mlp.down_proj`; also
    `embed_tokens` and `lm_head` where they are not tied to each other, on DTensor without tensor parallelism. Empty
    with `target_parameters` alone."""

    target_parameters: tuple[str, ...] = ()
    """Stacked weights of experts [experts, out, in] that get an adapter for each expert, by the ends of their names:
    `experts.gate_up_proj`, `experts.down_proj`; peft's word. A pass computes W + scaling * B A of all experts of a
    layer; on DTensor, over FSDP, without tensor or expert parallelism, compile or DoRA."""

    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (arXiv:2312.03732), so that the rank can be raised without a new learning rate."""

    use_dora: bool = False
    """Train the length of each row of a weight too (DoRA, arXiv:2402.09353): y = m / |W + scaling * B A| times what
    LoRA gives, with m [out] from |W|. It computes B A at every pass; not under tensor parallelism."""

    modules_to_save: tuple[str, ...] = ()
    """Ends of names of modules that are trained whole beside the adapters, such as the `score` head of a reward model.
    The reference can then no longer be the policy with its adapters off."""

    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the frozen weights are stored in. `bfloat16` halves their memory, and loses nothing of a checkpoint that is
    in bfloat16 itself. Adapters, their gradients and their optimizer state are float32 always."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_finite(self)
        for name in ("rank", "alpha"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            raise ValueError(
                f"target_modules={self.target_modules!r} must be 'all-linear' or a tuple of names: "
                f"({self.target_modules!r},)"
            )
        names = (*self.target_modules, *self.target_parameters, *self.modules_to_save)
        if not (self.target_modules or self.target_parameters) or not all(names):
            raise ValueError(
                f"target_modules={self.target_modules!r}, target_parameters={self.target_parameters!r} and "
                f"modules_to_save={self.modules_to_save!r} must hold names, and one of the first two at least one; to "
                f"train all weights, leave LoRA out"
            )
        if self.target_parameters and self.use_dora:
            raise ValueError(
                f"target_parameters={self.target_parameters!r} cannot be combined with use_dora=True, which is for "
                f"linear layers: switch one of them off"
            )

    @property
    def scaling(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)

    @property
    def torch_base_dtype(self) -> torch.dtype:
        """`base_dtype` as torch has it."""
        return torch.bfloat16 if self.base_dtype == "bfloat16" else torch.float32

"""What a user may choose: what configurations have in common, adapters, kernels, and the fields of both backends."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, get_args, get_origin

import torch

BOUNDS: Mapping[str, Callable[[float], bool]] = {
    "> 0": lambda value: value > 0,
    ">= 0": lambda value: value >= 0,
    ">= 1": lambda value: value >= 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Choices that are checked when they are made: one ValueError says all that is wrong, not one a try."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        problems = [*self._impossible_values()] or [*self._problems()]
        if problems:
            raise ValueError("; ".join(problems))

    def _problems(self) -> Iterator[str]:
        """One sentence for each thing that is wrong with values that are possible by themselves."""
        yield from ()

    def _impossible_values(self) -> Iterator[str]:
        """Text that is none of the values of a `Literal`, and floats, also in a tuple, that are not finite."""
        for field in fields(self):
            value, allowed = getattr(self, field.name), list(_allowed(field.type))
            if allowed and not any(value is each or (type(value) is type(each) and value == each) for each in allowed):
                names = {each.lower(): each for each in allowed if isinstance(each, str)}
                near = get_close_matches(str(value).lower(), names, n=1, cutoff=0.4)
                hint = f": {names[near[0]]!r} is the nearest" if near else ""
                yield f"{field.name}={value!r} must be one of {', '.join(map(repr, allowed))}{hint}"
            numbers = value if isinstance(value, tuple) else (value,)
            if any(isinstance(each, float) and not math.isfinite(each) for each in numbers):
                yield f"{field.name}={value} must be finite"

    def _outside(self, bounds: Mapping[str, str]) -> Iterator[str]:
        """Numbers outside of their bounds; a field that may be None has none then.

        bounds: "> 0", ">= 0" or ">= 1" -> names of fields, with spaces between them.
        """
        optional = {field.name for field in fields(self) if type(None) in get_args(field.type)}
        for bound, names in bounds.items():
            for name in names.split():
                value = getattr(self, name)
                if value is not None and not BOUNDS[bound](value):
                    yield f"{name}={value} must be {bound}{', or None' if name in optional else ''}"


def _allowed(annotation: Any) -> Iterator[Any]:
    """The values of a Literal, and None beside one; nothing of an annotation without a Literal."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    elif any(get_origin(part) is Literal for part in get_args(annotation)):
        for part in get_args(annotation):
            yield from (None,) if part is type(None) else _allowed(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Config):
    """LoRA (arXiv:2106.09685): y = W x + scaling * B A x, where W is frozen and A [rank, in] and B [out, rank] train.

    There is no dropout: the backend never runs in training mode, since dropout would make two functions of one model.
    """

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

    def _problems(self) -> Iterator[str]:
        yield from self._outside({">= 1": "rank alpha"})
        if isinstance(self.target_modules, str) and self.target_modules != "all-linear":
            yield (
                f"target_modules={self.target_modules!r} must be 'all-linear' or a tuple of names: "
                f"({self.target_modules!r},)"
            )
        names = (*self.target_modules, *self.target_parameters, *self.modules_to_save)
        if not (self.target_modules or self.target_parameters) or not all(names):
            yield (
                f"target_modules={self.target_modules!r}, target_parameters={self.target_parameters!r} and "
                f"modules_to_save={self.modules_to_save!r} must hold names, and one of the first two at least one; to "
                f"train all weights, leave LoRA out"
            )
        if self.target_parameters and self.use_dora:
            yield (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelsConfig(Config):
    """A choice that cannot run is refused by name, with the reason and the remedy; nothing else runs in its place."""

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

    def _problems(self) -> Iterator[str]:
        if self.loss_chunk_size is not None and self.loss_chunk_size < 1:
            yield f"kernels.loss_chunk_size={self.loss_chunk_size} must be >= 1, or None"
        if self.loss_chunk_size is not None and self.loss != "torch":
            yield (
                f"kernels.loss_chunk_size={self.loss_chunk_size} has no effect on kernels.loss={self.loss!r}, which "
                f"chooses its own: leave it out, or choose loss='torch'"
            )
        if self.float8_emulate and self.float8 is None:
            yield "kernels.float8_emulate=True needs kernels.float8, which it emulates"


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendConfig(Config):
    """The fields that `Backend` reads; a backend adds how ranks share the model."""

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

    def _problems(self) -> Iterator[str]:
        sizes = "context_parallel_size micro_batch_size micro_batch_tokens"
        yield from self._outside({">= 1": sizes, "> 0": "peak_flops_per_s timeout_s"})

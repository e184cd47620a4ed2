"""What step to predict: sizes, sharding, precision, and how the loss reads the lm_head."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.pipeline.schedule import Schedule
from rl_parallel_plans.plan.registry import CustomPlan
from rl_parallel_plans.sharding.activation_checkpointing import ActivationCheckpointing

OptimizerName = Literal["adamw", "adamw_fused", "sgd", "none"]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
LmHead = Literal["gathered", "one_piece", "sharded", "linear_logp"]
Loss = Callable[[Tensor, Tensor], Tensor]
Attention = Literal["flash", "model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """One training step whose memory is asked for."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    tp: int = 1
    """Ranks that a layer is split over."""
    dp: int = 1
    """Ranks that FSDP2 shards parameters, gradients and optimizer state over."""
    batch_size: int
    """Rows of a microbatch on one dp rank: activations grow with it."""
    sequence_length: int
    """Tokens of a row: activations grow with it, and with its square where attention holds scores or a mask."""
    sequence_parallel: bool = False
    """Cut the residual stream along the sequence over the tp ranks."""
    lm_head: LmHead = "linear_logp"
    """How the loss reads the lm_head. "gathered": whole logits on every rank, cast to fp32, log_softmax, as most
    trainers do. "one_piece": each rank its slice of the vocabulary, all tokens at once, as is usual. "sharded": the
    same in chunks, get_logprobs_from_vocab_parallel_logits. "linear_logp": from hidden states, no logits."""
    loss: Loss | None = None
    """A loss `(logits, token_ids) -> scalar` of your own in place of the one that goes with `lm_head`; it gets plain
    logits [B, S, V] from "gathered" and a DTensor Shard(-1) from "sharded"."""
    activation_checkpointing: ActivationCheckpointing | None = None
    """What layers keep for backward: None everything, "selective" and "full" less (apply_activation_checkpointing)."""
    weight_dtype: torch.dtype = torch.float32
    """Dtype of the sharded parameters, hence of their gradients and of the optimizer's state."""
    param_dtype: torch.dtype | None = torch.bfloat16
    """Dtype of the gathered parameters and of the forward; None computes in `weight_dtype`."""
    reduce_dtype: torch.dtype | None = torch.float32
    """Dtype in which gradients are reduced; None reduces in `param_dtype`."""
    optimizer: OptimizerName | MakeOptimizer = "adamw"
    """"adamw" is torch's with its default on GPUs (foreach), which holds one more copy of the parameters while it
    steps; "adamw_fused" holds none; "sgd" has no state; "none" neither steps nor has state. Or a function that
    makes one from a list of parameters, which are plain tensors: this rank's pieces."""
    attention: Attention = "flash"
    """"flash": scaled_dot_product_attention costs what fused kernels of a GPU cost; "model": what torch does on a CPU,
    with scores [B, heads, S, S] where there is a mask. Models that compute scores themselves hold them in both."""
    custom: CustomPlan | None = None
    """A plan of your own, as for `plan_for`."""
    pp: int = 1
    """Ranks that layers are split over (pipeline_stages)."""
    pp_rank: int = 0
    """Whose memory of those: each rank of the pipeline holds other stages."""
    microbatches: int | None = None
    """Microbatches of a pipeline step; None is twice the number of ranks of the pipeline."""
    schedule: Schedule = "1f1b"
    """How forwards and backwards of a pipeline take turns: fewer microbatches are alive at once under "1f1b"."""

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "batch_size", "sequence_length", "pp"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise PlanError(f"{name} is {value!r}: it must be a whole number, at least 1")
        if not isinstance(self.pp_rank, int) or not 0 <= self.pp_rank < self.pp:
            raise PlanError(f"pp_rank is {self.pp_rank!r}: it must be a rank of the pipeline, below pp={self.pp}")
        if self.microbatches is not None and (self.pp == 1 or self.microbatches < 1):
            raise PlanError(
                f"microbatches={self.microbatches} with pp={self.pp}: microbatches, 1 or more, are for pp > 1"
            )
        choices = (("lm_head", LmHead), ("attention", Attention), ("schedule", Schedule))
        for name, choice in choices:
            if getattr(self, name) not in get_args(choice):
                raise PlanError(f"{name} is {getattr(self, name)!r}: it must be one of {', '.join(get_args(choice))}")
        if not callable(self.optimizer) and self.optimizer not in get_args(OptimizerName):
            names = ", ".join(get_args(OptimizerName))
            raise PlanError(f"optimizer is {self.optimizer!r}: it must be a function or one of {names}")
        if self.activation_checkpointing not in (None, *get_args(ActivationCheckpointing)):
            names = ", ".join(get_args(ActivationCheckpointing))
            raise PlanError(f"activation_checkpointing is {self.activation_checkpointing!r}: None or one of {names}")
        if self.loss is not None and self.lm_head in ("one_piece", "linear_logp"):
            raise PlanError('a loss of your own reads logits: pass lm_head="gathered" or "sharded" with it')
        for name in ("weight_dtype", "param_dtype", "reduce_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
                raise PlanError(f"{name} is {dtype!r}: it must be a floating-point torch.dtype")

    def as_dict(self) -> dict[str, object]:
        """The options as values that JSON has; a function is given by its name."""
        values: dict[str, object] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.dtype):
                value = str(value).removeprefix("torch.")
            elif value is not None and not isinstance(value, int | str):
                value = getattr(value, "__qualname__", type(value).__name__)
            values[field.name] = value
        return values


def options_from_dict(values: Mapping[str, Any]) -> MemoryOptions:
    """The inverse of `as_dict` where no option is a function."""
    dtypes = {
        name: None if values[name] is None else getattr(torch, values[name])
        for name in ("weight_dtype", "param_dtype", "reduce_dtype")
        if name in values
    }
    return MemoryOptions(**{**values, **dtypes})

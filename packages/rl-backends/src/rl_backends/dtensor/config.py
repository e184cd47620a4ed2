"""How the DTensor backend shards a model and cuts a batch. None of it changes a result beyond rounding."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from rl_backends.config import BackendConfig, KernelsConfig
from rl_backends.kernels.table import static_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class DTensorConfig(BackendConfig):
    """Ranks = pipeline x replicate x shard x expert x context x tensor; `shard` is what the sizes below leave."""

    enabled: bool = True
    """Train with this backend, unless `megatron_cfg.enabled` takes precedence; see `select_backend`."""

    tensor_parallel_size: int = 1
    """Ranks that share each matrix multiplication."""

    expert_parallel_size: int = 1
    """Ranks that share the experts of a mixture; each has rows of its own."""

    pipeline_parallel_size: int = 1
    """Stages that the layers are shared out to, each with ranks of its own; microbatches go through one after another.
    """

    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """How forwards and backwards of a pipeline take turns. `1f1b` runs a backward as soon as it can, and holds the
    activations of fewer microbatches; `gpipe` runs all forwards first."""

    data_parallel_replicate_size: int = 1
    """Groups that hold a whole copy of the shards each (HSDP). 1 shards over all data-parallel ranks (FSDP)."""

    custom_parallel_plan: str | None = None
    """`package.module:name` of a plan or of a function that makes one, instead of the built-in plan."""

    share_prefixes: bool = False
    """Compute once what rows of one microbatch begin with alike: the prompt of a group of rollouts, and what their
    answers have in common. Needs `sequence_packing`; the result is the same."""

    activation_checkpointing: Literal["full", "selective"] | None = None
    """Recompute each layer's activations in backward: all of them, or all but matrix products and attention."""

    cpu_offload: bool = False
    """Keep shards, gradients and optimizer state in host memory; each layer visits the device when it runs."""

    compile: bool = False
    """Compile each layer with `torch.compile`: faster steps after a slow first one."""

    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    """Which code computes attention, the loss, norms, rotary embeddings, MLPs and linear layers."""

    reduce_gradients: Literal["every_microbatch", "last_microbatch"] = "every_microbatch"
    """When gradients are summed over data-parallel ranks. Once, at the last, communicates less, and keeps the whole
    gradient of the model on every rank until then."""

    router_aux_loss_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, sequence by sequence; 0 leaves it out."""

    def _problems(self) -> Iterator[str]:
        sizes = "tensor_parallel_size expert_parallel_size pipeline_parallel_size data_parallel_replicate_size"
        yield from super(DTensorConfig, self)._problems()
        yield from self._outside({">= 1": sizes, ">= 0": "router_aux_loss_coef"})
        yield from static_problems(self)
        if self.pipeline_parallel_size > 1:
            for holds, other in (
                (self.context_parallel_size > 1, "context_parallel_size > 1, which cuts what stages send"),
                (
                    self.expert_parallel_size > 1,
                    "expert_parallel_size > 1, whose ranks exchange tokens in their own time",
                ),
                (
                    self.micro_batch_tokens is not None and not self.sequence_packing,
                    "micro_batch_tokens of padded rows, whose bound one shape would break: set sequence_packing",
                ),
                (self.share_prefixes, "share_prefixes, whose packs have no padding to make them of one shape"),
                (self.lora_cfg is not None, "lora_cfg, whose merged weights are gathered from all layers"),
                (self.compile, "compile=True: stages are not compiled"),
                (self.router_aux_loss_coef > 0, "router_aux_loss_coef > 0, which every stage would have to report"),
            ):
                if holds:
                    yield f"pipeline_parallel_size > 1 cannot be combined with {other}; or set it to 1"
        if self.lora_cfg is not None and self.lora_cfg.use_dora and self.tensor_parallel_size > 1:
            yield (
                "lora_cfg.use_dora=True cannot be combined with tensor_parallel_size > 1, whose ranks do not have "
                "whole rows of a weight to take the length of: switch one of them off, or shard by FSDP alone"
            )
        if self.lora_cfg is not None and self.lora_cfg.target_parameters:
            for holds, other in (
                (self.tensor_parallel_size > 1, "tensor_parallel_size > 1: shard by FSDP alone"),
                (self.expert_parallel_size > 1, "expert_parallel_size > 1, whose plans know no adapters of experts"),
                (self.compile, "compile=True, which cannot follow weights that are merged in a pass"),
            ):
                if holds:
                    yield f"lora_cfg.target_parameters cannot be combined with {other}; or leave it out"
        if self.share_prefixes and not self.sequence_packing:
            yield "share_prefixes=True needs sequence_packing=True, whose attention knows where rows begin"
        if self.share_prefixes and self.router_aux_loss_coef > 0:
            yield (
                "share_prefixes=True cannot be combined with router_aux_loss_coef > 0, which balances experts within "
                "each row and would count shared tokens once; switch one of them off"
            )
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            yield "sequence_parallel=True needs tensor_parallel_size > 1, whose ranks share the sequence between blocks"
        if self.context_parallel_size > 1 and self.share_prefixes:
            yield (
                "context_parallel_size > 1 cannot be combined with share_prefixes, which reads rows out of a pack that "
                "one rank holds; switch one of them off"
            )

"""Configuration of the Megatron backend: the layout over ranks, microbatches, kernels.

Names are megatron-core's own, where it has one.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rl_backends.config import BackendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfig(BackendConfig):
    """Ranks = tensor x context x pipeline x data; experts are shared out within tensor x context x data."""

    enabled: bool = False
    """Train with this backend; it takes precedence over DTensor where both are enabled."""

    tensor_model_parallel_size: int = 1
    """Ranks that share each matrix multiplication."""

    pipeline_model_parallel_size: int = 1
    """Stages that the layers are shared out to; microbatches go through them in turn (1F1B)."""

    virtual_pipeline_model_parallel_size: int | None = None
    """Chunks of the model that each stage holds, which microbatches go through in turn (interleaved 1F1B): a stage
    waits less for the others. A step then has at least as many microbatches as there are stages. None is one."""

    num_layers_in_first_pipeline_stage: int | None = None
    """Layers of the first stage, which also holds the embedding; None shares the layers out evenly."""

    num_layers_in_last_pipeline_stage: int | None = None
    """Layers of the last stage, which also holds the head; None shares the layers out evenly."""

    pipeline_model_parallel_layout: str | None = None
    """What each stage holds, in Megatron's letters: E the embedding, t a layer, L the head, | the end of a stage, and
    a number after * to repeat: `Ett|t*3|t*2L`. With virtual stages it has a part for each of a stage's chunks: all
    first ones, then all second ones."""

    expert_model_parallel_size: int = 1
    """Ranks that share the experts of a mixture."""

    use_distributed_optimizer: bool = False
    """Share the optimizer's state out to data-parallel ranks (ZeRO-1)."""

    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute activations in backward: of whole layers, or of attention alone."""

    transformer_impl: Literal["local", "transformer_engine"] | None = None
    """Whose layers: plain torch, which runs anywhere, or Transformer Engine's kernels. None is Transformer Engine on
    `cuda`, and it is an error if it is not installed; plain torch on `cpu`."""

    bias_activation_fusion: bool = False
    """Compile SwiGLU into one kernel (torch.compile)."""

    bias_dropout_fusion: bool = False
    """Compile the addition of the residual into one kernel (torch.compile)."""

    apply_rope_fusion: bool = False
    """Rotary positions in one kernel of Transformer Engine."""

    moe_permute_fusion: bool = False
    """Sorting tokens by expert in one kernel of Transformer Engine."""

    moe_router_fusion: bool = False
    """Choosing experts in one kernel of Transformer Engine."""

    freeze_moe_router: bool = False
    """Leave the weights that choose experts as they are, so that trainer and engine choose alike for longer. Refused of
    a model without experts."""

    gradient_accumulation_fusion: bool = False
    """Add weight gradients to their float32 sum inside the matrix multiplication; needs Transformer Engine."""

    overlap_grad_reduce: bool = False
    """Sum gradients over data-parallel ranks while backward still runs. `forward_backward` is then called once a
    step."""

    overlap_param_gather: bool = False
    """Gather updated parameters over data-parallel ranks while the next forward runs. Needs `overlap_grad_reduce` and
    `use_distributed_optimizer`."""

    @property
    def data_multiple(self) -> int:
        """Ranks that hold one copy of the model: the run's ranks are a multiple of it."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    def _problems(self) -> Iterator[str]:
        sizes = (
            "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
            "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage"
        )
        yield from super(MegatronConfig, self)._problems()
        yield from self._outside({">= 1": sizes})
        if (chunks := self.virtual_pipeline_model_parallel_size) is not None and chunks < 2:
            yield f"virtual_pipeline_model_parallel_size={chunks} must be at least 2 chunks a stage, or None for one"
        tensor_parallel = self.tensor_model_parallel_size > 1
        if self.sequence_parallel and not tensor_parallel:
            yield (
                "sequence_parallel=True needs tensor_model_parallel_size > 1, whose ranks share the sequence between "
                "blocks"
            )
        if self.expert_model_parallel_size > 1 and tensor_parallel and not self.sequence_parallel:
            yield (
                "expert_model_parallel_size > 1 with tensor_model_parallel_size > 1 needs sequence_parallel=True, or "
                "its ranks would each send the same tokens to the experts"
            )
        uneven = (
            "num_layers_in_first_pipeline_stage",
            "num_layers_in_last_pipeline_stage",
            "pipeline_model_parallel_layout",
        )
        asked = [name for name in uneven if getattr(self, name) is not None]
        for name in (*asked, "virtual_pipeline_model_parallel_size"):
            if getattr(self, name) is not None and self.pipeline_model_parallel_size == 1:
                yield f"{name} needs pipeline_model_parallel_size > 1"
        if self.pipeline_model_parallel_layout is not None and len(asked) > 1:
            yield (
                "pipeline_model_parallel_layout says how many layers each stage has: leave the other fields of "
                "pipeline stages out"
            )
        plain = self.transformer_impl == "local" or (self.transformer_impl is None and self.device == "cpu")
        of_engine = ("apply_rope_fusion", "moe_permute_fusion", "moe_router_fusion", "gradient_accumulation_fusion")
        for name in of_engine:
            if getattr(self, name) and plain:
                yield (
                    f"{name}=True is a kernel of Transformer Engine, on a GPU: set device='cuda' and "
                    f"transformer_impl='transformer_engine', or leave it out"
                )
        if self.transformer_impl == "transformer_engine" and self.device == "cpu":
            yield "transformer_impl='transformer_engine' needs device='cuda'"
        if self.lora_cfg is not None:
            if not plain:
                yield (
                    "lora_cfg needs plain torch's layers: Transformer Engine's read their weights past torch. Set "
                    "transformer_impl='local', or lora_cfg to None"
                )
            if self.lora_cfg.use_dora:
                yield (
                    "lora_cfg.use_dora=True is the DTensor backend's: set policy.dtensor_cfg.enabled=true, or "
                    "use_dora=False"
                )
            if self.lora_cfg.base_dtype != self.precision:
                yield (
                    f"lora_cfg.base_dtype={self.lora_cfg.base_dtype!r} with precision={self.precision!r}: on Megatron "
                    f"frozen weights are in the precision of the others; set base_dtype to it"
                )
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            yield (
                "overlap_param_gather=True needs use_distributed_optimizer=True and overlap_grad_reduce=True: without "
                "them no rank lacks parameters"
            )


# ---- Where `rl-backends convert` keeps Megatron checkpoints of Hugging Face models.

VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
SUBFOLDER = "nemo_rl"


def megatron_checkpoint_dir() -> Path:
    """`NRL_MEGATRON_CHECKPOINT_DIR`, else `$HF_HOME/nemo_rl`, else `~/.cache/huggingface/nemo_rl`.

    A variable that is empty counts as not set.
    """
    return _chosen()[0]


def explain_megatron_checkpoint_dir() -> str:
    """That folder, and which rule gave it, in one line."""
    folder, reason = _chosen()
    return f"{folder} ({reason})"


def _chosen() -> tuple[Path, str]:
    if own := os.environ.get(VARIABLE):
        return Path(own).expanduser(), f"{VARIABLE} says so"
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / SUBFOLDER, f"HF_HOME is {home}, and {VARIABLE} is not set"
    return Path("~/.cache/huggingface").expanduser() / SUBFOLDER, f"neither {VARIABLE} nor HF_HOME is set"

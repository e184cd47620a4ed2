"""Training backends: examples and a loss over log-probabilities in, optimizer steps out.

A model is loaded, sharded over ranks, trained on microbatches and saved; what the loss means, where rollouts come from
and which engine takes the weights is the caller's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends.backend import Backend, TrainingBackend
    from rl_backends.checkpoint_directory import megatron_checkpoint_dir
    from rl_backends.checkpoints import (
        CheckpointState,
        CheckpointWrite,
        find_latest,
        load_checkpoint,
        prune,
        save_checkpoint,
    )
    from rl_backends.dry_run.explanation import Explanation, explain
    from rl_backends.dry_run.predict import DryRun, predict
    from rl_backends.dtensor.backend import DTensorBackend
    from rl_backends.dtensor.config import DTensorConfig
    from rl_backends.errors import (
        BatchError,
        CheckpointError,
        MissingDependencyError,
        ModelError,
        NonFiniteGradientError,
        RankError,
    )
    from rl_backends.examples import TokenBatch
    from rl_backends.export import export_pretrained
    from rl_backends.kernels import Kernel, KernelsConfig, register_kernel
    from rl_backends.loading import (
        LoadReport,
        ModelSource,
        check_generation_config,
        check_vocabulary,
        initialise,
        load_causal_lm,
        load_tokenizer,
        materialize,
        open_model,
    )
    from rl_backends.lora import LoraConfig, MergedWeights
    from rl_backends.megatron.backend import MegatronBackend
    from rl_backends.megatron.config import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
    from rl_backends.metrics import MemoryUse, ModelFlops, StepMetrics, memory_by_category, peak_flops_per_s
    from rl_backends.offload import Offloader, OffloadReport
    from rl_backends.optimizers import GradientStep, MuonConfig, OptimizerConfig, clip_and_step, make_optimizers
    from rl_backends.reference import ReferenceModel
    from rl_backends.selection import BackendSelection, select_backend

_HOMES = {
    "Backend": "backend",
    "TrainingBackend": "backend",
    "megatron_checkpoint_dir": "checkpoint_directory",
    "BackendSelection": "selection",
    "select_backend": "selection",
    "MissingDependencyError": "errors",
    "MegatronSchedulerConfig": "megatron.config",
    "MegatronOptimizerConfig": "megatron.config",
    "MegatronConfig": "megatron.config",
    "MegatronBackend": "megatron.backend",
    "BatchError": "errors",
    "CheckpointError": "errors",
    "CheckpointState": "checkpoints",
    "CheckpointWrite": "checkpoints",
    "DTensorBackend": "dtensor.backend",
    "DTensorConfig": "dtensor.config",
    "DryRun": "dry_run.predict",
    "Explanation": "dry_run.explanation",
    "GradientStep": "optimizers",
    "Kernel": "kernels",
    "KernelsConfig": "kernels",
    "register_kernel": "kernels",
    "LoadReport": "loading",
    "LoraConfig": "lora",
    "MemoryUse": "metrics",
    "MergedWeights": "lora",
    "ModelError": "errors",
    "ModelFlops": "metrics",
    "ModelSource": "loading",
    "MuonConfig": "optimizers",
    "NonFiniteGradientError": "errors",
    "OffloadReport": "offload",
    "Offloader": "offload",
    "OptimizerConfig": "optimizers",
    "RankError": "errors",
    "ReferenceModel": "reference",
    "StepMetrics": "metrics",
    "TokenBatch": "examples",
    "check_generation_config": "loading",
    "check_vocabulary": "loading",
    "clip_and_step": "optimizers",
    "explain": "dry_run.explanation",
    "export_pretrained": "export",
    "find_latest": "checkpoints",
    "initialise": "loading",
    "load_causal_lm": "loading",
    "load_checkpoint": "checkpoints",
    "load_tokenizer": "loading",
    "make_optimizers": "optimizers",
    "materialize": "loading",
    "memory_by_category": "metrics",
    "open_model": "loading",
    "peak_flops_per_s": "metrics",
    "predict": "dry_run.predict",
    "prune": "checkpoints",
    "save_checkpoint": "checkpoints",
}

__all__ = [
    "Backend",
    "BackendSelection",
    "BatchError",
    "CheckpointError",
    "CheckpointState",
    "CheckpointWrite",
    "DTensorBackend",
    "DTensorConfig",
    "DryRun",
    "Explanation",
    "GradientStep",
    "Kernel",
    "KernelsConfig",
    "LoadReport",
    "LoraConfig",
    "MegatronBackend",
    "MegatronConfig",
    "MegatronOptimizerConfig",
    "MegatronSchedulerConfig",
    "MemoryUse",
    "MergedWeights",
    "MissingDependencyError",
    "ModelError",
    "ModelFlops",
    "ModelSource",
    "MuonConfig",
    "NonFiniteGradientError",
    "OffloadReport",
    "Offloader",
    "OptimizerConfig",
    "RankError",
    "ReferenceModel",
    "StepMetrics",
    "TokenBatch",
    "TrainingBackend",
    "check_generation_config",
    "check_vocabulary",
    "clip_and_step",
    "explain",
    "export_pretrained",
    "find_latest",
    "initialise",
    "load_causal_lm",
    "load_checkpoint",
    "load_tokenizer",
    "make_optimizers",
    "materialize",
    "megatron_checkpoint_dir",
    "memory_by_category",
    "open_model",
    "peak_flops_per_s",
    "predict",
    "prune",
    "register_kernel",
    "save_checkpoint",
    "select_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

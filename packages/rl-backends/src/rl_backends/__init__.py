"""Training backends: examples and a loss over log-probabilities in, optimizer steps out.

A model is loaded, sharded over ranks, trained on microbatches and saved; what the loss means, where rollouts come from
and which engine takes the weights is the caller's.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends.backend import Backend, ReferenceModel, TrainingBackend
    from rl_backends.checkpoints import (
        CheckpointState,
        CheckpointWrite,
        find_latest,
        load_checkpoint,
        prune,
        save_checkpoint,
    )
    from rl_backends.dry_run.explanation import DryRun, Explanation, explain, predict
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
    from rl_backends.megatron.config import MegatronConfig, megatron_checkpoint_dir
    from rl_backends.metrics import MemoryUse, ModelFlops, StepMetrics, memory_by_category, peak_flops_per_s
    from rl_backends.offload import Offloader, OffloadReport
    from rl_backends.optimizers import GradientStep, MuonConfig, OptimizerConfig, clip_and_step, make_optimizers
    from rl_backends.selection import BackendSelection, select_backend

_HOMES = {
    name: home
    for home, names in {
        "backend": "Backend ReferenceModel TrainingBackend",
        "checkpoints": "CheckpointState CheckpointWrite find_latest load_checkpoint prune save_checkpoint",
        "dry_run.explanation": "DryRun explain Explanation predict",
        "dtensor.backend": "DTensorBackend",
        "dtensor.config": "DTensorConfig",
        "errors": "BatchError CheckpointError MissingDependencyError ModelError NonFiniteGradientError RankError",
        "examples": "TokenBatch",
        "export": "export_pretrained",
        "kernels": "Kernel KernelsConfig register_kernel",
        "loading": "check_generation_config check_vocabulary initialise load_causal_lm load_tokenizer LoadReport "
        "materialize ModelSource open_model",
        "lora": "LoraConfig MergedWeights",
        "megatron.backend": "MegatronBackend",
        "megatron.config": "megatron_checkpoint_dir MegatronConfig",
        "metrics": "memory_by_category MemoryUse ModelFlops peak_flops_per_s StepMetrics",
        "offload": "Offloader OffloadReport",
        "optimizers": "clip_and_step GradientStep make_optimizers MuonConfig OptimizerConfig",
        "selection": "BackendSelection select_backend",
    }.items()
    for name in names.split()
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

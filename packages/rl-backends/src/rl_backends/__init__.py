"""Training backends: examples and a loss over log-probabilities in, optimizer steps out.

A model is loaded, sharded over ranks, trained on microbatches and saved; what the loss means, where rollouts come from
and which engine takes the weights is the caller's.
"""

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends.backend import Backend, ReferenceModel, TrainingBackend
    from rl_backends.checkpoints.loading import CheckpointState, load_checkpoint
    from rl_backends.checkpoints.saving import CheckpointWrite, find_latest, prune, save_checkpoint
    from rl_backends.config import KernelsConfig, LoraConfig
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
    from rl_backends.kernels.table import Kernel, register_kernel
    from rl_backends.loading.skeleton import materialize
    from rl_backends.loading.source import (
        ModelSource,
        check_generation_config,
        check_vocabulary,
        load_causal_lm,
        load_tokenizer,
        open_model,
    )
    from rl_backends.loading.weights import LoadReport, initialise
    from rl_backends.lora.merged import MergedWeights
    from rl_backends.megatron.backend import MegatronBackend
    from rl_backends.megatron.config import MegatronConfig, megatron_checkpoint_dir
    from rl_backends.metrics.flops import ModelFlops, peak_flops_per_s
    from rl_backends.metrics.memory import MemoryUse, memory_by_category
    from rl_backends.metrics.step import StepMetrics
    from rl_backends.offload import Offloader, OffloadReport
    from rl_backends.optimizers.config import MuonConfig, OptimizerConfig
    from rl_backends.optimizers.optimizers import GradientStep, clip_and_step, make_optimizers
    from rl_backends.selection import BackendSelection, select_backend

# Each name is loaded when it is first asked for, from where the imports above, which only type checkers do, have it.
_HOMES = {
    alias.name: node.module
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.module is not None
    for alias in node.names
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
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

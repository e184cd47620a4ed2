"""What may be relied on: the names, the configurations, and what importing them costs."""

import subprocess
import sys

import pytest

import rl_backends
from rl_backends import DTensorConfig, OptimizerConfig

NAMES = {
    "BatchError",
    "CheckpointError",
    "CheckpointState",
    "CheckpointWrite",
    "DTensorBackend",
    "DTensorConfig",
    "GradientStep",
    "LoadReport",
    "LoraConfig",
    "MemoryUse",
    "MergedWeights",
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
    "check_generation_config",
    "check_vocabulary",
    "clip_and_step",
    "export_pretrained",
    "find_latest",
    "initialise",
    "load_causal_lm",
    "load_checkpoint",
    "load_tokenizer",
    "make_optimizers",
    "materialize",
    "memory_by_category",
    "open_model",
    "peak_flops_per_s",
    "prune",
    "save_checkpoint",
}


def test_the_public_names():
    assert set(rl_backends.__all__) == NAMES
    assert all(hasattr(rl_backends, name) for name in NAMES)


def test_importing_it_imports_no_model_code():
    code = (
        "import sys, rl_backends\n"
        "heavy = {'transformers', 'vllm', 'ray', 'pydantic', 'rl_algorithms', 'rl_generation', 'rl_refit'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("config", "options"),
    [
        (DTensorConfig, {"enabled": False}),
        (DTensorConfig, {"micro_batch_size": 0}),
        (DTensorConfig, {"tensor_parallel_size": -1}),
        (OptimizerConfig, {"lr": 0.0}),
        (OptimizerConfig, {"lr": 1e-3, "betas": (0.9, 1.0)}),
        (OptimizerConfig, {"lr": 1e-3, "final_lr_ratio": 1.5}),
        (OptimizerConfig, {"lr": 1e-3, "warmup_steps": -1}),
    ],
)
def test_an_impossible_configuration_names_its_value(config, options):
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"{name}={str(value).replace('(', '.').replace(')', '.')}"):
        config(**options)

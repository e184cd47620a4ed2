"""What may be relied on: the names, the configurations, and what importing them costs."""

import subprocess
import sys

import jaxtyping
import pytest

import rl_backends
from rl_backends import DTensorConfig, LoraConfig, MuonConfig, OptimizerConfig

NAMES = {
    "Backend",
    "TrainingBackend",
    "BackendSelection",
    "MegatronBackend",
    "MegatronConfig",
    "MissingDependencyError",
    "megatron_checkpoint_dir",
    "select_backend",
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
    "explain",
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
    "predict",
    "prune",
    "register_kernel",
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
        (DTensorConfig, {"micro_batch_size": 0}),
        (DTensorConfig, {"tensor_parallel_size": -1}),
        (OptimizerConfig, {"lr": 0.0}),
        (OptimizerConfig, {"lr": 1e-3, "betas": (0.9, 1.0)}),
        (OptimizerConfig, {"lr": 1e-3, "final_lr_ratio": 1.5}),
        (OptimizerConfig, {"lr": 1e-3, "warmup_steps": -1}),
        (OptimizerConfig, {"lr": float("inf")}),
        (OptimizerConfig, {"lr": 1e-3, "weight_decay": float("inf")}),
        (OptimizerConfig, {"lr": 1e-3, "betas": (0.9, float("nan"))}),
        (DTensorConfig, {"timeout_s": float("inf")}),
        (MuonConfig, {"adamw_lr_ratio": float("inf")}),
    ],
)
def test_an_impossible_configuration_names_its_value(config, options):
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=rf"{name}={str(value).replace('(', '.').replace(')', '.')}"):
        config(**options)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (DTensorConfig, {"precision": "bf16"}, "must be one of 'float32', 'bfloat16': 'bfloat16' is the nearest"),
        (DTensorConfig, {"reduce_gradients": "last"}, "'every_microbatch', 'last_microbatch': 'last_microbatch' is"),
        (DTensorConfig, {"activation_checkpointing": "Full"}, "'full', 'selective', None: 'full' is the nearest"),
        (DTensorConfig, {"device": "gpu"}, "must be one of 'cpu', 'cuda'"),
        (OptimizerConfig, {"lr": 1e-3, "name": "sgd"}, "must be one of 'adamw', 'adamw_8bit', 'muon'"),
        (OptimizerConfig, {"lr": 1e-3, "implementation": "for_loop"}, "'for-loop' is the nearest"),
        (OptimizerConfig, {"lr": 1e-3, "schedule": "cosin"}, "'cosine' is the nearest"),
        (OptimizerConfig, {"lr": 1e-3, "on_nonfinite_gradient": "ignore"}, "must be one of 'raise', 'skip'"),
        (MuonConfig, {"dtype": "float16"}, "must be one of 'bfloat16', 'float32'"),
        (MuonConfig, {"adjust_lr_fn": None}, "must be one of 'original', 'match_rms_adamw'"),
        (LoraConfig, {"base_dtype": "fp32"}, "must be one of 'float32', 'bfloat16'"),
    ],
)
def test_a_choice_that_there_is_not_is_refused_with_those_that_there_are(config, options, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks that only tests have
    name, value = list(options.items())[-1]
    with pytest.raises(ValueError, match=f"{name}={value!r} .*{message}"):
        config(**options)


def test_every_choice_that_there_is_can_be_made():
    for value in ("full", "selective", None):
        assert DTensorConfig(activation_checkpointing=value).activation_checkpointing == value

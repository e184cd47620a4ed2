"""What may be relied on: the names, the configurations, and what importing them costs."""

import itertools
import subprocess
import sys

import pytest

import rl_backends
from rl_backends import DTensorConfig, OptimizerConfig
from rl_backends.dtensor.optimizer import learning_rate_factor

NAMES = {
    "DTensorBackend",
    "DTensorConfig",
    "ModelError",
    "NonFiniteGradientError",
    "OptimizerConfig",
    "check_generation_config",
    "check_vocabulary",
    "load_causal_lm",
    "load_tokenizer",
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


def test_the_schedule_warms_up_peaks_and_ends_where_it_says():
    config = OptimizerConfig(lr=1.0, warmup_steps=10, final_lr_ratio=0.2)
    factors = [learning_rate_factor(index, config, num_steps=100) for index in range(100)]
    assert factors[0] == pytest.approx(0.1)
    assert factors[9] == factors[10] == pytest.approx(1.0)
    assert factors[-1] == pytest.approx(0.2)
    assert all(later < earlier for earlier, later in itertools.pairwise(factors[10:]))

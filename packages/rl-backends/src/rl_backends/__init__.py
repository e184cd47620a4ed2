"""Training backends: examples and a loss over log-probabilities in, optimizer steps out.

Knows how a model is loaded, cut over ranks and microbatches, trained and saved. Does not know what the loss means,
where rollouts come from, or which engine takes the weights.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_backends.dtensor.backend import DTensorBackend
    from rl_backends.dtensor.config import DTensorConfig
    from rl_backends.dtensor.reference import ReferenceModel
    from rl_backends.errors import BatchError, CheckpointError, ModelError, NonFiniteGradientError, RankError
    from rl_backends.examples import TokenBatch
    from rl_backends.loading import check_generation_config, check_vocabulary, load_causal_lm, load_tokenizer
    from rl_backends.optimizers import OptimizerConfig

_HOMES = {
    "BatchError": "errors",
    "CheckpointError": "errors",
    "DTensorBackend": "dtensor.backend",
    "DTensorConfig": "dtensor.config",
    "ModelError": "errors",
    "NonFiniteGradientError": "errors",
    "OptimizerConfig": "optimizers",
    "RankError": "errors",
    "ReferenceModel": "dtensor.reference",
    "TokenBatch": "examples",
    "check_generation_config": "loading",
    "check_vocabulary": "loading",
    "load_causal_lm": "loading",
    "load_tokenizer": "loading",
}

__all__ = [
    "BatchError",
    "CheckpointError",
    "DTensorBackend",
    "DTensorConfig",
    "ModelError",
    "NonFiniteGradientError",
    "OptimizerConfig",
    "RankError",
    "ReferenceModel",
    "TokenBatch",
    "check_generation_config",
    "check_vocabulary",
    "load_causal_lm",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this function from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

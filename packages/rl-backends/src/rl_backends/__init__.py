"""Training backends: examples and a loss over log-probabilities in, optimizer steps out.

Knows how a model is loaded, cut over ranks and microbatches, trained and saved. Does not know what the loss means,
where rollouts come from, or which engine takes the weights.
"""

from rl_backends.dtensor.backend import DTensorBackend, NonFiniteGradientError
from rl_backends.dtensor.config import DTensorConfig, OptimizerConfig
from rl_backends.loading import ModelError, check_generation_config, check_vocabulary, load_causal_lm, load_tokenizer

__all__ = [
    "DTensorBackend",
    "DTensorConfig",
    "ModelError",
    "NonFiniteGradientError",
    "OptimizerConfig",
    "check_generation_config",
    "check_vocabulary",
    "load_causal_lm",
    "load_tokenizer",
]

"""Generate rollouts with the log-probabilities that they were sampled from.

Knows language models, sampling and token ids. Does not know text, rewards, training or how new weights arrive.
"""

from rl_generation.errors import LogpError, ModelError, PromptError
from rl_generation.rollout import Rollout
from rl_generation.sampling import Sampling
from rl_generation.transformers_engine import TransformersEngine
from rl_generation.verify import LogpAgreement, verify_logp

__all__ = [
    "LogpAgreement",
    "LogpError",
    "ModelError",
    "PromptError",
    "Rollout",
    "Sampling",
    "TransformersEngine",
    "verify_logp",
]

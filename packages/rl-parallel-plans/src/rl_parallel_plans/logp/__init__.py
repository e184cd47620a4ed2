"""Log-probabilities of tokens from hidden states and an lm_head, or from logits, without all logits at once."""

from rl_parallel_plans.logp.chunks import TopKLogp
from rl_parallel_plans.logp.linear import linear_logp, logp_of_token_ids, top_k_logp
from rl_parallel_plans.logp.logits import get_logprobs_from_vocab_parallel_logits, top_k_logp_from_logits

__all__ = [
    "TopKLogp",
    "get_logprobs_from_vocab_parallel_logits",
    "linear_logp",
    "logp_of_token_ids",
    "top_k_logp",
    "top_k_logp_from_logits",
]

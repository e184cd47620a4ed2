"""Compares the log-probabilities that rollouts carry with a plain forward. Does not know caches, batching or draws.

Difference a token: d = logp of the rollout - logp of the forward. The forward is in float32 and sees whole sequences:
no cache, no padding, no mask; sequences of one length at a time.
Reference: token_mult_prob_error = mean exp|d|, NeMo RL (github.com/NVIDIA-NeMo/RL), which calls above 1.05 a fault.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_generation.distribution import sampled_logits
from rl_generation.errors import LogpError, ModelError
from rl_generation.rollout import Rollout
from rl_generation.sampling import Sampling
from rl_generation.transformers_engine import TransformersEngine

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["LogpAgreement", "verify_logp"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LogpAgreement:
    """How far the logp of rollouts is from that of a plain forward, in nats, over all tokens of all rollouts."""

    tokens: int
    """Tokens compared."""

    max_abs_difference: float
    """max |d|; in float32 below 1e-5 where nothing is wrong."""

    mean_abs_difference: float
    """mean |d|."""

    token_mult_prob_error: float
    """mean exp|d|, 1 where both agree."""

    worst: tuple[int, int]
    """Index of the rollout, and of the token in it, where |d| is largest."""

    outside_support: int
    """Tokens that the forward's top-k or top-p excludes; left out of all the above.

    A few are rounding: a token on the edge of the cut falls on either side of it. Many are a fault.
    """


def verify_logp(
    engine_or_model: "TransformersEngine | PreTrainedModel",
    prompts: Sequence[Sequence[int]],
    rollouts: Sequence[Rollout],
    *,
    sampling: Sampling,
    rows_per_forward: int = 16,
) -> LogpAgreement:
    """Recompute the logp of `rollouts` (rollout i answers prompt i, made under `sampling`) and compare.

    A model in lower precision is compared with a float32 copy of itself, which needs that much memory more.

    Raises:
        ValueError: Lists that do not match, no tokens, or rollouts made otherwise than `sampling` says.
        ModelError: The model is in training mode, or the engine's weights are of another version than the rollouts.
        LogpError: The forward itself gives NaN.
    """
    model = _model_of(engine_or_model, rollouts)
    _check(prompts, rollouts, sampling)
    reference = _in_float32(model)
    differences: dict[tuple[int, int], float] = {}
    outside_support = 0
    for batch in _batches(prompts, rollouts, rows_per_forward):
        logp = _plain_logp(reference, [(prompts[index], rollouts[index].tokens) for index in batch], sampling)
        places = [(index, step) for index in batch for step in range(len(rollouts[index].tokens))]
        for (index, step), expected in zip(places, logp.tolist(), strict=True):
            if math.isnan(expected):
                raise LogpError(f"rollout {index}: the plain forward gives NaN at token {step}; look at the weights")
            if expected == -torch.inf:
                outside_support += 1
            else:
                differences[index, step] = rollouts[index].logp[step] - expected
    return _summary(differences, outside_support)


def _model_of(
    engine_or_model: "TransformersEngine | PreTrainedModel", rollouts: Sequence[Rollout]
) -> "PreTrainedModel":
    model = engine_or_model.model if isinstance(engine_or_model, TransformersEngine) else engine_or_model
    if model.training:
        raise ModelError(f"{type(model).__name__} is in training mode, where dropout changes logp: call model.eval()")
    if isinstance(engine_or_model, TransformersEngine):
        for index, rollout in enumerate(rollouts):
            if rollout.version != engine_or_model.version:
                raise ModelError(
                    f"rollout {index} was made by weights of version {rollout.version}, and the engine now holds "
                    f"version {engine_or_model.version}: verify before the next refit"
                )
    return model


def _check(prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], sampling: Sampling) -> None:
    if len(prompts) != len(rollouts) or not rollouts:
        raise ValueError(
            f"verify_logp needs one prompt a rollout, and at least one; got {len(prompts)}, {len(rollouts)}"
        )
    logp_of = "raw" if sampling.greedy else "sampled"
    for index, rollout in enumerate(rollouts):
        if rollout.logp_of != logp_of or len(rollout.logp) != len(rollout.tokens):
            raise ValueError(
                f"rollout {index} has {len(rollout.tokens)} tokens with {len(rollout.logp)} logp of "
                f"{rollout.logp_of!r}; temperature={sampling.temperature} gives one each of {logp_of!r}"
            )


def _in_float32(model: "PreTrainedModel") -> "PreTrainedModel":
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return model
    duplicate = copy.deepcopy(model)
    torch.nn.Module.float(duplicate)
    return duplicate


def _batches(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], rows_per_forward: int
) -> Iterator[list[int]]:
    """Cut the rollouts into batches of one total length each."""
    by_length: dict[int, list[int]] = {}
    for index, (prompt, rollout) in enumerate(zip(prompts, rollouts, strict=True)):
        by_length.setdefault(len(prompt) + len(rollout.tokens), []).append(index)
    for indices in by_length.values():
        for start in range(0, len(indices), rows_per_forward):
            yield indices[start : start + rows_per_forward]


@torch.no_grad()
def _plain_logp(
    model: "PreTrainedModel", pairs: Sequence[tuple[Sequence[int], Sequence[int]]], sampling: Sampling
) -> Float[Tensor, " answer_tokens"]:
    """Return the logp of every answer token, in order; all pairs have one total length."""
    sequences = torch.tensor([[*prompt, *answer] for prompt, answer in pairs], device=model.device)
    logits = model(input_ids=sequences, use_cache=False).logits[:, :-1]
    before = torch.tensor([len(prompt) - 1 for prompt, _ in pairs], device=model.device)
    in_answer = torch.arange(logits.shape[1], device=model.device) >= before[:, None]
    return _logp(logits[in_answer], sequences[:, 1:][in_answer], sampling)


def _logp(logits: Float[Tensor, "N V"], tokens: Int[Tensor, " N"], sampling: Sampling) -> Float[Tensor, " N"]:
    allowed = logits.float() if sampling.greedy else sampled_logits(logits, sampling)
    return allowed.log_softmax(-1).gather(1, tokens[:, None])[:, 0]


def _summary(differences: dict[tuple[int, int], float], outside_support: int) -> LogpAgreement:
    if not differences:
        raise LogpError(
            f"all {outside_support} tokens are outside the plain forward's support: is this the same model?"
        )
    absolute = torch.tensor(list(differences.values()), dtype=torch.float64).abs()
    return LogpAgreement(
        tokens=len(differences),
        max_abs_difference=float(absolute.max()),
        mean_abs_difference=float(absolute.mean()),
        token_mult_prob_error=float(absolute.exp().mean()),
        worst=list(differences)[int(absolute.argmax())],
        outside_support=outside_support,
    )

"""Compares the log-probabilities that rollouts carry with a plain forward. Does not know caches, batching or draws.

Difference a token: d = logp of the rollout - logp of the forward. The forward is in float32 and sees whole sequences:
no cache, no padding, no mask; sequences of one length at a time.
Reference: token_mult_prob_error = mean exp|d|, NeMo RL (github.com/NVIDIA-NeMo/RL), which calls above 1.05 a fault.
"""

import copy
import math
import random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.agreement import LogpAgreement, TokenDifference
from rl_generation.distribution import SamplingTensors, raw_logp, sampled_logits
from rl_generation.engine import Engine
from rl_generation.errors import LogpError, ModelError
from rl_generation.requests import Limits, Request, Sampling, make_requests
from rl_generation.rollout import LogpOf, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compare_logp", "verify_logp"]

PROMPTS, PROMPT_LENGTHS, NEW_TOKENS = 8, (2, 24), 16


def verify_logp(
    engine: Engine,
    model: "PreTrainedModel",
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    rows_per_forward: int = 16,
) -> LogpAgreement:
    """Have `engine` answer `prompts`, and compare the logp of its answers with a forward of `model`.

    Args:
        engine: Any engine, of the same weights as `model`.
        model: The policy, or for a `TransformersEngine` its own `engine.model`. In eval mode. One in lower precision is
            compared through a float32 copy of itself, which needs that much memory more.
        prompts: Token ids; by default eight of random tokens and different lengths.
        sampling: By default 16 tokens at temperature 1 with a seed.
        rows_per_forward: Answers that one forward takes.

    Raises:
        ModelError: The model is in training mode.
        PromptError: The engine refuses the request, or there are no prompts.
        ValueError: The sampling has bad words, which a forward does not know of.
        LogpError: The forward itself gives NaN, or no answer has a token that the forward admits.
    """
    limits = engine.limits
    how = Sampling(max_new_tokens=NEW_TOKENS, seed=0) if sampling is None else sampling
    asked = _random_prompts(limits, new_tokens=_most_new_tokens(how)) if prompts is None else prompts
    requests = make_requests(asked, how, limits)
    rollouts = engine.generate(asked, [request.sampling for request in requests])
    return compare_logp(model, requests, rollouts, rows_per_forward=rows_per_forward)


def compare_logp(
    model: "PreTrainedModel", requests: Sequence[Request], rollouts: Sequence[Rollout], *, rows_per_forward: int = 16
) -> LogpAgreement:
    """Compare the logp of `rollouts`, made of `requests` some time ago, with a forward of `model`. As `verify_logp`."""
    _check(model, requests, rollouts)
    asked = {request.prompt_index: request for request in requests}
    reference = _in_float32(model)
    differences: list[TokenDifference] = []
    for batch in _batches(asked, rollouts, rows_per_forward):
        logp = _plain_logp(reference, [(asked[rollout.prompt_index], rollout) for rollout in batch]).tolist()
        places = [(rollout, step) for rollout in batch for step in range(len(rollout.tokens))]
        differences += [_difference(*place, expected) for place, expected in zip(places, logp, strict=True)]
    if not any(math.isfinite(each.model_logp) for each in differences):
        raise LogpError(
            f"all {len(differences)} tokens are outside the plain forward's support: is this the same model?"
        )
    differences.sort(key=lambda each: (each.prompt_index, each.sample_index, each.step))
    return LogpAgreement(differences=tuple(differences))


def _most_new_tokens(how: Sampling | Sequence[Sampling]) -> int:
    return max(each.max_new_tokens for each in ([how] if isinstance(how, Sampling) else how))


def _random_prompts(limits: Limits, *, new_tokens: int) -> list[list[int]]:
    draw = random.Random(0)
    shortest, longest = PROMPT_LENGTHS
    if limits.max_length is not None:
        longest = max(shortest, min(longest, limits.max_length - new_tokens))
    lengths = [draw.randint(shortest, longest) for _ in range(PROMPTS)]
    return [[draw.randrange(limits.vocab_size) for _ in range(length)] for length in lengths]


def _check(model: "PreTrainedModel", requests: Sequence[Request], rollouts: Sequence[Rollout]) -> None:
    if not isinstance(model, torch.nn.Module):
        raise ModelError(f"the model must be one of transformers, to run a plain forward; got {model!r:.60}")
    if model.training:
        raise ModelError(f"{type(model).__name__} is in training mode, where dropout changes logp: call model.eval()")
    if not sum(len(rollout.tokens) for rollout in rollouts):
        raise ValueError(f"there is nothing to compare: {len(rollouts)} rollouts hold no token")
    indices = {request.prompt_index for request in requests}
    for rollout in rollouts:
        name = f"rollout {rollout.sample_index} of prompt {rollout.prompt_index}"
        if rollout.prompt_index not in indices:
            raise ValueError(f"{name} answers none of the requests given; they are {sorted(indices)}")
        if len(rollout.versions) > 1:
            versions = [span.version for span in rollout.versions]
            raise ValueError(f"{name} was made by weights of versions {versions}, and a model has one")
    for request in requests:
        if request.sampling.bad_words:
            raise ValueError(
                f"prompt {request.prompt_index} has bad_words={request.sampling.bad_words}, which a plain forward does "
                f"not know of: verify without them"
            )


def _in_float32(model: "PreTrainedModel") -> "PreTrainedModel":
    if all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        return model
    duplicate = copy.deepcopy(model)
    torch.nn.Module.float(duplicate)
    return duplicate


def _batches(
    asked: dict[int, Request], rollouts: Sequence[Rollout], rows_per_forward: int
) -> Iterator[Sequence[Rollout]]:
    """Cut the rollouts into batches of one total length each."""
    by_length: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        if rollout.tokens:
            length = len(asked[rollout.prompt_index].prompt) + len(rollout.tokens)
            by_length.setdefault(length, []).append(rollout)
    for rows in by_length.values():
        for start in range(0, len(rows), rows_per_forward):
            yield rows[start : start + rows_per_forward]


@torch.no_grad()
def _plain_logp(model: "PreTrainedModel", pairs: Sequence[tuple[Request, Rollout]]) -> Float[Tensor, " answer_tokens"]:
    """Return the logp of every answer token, in order; all pairs have one total length."""
    rows = [[*request.prompt, *rollout.tokens] for request, rollout in pairs]
    sequences = torch.tensor(rows, device=model.device)
    logits = model(input_ids=sequences, use_cache=False).logits[:, :-1]
    before = torch.tensor([len(request.prompt) - 1 for request, _ in pairs], device=model.device)
    in_answer = torch.arange(logits.shape[1], device=model.device) >= before[:, None]
    samplings = [request.sampling for request, rollout in pairs for _ in rollout.tokens]
    drawn, answers = logits[in_answer], sequences[:, 1:][in_answer]
    return raw_logp(_of_distribution(drawn, samplings, pairs[0][1].logp_of), answers)


def _of_distribution(
    logits: Float[Tensor, "N V"], samplings: Sequence[Sampling], logp_of: LogpOf
) -> Float[Tensor, "N V"]:
    if logp_of == "raw":
        return logits
    return sampled_logits(logits, SamplingTensors.of(samplings, vocab_size=logits.shape[-1], device=logits.device))


def _difference(rollout: Rollout, step: int, expected: float) -> TokenDifference:
    if math.isnan(expected):
        raise LogpError(
            f"the plain forward gives NaN at token {step} of sample {rollout.sample_index} of prompt "
            f"{rollout.prompt_index}; look at the weights"
        )
    return TokenDifference(
        prompt_index=rollout.prompt_index,
        sample_index=rollout.sample_index,
        step=step,
        token=rollout.tokens[step],
        engine_logp=rollout.logp[step],
        model_logp=expected,
    )

"""Compares the log-probabilities that rollouts carry with a plain forward, at the lengths where engines break.

Difference a token: d = logp of the rollout - logp of the forward. The forward is in float32 and sees whole sequences:
no cache, no padding, no mask; sequences of one length at a time.
Reference: token_mult_prob_error = mean exp|d|, NeMo RL (github.com/NVIDIA-NeMo/RL), which calls above 1.05 a fault.

Where an engine is wrong, it is wrong from some length on: once a sliding window or a chunk of attention is left, once
positions pass those that rotary frequencies were trained for, where a block of the cache ends, where a long prompt is
prefilled in pieces, where a prefix is found in the cache, under weights that have changed since, say. So the default
prompts end around all of these places, as far as the configuration of the model and the limits of the engine name them.
"""

import copy
import inspect
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.agreement import Coverage, LogpAgreement, TokenDifference
from rl_generation.distribution import SamplingTensors, raw_logp, sampled_logits
from rl_generation.engine import Engine
from rl_generation.errors import LogpError, ModelError
from rl_generation.requests import Limits, Prompt, Request, Sampling, make_requests
from rl_generation.rollout import LogpOf, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["compare_logp", "verify_logp"]

NEW_TOKENS = 16
LONG_DECODE = 160
"""Tokens of one response, which crosses a block of either size by decoding alone."""

SHORT_PROMPTS, SHORT_LENGTHS = 8, (2, 24)
BLOCKS = (16, 128)
"""Tokens in a block of the cache: vLLM's on a GPU, and on a CPU."""

SHARED_PREFIX = 2 * max(BLOCKS) + 3
"""Tokens of the prompt that is asked again: whole blocks of it are found in a prefix cache."""

TOKENS_PER_FORWARD = 16_384
"""Of the plain forward, unless one row alone has more."""

MAX_POSITIONS = 16_640
"""How far the default prompts go; a plain forward costs the square of it."""


def verify_logp(
    engine: Engine,
    model: "PreTrainedModel",
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_positions: int = MAX_POSITIONS,
    rows_per_forward: int = 16,
) -> LogpAgreement:
    """Have `engine` answer `prompts`, and compare the logp of its answers with a forward of `model`.

    The default prompts are of random tokens, and the same in every call. They are asked all at once; then one that
    several begin with is asked again, which a prefix cache answers, and after a refit a stale one; then two of them
    alone. `explain()` of the result says what was covered, and what was not.

    Args:
        engine: Any engine, of the same weights as `model`.
        model: The policy, or for a `TransformersEngine` its own `engine.model`. In eval mode. One in lower precision is
            compared through a float32 copy of itself, which needs that much memory more.
        prompts: Token ids; by default those that reach where engines break.
        sampling: By default 16 tokens at temperature 1 with a seed, past stop tokens, and 160 once.
        max_positions: How far the default prompts go, with their responses.
        rows_per_forward: Answers that one forward takes; fewer where they are long.

    Raises:
        ModelError: The model is in training mode.
        PromptError: The engine refuses the request, or there are no prompts.
        ValueError: The sampling has bad words, penalties, biases or a grammar, which a forward does not know of; or
            there is one for each prompt, and no prompts.
        LogpError: The forward itself gives NaN, or no answer has a token that the forward admits.
    """
    limits = engine.limits
    if prompts is not None:
        how = _default_sampling() if sampling is None else sampling
        requests = make_requests(prompts, how, limits)
        rollouts = engine.generate(prompts, [request.sampling for request in requests])
        return compare_logp(model, requests, rollouts, rows_per_forward=rows_per_forward)
    if not isinstance(sampling, Sampling | None):
        raise ValueError(  # noqa: TRY004 - of the two together
            "a sampling for each prompt goes with prompts: give both, or one sampling for all"
        )
    rounds, landmarks = _rounds(model, limits, sampling, max_positions=max_positions)
    requests, rollouts = [], []
    for asked in rounds:
        first = len(requests)
        made = make_requests([prompt for prompt, _ in asked], [each for _, each in asked], limits)
        requests += [replace(request, prompt_index=first + request.prompt_index) for request in made]
        answers = engine.generate([request.prompt for request in made], [request.sampling for request in made])
        rollouts += [replace(rollout, prompt_index=first + rollout.prompt_index) for rollout in answers]
    agreement = compare_logp(model, requests, rollouts, rows_per_forward=rows_per_forward)
    coverage = Coverage(
        max_length=limits.max_length,
        landmarks=landmarks,
        spans=tuple(
            (len(requests[each.prompt_index].prompt), len(requests[each.prompt_index].prompt) + len(each.tokens))
            for each in rollouts
        ),
        repeated_prefix=max((len(prompt) for asked in rounds[1:2] for prompt, _ in asked), default=0),
        crowd=len(rounds[0]),
    )
    return replace(agreement, coverage=coverage)


def _default_sampling() -> Sampling:
    return Sampling(max_new_tokens=NEW_TOKENS, seed=0, ignore_eos=True)


_Asked = list[tuple[Prompt, Sampling]]


def _rounds(
    model: "PreTrainedModel", limits: Limits, sampling: Sampling | None, *, max_positions: int
) -> tuple[list[_Asked], dict[str, int]]:
    """The prompts of each call, and the places that they are chosen for, by name."""
    short = _default_sampling() if sampling is None else sampling
    room = max_positions if limits.max_length is None else min(limits.max_length, max_positions)
    longest = max(1, room - short.max_new_tokens)
    landmarks = _landmarks(model, limits)
    draw = random.Random(0)

    def tokens(length: int) -> Prompt:
        return tuple(draw.randrange(limits.vocab_size) for _ in range(max(1, min(length, longest))))

    # Responses begin before each place and end behind it, and begin behind it and behind twice as much.
    half = max(1, short.max_new_tokens // 2)
    lengths = {size + step for size in BLOCKS for step in (-1, 0, 1)} | {longest}
    for place in landmarks.values():
        lengths |= {place - half, place + 1, 2 * place + 1}
    first, last = SHORT_LENGTHS
    asked = [tokens(draw.randint(first, min(last, max(first, longest)))) for _ in range(SHORT_PROMPTS)]
    asked += [tokens(length) for length in sorted(lengths) if 1 <= length <= longest]
    shared = tokens(SHARED_PREFIX)
    asked += [shared, (*shared[: longest - 1], 0)]
    together = list(zip(asked, short.spread(len(asked)), strict=True))
    if sampling is None and room > LONG_DECODE:
        together.append((tokens(4), replace(short, max_new_tokens=min(LONG_DECODE, room - 4))))
    # With other seeds; a request that finds its prefix in the cache prefills its end only.
    other = short if short.seed is None else replace(short, seed=(short.seed + 1) % (1 << 31))
    alone = [[(asked[0], other)], [(max(asked, key=len), other)]]
    return [together, [(shared, other), (shared, short)], *alone], landmarks


def _landmarks(model: "PreTrainedModel", limits: Limits) -> dict[str, int]:
    """Lengths from which on a model or an engine works otherwise, by name."""
    config = model.config.get_text_config(decoder=True)
    kinds = set(getattr(config, "layer_types", None) or ())
    found: dict[str, int | None] = {}
    if "sliding_attention" in kinds or (not kinds and getattr(config, "use_sliding_window", True)):
        found["sliding window"] = getattr(config, "sliding_window", None)
    if "chunked_attention" in kinds:
        found["attention chunk"] = getattr(config, "attention_chunk_size", None)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    original = _original_length(rope) or getattr(config, "original_max_position_embeddings", None)
    if original != getattr(config, "max_position_embeddings", None):
        found["original rope length"] = original
    found["prefill chunk"] = limits.prefill_chunk
    return {name: place for name, place in found.items() if isinstance(place, int) and place > 0}


def _original_length(rope: Any) -> int | None:
    """The length in rotary parameters, which some models have for each kind of layer."""
    if not isinstance(rope, Mapping):
        return None
    lengths = [_original_length(each) for each in rope.values()]
    return rope.get("original_max_position_embeddings") or next((each for each in lengths if each), None)


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
        if request.sampling.constrained and (not rollouts or rollouts[0].logp_of == "sampled"):
            raise ValueError(
                f"prompt {request.prompt_index} asks for what a plain forward does not know of, bad words, penalties, "
                f"biases, a grammar or a minimal length: verify without them; got {request.sampling}"
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
    for length, rows in by_length.items():
        at_once = max(1, min(rows_per_forward, TOKENS_PER_FORWARD // length))
        for start in range(0, len(rows), at_once):
            yield rows[start : start + at_once]


@torch.no_grad()
def _plain_logp(model: "PreTrainedModel", pairs: Sequence[tuple[Request, Rollout]]) -> Float[Tensor, " answer_tokens"]:
    """Return the logp of every answer token, in order; all pairs have one total length."""
    rows = [[*request.prompt, *rollout.tokens] for request, rollout in pairs]
    sequences = torch.tensor(rows, device=model.device)
    # Of a long prompt the logits would need more memory than all else: only those from the first response on.
    first = min(len(request.prompt) for request, _ in pairs) - 1
    kept = {"logits_to_keep": sequences.shape[1] - first} if _keeps_logits(model) else {}
    logits = model(input_ids=sequences, use_cache=False, **kept).logits
    logits = logits[:, first - sequences.shape[1] : -1]
    before = torch.tensor([len(request.prompt) - 1 - first for request, _ in pairs], device=model.device)
    in_answer = torch.arange(logits.shape[1], device=model.device) >= before[:, None]
    samplings = [request.sampling for request, rollout in pairs for _ in rollout.tokens]
    drawn, answers = logits[in_answer], sequences[:, first + 1 :][in_answer]
    return raw_logp(_of_distribution(drawn, samplings, pairs[0][1].logp_of), answers)


def _keeps_logits(model: "PreTrainedModel") -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


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

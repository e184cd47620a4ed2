"""How far an engine's log-probabilities are from its model's: compared token by token, reported, watched over a run.

They are compared with a plain forward, at the lengths where engines break.
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING, Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from rl_generation.distribution import SamplingTensors, raw_logp, sampled_logits
from rl_generation.engine import Engine
from rl_generation.errors import LogpError, ModelError
from rl_generation.requests import Limits, Prompt, Request, Sampling, make_requests
from rl_generation.rollout import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAULT = 1.05
"""Of `token_mult_prob_error`, by NeMo RL."""

LARGEST_DIFFERENCE = 700.0
"""In nats, of those that are averaged: exp of a larger one is no number any more."""

DEFAULT = Sampling(max_new_tokens=16, seed=0, ignore_eos=True)
LONG_DECODE = 160
"""Tokens of one response, which crosses a block of either size by decoding alone."""

SHORT_PROMPTS, SHORT_LENGTHS = 8, (2, 24)
BLOCKS = (16, 128)
"""Tokens in a block of the cache: vLLM's on a GPU, and on a CPU."""

SHARED_PREFIX = 2 * max(BLOCKS) + 3
"""Tokens of the prompt that is asked again: whole blocks of it are found in a prefix cache."""

ROWS_PER_FORWARD, TOKENS_PER_FORWARD = 16, 16_384
"""Of the plain forward, unless one row alone has more tokens."""

MAX_POSITIONS = 16_640
"""How far the default prompts go; a plain forward costs the square of it."""


@final
class AgreementError(ValueError):
    """An engine and its model disagree on what was sampled: weights, precision or sampling differ."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenDifference:
    """One token as the engine and as the model saw it. Log-probabilities in nats."""

    prompt_index: int
    sample_index: int
    step: int
    """Place of the token in its answer."""

    token: int
    engine_logp: float
    model_logp: float
    """-inf where the model's top-k, top-p or min-p excludes the token."""

    @property
    def difference(self) -> float:
        """Of the engine's logp to the model's; +inf outside the model's support."""
        return self.engine_logp - self.model_logp


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Which positions a comparison looked at, and which of the places where engines break."""

    max_length: int | None
    """Tokens of a prompt and its response together that the engine takes; None where it knows no limit."""

    landmarks: Mapping[str, int]
    """Lengths from which on the model or the engine works otherwise, by name."""

    spans: tuple[tuple[int, int], ...]
    """Of each response, its first position and one after its last."""

    repeated_prefix: int
    """Tokens of the prompt that was asked again."""

    crowd: int
    """Requests that were asked at once."""

    def times_passed(self, length: int) -> int:
        """How many times over the longest prompt passes `length`, at most twice; 0 where no response goes beyond it."""
        if max(end for _, end in self.spans) <= length:
            return 0
        return 2 if max(start for start, _ in self.spans) > 2 * length else 1

    def explain(self) -> str:
        """Say what was looked at, and what was not. For people."""
        furthest = max(end for _, end in self.spans)
        whole = "an unknown number" if self.max_length is None else f"{self.max_length:,}"
        said = [f"positions 0-{furthest:,} of {whole}"]
        said += [
            f"{name} {length:,} {('never passed', 'passed', 'passed twice')[self.times_passed(length)]}"
            for name, length in self.landmarks.items()
        ]
        said.append(f"a prompt of {self.repeated_prefix:,} tokens asked again")
        said.append(f"requests alone and among {self.crowd}")
        return "covered: " + "; ".join(said)


@final
@dataclass(frozen=True, kw_only=True)
class LogpAgreement:
    """How far the logp of rollouts is from that of a plain forward, in nats."""

    differences: tuple[TokenDifference, ...]
    """Every token compared: by prompt, sample and step."""

    coverage: Coverage | None = None
    """What was looked at; None where the caller chose the prompts."""

    @property
    def tokens(self) -> int:
        """Tokens that both admit; the figures below are over these."""
        return len(self._sizes)

    @cached_property
    def max_abs_difference(self) -> float:
        """The largest |d|; in float32 below 1e-4 where nothing is wrong."""
        return max(self._sizes)

    @cached_property
    def mean_abs_difference(self) -> float:
        """The mean of |d|."""
        return fmean(self._sizes)

    @cached_property
    def token_mult_prob_error(self) -> float:
        """The mean of exp|d|, 1 where both agree."""
        return fmean(math.exp(min(size, LARGEST_DIFFERENCE)) for size in self._sizes)

    @property
    def outside_support(self) -> int:
        """Tokens that the model's cuts exclude; left out of all the above.

        A few are rounding: a token on the edge of a cut falls on either side of it. Many are a fault.
        """
        return len(self.differences) - self.tokens

    def worst(self, count: int = 10) -> list[TokenDifference]:
        """Return the tokens with the largest |d|, those outside the model's support first."""
        return sorted(self.differences, key=lambda each: -abs(each.difference))[:count]

    def explain(self, count: int = 10) -> str:
        """Say how well both agree, and where least. For people."""
        summary = (
            f"{self.tokens} tokens compared: token_mult_prob_error {self.token_mult_prob_error:.6f}, "
            f"|difference| at most {self.max_abs_difference:.1e}, {self.mean_abs_difference:.1e} on average; "
            f"{self.outside_support} outside the model's support"
        )
        header = f"{'prompt':>6} {'sample':>6} {'step':>6} {'token':>8} {'engine':>11} {'model':>11} {'difference':>11}"
        rows = [
            f"{each.prompt_index:>6} {each.sample_index:>6} {each.step:>6} {each.token:>8} "
            f"{each.engine_logp:>11.6f} {each.model_logp:>11.6f} {each.difference:>11.2e}"
            for each in self.worst(count)
        ]
        covered = [] if self.coverage is None else [self.coverage.explain()]
        return "\n".join([summary, *covered, header, *rows])

    @cached_property
    def _sizes(self) -> list[float]:
        return [abs(each.difference) for each in self.differences if math.isfinite(each.model_logp)]


# ---- asking an engine


def verify_logp(
    engine: Engine,
    model: "PreTrainedModel",
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    sampling: Sampling | Sequence[Sampling] | None = None,
    max_positions: int = MAX_POSITIONS,
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

    Raises:
        ModelError: The model is in training mode.
        PromptError: The engine refuses the request, or there are no prompts.
        ValueError: The sampling has bad words, penalties, biases or a grammar, which a forward does not know of; or
            there is one for each prompt, and no prompts.
        LogpError: The forward itself gives NaN, or no answer has a token that the forward admits.
    """
    limits = engine.limits
    if prompts is not None:
        requests = make_requests(prompts, DEFAULT if sampling is None else sampling, limits)
        rollouts = engine.generate(prompts, [request.sampling for request in requests])
        return compare_logp(model, requests, rollouts)
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
    agreement = compare_logp(model, requests, rollouts)
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


_Asked = list[tuple[Prompt, Sampling]]


def _rounds(
    model: "PreTrainedModel", limits: Limits, sampling: Sampling | None, *, max_positions: int
) -> tuple[list[_Asked], dict[str, int]]:
    """The prompts of each call, and the places that they are chosen for, by name."""
    short = DEFAULT if sampling is None else sampling
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


def compare_logp(model: "PreTrainedModel", requests: Sequence[Request], rollouts: Sequence[Rollout]) -> LogpAgreement:
    """Compare the logp of `rollouts`, made of `requests` some time ago, with a forward of `model`. As `verify_logp`."""
    _check(model, requests, rollouts)
    asked = {request.prompt_index: request for request in requests}
    reference = model
    if any(parameter.dtype != torch.float32 for parameter in model.parameters()):
        reference = copy.deepcopy(model)
        torch.nn.Module.float(reference)
    by_length: dict[int, list[Rollout]] = {}
    for rollout in rollouts:
        length = len(asked[rollout.prompt_index].prompt) + len(rollout.tokens)
        if rollout.tokens:
            by_length.setdefault(length, []).append(rollout)
    differences: list[TokenDifference] = []
    for length, rows in by_length.items():
        at_once = max(1, min(ROWS_PER_FORWARD, TOKENS_PER_FORWARD // length))
        for start in range(0, len(rows), at_once):
            batch = rows[start : start + at_once]
            expected = _plain_logp(reference, [(asked[rollout.prompt_index], rollout) for rollout in batch]).tolist()
            places = [(rollout, step) for rollout in batch for step in range(len(rollout.tokens))]
            for (rollout, step), logp in zip(places, expected, strict=True):
                if math.isnan(logp):
                    raise LogpError(
                        f"the plain forward gives NaN at token {step} of sample {rollout.sample_index} of prompt "
                        f"{rollout.prompt_index}; look at the weights"
                    )
                differences.append(
                    TokenDifference(
                        prompt_index=rollout.prompt_index,
                        sample_index=rollout.sample_index,
                        step=step,
                        token=rollout.tokens[step],
                        engine_logp=rollout.logp[step],
                        model_logp=logp,
                    )
                )
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


@torch.no_grad()
def _plain_logp(model: "PreTrainedModel", pairs: Sequence[tuple[Request, Rollout]]) -> Float[Tensor, " answer_tokens"]:
    """Return the logp of every answer token, in order; all pairs have one total length."""
    rows = [[*request.prompt, *rollout.tokens] for request, rollout in pairs]
    sequences = torch.tensor(rows, device=model.device)
    # Of a long prompt the logits would need more memory than all else: only those from the first response on.
    first = min(len(request.prompt) for request, _ in pairs) - 1
    keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
    kept = {"logits_to_keep": sequences.shape[1] - first} if keeps else {}
    logits = model(input_ids=sequences, use_cache=False, **kept).logits
    logits = logits[:, first - sequences.shape[1] : -1]
    before = torch.tensor([len(request.prompt) - 1 - first for request, _ in pairs], device=model.device)
    in_answer = torch.arange(logits.shape[1], device=model.device) >= before[:, None]
    drawn, answers = logits[in_answer], sequences[:, first + 1 :][in_answer]
    if pairs[0][1].logp_of == "sampled":
        samplings = [request.sampling for request, rollout in pairs for _ in rollout.tokens]
        drawn = sampled_logits(drawn, SamplingTensors.of(samplings, vocab_size=drawn.shape[-1], device=drawn.device))
    return raw_logp(drawn, answers)


# ---- watching a run


@final
class AgreementMonitor:
    """Asks for a comparison at the start of a run and every so many steps, and stops the run where it fails.

    Args:
        compare: Makes one, as `lambda: verify_logp(engine, model)`.
        every: Optimizer steps between two comparisons; 0 compares at the start alone.
        max_token_mult_prob_error: Above it a comparison fails.
    """

    def __init__(
        self, compare: Callable[[], LogpAgreement], *, every: int = 0, max_token_mult_prob_error: float = FAULT
    ) -> None:
        if every < 0:
            raise ValueError(f"every counts optimizer steps and is at least 0; got every={every}")
        if not max_token_mult_prob_error >= 1.0:
            raise ValueError(
                f"token_mult_prob_error is 1 where both agree; got "
                f"max_token_mult_prob_error={max_token_mult_prob_error}"
            )
        self._compare, self._every, self._limit = compare, every, max_token_mult_prob_error
        self._last: int | None = None

    def __call__(self, step: int) -> LogpAgreement | None:
        """Compare if `step` is the first one asked about, or `every` steps or more after the last comparison.

        Raises:
            AgreementError: They differ by more than the limit, or most tokens are outside the model's support.
        """
        if self._last is not None and (not self._every or step < self._last + self._every):
            return None
        self._last = step
        agreement = self._compare()
        if not agreement.token_mult_prob_error <= self._limit or agreement.outside_support > agreement.tokens:
            raise AgreementError(
                f"at step {step} the engine disagrees with its model: token_mult_prob_error is "
                f"{agreement.token_mult_prob_error:.4f}, above {self._limit}, or too many tokens are outside the "
                f"model's support. Look for weights that were not refitted, a lower precision, or another "
                f"temperature.\n{agreement.explain()}"
            )
        return agreement

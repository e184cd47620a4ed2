"""What vLLM generated, as a Rollout; a log-probability that is missing or not finite is an error here, never a zero."""

import math
from collections.abc import Sequence
from typing import Any, cast

from rl_generation.errors import LogpError, ModelError
from rl_generation.rollout import FinishReason, LogpOf, Rollout, RolloutTiming, VersionSpan
from rl_generation.vllm.options import VllmOptions

__all__ = ["logp_hint", "logp_of_tokens", "rollout_of", "spans_of", "timing_of", "version_of"]

FINISH_REASONS = ("stop", "length", "abort")


def rollout_of(
    completion: Any,
    *,
    prompt_index: int,
    sample_index: int,
    logp_of: LogpOf,
    version: int,
    timing: RolloutTiming | None = None,
    tokens: Sequence[int] | None = None,
    logp: Sequence[float] | None = None,
    seams: Sequence[tuple[int, int]] = (),
) -> Rollout:
    """Return the answer that a finished `vllm.outputs.CompletionOutput` holds.

    Args:
        completion: The output; of a stream, the last one.
        prompt_index: Place of its prompt in the call.
        sample_index: Which of the prompt's answers.
        logp_of: What the engine was made with.
        version: Of the weights now; the version of an answer without tokens.
        timing: See `timing_of`.
        tokens: All tokens, where `completion` is only the last delta.
        logp: Their log-probabilities, as `logp_of_tokens` gave them; goes with `tokens`.
        seams: Of a vLLM that does not say which weights made which tokens: the weights' versions before `version`, each
            with how many tokens there were when the next one came.

    Raises:
        LogpError: A log-probability is missing, NaN or infinite.
        ModelError: vLLM gave the answer up, or its weights are labelled with what is no number of steps.
    """
    if tokens is None or logp is None:
        tokens = completion.token_ids
        logp = logp_of_tokens(tokens, completion.logprobs, prompt_index=prompt_index, sample_index=sample_index)
    if completion.finish_reason not in FINISH_REASONS:
        raise ModelError(
            f"vLLM ended answer {sample_index} to prompt {prompt_index} with finish_reason="
            f"{completion.finish_reason!r} after {len(tokens)} tokens; its log says why"
        )
    return Rollout(
        tokens=tuple(tokens),
        logp=tuple(logp),
        logp_of=logp_of,
        finish_reason=cast("FinishReason", completion.finish_reason),
        stop_reason=_stop_reason(completion, tokens),
        versions=spans_of(getattr(completion, "weight_versions", None), len(tokens), version, seams=seams),
        timing=timing if tokens else None,
        prompt_index=prompt_index,
        sample_index=sample_index,
    )


def logp_of_tokens(
    tokens: Sequence[int], found: Any, *, prompt_index: int, sample_index: int, start: int = 0
) -> tuple[float, ...]:
    """Return one log-probability for each of `tokens`, which begin at position `start` of the answer.

    Args:
        tokens: As generated.
        found: vLLM's `FlatLogprobs` of them, or its list of dictionaries.
        prompt_index: For messages.
        sample_index: For messages.
        start: For messages.

    Raises:
        LogpError: One is missing, NaN or infinite.
    """
    values = _values(tokens, found)
    if len(values) == len(tokens) and all(map(math.isfinite, values)):
        return values
    if len(values) != len(tokens):
        fault = f"has {len(values)} log-probabilities for {len(tokens)} tokens"
    else:
        place = next(i for i, value in enumerate(values) if not math.isfinite(value))
        fault = f"has log-probability {values[place]} for token {tokens[place]} at position {start + place}"
    raise LogpError(f"answer {sample_index} to prompt {prompt_index} {fault}: the model's logits are broken")


def logp_hint(options: VllmOptions) -> str:
    """Return what to add to a LogpError of an engine with these options: nothing, or what is likely the cause."""
    if options.speculative_config is None:
        return ""
    return (
        ", or, more likely here, it is speculative decoding: vLLM's rejection sampler may give NaN for a sampled "
        "token, on a CPU above all; switch it off, speculative_config=None"
    )


def timing_of(stats: Any) -> RolloutTiming | None:
    """Return where time went, from vLLM's `RequestStateStats`; None where nothing was generated."""
    if stats is None or not stats.num_generation_tokens:
        return None
    first = stats.first_token_latency
    return RolloutTiming(first_token_s=first, total_s=first + stats.last_token_ts - stats.first_token_ts)


def version_of(label: str) -> int:
    """Return the version that vLLM's label of its weights means.

    Raises:
        ModelError: It is no number of optimizer steps.
    """
    if label.isdecimal():
        return int(label)
    raise ModelError(
        f"the engine's weights are labelled {label!r}, which is no number of optimizer steps; whoever updates them "
        f"calls commit_version(steps), or vLLM's update_weight_version(str(steps))"
    )


def spans_of(spans: Any, length: int, version: int, *, seams: Sequence[tuple[int, int]]) -> tuple[VersionSpan, ...]:
    """Return which weights made which of `length` tokens, by vLLM's own `spans` or, before 0.32, by `seams`.

    Args:
        spans: `CompletionOutput.weight_versions` of an answer's last output; None where vLLM does not say.
        length: Tokens of the answer.
        version: Of the weights now.
        seams: See `rollout_of`.

    Raises:
        ModelError: The weights are labelled with what is no number of steps.
    """
    if not spans or not length:
        ends = [*seams, (version, length)] if length else [(version, 0)]
        starts = [0, *(end for _, end in ends)]
        made_by = zip(ends, starts, strict=False)
        return tuple(VersionSpan(version=of, start=start, end=end) for (of, end), start in made_by if end > start) or (
            VersionSpan(version=version, start=0, end=length),
        )
    # An answer that is aborted may have a last span, of weights that made none of its tokens.
    made = [each for each in spans if each.start < each.end]
    return tuple(VersionSpan(version=version_of(each.version), start=each.start, end=each.end) for each in made)


def _values(tokens: Sequence[int], found: Any) -> tuple[float, ...]:
    if found is None:
        return ()
    flat = getattr(found, "logprobs", None)
    if flat is not None and found.token_ids == list(tokens):
        return tuple(flat)
    if flat is not None:  # one entry a token, since only the chosen one was asked for
        return tuple(value for value, of, token in zip(flat, found.token_ids, tokens, strict=False) if of == token)
    chosen = (each.get(token) for token, each in zip(tokens, found, strict=False))
    return tuple(each.logprob for each in chosen if each is not None)


def _stop_reason(completion: Any, tokens: Sequence[int]) -> int | str | None:
    if completion.finish_reason != "stop":
        return None
    reason = completion.stop_reason
    return tokens[-1] if reason is None else reason  # None is how vLLM says that its own eos token came

"""A Sampling as vLLM's SamplingParams: one request for each answer, which touches no other."""

import os
from collections.abc import Sequence
from typing import Any

from rl_generation.constraints import encode_bad_words
from rl_generation.detokenizer import INCOMPLETE, decode
from rl_generation.errors import PromptError
from rl_generation.requests import Limits, Request, Sampling

__all__ = ["MAX_TEMPERATURE", "check_for_vllm", "to_sampling_params"]

MAX_TEMPERATURE = 2.0
"""vLLM refuses what is above."""

EMBEDDED_ONLY = (
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_new_tokens",
    "json_schema",
    "regex",
    "top_logp",
)
"""Fields of Sampling that this engine refuses."""

ENOUGH_TOKENS = 8
"""At the end of a prompt, to tell whether it ends inside a character of at most four bytes."""

MAX_BAD_WORDS = ("VLLM_MAX_NUM_BAD_WORDS", 128)
"""Sequences of tokens; vLLM refuses more than this variable says, or else this number."""


def check_for_vllm(request: Request, limits: Limits) -> None:
    """Raise PromptError for what vLLM, alone of the engines, does not do, or would refuse after others have begun."""
    index, sampling = request.prompt_index, request.sampling
    if sampling.temperature > MAX_TEMPERATURE:
        raise PromptError(
            f"prompt {index} asks for temperature={sampling.temperature}, and vLLM goes up to {MAX_TEMPERATURE}"
        )
    off = Sampling(max_new_tokens=1)
    for name in EMBEDDED_ONLY:
        if getattr(sampling, name) != getattr(off, name):
            raise PromptError(
                f"prompt {index} asks for {name}={getattr(sampling, name)!r:.100}, which the embedded engine alone "
                f"does, not vLLM's: leave it out, or use TransformersEngine"
            )
    if sampling.stop and decode(limits.tokenizer, request.prompt[-ENOUGH_TOKENS:]).endswith(INCOMPLETE):
        raise PromptError(
            f"prompt {index} ends inside a character, and asks for stop={sampling.stop!r}, which vLLM would then look "
            f"for in the prompt too: end it with a whole character, or use stop_token_ids"
        )
    if sampling.bad_words:
        sequences = encode_bad_words(sampling.bad_words, limits.tokenizer, vocab_size=limits.vocab_size)
        variable, default = MAX_BAD_WORDS
        most = int(os.environ.get(variable, default))
        if len(sequences) > most:
            raise PromptError(
                f"prompt {index} has {len(sampling.bad_words)} bad_words, which make {len(sequences)} sequences of "
                f"tokens, with and without a space before them, and vLLM takes {most}; set {variable} to change that"
            )


def to_sampling_params(
    sampling: Sampling, *, stop_token_ids: Sequence[int], sample_index: int = 0, streaming: bool = False
) -> Any:
    """Return the `vllm.SamplingParams` of one answer.

    vLLM's own notion of an eos token is switched off, and what ends an answer is listed instead, so that every engine
    ends answers alike, whatever the checkpoint's generation config says.

    Args:
        sampling: What the caller asked for; of its `n` answers, this is `sample_index`, which draws with
            `seed + sample_index`.
        stop_token_ids: The engine's own, which `ignore_eos` switches off.
        sample_index: Which of the `n` answers.
        streaming: Whether the engine hands out new tokens as they come, or an answer when it is whole.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # `from vllm import` looks it up each time

    own = () if sampling.ignore_eos else tuple(stop_token_ids)
    return SamplingParams(
        n=1,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=None if sampling.seed is None else sampling.seed + sample_index,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *own],
        bad_words=list(sampling.bad_words),
        ignore_eos=True,
        max_tokens=sampling.max_new_tokens,
        logprobs=0,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA if streaming else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # made for one answer, and touched by nobody else
    )

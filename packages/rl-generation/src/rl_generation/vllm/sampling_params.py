"""A Sampling as vLLM's SamplingParams: one request for each answer, which touches no other."""

from collections.abc import Sequence
from typing import Any

from rl_generation.errors import PromptError
from rl_generation.sampling import Sampling

__all__ = ["MAX_TEMPERATURE", "check_for_vllm", "to_sampling_params"]

MAX_TEMPERATURE = 2.0
"""vLLM refuses what is above."""


def check_for_vllm(sampling: Sampling, *, prompt_index: int = 0) -> None:
    """Raise PromptError for what vLLM, alone of the engines, does not do."""
    if sampling.temperature > MAX_TEMPERATURE:
        raise PromptError(
            f"prompt {prompt_index} asks for temperature={sampling.temperature}, and vLLM goes up to {MAX_TEMPERATURE}"
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
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

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
        skip_clone=False,
    )

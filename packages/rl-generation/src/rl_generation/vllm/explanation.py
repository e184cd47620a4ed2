"""A vLLM engine in words, for people who ask what they have got."""

from collections.abc import Sequence

from rl_generation.requests import Limits
from rl_generation.rollout import LogpOf
from rl_generation.vllm.preparing import Prepared

__all__ = ["explain"]


def explain(
    prepared: Prepared,
    *,
    kind: str,
    limits: Limits,
    dtype: object,
    logp_of: LogpOf,
    stop_token_ids: Sequence[int],
    version: int | None,
) -> str:
    """Return one line for each thing that an engine was made with; `version` is None while no weights have come."""
    options = prepared.options
    sizes = {
        "tensor": options.tensor_parallel_size,
        "pipeline": options.pipeline_parallel_size,
        "data": options.data_parallel_size,
    }
    expert = ", experts whole on their ranks" if options.enable_expert_parallel else ""
    rows = {
        "engine": f"{kind} (vLLM {prepared.vllm_version})",
        "model": options.model + ("" if options.revision is None else f" at {options.revision}"),
        "load_format": prepared.load_format + (" (the first refit feeds it)" if prepared.unfed else ""),
        "dtype": str(dtype).removeprefix("torch."),
        "version": "none: no refit has been committed" if version is None else str(version),
        "parallel": ", ".join(f"{name} {size}" for name, size in sizes.items()) + expert,
        "vocabulary": f"{limits.vocab_size} tokens",
        limits.max_length_name: f"{limits.max_length} tokens of prompt and answer",
        "stop_token_ids": ", ".join(map(str, stop_token_ids)) or "none: answers end at max_new_tokens only",
        "tokenizer": "none: no stop strings, no bad words" if limits.tokenizer is None else "loaded",
        "logp_of": logp_of,
        **{f"quirk {quirk.name}": quirk.explain() for quirk in prepared.quirks},
        **{f"vllm_kwargs.{key}": repr(value) for key, value in options.vllm_kwargs.items()},
    }
    width = max(map(len, rows))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows.items())

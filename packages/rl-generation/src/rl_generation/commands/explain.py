"""`rl-generation explain`: what an engine would do with a model, from its config alone. Loads no weights.

Says what ends an answer, which quirks the model has here, and what it takes in memory. Exit codes: 0 it can be served,
1 its cache does not hold one sequence, 2 refused.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from rl_generation.checkpoints import load_config, meta_model, model_identity, stop_token_ids_of
from rl_generation.commands.console import show
from rl_generation.commands.flags import add_engine_arguments, spec_of
from rl_generation.loading import EngineSpec, tokenizer_of, vllm_options_of

__all__ = ["add_arguments", "run"]

OUR_BATCH = 256
"""Answers at once that figures are given for where nobody said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain, and return the exit code."""
    from rl_generation.memory import estimate_memory

    spec = spec_of(arguments)
    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    tokenizer = tokenizer_of(spec)
    dtype = spec.dtype if spec.dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
    dtype = dtype.removeprefix("torch.")
    if spec.engine == "transformers":
        quirks = _embedded_quirks(spec, config, dtype=dtype)
        sized: dict[str, Any] = {"max_num_seqs": spec.max_batch_size or OUR_BATCH, "block_size": 1}
    else:
        quirks, options = _vllm_quirks(config.model_type), vllm_options_of(spec)
        same = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "kv_cache_memory_bytes")
        sized = {name: getattr(options, name) for name in same} | {"max_num_seqs": options.max_num_seqs or OUR_BATCH}
        others = ("max_num_batched_tokens", "kv_cache_dtype", "block_size")
        sized |= {name: options.vllm_kwargs[name] for name in others if name in options.vllm_kwargs}
    memory = estimate_memory(config, dtype=dtype, **sized)
    stops = stop_token_ids_of(spec.model, config, tokenizer=tokenizer, revision=spec.revision)
    kind = f"{', '.join(config.architectures or ['unknown'])} ({config.model_type})"
    lines = [
        f"engine: {spec.engine}",
        f"model: {kind}, {dtype}, {model_identity(spec.model, config)}",
        f"tokenizer: {'none' if tokenizer is None else f'{type(tokenizer).__name__}, {len(tokenizer)} tokens'}",
        f"stop tokens: {list(stops) or 'none: answers end at max_new_tokens only'}",
        f"logp: {spec.logp_of}",
        *(f"quirk: {quirk}" for quirk in quirks),
        memory.explain(),
    ]
    show("\n".join(lines))
    sequences = memory.full_length_sequences
    return 0 if sequences is None or sequences >= 1 else 1


def _vllm_quirks(model_type: str) -> list[str]:
    """What is known of the model under the vLLM that is installed, or, where none is, the newest that is known."""
    from rl_generation.model_flags import flags_for, installed_version
    from rl_generation.vllm.preparing import TESTED

    version = installed_version()
    notes = [] if version else [f"vLLM is not installed here; these are those of {TESTED[-1]}"]
    return [*notes, *(quirk.explain() for quirk in flags_for(model_type, version=version or TESTED[-1]))]


def _embedded_quirks(spec: EngineSpec, config: Any, *, dtype: str) -> Sequence[str]:
    """What the embedded engine will find special about the model."""
    from rl_generation.embedded.choice import inspect_model

    model = meta_model(config, dtype=dtype, trust_remote_code=spec.trust_remote_code)
    support = inspect_model(model)
    if spec.continuous_batching == "off":
        batching = "continuous batching: off, as asked for"
    elif support.missing or not getattr(model, "_supports_attention_backend", False):
        lacking = f"forward has no {', '.join(support.missing)}" if support.missing else "it attends by itself"
        batching = f"continuous batching: not with {type(model).__name__} ({lacking}); model.generate serves it"
    else:
        batching = "continuous batching: proven on two prompts when the engine starts, or else model.generate serves"
    return (batching, *support.quirks)

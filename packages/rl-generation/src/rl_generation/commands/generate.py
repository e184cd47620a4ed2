"""`rl-generation generate`: answers the prompts of a JSON Lines file into another, and can go on where it was stopped.

Everything that can be refused is refused before the engine generates: bad rows, another run's output, a changed model.
Row i draws with seed i of `Sampling.spread`, and prompts are answered in chunks, whose lines are written at once and
synced. An interruption can tear the last chunk only. It is cut off and made again whole, so that its batches hold what
they would have held: an interrupted and resumed run writes what an uninterrupted one does. Beside the output lies a
record of what its answers follow from (`identity`, which must be the same) and of what may change (`circumstances`).
Exit codes: 0 every prompt is answered, 1 the engine failed or answers timed out, 2 refused.
"""

import argparse
import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any, final

from rl_generation.chat import decode_rollout, encode_chat, encode_text
from rl_generation.checkpoints import load_config, model_identity
from rl_generation.commands.console import CommandError, installed_versions, say, show_json
from rl_generation.commands.flags import (
    add_engine_arguments,
    add_sampling_arguments,
    json_pairs,
    sampling_of,
    spec_of,
    start_engine,
)
from rl_generation.commands.prompt_rows import PromptRow, check_limits, read_rows
from rl_generation.detokenizer import answer_text
from rl_generation.engine import Engine
from rl_generation.errors import EngineDeadError, LogpError, SampleTimeoutError, TimedOutSample
from rl_generation.loading import EngineSpec, check_available, tokenizer_of
from rl_generation.rollout import Rollout

__all__ = ["add_arguments", "run"]

CHUNK_ANSWERS = 1024
"""Of a chunk, where nobody says: enough for an engine to replace answers that are finished."""

DECISIVE = ("engine", "with_tokenizer", "dtype", "logp_of", "enforce_eager", "vllm_kwargs")
"""Fields of an EngineSpec that answers follow from, besides the model and its tokenizer."""

TIMEOUT = "timeout"
"""The finish reason of a sample that was lost; its line has the tokens that it had reached, without logp."""

OUTPUT_FIELDS = {
    *("index", "sample_index", "id", "text", "token_ids", "logp", "logp_of", "top_logp", "finish_reason"),
    *("stop_reason", "version", "versions", "first_token_s", "total_s"),
}
"""What a line can have besides the fields that it carries over from its prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("files")
    group.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON Lines: prompts")
    group.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON Lines: answers")
    existing = group.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with a run that was interrupted, or begin it")
    existing.add_argument("--overwrite", action="store_true", help="begin again, and lose what the output holds")
    group.add_argument(
        "--chunk-prompts",
        type=int,
        metavar="N",
        help=f"prompts answered and saved together, which an interruption can cost (default: {CHUNK_ANSWERS} answers)",
    )
    group.add_argument(
        "--carry",
        action="append",
        default=[],
        metavar="FIELD",
        help="copy a field of the input to its answers; can be repeated",
    )
    group.add_argument("--timing", action="store_true", help="add the seconds of each answer, which no two runs share")
    group.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    group = parser.add_argument_group("text")
    group.add_argument(
        "--add-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="put around a text what the tokenizer puts around texts, such as bos (default: do)",
    )
    group.add_argument(
        "--chat-template-kwarg",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a variable of the chat template, as enable_thinking=false; can be repeated",
    )
    add_sampling_arguments(parser, max_new_tokens=256)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and return the exit code."""
    spec, path = spec_of(arguments), arguments.output
    if not arguments.resume:  # which may have nothing left to generate, or be another run's
        check_available(spec)
    job = _make_job(arguments, spec)
    with _open_locked(path) as output:
        done, finished, start_s, tokens = 0, Counter[str](), time.monotonic(), 0
        if job.begun:
            done, finished = _cut_to_whole_chunks(output, path, job)
            say(f"{done} of {len(job.rows)} prompts are answered")
        else:
            say(f"{len(job.rows)} prompts, seed {job.identity['sampling']['seed']}")
        if done < len(job.rows):
            from transformers.utils.logging import tqdm

            engine, _ = start_engine(spec)
            try:
                check_limits(arguments.input, job.rows, engine.limits)
                if not job.begun:  # only now, when nothing is left to be refused, is lost what the output held
                    output.truncate(0)
                    record = {"identity": job.identity, "circumstances": job.circumstances}
                    with _writing(path), _record_path(path).open("wb") as file:
                        _save(file, json.dumps(record, indent=1))  # before there is an answer
                start_s = time.monotonic()
                total, often = sum(row.sampling.n for row in job.rows), 0.1 if sys.stderr.isatty() else 10.0
                with tqdm(total=total, initial=finished.total(), unit="answer", mininterval=often) as bar:
                    for start in range(done, len(job.rows), job.chunk_prompts):
                        lines = _answer_chunk(engine, job, start, timing=arguments.timing)
                        with _writing(path):
                            _save(output, *(json.dumps(line, ensure_ascii=False, allow_nan=False) for line in lines))
                        finished.update(line["finish_reason"] for line in lines)
                        tokens += sum(len(line["token_ids"]) for line in lines)
                        bar.set_postfix_str(f"{tokens / (time.monotonic() - start_s):,.0f} tokens/s", refresh=False)
                        bar.update(len(lines))
            except (EngineDeadError, LogpError, KeyboardInterrupt):
                say(f"what is done is in {path}; the same command with --resume goes on")
                raise
            finally:
                engine.close()
    seconds = time.monotonic() - start_s
    say(f"{path}: {finished.total()} answers ({', '.join(f'{n} {why}' for why, n in sorted(finished.items()))})")
    if tokens:
        say(f"in this run {tokens} tokens, {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s")
    if finished[TIMEOUT]:
        say(f'{finished[TIMEOUT]} answers timed out; their lines have "finish_reason": "{TIMEOUT}"')
    if arguments.json:
        show_json(
            {
                "output": str(path),
                "prompts": len(job.rows),
                "answers": finished.total(),
                "finished": dict(finished),
                "seed": job.identity["sampling"]["seed"],
                "generated_tokens": tokens,
                "seconds": seconds if tokens else 0.0,
                "tokens_per_s": tokens / seconds if tokens else None,
                "holds": not finished[TIMEOUT],
            }
        )
    return 1 if finished[TIMEOUT] else 0


# ---- what is to be done, settled before there is an engine


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is to be generated."""

    rows: list[PromptRow]

    tokenizer: Any
    """None where texts are not wanted."""

    identity: Mapping[str, Any]
    """What the answers follow from: names and values of JSON, short enough to be shown."""

    circumstances: Mapping[str, Any]
    """What else is worth telling of a run."""

    chunk_prompts: int
    """How many prompts are answered and saved together."""

    begun: bool
    """Whether the output holds answers of this job, made by an earlier run."""


def _make_job(arguments: argparse.Namespace, spec: EngineSpec) -> Job:
    """Read and encode the rows, and compare with the run that was interrupted, if there was one.

    Raises:
        CommandError: Rows are bad, the output holds something else, or the interrupted run was another one.
        ModelError: The config or the tokenizer cannot be loaded.
    """
    if arguments.chunk_prompts is not None and arguments.chunk_prompts < 1:
        raise CommandError(f"--chunk-prompts must be at least 1; got {arguments.chunk_prompts}")
    if taken := [name for name in arguments.carry if name in OUTPUT_FIELDS]:
        raise CommandError(f"--carry {taken[0]}: answers have a field of that name already; rename it in the input")
    if arguments.input.resolve() == arguments.output.resolve():
        raise CommandError(f"--input and --output are both {arguments.input}")
    if not arguments.output.resolve().parent.is_dir():
        raise CommandError(f"{arguments.output.resolve().parent} is no folder, so nothing can be written there")
    before = _read_record(arguments)
    sampling, chunk_prompts = sampling_of(arguments), arguments.chunk_prompts
    if sampling.seed is None:
        sampling = replace(sampling, seed=before["identity"]["sampling"]["seed"] if before else secrets.randbits(32))
    if chunk_prompts is None:
        chunk_prompts = before["identity"]["chunk_prompts"] if before else max(1, CHUNK_ANSWERS // sampling.n)

    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    tokenizer = tokenizer_of(spec)
    variables = json_pairs(arguments.chat_template_kwarg, "--chat-template-kwarg")

    def encode(kind: str, content: Any) -> list[int]:
        if tokenizer is None:
            raise ValueError(f"{kind} is text, and --no-tokenizer leaves nothing to encode it with")
        if kind == "messages":
            return encode_chat(tokenizer, content, template_kwargs=variables)
        return encode_text(tokenizer, content, add_special_tokens=arguments.add_special_tokens)

    rows = read_rows(arguments.input, sampling, encode=encode, carry=arguments.carry)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, row.carried, row.prompt, row.overrides], sort_keys=True).encode() + b"\n")
    settings = asdict(spec)
    identity = {
        "input": f"{len(rows)} prompts, sha256:{digest.hexdigest()}",
        "sampling": asdict(sampling),
        "model": model_identity(spec.model, config),
        "tokenizer": None if spec.tokenizer is None else model_identity(spec.tokenizer, tokenizer),
        **{name: settings.pop(name) for name in DECISIVE},
        "chunk_prompts": chunk_prompts,
        "timing": arguments.timing,
    }
    circumstances = {"input_file": str(arguments.input), **settings, **installed_versions()}
    # As they are when they are read back: tuples are lists.
    identity, circumstances = json.loads(json.dumps([identity, circumstances]))
    if before:
        if differences := list(_differences(before["identity"], identity)):
            listed = "".join(f"\n  {difference}" for difference in differences)
            raise CommandError(
                f"this is not the run that was interrupted:{listed}\n"
                f"give what was given then, write to another file, or begin again with --overwrite"
            )
        for difference in _differences(before["circumstances"], circumstances):
            say(f"since the run began, {difference}")
    return Job(
        rows=rows,
        tokenizer=tokenizer,
        identity=identity,
        circumstances=circumstances,
        chunk_prompts=chunk_prompts,
        begun=bool(before),
    )


# ---- the record beside the output


def _record_path(output: Path) -> Path:
    return output.with_name(output.name + ".run.json")


def _read_record(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return the record of the run to go on with; None begins one. An output that is empty is as good as none."""
    output: Path = arguments.output
    if arguments.overwrite or not output.exists() or not output.stat().st_size:
        return None
    if not arguments.resume:
        raise CommandError(f"{output} exists: go on with it by --resume, or lose it by --overwrite")
    path = _record_path(output)
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        identity, _ = record["identity"], record["circumstances"].items()
        _ = int(identity["sampling"]["seed"]), int(identity["chunk_prompts"])
    except FileNotFoundError:
        raise CommandError(
            f"{output} has no {path.name} beside it, so nobody knows what it was made of; write to another file, or "
            f"begin again with --overwrite"
        ) from None
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(f"{path} is damaged ({error!r}); begin again with --overwrite") from None
    return record


def _differences(before: Mapping[str, Any], now: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name in {**before, **now}:
        one, other = before.get(name), now.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            yield from _differences(one, other, within=f"{within}{name}.")
        elif one != other:
            yield f"{within}{name}: was {json.dumps(one)}, now {json.dumps(other)}"


# ---- the output


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:  # as where the disk is full
        raise CommandError(f"{error.filename or path} cannot be written: {error.strerror}; --resume goes on") from None


def _save(file: IO[bytes], *lines: str) -> None:
    """Write lines; once this returns, a power failure does not lose them."""
    file.write("".join(f"{line}\n" for line in lines).encode())
    file.flush()
    os.fsync(file.fileno())


@contextlib.contextmanager
def _open_locked(path: Path) -> Iterator[IO[bytes]]:
    """Open `path` for appending, which no other process then writes; an empty file does not outlive this."""
    with _writing(path):
        file = path.open("a+b")
    with file:
        try:  # held until the file is closed, or its process ends in whatever way
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CommandError(f"{path} is being written by another run of this command") from None
        try:
            yield file
        finally:
            if not path.stat().st_size:
                path.unlink()


def _cut_to_whole_chunks(file: IO[bytes], path: Path, job: Job) -> tuple[int, Counter[str]]:
    """Cut a torn chunk off; return how many prompts are answered, and finish reason → their answers.

    Raises:
        CommandError: The file holds what this job did not write.
    """
    file.seek(0)
    done, length, finished = 0, 0, Counter[str]()
    while done < len(job.rows):
        end = min(done + job.chunk_prompts, len(job.rows))
        expected = [(index, sample) for index in range(done, end) for sample in range(job.rows[index].sampling.n)]
        answers = [_parsed(line) for line in itertools.islice(file, len(expected))]
        if [(answer.get("index"), answer.get("sample_index")) for answer in answers] != expected:
            if answers:
                say(f"the {len(answers)} lines of a chunk that was not finished are made again")
            break
        done, length = end, file.tell()
        finished.update(answer["finish_reason"] for answer in answers)
    if file.read(1):
        raise CommandError(
            f"{path} holds what this run did not write, after the {finished.total()} answers of its first {done} "
            f"prompts; write to another file, or begin again with --overwrite"
        )
    file.truncate(length)
    return done, finished


def _parsed(line: bytes) -> dict[str, Any]:
    """The answer in a line; an empty one where it is torn."""
    try:
        answer = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) and "finish_reason" in answer else {}


def _answer_chunk(engine: Engine, job: Job, start: int, *, timing: bool) -> list[dict[str, Any]]:
    """Answer the chunk that begins with row `start`; return the line of each answer, by prompt and sample."""
    rows = job.rows[start : start + job.chunk_prompts]
    answers: Sequence[Rollout | TimedOutSample]
    try:
        answers = engine.generate([row.prompt for row in rows], [row.sampling for row in rows])
    except SampleTimeoutError as error:
        say(str(error))
        answers = sorted([*error.rollouts, *error.timed_out], key=lambda each: (each.prompt_index, each.sample_index))
    return [
        {
            "index": start + answer.prompt_index,
            "sample_index": answer.sample_index,
            "id": rows[answer.prompt_index].id,
            **answer_fields(answer, rows[answer.prompt_index], job.tokenizer, timing=timing),
            **rows[answer.prompt_index].carried,
        }
        for answer in answers
    ]


def answer_fields(
    answer: Rollout | TimedOutSample, row: PromptRow, tokenizer: Any, *, timing: bool = False
) -> dict[str, Any]:
    """What a line says of its answer; its text is null without a tokenizer."""
    if isinstance(answer, TimedOutSample):
        text = None if tokenizer is None else answer_text(tokenizer, answer.tokens, prompt=row.prompt)
        return {"text": text, "token_ids": answer.tokens, "logp": None, "finish_reason": TIMEOUT}
    fields: dict[str, Any] = {
        "text": None if tokenizer is None else decode_rollout(tokenizer, answer, prompt=row.prompt),
        "token_ids": answer.tokens,
        "logp": answer.logp,
        "logp_of": answer.logp_of,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "version": answer.version,
        "versions": [[span.version, span.start, span.end] for span in answer.versions],
    }
    if answer.top_logp:
        fields["top_logp"] = answer.top_logp
    if timing and answer.timing is not None:
        fields |= {"first_token_s": answer.timing.first_token_s, "total_s": answer.timing.total_s}
    return fields

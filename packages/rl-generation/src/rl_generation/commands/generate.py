"""`rl-generation generate`: answers the prompts of a JSON Lines file into another, and can go on where it was stopped.

A row of the input is an object with one of
    "prompt": text          "messages": [{"role": …, "content": …}, …]          "prompt_token_ids": [1, 2, …]
whose other fields stand in the `row` of its answers. Row i draws with seed i of `Sampling.spread`, in whichever run it
is answered. Answers are a line each, appended in batches that are synced; `--resume` keeps the rows that have all of
theirs. What answers follow from is noted beside the output, so that no file mixes two models' answers. Exit codes: 0
every prompt is answered, 1 the engine failed or answers timed out, 2 refused.
"""

import argparse
import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_generation.chat import decode_rollout, encode_chat, encode_text
from rl_generation.checkpoints import load_config, model_identity
from rl_generation.commands import CommandError, say, show
from rl_generation.commands.flags import (
    add_engine_arguments,
    add_sampling_arguments,
    json_pairs,
    sampling_of,
    spec_of,
    start_engine,
)
from rl_generation.detokenizer import answer_text
from rl_generation.engine import Engine
from rl_generation.errors import EngineDeadError, LogpError, PromptError, SampleTimeoutError, TimedOutSample
from rl_generation.loading import check_available, tokenizer_of
from rl_generation.requests import Prompt, Sampling, make_requests
from rl_generation.rollout import Rollout, in_order

KINDS = {
    "prompt": "text",
    "messages": 'a list of objects with a "role", not empty',
    "prompt_token_ids": "a list of integers, not empty",
}
"""The fields that a prompt may be in, and what they must hold."""
TIMEOUT = "timeout"
"""The finish reason of a sample that was lost; its line has the tokens that it had reached, without logp."""
BATCH_ANSWERS = 1024
"""Generated and saved together: enough for an engine to replace answers that are finished."""
DECISIVE = ("engine", "tokenizer", "with_tokenizer", "dtype", "logp_of", "vllm_kwargs")
"""Fields of an EngineSpec that answers follow from, besides the model."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    group = parser.add_argument_group("files")
    group.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON Lines: prompts")
    group.add_argument("--output", type=Path, required=True, metavar="FILE", help="JSON Lines: answers")
    existing = group.add_mutually_exclusive_group()
    existing.add_argument("--resume", action="store_true", help="go on with a run that was interrupted, or begin it")
    existing.add_argument("--overwrite", action="store_true", help="begin again, and lose what the output holds")
    group.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    group = parser.add_argument_group("text")
    group.add_argument(
        "--chat-template-kwarg",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="a variable of the chat template, as enable_thinking=false; can be repeated",
    )
    add_sampling_arguments(parser, max_new_tokens=256, seed=0)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and return the exit code."""
    spec, path, sampling = spec_of(arguments), arguments.output, sampling_of(arguments)
    check_available(spec)
    if not path.resolve().parent.is_dir() or path.resolve() == arguments.input.resolve():
        raise CommandError(f"--output {path} must be in a folder that exists, and be another file than --input")
    begun = not arguments.overwrite and path.exists() and path.stat().st_size > 0
    if begun and not arguments.resume:
        raise CommandError(f"{path} exists: go on with it by --resume, or lose it by --overwrite")
    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    tokenizer, variables = tokenizer_of(spec), json_pairs(arguments.chat_template_kwarg, "--chat-template-kwarg")

    def encode(kind: str, content: Any) -> Sequence[int]:
        if kind == "prompt_token_ids":
            return tuple(content)
        if tokenizer is None:
            raise ValueError(f"{kind} is text, and --no-tokenizer leaves nothing to encode it with")
        if kind == "messages":
            return encode_chat(tokenizer, content, template_kwargs=variables)
        return encode_text(tokenizer, content)

    rows = read_rows(arguments.input, sampling, encode)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr(row).encode())
    made_of = {name: getattr(spec, name) for name in DECISIVE} | asdict(sampling)
    made_of |= {"model": model_identity(spec.model, config), "rows": digest.hexdigest()}
    answers, length = read_answers(path, rows, made_of) if begun else ([], 0)
    if begun:
        os.truncate(path, length)  # what the end of that run tore
    reasons = Counter(line["finish_reason"] for line in answers)
    done = answers[-1]["index"] + 1 if answers else 0
    say(f"{done} of {len(rows)} prompts are answered")

    start_s, tokens = time.monotonic(), 0
    if done < len(rows):
        engine, _ = start_engine(spec)
        try:
            for row in rows:
                try:
                    make_requests([row.prompt], [row.sampling], engine.limits)
                except PromptError as error:
                    told = str(error).replace("prompt 0", "the prompt", 1)
                    raise CommandError(f"{arguments.input}, line {row.line}: {told}; nothing was generated") from None
            if not begun:  # only now, when nothing is left to be refused, is lost what the output held
                record_of(path).write_text(json.dumps(made_of, indent=1), encoding="utf-8")
            start_s, size = time.monotonic(), max(1, BATCH_ANSWERS // sampling.n)
            with path.open("ab") as output:
                output.truncate(length)
                for first in range(done, len(rows), size):
                    lines = answer(engine, rows[first : first + size], tokenizer)
                    output.write("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode())
                    output.flush()
                    os.fsync(output.fileno())  # from here on a power failure does not lose them
                    reasons.update(line["finish_reason"] for line in lines)
                    tokens += sum(len(line["token_ids"]) for line in lines)
                    speed = tokens / (time.monotonic() - start_s)
                    say(f"{lines[-1]['index'] + 1} of {len(rows)} prompts are answered, {speed:,.0f} tokens/s")
        except (EngineDeadError, LogpError, KeyboardInterrupt):
            say(f"what is done is in {path}; the same command with --resume goes on")
            raise
        except OSError as error:  # as where the disk is full
            raise CommandError(f"{path} cannot be written: {error.strerror}; --resume goes on") from error
        finally:
            engine.close()
    say(f"{path}: {reasons.total()} answers ({', '.join(f'{n} {why}' for why, n in sorted(reasons.items()))})")
    if arguments.json:
        figures = {"output": str(path), "prompts": len(rows), "answers": reasons.total(), "finished": dict(reasons)}
        figures |= {"generated_tokens": tokens, "seconds": time.monotonic() - start_s, "holds": not reasons[TIMEOUT]}
        show(json.dumps(figures, allow_nan=False))
    return 1 if reasons[TIMEOUT] else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt of the input."""

    line: int
    """Of the file, from 1; blank lines count."""

    index: int
    """Among the rows, from 0."""

    prompt: Prompt
    sampling: Sampling
    others: dict[str, Any]
    """Fields that mean nothing here, given back with its answers."""


def read_rows(path: Path, sampling: Sampling, encode: Callable[[str, Any], Sequence[int]]) -> list[Row]:
    """Read the rows of a file in UTF-8; each draws with the seed of its place in `Sampling.spread`.

    Raises:
        CommandError: The file cannot be read, is empty, or has a bad row; it names the line and the reason.
    """
    try:
        lines = [(number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()]
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    if not lines:
        raise CommandError(f"{path} has no rows: each prompt is one line of JSON")
    rows = []
    for index, ((number, line), how) in enumerate(zip(lines, sampling.spread(len(lines)), strict=True)):
        try:
            row = json.loads(line)
            kind = kind_of(row)
            prompt = tuple(encode(kind, row.pop(kind)))
        except ValueError as error:  # of the JSON, the encoding, the chat template, or the row
            raise CommandError(f"{path}, line {number}: {error}; nothing was generated") from None
        rows.append(Row(line=number, index=index, prompt=prompt, sampling=how, others=row))
    return rows


def kind_of(row: Any) -> str:
    """Say in which of the KINDS a row has its prompt; ValueError where what a line holds cannot be a row."""
    present = [kind for kind in KINDS if isinstance(row, dict) and kind in row]
    if len(present) != 1:
        got = " and ".join(present) or repr(row)[:200]
        raise ValueError(f"a row must be a JSON object with one of {', '.join(KINDS)}; got {got}")
    (kind,), content = present, row[present[0]]
    fits = {
        "prompt": isinstance(content, str),
        "messages": isinstance(content, list) and all(isinstance(each, dict) and "role" in each for each in content),
        "prompt_token_ids": isinstance(content, list) and all(type(each) is int for each in content),
    }
    if not fits[kind] or content == []:
        raise ValueError(f"{kind} must be {KINDS[kind]}; got {content!r:.200}")
    return kind


def record_of(output: Path) -> Path:
    """The file beside the output that says what its answers follow from."""
    return output.with_name(f"{output.name}.run.json")


def read_answers(path: Path, rows: Sequence[Row], made_of: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    """Read what an earlier run wrote.

    Returns:
        The answers to each row that has all of its own, which are the first rows; and their bytes in the file, behind
        which is what the end of that run tore.

    Raises:
        CommandError: It is of another run, or nobody knows of which.
    """
    lines = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    try:
        before, now = json.loads(record_of(path).read_bytes()), json.loads(json.dumps(made_of))
        changed = [
            f"\n  {name}: was {before.get(name)!r}, now {now[name]!r}" for name in now if before.get(name) != now[name]
        ]
        answers = [json.loads(line) for line in lines if not changed]
        while answers and answers[-1]["sample_index"] + 1 < rows[answers[-1]["index"]].sampling.n:
            answers.pop()
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CommandError(
            f"{path} or {record_of(path)} is damaged ({error!r}); begin again with --overwrite"
        ) from None
    if changed:
        raise CommandError(f"{path} is of another run:{''.join(changed)}\ngive what was given then, or --overwrite")
    return answers, sum(map(len, lines[: len(answers)]))


def answer(engine: Engine, rows: Sequence[Row], tokenizer: Any) -> list[dict[str, Any]]:
    """Answer the rows; return the line of each answer, by row and sample."""
    answers: Sequence[Rollout | TimedOutSample]
    try:
        answers = engine.generate([row.prompt for row in rows], [row.sampling for row in rows])
    except SampleTimeoutError as error:
        say(str(error))
        answers = in_order([*error.rollouts, *error.timed_out])
    return [answer_line(each, rows[each.prompt_index], tokenizer) for each in answers]


def answer_line(answer: Rollout | TimedOutSample, row: Row, tokenizer: Any) -> dict[str, Any]:
    """What is written of an answer; its text is null without a tokenizer."""
    line: dict[str, Any] = {"index": row.index, "sample_index": answer.sample_index, "row": row.others}
    if isinstance(answer, TimedOutSample):
        text = None if tokenizer is None else answer_text(tokenizer, answer.tokens, prompt=row.prompt)
        return line | {"text": text, "token_ids": answer.tokens, "logp": None, "finish_reason": TIMEOUT}
    line |= {
        "text": None if tokenizer is None else decode_rollout(tokenizer, answer, prompt=row.prompt),
        "token_ids": answer.tokens,
        "logp": answer.logp,
        "logp_of": answer.logp_of,
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
        "version": answer.version,
        "versions": [[span.version, span.start, span.end] for span in answer.versions],
    }
    return line | ({"top_logp": answer.top_logp} if answer.top_logp else {})

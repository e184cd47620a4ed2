"""`rl-generation generate`: answers the prompts of a JSON Lines file into another, and can go on where it was stopped.

A row of the input is an object with one of
    "prompt": text          "messages": [{"role": …, "content": …}, …]          "prompt_token_ids": [1, 2, …]
whose other fields stand in the `row` of its answers. Row i draws with seed i of `Sampling.spread`, in whichever run it
is answered. Answers are a line each, appended in batches that are synced; `--resume` keeps the rows that have all of
theirs. What answers follow from is noted beside the output, so that no file mixes two models' answers. Exit codes: 0
every prompt is answered, 1 the engine failed or answers timed out, 2 refused.
"""

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg, create_mutex_group

from rl_generation.chat import decode_rollout, encode_chat, encode_text
from rl_generation.checkpoints import load_config, model_identity
from rl_generation.commands import CommandError, say, show_json
from rl_generation.commands.flags import EngineFlags, Flag, json_pairs, start_engine
from rl_generation.detokenizer import answer_text
from rl_generation.engine import Engine
from rl_generation.errors import EngineDeadError, LogpError, PromptError, SampleTimeoutError, TimedOutSample
from rl_generation.loading import check_available, tokenizer_of
from rl_generation.requests import Prompt, Sampling, make_requests
from rl_generation.rollout import Rollout, in_order

TIMEOUT = "timeout"
"""The finish reason of a sample that was lost; its line has the tokens that it had reached, without logp."""
BATCH_ANSWERS = 1024
"""Generated and saved together: enough for an engine to replace answers that are finished."""
DECISIVE = ("engine", "tokenizer", "with_tokenizer", "dtype", "logp_of", "vllm_kwargs")
"""Fields of an EngineSpec that answers follow from, besides the model."""

EXISTING = create_mutex_group(required=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Answer the prompts of a JSON Lines file; an interrupted run can be resumed."""

    engine: EngineFlags

    input: Path
    """JSON Lines: prompts."""

    output: Path
    """JSON Lines: answers."""

    resume: Annotated[Flag, EXISTING] = False
    """Go on with a run that was interrupted, or begin it."""

    overwrite: Annotated[Flag, EXISTING] = False
    """Begin again, and lose what the output holds."""

    json: Flag = False
    """End with one line of JSON that holds every figure."""

    chat_template_kwarg: Annotated[tuple[str, ...], arg(metavar="KEY=JSON")] = ()
    """A variable of the chat template, as enable_thinking=false."""

    sampling: Sampling = field(default_factory=lambda: Sampling(max_new_tokens=256, seed=0))

    def run(self) -> int:
        """Generate, and return the exit code."""
        spec, path = self.engine.spec(), self.output
        check_available(spec)
        if not path.resolve().parent.is_dir() or path.resolve() == self.input.resolve():
            raise CommandError(f"--output {path} must be in a folder that exists, and be another file than --input")
        begun = not self.overwrite and path.exists() and path.stat().st_size > 0
        if begun and not self.resume:
            raise CommandError(f"{path} exists: go on with it by --resume, or lose it by --overwrite")
        config = load_config(spec)
        tokenizer, variables = tokenizer_of(spec), json_pairs(self.chat_template_kwarg, "--chat-template-kwarg")

        def encode(kind: str, content: Any) -> Sequence[int]:
            if kind == "prompt_token_ids":
                return tuple(content)
            if tokenizer is None:
                raise ValueError(f"{kind} is text, and --no-tokenizer leaves nothing to encode it with")
            if kind == "messages":
                return encode_chat(tokenizer, content, template_kwargs=variables)
            return encode_text(tokenizer, content)

        rows = read_rows(self.input, self.sampling, encode)
        digest = hashlib.sha256()
        for row in rows:
            digest.update(repr(row).encode())
        made_of = {name: getattr(spec, name) for name in DECISIVE} | asdict(self.sampling)
        made_of |= {"model": model_identity(spec.model, config), "rows": digest.hexdigest()}
        answers = read_answers(path, rows, made_of) if begun else []
        done = answers[-1]["index"] + 1 if answers else 0
        say(f"{done} of {len(rows)} prompts are answered")

        reasons, tokens, start_s = Counter(line["finish_reason"] for line in answers), 0, time.monotonic()
        if done < len(rows):
            engine, _ = start_engine(spec)
            try:
                self._check(rows, engine)
                if not begun:  # only now, when nothing is left to be refused, is lost what the output held
                    path.write_bytes(b"")
                    record_of(path).write_text(json.dumps(made_of, indent=1), encoding="utf-8")
                start_s, size = time.monotonic(), max(1, BATCH_ANSWERS // self.sampling.n)
                with path.open("ab") as output:
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
        if self.json:
            figures = {"output": str(path), "prompts": len(rows), "answers": reasons.total(), "finished": dict(reasons)}
            figures |= {"generated_tokens": tokens, "seconds": time.monotonic() - start_s}
            show_json(figures | {"holds": not reasons[TIMEOUT]})
        return 1 if reasons[TIMEOUT] else 0

    def _check(self, rows: Sequence["Row"], engine: Engine) -> None:
        """Refuse, by its line, the first row that the engine would."""
        for row in rows:
            try:
                make_requests([row.prompt], [row.sampling], engine.limits)
            except PromptError as error:
                told = str(error).replace("prompt 0", "the prompt", 1)
                raise CommandError(f"{self.input}, line {row.line}: {told}; nothing was generated") from None


# ---- rows of the input


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


KINDS = {
    "prompt": "text",
    "messages": 'a list of objects with a "role", not empty',
    "prompt_token_ids": "a list of integers, not empty",
}
"""The fields that a prompt may be in, and what they must hold."""


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
            kind = _kind_of(row)
            prompt = tuple(encode(kind, row.pop(kind)))
        except ValueError as error:  # of the JSON, the encoding, the chat template, or the row
            raise CommandError(f"{path}, line {number}: {error}; nothing was generated") from None
        rows.append(Row(line=number, index=index, prompt=prompt, sampling=how, others=row))
    return rows


def _kind_of(row: Any) -> str:
    """In which of the KINDS a row has its prompt; ValueError where what a line holds cannot be a row."""
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


# ---- lines of the output


def record_of(output: Path) -> Path:
    """The file beside the output that says what its answers follow from."""
    return output.with_name(f"{output.name}.run.json")


def read_answers(path: Path, rows: Sequence[Row], made_of: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Read the answers to each row that has all of its own, which are the first; cut off what the run's end tore.

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
    os.truncate(path, sum(map(len, lines[: len(answers)])))
    return answers


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
    line: dict[str, Any] = {"index": row.index, "sample_index": answer.sample_index, "row": row.others, "text": None}
    if isinstance(answer, TimedOutSample):
        if tokenizer is not None:
            line["text"] = answer_text(tokenizer, answer.tokens, prompt=row.prompt)
        return line | {"token_ids": answer.tokens, "logp": None, "finish_reason": TIMEOUT}
    if tokenizer is not None:
        line["text"] = decode_rollout(tokenizer, answer, prompt=row.prompt)
    line |= {name: getattr(answer, name) for name in ("logp", "logp_of", "finish_reason", "stop_reason", "version")}
    line |= {
        "token_ids": answer.tokens,
        "versions": [[span.version, span.start, span.end] for span in answer.versions],
    }
    return line | ({"top_logp": answer.top_logp} if answer.top_logp else {})

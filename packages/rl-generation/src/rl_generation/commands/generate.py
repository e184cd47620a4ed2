"""`rl-generation generate`: answers the prompts of a JSON Lines file into another, and can go on where it was stopped.

Everything that can be refused is refused before the engine generates: bad rows, another run's output, a changed model.
Row i draws with seed i of `Sampling.spread`, and prompts are answered in chunks that do not depend on where a run was
interrupted: an interrupted and resumed run writes what an uninterrupted one does.
Exit codes: 0 every prompt is answered, 1 the engine failed or answers timed out, 2 refused.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_generation.commands.answer_rows import TIMEOUT, answer_rows
from rl_generation.commands.chunked_output import ChunkedOutput, Progress, open_output
from rl_generation.commands.console import say, show_json
from rl_generation.commands.engine_flags import add_engine_arguments, check_available, spec_of, start_engine
from rl_generation.commands.generation_job import CHUNK_ANSWERS, GenerationJob, make_job
from rl_generation.commands.progress import ProgressReport
from rl_generation.commands.prompt_rows import check_limits
from rl_generation.commands.run_record import write_record
from rl_generation.commands.sampling_flags import add_sampling_arguments
from rl_generation.engine import Engine
from rl_generation.errors import EngineDeadError, LogpError, SampleTimeoutError, TimedOutSample
from rl_generation.requests import Prompt, Sampling
from rl_generation.rollout import Rollout

__all__ = ["add_arguments", "run"]

MAX_NEW_TOKENS = 256


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_engine_arguments(parser)
    _add_file_arguments(parser)
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
    add_sampling_arguments(parser, max_new_tokens=MAX_NEW_TOKENS)


def run(arguments: argparse.Namespace) -> int:
    """Generate, and return the exit code."""
    spec = spec_of(arguments)
    if not arguments.resume:  # which may have nothing left to generate, or be another run's
        check_available(spec)
    job = make_job(arguments, spec)
    if job.interrupted is not None:
        for difference in job.interrupted.check(job.record):
            say(f"since the run began, {difference}")
    answers = [row.sampling.n for row in job.rows]
    with open_output(
        arguments.output, answers, chunk_prompts=job.chunk_prompts, begin_again=arguments.overwrite
    ) as output:
        progress = output.progress
        _say_where(job, progress)
        if progress.prompts == len(job.rows):
            return _finish(job, arguments, finished=progress.finished, report=None)
        engine, _ = start_engine(spec)
        try:
            check_limits(arguments.input, job.rows, job.prompts, limits=engine.limits)
            if job.interrupted is None:
                output.begin()  # only now, when nothing is left to be refused, is lost what it held
                write_record(arguments.output, job.record)
            with ProgressReport(total=sum(answers), done=progress.answers) as report:
                finished = progress.finished + _generate(job, engine, arguments, output=output, report=report)
            return _finish(job, arguments, finished=finished, report=report)
        except (EngineDeadError, LogpError, KeyboardInterrupt):
            say(f"what is done is in {arguments.output}; the same command with --resume goes on")
            raise
        finally:
            engine.close()


def _add_file_arguments(parser: argparse.ArgumentParser) -> None:
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


def _say_where(job: GenerationJob, progress: Progress) -> None:
    if job.interrupted is None:
        say(f"{len(job.rows)} prompts, seed {job.seed}")
    else:
        torn = f"; the {progress.torn_lines} lines of a chunk that was not finished are made again"
        say(f"{progress.prompts} of {len(job.rows)} prompts are answered{torn if progress.torn_lines else ''}")


def _generate(
    job: GenerationJob, engine: Engine, arguments: argparse.Namespace, *, output: ChunkedOutput, report: ProgressReport
) -> Counter[str]:
    """Answer the prompts that are left, a chunk at a time; return how their answers ended."""
    finished: Counter[str] = Counter()
    for start in range(output.progress.prompts, len(job.rows), job.chunk_prompts):
        chunk = slice(start, start + job.chunk_prompts)
        answers = _answers(engine, job.prompts[chunk], [row.sampling for row in job.rows[chunk]])
        lines = answer_rows(
            job.rows,
            answers,
            first_index=start,
            prompts=job.prompts,
            tokenizer=job.tokenizer,
            timing=arguments.timing,
        )
        output.append(list(lines))
        finished.update(TIMEOUT if isinstance(answer, TimedOutSample) else answer.finish_reason for answer in answers)
        report.update(answers=len(answers), tokens=sum(len(answer.tokens) for answer in answers))
    return finished


def _answers(
    engine: Engine, prompts: Sequence[Prompt], samplings: Sequence[Sampling]
) -> Sequence[Rollout | TimedOutSample]:
    try:
        return engine.generate(prompts, samplings)
    except SampleTimeoutError as error:
        say(str(error))
        return [*error.rollouts, *error.timed_out]


def _finish(
    job: GenerationJob, arguments: argparse.Namespace, *, finished: Counter[str], report: ProgressReport | None
) -> int:
    """Say what was done; return the exit code."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(finished.items()))
    say(f"{arguments.output}: {finished.total()} answers ({reasons})")
    done = {"generated_tokens": 0, "seconds": 0.0, "tokens_per_s": None} if report is None else report.figures()
    if report is not None:
        say("in this run {generated_tokens} tokens, {seconds:.1f} s, {tokens_per_s:,.0f} tokens/s".format(**done))
    holds = not finished[TIMEOUT]
    if not holds:
        say(f'{finished[TIMEOUT]} answers timed out; their lines have "finish_reason": "{TIMEOUT}"')
    if arguments.json:
        show_json({**_figures(job, arguments, finished), **done, "holds": holds})
    return 0 if holds else 1


def _figures(job: GenerationJob, arguments: argparse.Namespace, finished: Counter[str]) -> dict[str, Any]:
    return {
        "output": str(arguments.output),
        "prompts": len(job.rows),
        "answers": finished.total(),
        "finished": dict(finished),
        "seed": job.seed,
    }

"""The lines of the output: one for each answer, by prompt and sample."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rl_generation.chat import decode_rollout
from rl_generation.commands.prompt_rows import PromptRow
from rl_generation.detokenizer import answer_text
from rl_generation.errors import TimedOutSample
from rl_generation.requests import Prompt
from rl_generation.rollout import Rollout

__all__ = ["OUTPUT_FIELDS", "TIMEOUT", "answer_rows"]

OUTPUT_FIELDS = (
    "index",
    "sample_index",
    "id",
    "text",
    "token_ids",
    "logp",
    "logp_of",
    "top_logp",
    "finish_reason",
    "stop_reason",
    "version",
    "versions",
    "first_token_s",
    "total_s",
)
"""What a line can have besides the fields that it carries over from its prompt."""

TIMEOUT = "timeout"
"""The finish reason of a sample that was lost; its line has the tokens that it had reached, without logp."""


def answer_rows(
    rows: Sequence[PromptRow],
    answers: Sequence[Rollout | TimedOutSample],
    *,
    first_index: int,
    prompts: Sequence[Prompt],
    tokenizer: Any,
    timing: bool,
) -> Iterator[dict[str, Any]]:
    """Yield the line of each answer, in order.

    Args:
        rows: All rows of the input.
        answers: To the rows from `first_index` on, whose `prompt_index` counts from there.
        first_index: See above.
        prompts: Token ids of all rows.
        tokenizer: None leaves the text out (null).
        timing: Whether lines say how long their answers took.
    """
    for answer in sorted(answers, key=lambda each: (each.prompt_index, each.sample_index)):
        index = first_index + answer.prompt_index
        make: Callable[..., dict[str, Any]] = _timed_out if isinstance(answer, TimedOutSample) else _made
        made = make(answer, tokenizer, prompt=prompts[index])
        line = {"index": index, "sample_index": answer.sample_index, "id": rows[index].id, **made}
        if isinstance(answer, Rollout) and answer.top_logp:
            line["top_logp"] = answer.top_logp
        if timing and isinstance(answer, Rollout) and answer.timing is not None:
            line |= {"first_token_s": answer.timing.first_token_s, "total_s": answer.timing.total_s}
        yield {**line, **rows[index].carried}


def _made(rollout: Rollout, tokenizer: Any, *, prompt: Prompt) -> dict[str, Any]:
    return {
        "text": None if tokenizer is None else decode_rollout(tokenizer, rollout, prompt=prompt),
        "token_ids": rollout.tokens,
        "logp": rollout.logp,
        "logp_of": rollout.logp_of,
        "finish_reason": rollout.finish_reason,
        "stop_reason": rollout.stop_reason,
        "version": rollout.version,
        "versions": [[span.version, span.start, span.end] for span in rollout.versions],
    }


def _timed_out(sample: TimedOutSample, tokenizer: Any, *, prompt: Prompt) -> dict[str, Any]:
    text = None if tokenizer is None else answer_text(tokenizer, sample.tokens, prompt=prompt)
    return {"text": text, "token_ids": sample.tokens, "logp": None, "finish_reason": TIMEOUT}

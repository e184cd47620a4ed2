"""Self-distillation: the teacher is the policy itself, with more in its prompt than the student has.

    x         the prompt                                     c   what the teacher is told besides: an answer, feedback,
    x'        the prompt with c in its last user message         a demonstration, or a response that succeeded
    y         the student's response to x, or a demonstration
    P[t]      the teacher's distribution given x', y[:t]     Q[t]   the student's given x, y[:t]
    L         sum_t D(P[t], Q[t]) / N                        D, N: `rl_algorithms.distill`'s

So the student learns to say without c what it says with it. The same tokens y stand after two prompts: `RowsOfBoth`
holds both, and `prepare` brings what the teacher says of y to where y stands in the student's row.

SDFT takes c from the data: `{prompt} {answer}`. SDPO takes another response to the same prompt that earned
`success_reward`, `{successful_response}`: the first in the group that is not the response itself. A response without
one is not trained on. The teacher is what `distill.train` is given: the policy, then it is asked as it is before the
steps of each batch (TRL's `live`), or a frozen copy (`base`).

Where others differ: TRL 1.16 compares one sampled token by default in SDPO, and in `topk_logits` the student's most
probable words; here they are the teacher's. A batch in which no response has a c takes no step; there it is a step of
loss 0. A moving average of the policy (TRL's `ema`) is no teacher here, nor is an environment's feedback a c.

Axes: B rows, T tokens of the student's, S of the teacher's, K words.
References: SDFT (arXiv:2601.19897), SDPO (arXiv:2601.20802); TRL 1.16, `trl.experimental.sdft` and `.sdpo`.
"""

from collections.abc import Sequence
from dataclasses import replace
from string import Formatter
from typing import Any

import torch

from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.distillation.examples import Rows, RowsOfBoth
from rl_algorithms.padding import pad
from rl_algorithms.rollouts import Rollouts
from rl_algorithms.rows import DataError, Row

__all__ = ["SUCCESSFUL_RESPONSE", "check_template", "demonstrations", "of_rollouts"]

SUCCESSFUL_RESPONSE = "successful_response"
"""The name in a template of another response to the same prompt that succeeded."""


def check_template(template: str, *, successful: bool = True) -> set[str]:
    """The columns that a template of teacher prompts names, `SUCCESSFUL_RESPONSE` among them.

    Args:
        template: `{prompt}` stands for the prompt's last message, any other name in braces for a column of its row.
        successful: whether there are other responses to the same prompt.

    Raises:
        ValueError: it has no `{prompt}`, or nothing else, so that the teacher would know no more than the student; or
            it asks for other responses where there are none.
    """
    names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    if "prompt" not in names or len(names) == 1:
        raise ValueError(
            f"teacher_prompt_template={template!r} must have {{prompt}} and at least one more name in braces: a column "
            f"of the data, such as {{answer}}, or {{{SUCCESSFUL_RESPONSE}}}; without it the teacher knows what the "
            f"student knows, and every loss is 0"
        )
    if SUCCESSFUL_RESPONSE in names and not successful:
        raise ValueError(
            f"{{{SUCCESSFUL_RESPONSE}}} is a sampled response, and demonstrations are given: name a column"
        )
    return names - {"prompt"}


def of_rollouts(
    rollouts: Rollouts, prompts: Sequence[Prompt], chat: Chat, *, template: str, success_reward: float
) -> RowsOfBoth:
    """Sampled responses after both prompts. Rows that failed, or have no successful response to show, train nothing.

    Args:
        rollouts: of one batch.
        prompts: of that batch; `rollouts.groups` are their numbers.
        chat: makes the teacher's prompts.
        template: as in `check_template`.
        success_reward: what a response must have earned to be shown.

    Raises:
        DataError: a column that the template names is not in a row.
    """
    needs_success = SUCCESSFUL_RESPONSE in check_template(template)
    succeeded = ((rollouts.rewards >= success_reward) & ~rollouts.failed).tolist()
    groups = rollouts.groups.tolist()
    told: list[Sequence[int]] = []
    usable = ~rollouts.failed
    for row, group in enumerate(groups):
        others = (other for other, (its, won) in enumerate(zip(groups, succeeded, strict=True)) if won and its == group)
        shown = next((other for other in others if other != row), None)
        if needs_success and shown is None:
            usable[row] = False
            told.append(prompts[group].tokens)
        else:
            more = {} if shown is None else {SUCCESSFUL_RESPONSE: rollouts.answers[shown]}
            told.append(_teacher_prompt(prompts[group].row, chat, template=template, more=more))
    return _of_both(
        Rows(tokens=rollouts.tokens, lengths=rollouts.lengths, trainable=rollouts.response & usable[:, None]),
        prompt_lengths=[len(prompts[group].tokens) for group in groups],
        told=told,
    )


def demonstrations(rows: Sequence[Row], chat: Chat, *, template: str) -> RowsOfBoth:
    """The rows' own answers after both prompts, for `distill.train_offline`.

    Raises:
        ValueError: the template is none for demonstrations.
        DataError: a row has no answer, or a column that the template names is not in it.
    """
    check_template(template, successful=False)
    made = [chat.demonstration(row) for row in rows]
    starts = [each.prompt_length for each in made]
    padded = pad([each.tokens for each in made], answer_starts=starts)
    return _of_both(
        Rows(tokens=padded.tokens, lengths=padded.lengths, trainable=padded.answer),
        prompt_lengths=starts,
        told=[_teacher_prompt(row, chat, template=template, more={}) for row in rows],
    )


def _teacher_prompt(row: Row, chat: Chat, *, template: str, more: dict[str, str]) -> tuple[int, ...]:
    named: dict[str, Any] = {**row.columns, **more, "prompt": row.prompt}
    try:
        text = template.format_map(named)
    except KeyError as error:
        raise DataError(
            f"{row.where}: teacher_prompt_template names the column {error}, and the row has {', '.join(row.columns)}"
        ) from None
    messages = (*row.messages[:-1], {**row.messages[-1], "content": text})
    return chat.prompt(replace(row, messages=messages)).tokens


def _of_both(rows: Rows, *, prompt_lengths: Sequence[int], told: Sequence[Sequence[int]]) -> RowsOfBoth:
    starts, ends = list(prompt_lengths), rows.lengths.tolist()
    after = [
        [*prompt, *tokens[start:end].tolist()]
        for prompt, tokens, start, end in zip(told, rows.tokens, starts, ends, strict=True)
    ]
    padded = pad(after, answer_starts=[len(prompt) for prompt in told])
    return RowsOfBoth(
        tokens=rows.tokens,
        lengths=rows.lengths,
        trainable=rows.trainable,
        teacher_tokens=padded.tokens,
        teacher_lengths=padded.lengths,
        shift=torch.tensor([len(prompt) for prompt in told]) - torch.tensor(starts),
    )

"""The named conditions of a run: what each is, and what the run does. Notices none of them itself.

The names stand in `events.jsonl`, in the summary and in the live view; documents take the table from here.
"""

import errno
from collections.abc import Iterator
from dataclasses import dataclass

from rl_launcher.errors import ConditionError, RestartableError

__all__ = ["CONDITIONS", "Condition", "conditions_table", "is_disk_full", "name_of", "reaction_to"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that may happen to a run."""

    name: str
    cause: str
    """What is the case, or how it is noticed."""
    reaction: str
    """What the run does."""


CONDITIONS = (
    Condition(
        name="nonfinite_loss",
        cause="the loss of a step is NaN or infinite",
        reaction="its gradient is not applied; the run saves what it was before the step, and ends with exit code 1",
    ),
    Condition(
        name="reward_collapse",
        cause="the mean reward of `health.reward_collapse_steps` logged steps is below `health.reward_collapse_share` "
        "of the best such mean before, and that was positive",
        reaction="`health.on_reward_collapse`: told once until it recovers, or saved and ended with exit code 1",
    ),
    Condition(
        name="logp_mismatch",
        cause="`token_mult_prob_error` is above `health.max_token_mult_prob_error`: engine and trainer do not hold "
        "the same model",
        reaction="`health.on_logp_mismatch`: told once until it recovers, or saved and ended with exit code 1",
    ),
    Condition(
        name="disk_full",
        cause="the disk, or its quota, refuses a line of the log or a checkpoint",
        reaction="the run ends with exit code 1; every checkpoint that was whole is whole, and the message says what "
        "is free",
    ),
    Condition(
        name="rollouts_failed",
        cause="an answer could not be judged, or an environment failed or took longer than `env.timeout_s`",
        reaction="that rollout alone is left out, or is worth 0 (`env.on_error`), and is counted; told at the 1st, "
        "2nd, 4th, 8th ...",
    ),
    Condition(
        name="engine_restarted",
        cause="an engine died or did not answer",
        reaction="a new one takes its place and its current version of the weights; its prompts are asked again",
    ),
    Condition(
        name="engine_healed",
        cause="a restarted engine has weights again",
        reaction="it answers prompts as before",
    ),
    Condition(
        name="refit_repeated",
        cause="an engine died during a refit",
        reaction="the refit is given up everywhere, and done again with a new engine",
    ),
    Condition(
        name="engine_waits",
        cause="a restarted engine has no weights yet, since the trainer's are moving",
        reaction="the other engines go on; the next refit brings it weights",
    ),
    Condition(
        name="engine_died",
        cause="an engine died, and `policy.generation.max_restarts` are used up",
        reaction="the run saves; with `cluster.max_restarts` left, all processes start anew from there, else it ends "
        "with exit code 1",
    ),
    Condition(
        name="trainer_died",
        cause="a rank of the trainer died",
        reaction="with `cluster.max_restarts` left, all processes start anew from the last whole checkpoint; else the "
        "run ends with exit code 1",
    ),
    Condition(
        name="restarted",
        cause="the run went on by itself after it had lost a process",
        reaction="later steps than the checkpoint's are cut from the log into `*.discarded`, and taken again",
    ),
    Condition(
        name="resumed",
        cause="`rl-launcher resume`",
        reaction="as `restarted`; which keys, and which of the user's files, were changed is told",
    ),
    Condition(
        name="interrupted",
        cause="Ctrl-C or SIGTERM",
        reaction="the step at hand ends, the run saves and ends with exit code 130; a second signal ends it at once, "
        "without saving",
    ),
    Condition(
        name="must_save_by",
        cause="`checkpointing.checkpoint_must_save_by` would pass during the next step",
        reaction="the run saves and ends with exit code 75: to be resumed",
    ),
    Condition(
        name="failed",
        cause="anything else that ends a run half-way",
        reaction="the run saves what it can, and ends with exit code 1",
    ),
)


def conditions_table() -> str:
    """All conditions as a table in Markdown."""
    rows = [f"| `{each.name}` | {each.cause} | {each.reaction} |" for each in CONDITIONS]
    return "\n".join(["| condition | cause | reaction |", "|---|---|---|", *rows])


def reaction_to(name: str) -> str:
    """What the run does about a condition."""
    known = {each.name: each.reaction for each in CONDITIONS}
    return known.get(name, known["failed"])


def name_of(error: BaseException) -> str:
    """Which condition ended a run."""
    if isinstance(error, ConditionError | RestartableError):
        return error.condition
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if is_disk_full(error):
        return "disk_full"
    # A sibling raises it as a ValueError with this text; the claim about NaN in test_health holds the two together.
    return "nonfinite_loss" if str(error).startswith("the loss of this step is ") else "failed"


def is_disk_full(error: BaseException) -> bool:
    """Whether a full disk is behind an error, or behind what another process told of one."""
    full = {errno.ENOSPC, errno.EDQUOT}
    return any(
        (isinstance(each, OSError) and each.errno in full) or "No space left on device" in str(each)
        for each in _chain(error)
    )


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__

"""Every condition that can happen to a run of the launcher, by name: those of the log and those of its processes."""

from rl_observe import health
from rl_observe.health import Condition

__all__ = ["CONDITIONS", "conditions_table", "name_of", "reaction_to"]

CONDITIONS = (
    Condition(
        "nonfinite_loss",
        "the loss of a step is NaN or infinite",
        "its gradient is not applied; the run saves the state before the step, and ends with exit code 1",
    ),
    *health.CONDITIONS,
    Condition(
        "disk_full",
        "the disk, or its quota, refuses a line of the log or a checkpoint",
        "the run ends with exit code 1; every complete checkpoint stays complete, and the message names the free space",
    ),
    Condition(
        "engine_restarted",
        "an engine died or did not respond",
        "a new engine starts with the current version of the weights; its prompts are sent again",
    ),
    Condition("engine_healed", "a restarted engine has weights again", "it generates as before"),
    Condition(
        "refit_repeated",
        "an engine died during a refit",
        "the refit is aborted on all engines, and repeated with a new engine",
    ),
    Condition(
        "engine_waits",
        "a restarted engine has no weights yet, because the trainer's are changing",
        "the other engines continue; the next refit brings it weights",
    ),
    Condition(
        "engine_died",
        "an engine died, and `policy.generation.max_restarts` are used up",
        "the run saves; with `cluster.max_restarts` left, all processes restart from there, else it ends with exit "
        "code 1",
    ),
    Condition(
        "trainer_died",
        "a rank of the trainer died",
        "with `cluster.max_restarts` left, all processes restart from the last complete checkpoint; else the run ends "
        "with exit code 1",
    ),
    Condition(
        "restarted",
        "the run restarted by itself after it had lost a process",
        "steps after the checkpoint are moved from the log to `*.discarded`, and repeated",
    ),
    Condition(
        "resumed",
        "`rl-launcher resume`",
        "as `restarted`; the message lists which keys, and which of the user's files, have changed",
    ),
    Condition(
        "interrupted",
        "Ctrl-C or SIGTERM",
        "the current step completes, the run saves and ends with exit code 130; a second signal ends it at once, "
        "without saving",
    ),
    Condition(
        "must_save_by",
        "`checkpointing.checkpoint_must_save_by` would pass during the next step",
        "the run saves and ends with exit code 75: resume it",
    ),
    Condition("failed", "any other error that ends a run", "the run saves what it can, and ends with exit code 1"),
)


def conditions_table() -> str:
    """Return all conditions as a table in Markdown."""
    return health.conditions_table(CONDITIONS)


def reaction_to(name: str) -> str:
    """Return what the run does about a condition."""
    known = {each.name: each.reaction for each in CONDITIONS}
    return known.get(name, known["failed"])


def name_of(error: BaseException) -> str:
    """Name the condition that ended a run."""
    name = health.name_of(error)
    # rl-backends raises a ValueError with this text; the test of a NaN loss in test_health.py holds the two together.
    return "nonfinite_loss" if name == "failed" and str(error).startswith("the loss of this step is ") else name

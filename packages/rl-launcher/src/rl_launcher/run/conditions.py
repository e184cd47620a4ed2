"""Every condition that can happen to a run of the launcher, by name: those of the log and those of its processes."""

from pathlib import Path

import yaml

from rl_observe import health
from rl_observe.health import Condition

_FIRST, *_REST = (Condition(**each) for each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8")))
CONDITIONS = (_FIRST, *health.CONDITIONS, *_REST)


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

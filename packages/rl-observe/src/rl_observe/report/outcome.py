"""What came of a run: the figures behind the sentence and the cards at the top of the report.

A figure that summary.json lacks is taken from the log; one that neither has is None. The words are in
templates/outcome.html.j2.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

from rl_observe.report.curves import points
from rl_observe.report.record import RunRecord, number, text

__all__ = ["HeldOut", "outcome"]

_QUANTILE_95 = 1.96  # two-sided 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A held-out mean before and after training; either may be unknown."""

    before: float | None
    after: float | None
    unit: str

    @property
    def change(self) -> float:
        """How much it rose."""
        return (self.after or 0.0) - (self.before or 0.0)


def outcome(record: RunRecord) -> dict[str, Any]:
    """The outcome for the templates, under the names that templates/outcome.html.j2 uses."""
    task = text(record.summary, "task") or record.path.name
    reference = re.fullmatch(r"(?:\w+\.)*(\w+):\w+", task)  # `package.sort_digits:dataset`
    algorithm = text(record.summary, "algorithm") or "training"
    last_steps = {stage: max(number(row, "step") or 0.0 for row in rows) for stage, rows in record.stages.items()}
    steps, wall_s = number(record.summary, "steps"), number(record.summary, "wall_s")
    times = [time for row in record.rows if (time := number(row, "time_s")) is not None]
    tokens = [number(row, name) or 0.0 for row in record.rows for name in ("sampled_tokens", "trained_tokens")]
    speed = None
    for stage, rows in record.stages.items():  # the last stage that logged a speed
        if speeds := [value for _, value in points(rows, "tokens_per_s") if value is not None]:
            speed = (statistics.median(speeds), stage)
    sampled, size = _held_out(record, "sampled"), max(number(record.summary, "held_out_size") or 0.0, 0.0)
    interval = None
    if size and sampled.after is not None and sampled.unit == "share":
        # Half of the 95 % interval; an upper bound for rewards that are not just 0 or 1.
        interval = _QUANTILE_95 * math.sqrt(sampled.after * (1 - sampled.after) / size)
    # Minutes are enough to tell two runs apart; a date that is not ISO 8601 is shown unchanged.
    date = re.sub(
        r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1, \2 UTC", text(record.versions, "collected_at") or ""
    )
    return {
        "date": date or "date unknown",
        "task": task,
        "title": reference[1].replace("_", " ") if reference else task,
        "algorithm": algorithm,
        "algorithm_name": algorithm.upper() if re.fullmatch(r"[^\W\d_]{1,4}", algorithm) else algorithm.capitalize(),
        "interrupted": record.interrupted,
        "is_binary": record.rewards_are_right_or_wrong,
        "sampled": sampled,
        "interval": interval,
        "greedy": _held_out(record, "greedy"),
        "loss": _held_out(record, "loss", "number"),
        "pairs": _held_out(record, "pair_accuracy", "share"),
        "margin": _held_out(record, "margin", "number"),
        "size": round(size),
        "steps": round(sum(last_steps.values()) if steps is None else steps),
        "last_steps": last_steps,
        "wall_s": max(times, default=None) if wall_s is None else wall_s,
        "tokens": number(record.summary, "tokens") or sum(tokens),
        "speed": speed,
    }


def _held_out(record: RunRecord, kind: str, unit: str | None = None) -> HeldOut:
    name = f"held_out_{kind}"
    before, after = (number(record.summary, f"{name}_{when}") for when in ("before", "after"))
    logged = [point for rows in record.stages.values() for point in points(rows, name)]
    if before is None:  # an evaluation at step 0 was made before training
        before = next((value for step, value in logged if step == 0), None)
    if after is None:
        after = next((value for step, value in reversed(logged) if step > 0 and value is not None), None)
    is_share = all(0 <= value <= 1 for value in (before, after) if value is not None)
    return HeldOut(before, after, unit or ("share" if is_share else "score"))

"""What came of a run: the sentence at the top of the report and the cards below it.

A figure that summary.json lacks is taken from the log; one that neither has is left out.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rl_observe.number_format import format_count, format_duration
from rl_observe.report.curves import points
from rl_observe.report.record import RunRecord, number, text
from rl_observe.report.typeset import typeset_value

__all__ = ["outcome"]

_QUANTILE_95 = 1.96  # two-sided 95 % of a normal distribution


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """A held-out mean before and after training, as numbers and as text; either may be unknown."""

    before: float | None
    after: float | None
    unit: str

    def write(self, when: str) -> str:
        value = self.before if when == "before" else self.after
        return "" if value is None else typeset_value(value, self.unit)


def outcome(record: RunRecord) -> dict[str, Any]:
    """For the templates: `title`, `sentence` (HTML), `cards` and `facts` (when, where and on which machine).

    A card has `label`, `value` and `note`; the first one may have `before` and a `meter`, two shares of one.
    """
    task = text(record.summary, "task") or record.path.name
    reference = re.fullmatch(r"(?:\w+\.)*(\w+):\w+", task)  # `package.sort_digits:dataset`
    title = reference[1].replace("_", " ") if reference else task
    steps = number(record.summary, "steps")
    steps = round(sum(_last_steps(record).values()) if steps is None else steps)
    wall_s = number(record.summary, "wall_s")
    if wall_s is None:
        wall_s = max((time for row in record.rows if (time := number(row, "time_s")) is not None), default=None)

    early = Markup("<strong>This run ended early.</strong> ") if record.interrupted else Markup()
    result = _result(record) or "It was not evaluated on held-out problems after training."
    took = f" and {format_duration(wall_s)}" if wall_s is not None else ""
    cost = f" The run took {steps} step{'s' * (steps != 1)}{took}." if steps or took else ""

    moment = text(record.versions, "collected_at")
    torch, cores = text(record.versions, "torch"), number(record.versions, "cpu_count")
    # Minutes are enough to tell two runs apart; a date that is not ISO 8601 is shown unchanged.
    date = re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1, \2 UTC", moment) if moment else "date unknown"
    facts = [date, record.path.name, "" if task in (title, record.path.name) else task]
    facts += [f"torch {torch}" if torch else "", f"{cores:.0f} cores" if cores else ""]
    cards = [*_held_out_cards(record), *_cost_cards(record, steps=steps, wall_s=wall_s)]
    return {
        "title": title,
        "sentence": early + result + cost,
        "cards": cards,
        "facts": [each for each in facts if each],
    }


def _held_out_cards(record: RunRecord) -> list[dict[str, Any]]:
    cards: list[dict[str, Any]] = []
    sampled, greedy, size = _held_out(record, "sampled"), _held_out(record, "greedy"), _held_out_size(record)
    if sampled.after is not None:
        notes, meter = [], None
        if sampled.before is not None and sampled.unit == "share":
            notes.append(f"{100 * (sampled.after - sampled.before):+.1f} points".replace("-", "−"))
            meter = (sampled.before, sampled.after)
        if size:
            notes.append(f"{size} problems")
            if sampled.unit == "share":
                # Half of the 95 % interval; an upper bound for rewards that are not just 0 or 1.
                margin = _QUANTILE_95 * math.sqrt(sampled.after * (1 - sampled.after) / size)
                notes.append(f"± {100 * margin:.1f} at 95 %")
        card = {"label": "Held-out, sampled", "value": sampled.write("after"), "note": " · ".join(notes)}
        cards.append({**card, "before": sampled.write("before"), "meter": meter})
    for label, held_out in (
        ("Held-out, greedy", greedy),
        ("Held-out loss", _held_out(record, "loss")),
        ("Held-out pairs right", _held_out(record, "pair_accuracy")),
    ):
        # The loss of demonstrations is the result of supervised fine-tuning alone.
        if held_out.after is not None and (label != "Held-out loss" or text(record.summary, "algorithm") == "sft"):
            note = f"before: {held_out.write('before')}" if held_out.before is not None else ""
            if label == "Held-out pairs right" and (margin_text := _held_out(record, "margin").write("after")):
                note = f"margin {margin_text}"
            cards.append({"label": label, "value": held_out.write("after"), "note": note})
    return cards


def _cost_cards(record: RunRecord, *, steps: int, wall_s: float | None) -> list[dict[str, Any]]:
    cards = []
    if record.stages:
        note = " · ".join(f"{name} {last:.0f}" for name, last in _last_steps(record).items())
        cards.append({"label": "Optimizer steps", "value": str(steps), "note": note})
    if wall_s is not None:
        note = f"{format_duration(wall_s / steps)} per step" if steps else ""
        cards.append({"label": "Wall time", "value": format_duration(wall_s), "note": note})
    counts = [number(row, name) or 0.0 for row in record.rows for name in ("sampled_tokens", "trained_tokens")]
    total, speed = number(record.summary, "tokens") or sum(counts), ""
    for name, rows in record.stages.items():  # the last stage that logged a speed
        if speeds := [value for _, value in points(rows, "tokens_per_s") if value is not None]:
            speed = f"{format_count(statistics.median(speeds))}/s in {name}"
    if total or speed:
        cards.append({"label": "Tokens", "value": format_count(total) if total else "–", "note": speed})
    return cards


def _result(record: RunRecord) -> Markup | None:
    """What became of the held-out reward, otherwise of the pairs or of the loss; None if nothing was evaluated."""
    size = f"{size} " if (size := _held_out_size(record)) else ""
    algorithm = text(record.summary, "algorithm") or "training"
    algorithm = algorithm.upper() if algorithm.isalpha() and len(algorithm) <= len("GRPO") else algorithm.capitalize()
    held_out, what, end = _held_out(record, "sampled"), f"the mean reward on {size}held-out problems", "."
    if record.rewards_are_right_or_wrong:
        what = f"the share of right responses on {size}held-out problems"
    pairs = _held_out(record, "pair_accuracy")
    if held_out.after is None and pairs.after is not None:
        of = f"{size or 'the '}held-out pairs"
        if pairs.before is not None and _held_out(record, "margin").before:  # a loss without a reference
            told = Markup(
                "The chosen response is the likelier one, per token, in <strong>{}</strong> of {}. Before: {}."
            )
            return told.format(pairs.write("after"), of, pairs.write("before"))
        told = Markup("{} made the chosen response gain on the rejected one in <strong>{}</strong> of {}.")
        return told.format(algorithm, pairs.write("after"), of)
    if held_out.after is None:
        held_out, what = _held_out(record, "loss"), f"the loss of {size}held-out demonstrations"
        end = " nats per token."
    if held_out.after is None:
        return None
    before, after = (Markup("<strong>{}</strong>").format(held_out.write(when)) for when in ("before", "after"))
    if held_out.before is None:
        return Markup("{} came to {}{}").format(what[:1].upper() + what[1:], after, end)
    if held_out.after == held_out.before:
        return Markup("{} left {} at {}{}").format(algorithm, what, after, end)
    verb = "raised" if held_out.after > held_out.before else "lowered"
    return Markup("{} {} {} from {} to {}{}").format(algorithm, verb, what, before, after, end)


def _held_out(record: RunRecord, kind: str) -> _HeldOut:
    name = f"held_out_{kind}"
    before, after = (number(record.summary, f"{name}_{when}") for when in ("before", "after"))
    logged = [point for rows in record.stages.values() for point in points(rows, name)]
    if before is None:  # an evaluation at step 0 was made before training
        before = next((value for step, value in logged if step == 0), None)
    if after is None:
        after = next((value for step, value in reversed(logged) if step > 0 and value is not None), None)
    is_share = all(0 <= value <= 1 for value in (before, after) if value is not None)
    units = {"loss": "number", "margin": "number", "pair_accuracy": "share"}
    return _HeldOut(before, after, units.get(kind, "share" if is_share else "score"))


def _held_out_size(record: RunRecord) -> int | None:
    """The number of held-out problems, if the summary has both the size and a result."""
    size = number(record.summary, "held_out_size")
    return None if size is None else round(size)


def _last_steps(record: RunRecord) -> dict[str, float]:
    return {stage: max(number(row, "step") or 0.0 for row in rows) for stage, rows in record.stages.items()}

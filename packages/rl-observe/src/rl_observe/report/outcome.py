"""What came of a run: the sentence at the top and the figures under it.

Where the summary lacks a figure, the log supplies it; where both do, it is left out.
"""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import dataclass

from rl_observe.number_format import format_count, format_duration
from rl_observe.report.markup import Html, element, fragment
from rl_observe.report.record import RunRecord, number, rewards_are_right_or_wrong, text
from rl_observe.report.series import points
from rl_observe.report.typography import typeset_value

__all__ = ["cards", "masthead"]

# Two-sided 95 % of a normal distribution.
_QUANTILE_95 = 1.96


@dataclass(frozen=True, slots=True)
class _HeldOut:
    """A held-out mean before and after; either may be unknown."""

    before: float | None
    after: float | None
    size: int | None

    @property
    def unit(self) -> str:
        return "share" if all(0 <= value <= 1 for value in (self.before, self.after) if value is not None) else "score"

    def margin(self) -> float | None:
        """Half of the 95 % interval of `after`; an upper bound for rewards that are not just 0 or 1."""
        if self.after is None or not self.size or self.unit != "share":
            return None
        return _QUANTILE_95 * math.sqrt(self.after * (1 - self.after) / self.size)


def masthead(record: RunRecord) -> Html:
    """The title, the sentence that says what came of the run, and when and how it was made."""
    algorithm = text(record.summary, "algorithm")
    stages = " → ".join(record.stages) or algorithm
    return element(
        "header",
        element("p", "Training run", element("span", stages, class_="chip") if stages else None, class_="eyebrow"),
        element("h1", title(record)),
        element("p", *_sentence(record), class_="outcome"),
        element("p", " · ".join(_facts(record)), class_="facts"),
    )


def title(record: RunRecord) -> str:
    """What the run is called: its task, or its folder's name; of `package.sort_digits:dataset`, `sort digits`."""
    task = text(record.summary, "task") or record.path.name
    reference = re.fullmatch(r"(?:\w+\.)*(\w+):\w+", task)
    return reference[1].replace("_", " ") if reference else task


def cards(record: RunRecord) -> Html:
    """The figures that people ask for first."""
    found = [
        _held_out_card(record),
        _greedy_card(record),
        _loss_card(record),
        _pairs_card(record),
        _steps_card(record),
        _time_card(record),
        _tokens_card(record),
    ]
    return element("div", *(card for card in found if card is not None), class_="cards")


def _held_out(record: RunRecord, kind: str) -> _HeldOut:
    name = f"held_out_{kind}"
    before, after = (number(record.summary, f"{name}_{when}") for when in ("before", "after"))
    size = number(record.summary, "held_out_size") if after is not None else None
    if before is None:
        # An evaluation after some steps is no figure of before.
        before = next((value for step, value in points(record.rows, name) if step == 0), None)
    if after is None:
        after = next(
            (value for step, value in reversed(points(record.rows, name)) if step > 0 and value is not None), None
        )
    return _HeldOut(before, after, None if size is None else round(size))


def _sentence(record: RunRecord) -> list[str | Html]:
    held_out, after, before = _held_out(record, "sampled"), None, None
    if held_out.after is not None:
        after = element("strong", typeset_value(held_out.after, held_out.unit))
    if held_out.before is not None:
        before = element("strong", typeset_value(held_out.before, held_out.unit), class_="before")
    what = "the share of right answers" if rewards_are_right_or_wrong(record) else "the mean reward"
    where = f" on {f'{held_out.size} ' if held_out.size else ''}held-out problems "
    early: list[str | Html] = [element("strong", "This run ended early."), " "] if record.interrupted else []
    if after is None or held_out.after is None:
        if (told := _pairs_sentence(record) or _loss_sentence(record)) is not None:
            return [*early, *told, _cost(record)]
        return [*early, "It was not evaluated on held-out problems after training.", _cost(record)]
    if before is None or held_out.before is None:
        return [*early, what.capitalize(), where, "came to ", after, ".", _cost(record)]
    change = held_out.after - held_out.before
    if change == 0:
        return [*early, _algorithm(record), " left ", what, where, "at ", after, ".", _cost(record)]
    verb = " raised " if change > 0 else " lowered "
    return [*early, _algorithm(record), verb, what, where, "from ", before, " to ", after, ".", _cost(record)]


def _pairs_sentence(record: RunRecord) -> list[str | Html] | None:
    """Of a run that nobody judged and that learnt from pairs: in how many the chosen answer gained."""
    held_out = _held_out(record, "pair_accuracy")
    if held_out.after is None:
        return None
    share = element("strong", typeset_value(held_out.after, "share"))
    of = f" of {held_out.size} held-out pairs." if held_out.size else " of the held-out pairs."
    if held_out.before is not None and _held_out(record, "margin").before:  # compared with no reference
        before = element("strong", typeset_value(held_out.before, "share"), class_="before")
        return [
            "The chosen answer is the likelier one, token by token, in ",
            share,
            of,
            " Before: ",
            before,
            ".",
        ]
    return [_algorithm(record), " made the chosen answer gain on the rejected one in ", share, of]


def _loss_sentence(record: RunRecord) -> list[str | Html] | None:
    """Of a run that nobody judged: what became of the loss."""
    held_out = _held_out(record, "loss")
    if held_out.after is None:
        return None
    of = f" of {held_out.size}" if held_out.size else " of"
    what = f"the loss{of} held-out demonstrations "
    after = element("strong", typeset_value(held_out.after, "number"))
    if held_out.before is None:
        return [what.capitalize(), "came to ", after, " nats a token."]
    before = element("strong", typeset_value(held_out.before, "number"), class_="before")
    change = held_out.after - held_out.before
    verb = " lowered " if change < 0 else " raised " if change > 0 else " left "
    return [_algorithm(record), verb, what, "from ", before, " to ", after, " nats a token."]


def _cost(record: RunRecord) -> str:
    steps, wall_s = _num_steps(record), _wall_s(record)
    if not steps and wall_s is None:
        return ""
    took = f" and {format_duration(wall_s)}" if wall_s is not None else ""
    return f" The whole run took {steps} step{'s' * (steps != 1)}{took}."


def _algorithm(record: RunRecord) -> str:
    name = text(record.summary, "algorithm") or "training"
    return name.upper() if name.isalpha() and len(name) <= len("GRPO") else name.capitalize()


def _facts(record: RunRecord) -> list[str]:
    moment = text(record.versions, "collected_at")
    facts = [_date(moment) if moment else "date unknown", record.path.name]
    task = text(record.summary, "task")
    if task is not None and task != title(record):
        facts.append(task)
    torch = text(record.versions, "torch")
    if torch:
        facts.append(f"torch {torch}")
    cores = number(record.versions, "cpu_count")
    if cores:
        facts.append(f"{cores:.0f} cores")
    return facts


def _date(moment: str) -> str:
    # Minutes are enough to tell two runs apart; what does not look like ISO 8601 stays as it is.
    return re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d).*\+00:00$", r"\1, \2 UTC", moment)


def _held_out_card(record: RunRecord) -> Html | None:
    held_out = _held_out(record, "sampled")
    if held_out.after is None:
        return None
    value: list[str | Html] = [typeset_value(held_out.after, held_out.unit)]
    meter = None
    if held_out.before is not None:
        before = element("span", typeset_value(held_out.before, held_out.unit), class_="before")
        value = [before, element("span", " → ", class_="arrow"), *value]
        meter = _meter(held_out)
    return _card("Held-out, sampled", fragment(*value), _uncertainty(held_out), extra=meter, lead=True)


def _uncertainty(held_out: _HeldOut) -> str:
    parts = []
    if held_out.before is not None and held_out.after is not None and held_out.unit == "share":
        parts.append(f"{100 * (held_out.after - held_out.before):+.1f} points".replace("-", "−"))
    if held_out.size:
        parts.append(f"{held_out.size} problems")
    margin = held_out.margin()
    if margin is not None:
        parts.append(f"± {100 * margin:.1f} at 95 %")
    return " · ".join(parts)


def _meter(held_out: _HeldOut) -> Html | None:
    if held_out.unit != "share" or held_out.before is None or held_out.after is None:
        return None
    bars = [
        element("span", class_=f"fill {name}", style=f"width:{100 * value:.1f}%")
        for name, value in (("before", held_out.before), ("after", held_out.after))
    ]
    return element("div", *bars, class_="meter", aria_hidden="true")


def _greedy_card(record: RunRecord) -> Html | None:
    held_out = _held_out(record, "greedy")
    if held_out.after is None:
        return None
    before = f"before: {typeset_value(held_out.before, held_out.unit)}" if held_out.before is not None else ""
    return _card("Held-out, greedy", typeset_value(held_out.after, held_out.unit), before)


def _loss_card(record: RunRecord) -> Html | None:
    """Of a run that is about imitation."""
    held_out = _held_out(record, "loss")
    if held_out.after is None or text(record.summary, "algorithm") != "sft":
        return None
    before = f"before: {typeset_value(held_out.before, 'number')}" if held_out.before is not None else ""
    return _card("Held-out loss", typeset_value(held_out.after, "number"), before)


def _pairs_card(record: RunRecord) -> Html | None:
    """Of a run that learnt from pairs."""
    held_out, margin = _held_out(record, "pair_accuracy"), _held_out(record, "margin")
    if held_out.after is None:
        return None
    by = "" if margin.after is None else f"margin {typeset_value(margin.after, 'number')}"
    return _card("Held-out pairs right", typeset_value(held_out.after, "share"), by)


def _steps_card(record: RunRecord) -> Html | None:
    steps = _num_steps(record)
    stages = " · ".join(f"{name} {_last_step(record, name)}" for name in record.stages)
    return _card("Optimizer steps", str(steps), stages) if record.stages else None


def _time_card(record: RunRecord) -> Html | None:
    wall_s, steps = _wall_s(record), _num_steps(record)
    if wall_s is None:
        return None
    return _card("Wall time", format_duration(wall_s), f"{format_duration(wall_s / steps)} a step" if steps else "")


def _tokens_card(record: RunRecord) -> Html | None:
    sampled, trained = (
        sum(value for _, value in points(record.rows, name) if value is not None)
        for name in ("sampled_tokens", "trained_tokens")
    )
    total = number(record.summary, "tokens") or sampled + trained
    stage, speed = _speed(record)
    if total:
        return _card("Tokens", format_count(total), f"{speed}/s in {stage}" if speed else "sampled and trained on")
    return _card("Tokens per second", speed, f"in {stage}, median") if speed else None


def _speed(record: RunRecord) -> tuple[str, str]:
    """The last stage that logged one, and its median speed; two empty strings if none did."""
    for stage in reversed(record.stages):
        speeds = [value for _, value in points(record.stages[stage], "tokens_per_s") if value is not None]
        if speeds:
            return stage, format_count(statistics.median(speeds))
    return "", ""


def _card(label: str, value: str, note: str, *, extra: Html | None = None, lead: bool = False) -> Html:
    return element(
        "div",
        element("h3", label),
        element("p", value, class_="value"),
        extra,
        element("p", note, class_="note") if note else None,
        class_="card lead-card" if lead else "card",
    )


def _num_steps(record: RunRecord) -> int:
    steps = number(record.summary, "steps")
    return round(steps) if steps is not None else sum(_last_step(record, name) for name in record.stages)


def _last_step(record: RunRecord, stage: str) -> int:
    return round(max(number(row, "step") or 0.0 for row in record.stages[stage]))


def _wall_s(record: RunRecord) -> float | None:
    wall_s = number(record.summary, "wall_s")
    if wall_s is not None:
        return wall_s
    return max((time for row in record.rows if (time := number(row, "time_s")) is not None), default=None)

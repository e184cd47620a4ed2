"""The same questions before and after training, side by side, each answer marked in words and not by colour alone.

It does not know how answers are judged: where every reward is 0 or 1 they are called right and wrong, otherwise the
rewards are shown, and where there are none, nothing is said.
"""

from __future__ import annotations

from collections.abc import Mapping

from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, rewards_are_right_or_wrong, text
from rl_observe.report.typography import typeset_value

__all__ = ["samples_section"]

# More of them make the page long without making the reader wiser; samples.jsonl has them all.
_MOST_SHOWN = 16

_WHENS = ("before", "after")
Pair = dict[str, Row]


def samples_section(record: RunRecord) -> Html | None:
    """Show answers of before beside those of after; None if there are none."""
    pairs = _pairs(record)
    if not pairs:
        return None
    shown = list(pairs.items())[:_MOST_SHOWN]
    judged = any(number(sample, "reward") is not None for sample in record.samples)
    graded = not rewards_are_right_or_wrong(record) if judged else None
    heads = ("prompt", "expected", *_WHENS)
    return element(
        "section",
        element("h2", "Before and after"),
        element("p", _describe(pairs, num_shown=len(shown), graded=graded), class_="lead"),
        element(
            "table",
            element("thead", element("tr", *(element("th", head, scope="col") for head in heads))),
            element("tbody", *(_row(prompt, pair, graded=graded) for (_, prompt), pair in shown)),
            class_="samples",
        ),
        id="samples",
    )


def _pairs(record: RunRecord) -> Mapping[tuple[str, str], Pair]:
    pairs: dict[tuple[str, str], Pair] = {}
    for sample in record.samples:
        prompt, when = text(sample, "prompt"), text(sample, "when")
        if prompt is not None and when in _WHENS:
            pairs.setdefault((text(sample, "stage") or "", prompt), {}).setdefault(when, sample)
    return pairs


def _describe(pairs: Mapping[tuple[str, str], Pair], *, num_shown: int, graded: bool | None) -> str:
    counts = []
    for when in _WHENS if graded is not None else ():
        answers = [pair[when] for pair in pairs.values() if when in pair]
        rewards = [number(answer, "reward") or 0.0 for answer in answers]
        if graded and rewards:
            counts.append(f"mean reward {typeset_value(sum(rewards) / len(rewards), 'number')} {when}")
        elif rewards:
            counts.append(f"{sum(reward >= 1 for reward in rewards)} of {len(rewards)} right {when}")
    shown = "" if num_shown == len(pairs) else f" The first {num_shown} are shown; samples.jsonl has all."
    judged = f"Held-out problems, sampled: {', '.join(counts)} training." if counts else "Held-out problems, sampled."
    return f"{judged}{shown}"


def _row(prompt: str, pair: Pair, *, graded: bool | None) -> Html:
    expected = next((found for sample in pair.values() if (found := text(sample, "expected")) is not None), None)
    return element(
        "tr",
        element("th", element("pre", prompt), scope="row", data_label="prompt"),
        element("td", element("pre", expected) if expected is not None else "–", data_label="expected"),
        *(
            element("td", element("div", *_answer(pair.get(when), graded=graded), class_="answer"), data_label=when)
            for when in _WHENS
        ),
    )


def _answer(sample: Row | None, *, graded: bool | None) -> list[Html | str]:
    if sample is None:
        return ["–"]
    answer: list[Html | str] = [] if graded is None else [_mark(sample, graded=graded)]
    answer.append(element("pre", text(sample, "response") or ""))
    if sample.get("truncated") is True:
        answer.append(element("small", "cut off at the token limit"))
    return answer


def _mark(sample: Row, *, graded: bool) -> Html:
    reward = number(sample, "reward")
    if reward is None:
        return element("span", "no reward", class_="mark-word")
    if graded:
        return element("span", f"reward {typeset_value(reward, 'number')}", class_="mark-word")
    if reward >= 1:
        return element("span", "✓ right", class_="mark-word right")
    return element("span", "✗ wrong", class_="mark-word wrong")

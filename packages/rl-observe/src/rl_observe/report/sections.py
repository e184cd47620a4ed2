"""The sections of the report that are not about time or curves: outcome, responses, conversations, refits.

Each function returns what a template shows. A figure that summary.json lacks comes from the log; one that neither has
is None.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rl_observe.glossary import finite_number, metric_of
from rl_observe.log_files import Row
from rl_observe.report.curves import Chart, Curve, points
from rl_observe.report.record import RunRecord, number, section, text

_PEAKS = "memory_"  # metrics of which the largest value counts, and not the usual one
_QUANTILE_95 = 1.96  # two-sided 95 % of a normal distribution


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
    if size and sampled["after"] is not None and sampled["unit"] == "share":
        # Half of the 95 % interval; an upper bound for rewards that are not just 0 or 1.
        interval = _QUANTILE_95 * math.sqrt(sampled["after"] * (1 - sampled["after"]) / size)
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


def _held_out(record: RunRecord, kind: str, unit: str | None = None) -> dict[str, Any]:
    """A held-out mean before and after training; either may be None."""
    name = f"held_out_{kind}"
    before, after = (number(record.summary, f"{name}_{when}") for when in ("before", "after"))
    logged = [point for rows in record.stages.values() for point in points(rows, name)]
    if before is None:  # an evaluation at step 0 was made before training
        before = next((value for step, value in logged if step == 0), None)
    if after is None:
        after = next((value for step, value in reversed(logged) if step > 0 and value is not None), None)
    is_share = all(0 <= value <= 1 for value in (before, after) if value is not None)
    unit = unit or ("share" if is_share else "score")
    return {"before": before, "after": after, "unit": unit, "change": (after or 0.0) - (before or 0.0)}


_MAX_CONVERSATIONS = 12
_MAX_TOKENS = 1200  # a longer conversation is shown at both ends; the middle would make the page heavy
_WHENS = ("before", "after")


def before_after(record: RunRecord) -> dict[str, Any] | None:
    """For the template: `counts`, `is_binary` and `pairs` of samples. None if there are no samples.

    `counts` says before and after training how many responses were right, wrong or cut off, of how many, and their
    mean reward. A pair is the prompt, the expected answer or None, and the samples before and after, None if missing.
    """
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for sample in record.samples:
        prompt, when = text(sample, "prompt"), text(sample, "when")
        if prompt is not None and when in _WHENS:
            pairs.setdefault((text(sample, "stage") or "", prompt), {}).setdefault(when, sample)
    counts = {}
    for when in _WHENS:
        found = [pair[when] for pair in pairs.values() if when in pair]
        rewards = [reward for sample in found if (reward := number(sample, "reward")) is not None]
        kinds = Counter(
            "right" if number(sample, "reward") == 1 else "cut off" if sample.get("truncated") is True else "wrong"
            for sample in found
        )
        if rewards:
            counts[when] = {"kinds": kinds, "of": len(found), "mean": sum(rewards) / len(rewards)}
    rows = []
    for (_, prompt), pair in pairs.items():
        expected = next((gold for sample in pair.values() if (gold := text(sample, "expected")) is not None), None)
        rows.append((prompt, expected, [pair.get(when) for when in _WHENS]))
    return {"counts": counts, "is_binary": record.rewards_are_right_or_wrong, "pairs": rows} if rows else None


def conversations(record: RunRecord) -> list[dict[str, Any]]:
    """At most twelve samples that were kept with their tokens, those of the same prompt together.

    Each has the `sample`, its `num_tokens`, `num_sampled`, `num_turns` and mean `probability`, and `tokens`. A token
    has `text`; a sampled one also `logp`, `shade` (its probability in tenths), `trained`, `turn` and `index`.
    """
    found: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for sample in record.samples:
        if (conversation := _conversation(sample)) is not None:
            found.setdefault((text(sample, "stage"), text(sample, "prompt")), []).append(conversation)
    return [conversation for group in found.values() for conversation in group][:_MAX_CONVERSATIONS]


def _conversation(sample: Row) -> dict[str, Any] | None:
    kept = sample.get("tokens")
    columns = [kept.get(name) for name in ("pieces", "logp", "trained", "turns")] if isinstance(kept, dict) else []
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < 4 or len({len(column) for column in lists}) > 1 or not lists[0]:
        return None
    tokens: list[dict[str, Any]] = []
    for index, (piece, value, trained, turn) in enumerate(zip(*lists, strict=True)):
        shown, logp = piece if isinstance(piece, str) else "", finite_number(value)
        token: dict[str, Any] = {"text": shown}
        if logp is not None:
            logp = min(logp, 0.0)
            # A newline would have no width to be shaded or pointed at.
            token |= {"text": shown.replace("\n", "↵\n") or "·", "logp": logp, "index": index}
            token |= {"shade": min(9, int(10 * math.exp(logp))), "trained": trained is True}
            token["turn"] = int(finite_number(turn) or 0)
        tokens.append(token)
    logps = [token["logp"] for token in tokens if "logp" in token]
    shown_tokens = _join_context(tokens)
    if len(tokens) > _MAX_TOKENS:
        half = _MAX_TOKENS // 2
        gap = {"text": f" … {len(tokens) - 2 * half} tokens left out … ", "gap": True}
        shown_tokens = [*_join_context(tokens[:half]), gap, *_join_context(tokens[-half:])]
    return {
        "sample": sample,
        "num_tokens": len(tokens),
        "num_sampled": len(logps),
        "num_turns": len({token["turn"] for token in tokens if "logp" in token}),
        "probability": math.exp(sum(logps) / len(logps)) if logps else None,
        "tokens": shown_tokens,
    }


def _join_context(tokens: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join runs of tokens that were not sampled: nobody points at them one by one."""
    parts: list[dict[str, Any]] = []
    for is_sampled, run in groupby(tokens, key=lambda token: "logp" in token):
        group = list(run)
        parts += group if is_sampled else [{"text": "".join(token["text"] for token in group)}]
    return parts


def predicted(record: RunRecord) -> dict[str, Any] | None:
    """What was predicted of the run beside what was measured, for the template; None if nothing was predicted.

    `rows` has of each figure its `name`, `meaning` and `unit`, the figures `predicted` and `measured`, their `ratio`
    (measured over predicted) and `how` it was measured, where it was. `unknown` are names and reasons.
    """
    figures, unknown = section(record.prediction, "figures"), section(record.prediction, "unknown")
    if not figures and not unknown:
        return None
    stage = text(record.prediction, "stage")
    logged = [row for row in record.stages.get(stage or "", record.rows) if (number(row, "step") or 0) > 0]
    rows = []
    for name in figures:
        if (expected := number(figures, name)) is None:
            continue
        metric = metric_of(name)
        values = [value for row in logged if (value := number(row, name)) is not None]
        measured, how = None, "the run does not log it"
        if values and name.startswith(_PEAKS):
            measured, how = max(values), f"the most in {len(values)} steps"
        elif values:  # of a median, a first step that compiles and fills caches is no part
            measured, how = statistics.median(values), f"median of {len(values)} steps"
        rows.append(
            {
                "name": metric.label if metric else name,
                "meaning": metric.meaning if metric else "",
                "unit": metric.unit if metric else "number",
                "predicted": expected,
                "measured": measured,
                "ratio": None if measured is None or not expected else measured / expected,
                "how": how,
            }
        )
    assumed = record.prediction.get("assumed")
    return {
        "rows": rows,
        "stage": stage,
        "device": text(record.prediction, "device"),
        "assumed": [each for each in assumed if isinstance(each, str)] if isinstance(assumed, list) else [],
        "unknown": [
            (metric.label if (metric := metric_of(name)) else name, text(unknown, name) or "no reason is given")
            for name in unknown
        ],
    }


def refits(record: RunRecord) -> dict[str, Any] | None:
    """The refits for the template; None for a run without an engine.

    Figures come from the summary, otherwise from the last refit or the last logged step. `latest` are the last eight
    refits, each with its `seconds` summed up, and whether it was verified.
    """
    summary, rows = section(record.summary, "refit"), record.refits
    logged = [row for row in record.rows if number(row, "refit_bytes") is not None]
    if not summary and not logged and not rows:
        return None
    last, last_logged = rows[-1] if rows else {}, logged[-1] if logged else {}

    def known(name: str, logged_name: str) -> float | None:
        found = (number(summary, name), number(last, name), number(last_logged, logged_name))
        return next((value for value in found if value is not None), None)

    seconds = [value for row in logged if (value := number(row, "refit_s")) is not None]
    seconds = seconds or [value for row in rows if (value := _seconds(row)) is not None]
    timed = sorted({float(at): _seconds(row) for row in rows if (at := number(row, "version")) is not None}.items())
    note, curve = "Over the version of the weights, verification included.", Curve("refit time", "main", timed)
    chart = Chart("Seconds of each refit", note, "seconds", [curve], group="refits")
    num_verified = sum(map(_is_verified, rows))
    return {
        "count": number(summary, "count") or len(rows) or len(logged),
        "version": known("version", "version"),
        "tensors": known("tensors", "refit_tensors"),
        "bytes": known("bytes", "refit_bytes"),
        "median_s": statistics.median(seconds) if seconds else None,
        "digest": text(summary, "digest") or text(last, "digest"),
        "num_verified": num_verified,
        "is_unverified": ("digest" in summary and not text(summary, "digest")) or (bool(rows) and not num_verified),
        "chart": chart if sum(value is not None for _, value in timed) >= 3 else None,
        "latest": [({**row, "seconds": _seconds(row)}, _is_verified(row)) for row in rows[-8:]],
    }


def _is_verified(refit: Row) -> bool:
    return text(refit, "digest") is not None and text(refit, "verified") != "nothing"


def _seconds(refit: Row) -> float | None:
    known = [value for phase in section(refit, "seconds").values() if (value := finite_number(phase)) is not None]
    return sum(known) if known else None

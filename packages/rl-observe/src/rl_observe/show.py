"""Recorded steps in a terminal: which there are, the rollouts of one, and one rollout token by token.

Prompts and responses are shown as plain text: control characters in them are replaced, and no markup is read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rl_observe.recorded_steps import RecordedStep, RecordedStepError, RecordedSteps

__all__ = ["ORDERS", "order_rollouts", "rollout_page", "rollouts_table", "steps_table"]

ORDERS: dict[str, str] = {
    "reward": "reward",
    "advantage": "advantage",
    "length": "response_tokens",
    "logp": "logp_old",
    "gap": "max_logp_gap",
    "loss": "loss",
}
"""What rollouts can be ordered by, and the column of `RecordedStep.rows` that it is."""

SHADES = ("white", "green", "yellow", "dark_orange", "red")
"""Of a token, from likely to unlikely; a factor of 10 each."""


def steps_table(steps: RecordedSteps) -> Table:
    """Every recorded step of the stage with its figures; a step that cannot be read is a line that says why."""
    table = Table(title=f"recorded steps of {steps.stage}", title_justify="left", box=None, pad_edge=False)
    for name in (
        "step",
        "rollouts",
        "reward",
        "groups with signal",
        "response tokens",
        "cut off",
        "max |logp_old - logp|",
    ):
        table.add_column(name, justify="right")
    table.add_column("")
    readable, remarks = steps.readable()
    for step in readable:
        rows = step.rows
        gaps = [row["max_logp_gap"] for row in rows if row.get("max_logp_gap") is not None and row["update"] == 0]
        rewards: dict[int, set[float]] = {}
        for row in rows:
            rewards.setdefault(row["group"], set()).add(row["reward"])
        errors = [str(step.data["error"])] if "error" in step.data else []
        table.add_row(
            str(step.step),
            str(len(step)),
            f"{sum(row['reward'] for row in rows) / max(1, len(rows)):.4g}",
            f"{sum(len(found) > 1 for found in rewards.values())} of {len(rewards)}",
            f"{sum(row['response_tokens'] for row in rows) / max(1, len(rows)):.1f}",
            f"{sum(row['truncated'] for row in rows)}",
            f"{max(gaps):.3g}" if gaps else "–",
            Text(_line("; ".join([*errors, *filter(None, [step.cut_told])]), 80), style="red"),
        )
    for remark in remarks:
        table.add_row("", "", "", "", "", "", "", Text(remark, style="red"))
    return table


def order_rollouts(step: RecordedStep, by: str, *, descending: bool = False) -> list[dict[str, Any]]:
    """The rollouts as `RecordedStep.rows` has them, ordered by one of `ORDERS`; those without a value last.

    Raises:
        RecordedStepError: there is no such order.
    """
    if by not in ORDERS:
        raise RecordedStepError(f"rollouts cannot be ordered by {by!r}; choose {', '.join(ORDERS)}")
    column = ORDERS[by]

    def key(row: dict[str, Any]) -> tuple[bool, float]:
        value = math.nan if row.get(column) is None else float(row[column])
        missing = math.isnan(value)
        return missing, 0.0 if missing else (-value if descending else value)

    return sorted(step.rows, key=key)


def rollouts_table(step: RecordedStep, rows: Sequence[dict[str, Any]]) -> Table:
    """Rollouts with their figures, one line each."""
    shown = f"{len(rows)} of {len(step)} rollouts" if len(rows) < len(step) else f"{len(step)} rollouts"
    version = "" if step.version is None else f", sampled for weights of version {step.version}"
    title = f"step {step.step} of {step.stage}: {shown}{version}"
    title += f"\n{step.cut_told}" if step.cut else ""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = ("row", "group", "reward", "advantage", "tokens", "logp_old", "max gap")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("prompt", max_width=32, no_wrap=True)
    table.add_column("response", ratio=1, no_wrap=True)
    for row in rows:
        marks = "".join(mark for name, mark in (("truncated", "…"), ("failed", "✗")) if row[name])
        table.add_row(
            str(row["row"]),
            str(row["group"]),
            f"{row['reward']:.4g}",
            _number(row["advantage"]),
            f"{row['response_tokens']}{marks}",
            _number(row["logp_old"]),
            _number(row.get("max_logp_gap")),
            Text(_line(row["prompt"] or "", 60)),
            Text(_line(row["response"], 200)),
        )
    return table


def rollout_page(step: RecordedStep, row: int) -> RenderableType:
    """One rollout: its figures, its tokens shaded by how unlikely they were, and the others of its group.

    Raises:
        RecordedStepError: there is no such row.
    """
    tokens = step.token_rows(row)
    each = step.rows[row]
    head = Text(f"step {step.step} of {step.stage}, row {row} of group {each['group']}", style="bold")
    facts = [
        f"reward {each['reward']:.4g}",
        f"advantage {_number(each['advantage'])}",
        f"{each['response_tokens']} tokens",
    ]
    facts += [f"{name} {each[name]:.4g}" for name in each if name.startswith("reward/")]
    facts += [word for name, word in (("truncated", "cut off"), ("failed", f"failed: {each['failure']}")) if each[name]]
    facts += [f"source: {each['source']}"] if each["source"] else []
    facts += [f"expected: {_line(str(each['expected']), 80)}"] if each["expected"] else []
    text = Text()
    for token in tokens:
        # A shade for each factor of ten; what the policy did not choose is dim.
        logp = token.get("logp_old")
        style = "dim"
        if token["response"]:
            depth = 0 if logp is None or math.isnan(logp) else int(min(len(SHADES) - 1, max(0.0, -logp) / math.log(10)))
            style = (
                SHADES[depth] + ("" if token["trainable"] else " strike") + (" underline" if token["clipped"] else "")
            )
        text.append(_printable(token["text"]), style=style)
    legend = Text("likely", style="white")
    for shade, word in zip(SHADES[1:], ("< 0.1", "< 0.01", "< 0.001", "< 0.0001"), strict=True):
        legend.append(f"  {word}", style=shade)
    legend.append("  prompt", style="dim")
    legend.append("  struck: not trained on, underlined: clipped", style="dim")
    worst = sorted(
        (token for token in tokens if "ratio" in token and not math.isnan(token["ratio"])),
        key=lambda token: -abs(math.log(max(token["ratio"], 1e-9))),
    )[:5]
    gaps = Table(title="largest differences of engine and trainer", title_justify="left", box=None, pad_edge=False)
    for name in ("token", "text", "logp_old", "logp", "ratio"):
        gaps.add_column(name, justify="left" if name == "text" else "right")
    for token in worst:
        figures = (f"{token['logp_old']:.4f}", f"{token['logp']:.4f}", f"{token['ratio']:.4f}")
        gaps.add_row(str(token["index"]), Text(_printable(token["text"])), *figures)
    group = [other for other in step.rows if other["group"] == each["group"]]
    parts: list[RenderableType] = [head, Text(" · ".join(facts)), Text(), text, Text(), legend]
    parts += [Text(), gaps] if worst else []
    return Group(*parts, Text(), rollouts_table(step, group))


def _number(value: float | None) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.4g}"


def _line(text: str, size: int) -> str:
    """A text as one line of at most `size` characters."""
    line = " ".join(_printable(text).split())
    return line if len(line) <= size else line[: size - 1] + "…"


def _printable(text: str) -> str:
    """The text without characters that a terminal acts on, except for line breaks and tabs."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "�", text)

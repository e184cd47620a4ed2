"""The result of a run as one JSON object: what `run` prints last and `summary.json` holds.

Phases and tokens are added up from the log, so that they count what was done before an interruption too.
"""

from typing import Any

from rl_launcher.checkpointing import Progress
from rl_launcher.evaluating import Evaluator
from rl_launcher.health import count_events
from rl_launcher.observe import RunDirectory, read_metrics
from rl_launcher.parts import Parts
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import PHASE, TOKENS

__all__ = ["summarize"]


def summarize(
    recipe: Recipe,
    parts: Parts,
    directory: RunDirectory,
    *,
    progress: Progress,
    after: dict[str, float] | None,
    ended_by: str | None = None,
) -> dict[str, Any]:
    """What is known at the end; `after` is None for a run that ended early, `ended_by` the condition that ended it."""
    rows = read_metrics(directory)
    report = parts.weight_sync.last
    before, headline = progress.before or {}, recipe.headline
    reached = after or {}
    return {
        "run_dir": str(directory.path),
        "task": recipe.data.source,
        "algorithm": headline,
        "seed": recipe.seed,
        "interrupted": after is None,
        "ended_by": ended_by,
        "conditions": count_events(directory),
        "restarts": progress.restarts,
        "held_out_sampled_before": before.get("held_out_sampled"),
        "held_out_sampled_after": reached.get("held_out_sampled"),
        "held_out_greedy_before": before.get("held_out_greedy"),
        "held_out_greedy_after": reached.get("held_out_greedy"),
        "held_out_loss_before": before.get("held_out_loss"),
        "held_out_loss_after": reached.get("held_out_loss"),
        **pair_figures(rows, ended=after is not None),
        "held_out_size": Evaluator(parts, recipe).size,
        "steps": parts.policy.version,
        "tokens": sum(int(_number(row, name)) for row in rows for name in TOKENS),
        "reward_errors": parts.environment.errors,
        "rows_skipped": parts.skipped.count,
        "phase_share": phase_share([row for row in rows if row["stage"] == headline]),
        "wall_s": round(progress.wall_s, 2),
        "refit": report
        and {
            "count": parts.weight_sync.count,
            "tensors": report.tensors,
            "bytes": report.bytes,
            "digest": report.digest,
            "version": report.version,
        },
    }


def phase_share(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Share of each phase in the time of these log lines, the largest first; they sum to 1."""
    totals: dict[str, float] = {}
    for row in rows:
        for name in row:
            if name.startswith(PHASE):
                totals[name] = totals.get(name, 0.0) + _number(row, name)
    whole = sum(totals.values()) or 1.0
    largest_first = sorted(totals, key=totals.__getitem__, reverse=True)
    return {name.removeprefix(PHASE): round(totals[name] / whole, 4) for name in largest_first}


def pair_figures(rows: list[dict[str, Any]], *, ended: bool) -> dict[str, float | None]:
    """Margin and accuracy of held-out pairs before DPO and, where it came to its end, after; None: not measured."""
    figures: dict[str, float | None] = {}
    for name in ("held_out_margin", "held_out_pair_accuracy"):
        measured = [row for row in rows if row["stage"] == "dpo" and name in row]
        figures[f"{name}_before"] = next((row[name] for row in measured if row["step"] == 0), None)
        figures[f"{name}_after"] = measured[-1][name] if ended and measured else None
    return figures


def _number(row: dict[str, Any], name: str) -> float:
    return float(row.get(name) or 0.0)

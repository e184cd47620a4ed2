"""The result of a run as one JSON object: what `run` prints last and `summary.json` holds.

Phases and tokens are added up from the log, so that they count what was done before an interruption too.
"""

from typing import Any

from rl_launcher.building import Parts
from rl_launcher.evaluating import Evaluator
from rl_launcher.observe import RunDirectory, read_metrics
from rl_launcher.progress import Progress
from rl_launcher.recipe_schema import Recipe
from rl_launcher.recording import PHASE, TOKENS
from rl_launcher.training import headline_stage

__all__ = ["summarize"]


def summarize(
    recipe: Recipe, parts: Parts, directory: RunDirectory, *, progress: Progress, after: dict[str, float] | None
) -> dict[str, Any]:
    """What is known at the end; `after` is None for a run that ended early."""
    rows = read_metrics(directory)
    report = parts.weight_sync.last
    before, headline = progress.before or {}, headline_stage(recipe)
    reached = after or {}
    return {
        "run_dir": str(directory.path),
        "task": recipe.data.source,
        "algorithm": headline,
        "seed": recipe.seed,
        "interrupted": after is None,
        "held_out_sampled_before": before.get("held_out_sampled"),
        "held_out_sampled_after": reached.get("held_out_sampled"),
        "held_out_greedy_before": before.get("held_out_greedy"),
        "held_out_greedy_after": reached.get("held_out_greedy"),
        "held_out_size": Evaluator(parts, recipe).size,
        "steps": parts.policy.version,
        "tokens": sum(int(_number(row, name)) for row in rows for name in TOKENS),
        "reward_errors": parts.environment.errors,
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


def _number(row: dict[str, Any], name: str) -> float:
    return float(row.get(name) or 0.0)

"""`run` and `resume`: what trains. Both end with one line of JSON, the summary."""

from collections.abc import Callable
from typing import Any

from rl_launcher.cli.arguments import Overrides, RecipeFile, RunPath, load
from rl_launcher.cli.console import INTERRUPTED, print_json, refuse, show, warn

__all__ = ["resume", "run"]


def run(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train as the recipe says. The last line printed is JSON with the result."""
    resolved = load(recipe, overrides)

    def carry_out() -> dict[str, Any]:
        from rl_launcher.running import run as run_recipe

        return run_recipe(resolved)

    _train(carry_out)


def resume(run_dir: RunPath, overrides: Overrides = None) -> None:
    """Carry a run that ended early to its end, from its last checkpoint. The last line printed is JSON."""

    def carry_out() -> dict[str, Any]:
        from rl_launcher.running import resume as resume_run

        return resume_run(run_dir, overrides or ())

    _train(carry_out)


def _train(carry_out: Callable[[], dict[str, Any]]) -> None:
    from rl_launcher.errors import RunStoppedError

    try:
        summary = carry_out()
    except RunStoppedError as error:
        refuse(error, error.exit_code)
    except KeyboardInterrupt:
        refuse("interrupted before training began; nothing was written", INTERRUPTED)
    except (ValueError, OSError) as error:
        refuse(error)
    for complaint in summary.get("unwritten", []):
        warn(f"not written: {complaint}")
    show(f"report: {summary['run_dir']}/report.html   model: {summary['run_dir']}/model")
    print_json(summary)

"""The command line: `rl-launcher run|resume|explain|validate|report|keys`.

Exit codes: 0 it holds; 1 the run failed half-way; 2 refused or misused; 130 interrupted. The reasons are printed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from rl_launcher.errors import RunStoppedError
from rl_launcher.recipe import Resolved, load_recipe, reference

if TYPE_CHECKING:
    from rl_launcher.recipe_schema import Recipe

__all__ = ["app", "main"]

FAILED, REFUSED, INTERRUPTED = 1, 2, 130
ResultT = TypeVar("ResultT")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train a language model from one YAML recipe.",
    epilog="Exit codes: 0 it holds; 1 the run failed half-way; 2 refused or misused; 130 interrupted.",
)
RecipeFile = Annotated[Path, typer.Argument(help="The recipe, a YAML file.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="`section.key=value`, as many as you like.", show_default=False)
]


RunDirectoryPath = Annotated[Path, typer.Argument(help="The directory of a run.", show_default=False)]


@app.command()
def run(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train as the recipe says. The last line printed is JSON with the result."""
    resolved = _load(recipe, overrides)

    def carry_out() -> dict[str, Any]:
        from rl_launcher.running import run as run_recipe

        return run_recipe(resolved)

    _train(carry_out)


@app.command()
def resume(run_dir: RunDirectoryPath) -> None:
    """Carry an interrupted run to its end, exactly where it stopped. The last line printed is JSON with the result."""

    def carry_out() -> dict[str, Any]:
        from rl_launcher.running import resume as resume_run

        return resume_run(run_dir)

    _train(carry_out)


@app.command()
def explain(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Say what a run would do: every key with its origin, the sharding plan, the refit plan. Trains nothing."""
    resolved = _load(recipe, overrides)
    from rl_launcher.explaining import explain as explain_recipe

    print(_or_refuse(lambda: explain_recipe(resolved)))


@app.command()
def validate(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Check a recipe and print it resolved, every default filled in. Loads no model."""
    print(_load(recipe, overrides).to_yaml(), end="")


@app.command()
def report(run_dir: RunDirectoryPath) -> None:
    """Write the report of a run again, from its log."""
    from rl_launcher.observe import RunDirectory, write_report

    print(_or_refuse(lambda: write_report(RunDirectory.open(run_dir))))


@app.command()
def keys() -> None:
    """Print every key that a recipe may have, with its type, default and meaning."""
    from rl_launcher.recipe_schema import Recipe

    print(reference(Recipe))


def main() -> None:
    """Run the command line."""
    app()


def _train(carry_out: Callable[[], dict[str, Any]]) -> None:
    try:
        summary = carry_out()
        for complaint in summary.get("unwritten", []):
            Console(stderr=True, highlight=False).print(
                f"[bold red]not written:[/] {escape(complaint)}", soft_wrap=True
            )
        print(f"report: {summary['run_dir']}/report.html   model: {summary['run_dir']}/model")
        print(json.dumps(summary))
    except RunStoppedError as error:
        _refuse(error, INTERRUPTED if error.interrupted else FAILED)
    except KeyboardInterrupt:
        _refuse("interrupted before training began; nothing was written", INTERRUPTED)
    except (ValueError, OSError) as error:
        _refuse(error, REFUSED)


def _load(recipe: Path, overrides: list[str] | None) -> "Resolved[Recipe]":
    from rl_launcher.recipe_schema import Recipe

    return _or_refuse(lambda: load_recipe(recipe, schema=Recipe, overrides=overrides or ()))


def _or_refuse(action: Callable[[], ResultT]) -> ResultT:
    try:
        return action()
    except (ValueError, OSError) as error:
        _refuse(error, REFUSED)


def _refuse(error: object, code: int) -> NoReturn:
    console = Console(stderr=True, highlight=False)
    console.print("[bold red]rl-launcher:[/] " + escape(str(error)), soft_wrap=True)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()

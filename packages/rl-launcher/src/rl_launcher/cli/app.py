"""The commands under their names, and the exit codes that all of them keep to."""

from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer

from rl_launcher.cli import cluster_commands as machines
from rl_launcher.cli import recipe_commands as knowing
from rl_launcher.cli import run_commands as measuring
from rl_launcher.cli import run_commands as results
from rl_launcher.cli import run_commands as training

__all__ = ["app", "main"]

EXIT_CODES = (
    "Exit codes: 0 it holds; 1 the run failed half-way, or what is measured does not hold; 2 refused or misused; "
    "75 saved and ended before its time was up, as asked: resume it; 130 interrupted."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train a language model from one YAML recipe, on a laptop or a cluster.",
    epilog=EXIT_CODES,
)
render = typer.Typer(no_args_is_help=True, help="Write the job that runs a recipe on a cluster.", epilog=EXIT_CODES)
recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with the package.", epilog=EXIT_CODES)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        try:
            typer.echo(f"rl-launcher {metadata.version('rl-launcher')}")
        except metadata.PackageNotFoundError:  # of a checkout on the path
            typer.echo("rl-launcher is not installed as a distribution, and has no version here")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Take what stands before a command."""


def _add(to: typer.Typer, panel: str, **commands: Callable[..., Any]) -> None:
    for name, command in commands.items():
        to.command(name.rstrip("_").replace("_", "-"), rich_help_panel=panel, epilog=EXIT_CODES)(command)


_add(app, "Train", run=training.run, resume=training.resume)
_add(app, "Before a run", explain=measuring.explain, validate=measuring.validate)
_add(app, "After a run", evaluate=measuring.evaluate, report=results.report, export=results.export)
app.add_typer(recipes, name="recipes", rich_help_panel="Recipes")
_add(app, "Recipes", keys=knowing.keys, schema=knowing.schema, import_nemo_rl=knowing.import_nemo_rl)
_add(app, "Machines", doctor=machines.doctor)
app.add_typer(render, name="render", rich_help_panel="Machines")
_add(recipes, "Commands", list_=knowing.list_recipes, show=knowing.show_recipe, copy=knowing.copy)
_add(render, "Commands", slurm=machines.slurm, kubernetes=machines.kubernetes)


def main() -> None:
    """Run the command line."""
    app()

"""The names of the commands, and the exit codes that all of them share."""

import sys
from collections.abc import Callable
from importlib import metadata
from typing import Annotated, Any

import typer

from rl_launcher.cli import cluster_commands, recipe_commands, run_commands

EXIT_CODES = (
    "Exit codes: 0 it holds; 1 the run failed, or what is measured does not hold; 2 refused or misused; "
    "75 saved and ended at its time limit: resume it; 130 interrupted."
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    help="Post-train a language model from one YAML recipe, on a laptop or a cluster.",
    epilog=EXIT_CODES,
)
render = typer.Typer(no_args_is_help=True, help="Write a job that runs a recipe on a cluster.", epilog=EXIT_CODES)
recipes = typer.Typer(no_args_is_help=True, help="The recipes that come with the package.", epilog=EXIT_CODES)


def _print_version(asked: bool) -> None:  # noqa: FBT001 - typer calls it so
    if asked:
        try:
            typer.echo(f"rl-launcher {metadata.version('rl-launcher')}")
        except metadata.PackageNotFoundError:  # a checkout on PYTHONPATH
            typer.echo("rl-launcher is not installed as a distribution, so its version is not known")
        raise typer.Exit


@app.callback()
def _options(
    *,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Handle options before the command."""


def _add(to: typer.Typer, panel: str, **commands: Callable[..., Any]) -> None:
    for name, command in commands.items():
        to.command(name.rstrip("_").replace("_", "-"), rich_help_panel=panel, epilog=EXIT_CODES)(command)


_add(app, "Train", run=run_commands.run, resume=run_commands.resume, serve=run_commands.serve)
_add(
    app,
    "Before a run",
    explain=run_commands.explain,
    validate=run_commands.validate,
    try_reward=run_commands.try_reward,
)
_add(app, "After a run", evaluate=run_commands.evaluate, report=run_commands.report, export=run_commands.export)
app.add_typer(recipes, name="recipes", rich_help_panel="Recipes")
_add(
    app,
    "Recipes",
    keys=recipe_commands.keys,
    schema=recipe_commands.schema,
    import_nemo_rl=recipe_commands.import_nemo_rl,
    import_verl=recipe_commands.import_verl,
    import_trl=recipe_commands.import_trl,
)
_add(app, "Machines", doctor=cluster_commands.doctor)
app.add_typer(render, name="render", rich_help_panel="Machines")
_add(
    recipes, "Commands", list_=recipe_commands.list_recipes, show=recipe_commands.show_recipe, copy=recipe_commands.copy
)
_add(render, "Commands", slurm=cluster_commands.slurm, kubernetes=cluster_commands.kubernetes)


_started_as_command = False


def is_main() -> bool:
    """Whether this process was started as the command line, and is not a caller's that runs one command."""
    return _started_as_command


def main() -> None:
    """Run the command line."""
    global _started_as_command  # noqa: PLW0603 - set once, by the process's entry
    _started_as_command = True
    code = 1
    try:
        app(prog_name="rl-launcher")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        raise
    finally:
        # Only a run over Ray has loaded this module, and only its driver has a parent that is told.
        if (driver := sys.modules.get("rl_launcher.run.driver_process")) is not None:
            driver.ended(code)

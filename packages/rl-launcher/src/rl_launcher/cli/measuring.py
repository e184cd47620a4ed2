"""`explain`, `validate` and `evaluate`: what a recipe would do, whether it may, and how good a model is."""

from pathlib import Path
from typing import Annotated

import typer

from rl_launcher.cli.arguments import Json, Overrides, RecipeFile, complete_recipes, load
from rl_launcher.cli.console import or_refuse, print_json, refuse, show, warn

__all__ = ["evaluate", "explain", "validate"]

ModelFolder = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER", help="Measure this model: a folder or hub id.", show_default=False),
]


def explain(recipe: RecipeFile, overrides: Overrides = None, *, json: Json = False) -> None:
    """Say what a run would do: origins of keys, placement, sharding, memory, refit, objective. No GPU, no weights."""
    resolved = load(recipe, overrides)
    from rl_launcher import preflight
    from rl_launcher.explaining import explain as explain_recipe

    explained = or_refuse(lambda: explain_recipe(resolved))
    or_refuse(lambda: preflight.check_rows(resolved.value))
    show(explained.text())
    if json:
        print_json(explained.figures)
    if explained.refusal is not None:
        refuse(explained.refusal)


def validate(recipe: RecipeFile, overrides: Overrides = None, *, json: Json = False) -> None:
    """Check a recipe, its files, rows, mesh and memory, and print it resolved, credentials left out. Loads no model."""
    resolved = load(recipe, overrides)
    from rl_launcher import preflight
    from rl_launcher.observe import redact
    from rl_launcher.recipe.interpolation import escape
    from rl_launcher.recipe.plain_data import to_plain
    from rl_launcher.recipe.yaml_dialect import dump

    or_refuse(lambda: preflight.check(resolved.value, new_run=False))
    or_refuse(lambda: preflight.check_rows(resolved.value))
    if (reason := preflight.taken(resolved.value.run_dir)) is not None:
        warn(f"`rl-launcher run` will refuse it as it is: {reason}")
    show(dump(escape(redact(to_plain(resolved.value)))), end="")
    if json:
        print_json({"valid": True, "stages": [*resolved.value.stages]})


def evaluate(
    subject: Annotated[
        Path,
        typer.Argument(
            metavar="RECIPE|RUN",
            help="A recipe, or the directory of a run, whose model is then measured.",
            show_default=False,
            autocompletion=complete_recipes,
        ),
    ],
    overrides: Overrides = None,
    *,
    model: ModelFolder = None,
    json: Json = False,
) -> None:
    """Ask a model the held-out prompts: mean reward and pass@k, sampled and greedy, with intervals."""
    from rl_launcher.measuring import measured_recipe
    from rl_launcher.shipped import find_recipe

    resolved = or_refuse(lambda: measured_recipe(find_recipe(subject), overrides=overrides or (), model=model))
    from rl_launcher.measuring import measure

    measured = or_refuse(lambda: measure(resolved))
    show(measured.text())
    if json:
        print_json(measured.figures())

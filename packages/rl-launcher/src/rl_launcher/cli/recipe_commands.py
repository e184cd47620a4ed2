"""`recipes`, `keys`, `schema` and `import-...`: recipes to start from, or of others, and the keys of a recipe."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_launcher.cli.arguments import Out, complete_keys
from rl_launcher.cli.console import or_refuse, show, warn, write
from rl_launcher.recipe_files.shipped import about, copy_recipe, shipped_recipe, shipped_recipes

if TYPE_CHECKING:
    from rl_launcher.import_nemo_rl import Translation


def complete_names(incomplete: str) -> list[str]:
    """Complete names of shipped recipes."""
    return [name for name in shipped_recipes() if name.startswith(incomplete)]


Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A shipped recipe.", show_default=False, autocompletion=complete_names)
]


def list_recipes() -> None:
    """Print the names of the shipped recipes and what each does."""
    known = shipped_recipes()
    width = max(map(len, known))
    for name, path in known.items():
        show(f"{name:<{width}}  {about(path)}")


def show_recipe(name: Name) -> None:
    """Print a shipped recipe as it is written; `rl-launcher validate --print NAME` prints it with what it inherits."""
    show(or_refuse(lambda: shipped_recipe(name)).read_text(encoding="utf-8"), end="")


def copy(
    name: Name,
    to: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder to copy to; by default the current one.")
    ] = Path(),
) -> None:
    """Copy a shipped recipe and what it inherits, to edit it. Overwrites nothing."""
    for path in or_refuse(lambda: copy_recipe(name, to)):
        show(path)


def keys(
    prefix: Annotated[
        str,
        typer.Argument(help="Only keys with this prefix, such as grpo.objective.", autocompletion=complete_keys),
    ] = "",
) -> None:
    """Print every key that a recipe may have, with its type, default and meaning."""
    from rl_launcher.recipe_files import reference
    from rl_launcher.recipe_files.problems import nearest
    from rl_launcher.schema import Recipe

    head, rule, *rows = reference(Recipe).splitlines()
    kept = [row for row in rows if row.startswith(f"| `{prefix.rstrip('=')}")]
    if not kept:
        like = nearest(prefix, [row.split("`")[1] for row in rows])
        warn(f"no key begins with {prefix}" + (f"; did you mean {like[0]}?" if like else ""))
        raise typer.Exit(2)
    show("\n".join([head, rule, *kept]))


def schema(*, out: Out = None) -> None:
    """Print the JSON schema with which an editor completes and checks recipes."""
    from rl_launcher.recipe_files import json_schema
    from rl_launcher.schema import Recipe

    write(json.dumps(json_schema(Recipe), indent=1, ensure_ascii=False) + "\n", out)


def import_nemo_rl(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A NeMo-RL recipe.", show_default=False)],
    *,
    out: Out = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list the keys that have no effect here.")] = False,
) -> None:
    """Translate a NeMo-RL recipe; keys that could not be translated are listed with the reason.

    Exit code 0: the recipe loads, and what remains to be filled in, such as a file of rows or a reward function, is
    listed at its top. Exit code 2: a recipe is written that does not load; the last lines say which keys are refused.
    """
    from rl_launcher.import_nemo_rl import translate

    _write_translation(or_refuse(lambda: translate(file)), out, verbose=verbose)


def import_verl(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A script of verl's examples.", show_default=False)],
    *,
    out: Out = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list the keys that have no effect here.")] = False,
) -> None:
    """Translate a shell script that runs verl's main_ppo; overrides that could not be translated are listed.

    Nothing of the script is run. Exit codes are those of `import-nemo-rl`.
    """
    from rl_launcher.import_verl import translate

    _write_translation(or_refuse(lambda: translate(file)), out, verbose=verbose)


def import_trl(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A YAML of TRL, or a text with a command.", show_default=False)
    ],
    *,
    algorithm: Annotated[
        str | None, typer.Option("--algorithm", help="Of a YAML: grpo, rloo, sft, dpo, kto, orpo or reward.")
    ] = None,
    out: Out = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Also list the keys that have no effect here.")] = False,
) -> None:
    """Translate a configuration of TRL, or the arguments of `trl grpo` in a script; what could not be is listed.

    Exit codes are those of `import-nemo-rl`.
    """
    from rl_launcher.import_trl import translate

    _write_translation(or_refuse(lambda: translate(file, algorithm=algorithm)), out, verbose=verbose)


def _write_translation(translation: "Translation", out: Path | None, *, verbose: bool) -> None:
    write(translation.yaml, out)
    warn(translation.report(verbose=verbose))
    if translation.problems:
        raise typer.Exit(2)

"""Commands about one run: run, resume, explain, validate, evaluate, report, export."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from rl_launcher.cli.arguments import Json, Overrides, RecipeFile, RunPath, complete_recipes, load
from rl_launcher.cli.console import INTERRUPTED, or_refuse, print_json, refuse, show, warn

__all__ = ["evaluate", "explain", "export", "report", "resume", "run", "validate"]


def run(recipe: RecipeFile, overrides: Overrides = None) -> None:
    """Train as the recipe says. The last line printed is JSON with the result."""
    resolved = load(recipe, overrides)

    def carry_out() -> dict[str, Any]:
        from rl_launcher.run.run import run as run_recipe

        return run_recipe(resolved)

    _train(carry_out)


def resume(run_dir: RunPath, overrides: Overrides = None) -> None:
    """Carry a run that ended early to its end, from its last checkpoint. The last line printed is JSON."""

    def carry_out() -> dict[str, Any]:
        from rl_launcher.run.run import resume as resume_run

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


ModelFolder = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER", help="Measure this model: a folder or hub id.", show_default=False),
]


def explain(recipe: RecipeFile, overrides: Overrides = None, *, json: Json = False) -> None:
    """Say what a run would do: origins of keys, placement, sharding, memory, refit, objective. No GPU, no weights."""
    resolved = load(recipe, overrides)
    from rl_launcher.checks import preflight
    from rl_launcher.checks.explain import explain as explain_recipe

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
    from rl_launcher.checks import preflight
    from rl_launcher.recipe_files.dataclass_schema import to_plain
    from rl_launcher.recipe_files.load import escape
    from rl_launcher.recipe_files.yaml_source import dump
    from rl_observe import redact

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
    from rl_launcher.bundled_recipes import find_recipe
    from rl_launcher.run.evaluate import measured_recipe

    resolved = or_refuse(lambda: measured_recipe(find_recipe(subject), overrides=overrides or (), model=model))
    from rl_launcher.run.evaluate import measure

    measured = or_refuse(lambda: measure(resolved))
    show(measured.text())
    if json:
        print_json(measured.figures())


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of runs.", show_default=False)],
    *,
    out: Annotated[
        Path, typer.Option("--out", metavar="FILE", help="Where the comparison of several runs goes.")
    ] = Path("comparison.html"),
    trace: Annotated[
        bool, typer.Option("--trace", help="Write trace.json too, for ui.perfetto.dev and chrome://tracing.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the report of a run again, from its log; of several runs, one page that compares them."""
    from rl_observe import RunDirectory, compare_runs, write_report, write_trace

    opened = [or_refuse(partial(RunDirectory.open, path)) for path in runs]
    if len(opened) > 1:
        written = [or_refuse(lambda: compare_runs(opened, to=out))]
    else:
        written = [or_refuse(lambda: write_report(opened[0]))]
    if trace:
        written += [or_refuse(partial(write_trace, run)) for run in opened]
    for path in written:
        show(path)
    if json:
        from json import loads

        finished = [run for run in opened if run.summary.is_file()]
        summaries = {str(run.path): loads(run.summary.read_text(encoding="utf-8")) for run in finished}
        print_json({"written": [str(path) for path in written], "summaries": summaries})


def export(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="The directory of a run, or one of its checkpoints.", show_default=False),
    ],
    to: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="What is written; it must not exist.", show_default=False)
    ],
    *,
    step: Annotated[
        int | None,
        typer.Option(help="The checkpoint after so many steps; the newest, if not given.", show_default=False),
    ] = None,
) -> None:
    """Write the model of a run, or of one of its checkpoints, as a Hugging Face folder: whole, or not at all."""
    from rl_launcher.checkpoints import export as export_model

    show(or_refuse(lambda: export_model(run, to, step=step)))

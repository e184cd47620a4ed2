"""Commands about one run: run, resume, serve, explain, validate, try-reward, evaluate, report, export."""

import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rl_launcher.cli.arguments import Json, Overrides, RecipeFile, RunPath, Traceback, complete_recipes, load
from rl_launcher.cli.console import or_refuse, print_json, refuse, report_and_exit, show, warn

if TYPE_CHECKING:
    from rl_launcher.schema import Recipe


def run(recipe: RecipeFile, overrides: Overrides = None, *, traceback: Traceback = False) -> None:
    """Train as the recipe says. The last line printed is JSON with the result."""
    resolved = load(recipe, overrides)
    _fork_driver(resolved.value, resuming=False, traceback=traceback)
    # Called from here and not through a helper: every debugger and traceback of a run begins with these frames.
    try:
        from rl_launcher.api import run_recipe

        summary = run_recipe(resolved).summary
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - report_and_exit raises what it does not know
        report_and_exit(error, traceback=traceback)
    _show_summary(summary)


def resume(run_dir: RunPath, overrides: Overrides = None, *, traceback: Traceback = False) -> None:
    """Continue a run that ended early from its last checkpoint. The last line printed is JSON."""
    from rl_launcher.api import resume as resume_run

    if (recipe := _recipe_of(run_dir, overrides)) is not None:
        _fork_driver(recipe, resuming=True, traceback=traceback)
    _show_summary(or_refuse(lambda: resume_run(run_dir, overrides=overrides or ()), traceback=traceback).summary)


def _recipe_of(run_dir: Path, overrides: list[str] | None) -> "Recipe | None":
    """The recipe of an earlier run; None if it cannot be read, which resuming will refuse in its own words."""
    from rl_launcher.recipe_files import load_recipe
    from rl_launcher.schema import Recipe
    from rl_observe import RunDirectory

    try:
        recipe = load_recipe(RunDirectory.open(run_dir).recipe, schema=Recipe, overrides=overrides or ()).value
    except (OSError, ValueError):
        return None
    return replace(recipe, run_dir=str(run_dir))


def _fork_driver(recipe: "Recipe", *, resuming: bool, traceback: bool) -> None:
    """Over Ray, go on in a child of this process; this one waits for it and ends with its exit code."""
    from rl_launcher.cli.app import is_main

    if recipe.cluster.runtime != "ray" or not is_main():
        return
    from rl_launcher.run import driver_process
    from rl_launcher.run.run import restart

    if not driver_process.can_have_parent():
        return

    def go_on(restarts: int) -> None:
        _show_summary(or_refuse(lambda: restart(recipe, restarts=restarts), traceback=traceback))

    code = driver_process.supervise(recipe, go_on, resuming=resuming)
    if code is not None:
        raise typer.Exit(code)


def serve(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    host: Annotated[str, typer.Option(help="Address of this machine that the trainer reaches.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="For prompts; 0 takes a free one. Of SGLang, the one it listens to.")
    ] = 8000,
    weights_dtype: Annotated[str, typer.Option(help="In which dtype the trainer sends its weights.")] = "float32",
) -> None:
    """Bring an engine on this machine to the trainer of RECIPE, which policy.generation.remote names."""
    resolved = load(recipe, overrides)

    def run_until_ended() -> None:
        try:
            from rl_launcher.build.remote_engines import read_shared_token
            from rl_launcher.serve import serving
        except ImportError as error:
            refuse(error)
        token = read_shared_token(resolved.value) or ""  # without remote, serving says what is missing
        with serving(resolved.value, token=token, host=host, port=port, weights_dtype=weights_dtype) as (url, serve):
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # so that it leaves the trainer
            show(f"engine: {url}")
            serve()

    or_refuse(run_until_ended)


def _show_summary(summary: dict[str, Any]) -> None:
    for complaint in summary.get("unwritten", []):
        warn(f"not written: {complaint}")
    show(f"report: {summary['run_dir']}/report.html   model: {summary['run_dir']}/model")
    print_json(summary)


def explain(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME|BYTES", help="Compare with this GPU, such as h100-80gb.", show_default=False),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Look at the running Ray cluster that cluster.address names.")
    ] = False,
    json: Json = False,
) -> None:
    """Show what a run would do: origins of keys, placement, sharding, memory, refit, objective. No GPU, no weights.

    With --gpu: whether it fits in each phase, host memory, the time of a step, and the smallest change that fits. With
    --live: on which nodes of the running cluster it would be, or which node it lacks.
    """
    resolved = load(recipe, overrides, print_notes=False)  # they are part of the explanation
    from rl_launcher.checks import preflight
    from rl_launcher.checks.explain import explain as explain_recipe
    from rl_launcher.checks.gpu_budget import gpu_named
    from rl_launcher.ray.cluster import look_at_cluster

    device = None if gpu is None else or_refuse(lambda: gpu_named(gpu))
    there = or_refuse(lambda: look_at_cluster(resolved.value.cluster)) if live else None
    explained = or_refuse(lambda: explain_recipe(resolved, gpu=device, there=there))
    or_refuse(lambda: preflight.check_rows(resolved.value))
    show(explained.text())
    if json:
        print_json(explained.figures)
    if explained.refusal is not None:
        refuse(explained.refusal)


def validate(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    print_recipe: Annotated[
        bool, typer.Option("--print", help="Print the resolved recipe, with every default, without credentials.")
    ] = False,
    json: Json = False,
) -> None:
    """Check a recipe, its files, rows, mesh and memory. Loads no model."""
    resolved = load(recipe, overrides)
    from rl_launcher.checks import preflight
    from rl_observe import redact

    or_refuse(lambda: preflight.check(resolved.value, new_run=False))
    or_refuse(lambda: preflight.check_rows(resolved.value))
    if (reason := preflight.taken(resolved.value.run_dir)) is not None:
        warn(f"`rl-launcher run` will refuse it as it is: {reason}")
    if print_recipe:
        show(resolved.to_yaml(hide=redact), end="")
    stages = ", then ".join(f"{name} ({stage.max_num_steps} steps)" for name, stage in resolved.value.stages.items())
    ok = f"OK: {recipe}: {stages or 'no stage, for evaluation only'}; run directory {resolved.value.run_dir}"
    warn(ok) if print_recipe else show(ok)  # what is printed may be kept as a recipe
    if json:
        print_json({"valid": True, "stages": [*resolved.value.stages], "notes": resolved.notes})


def try_reward(
    recipe: RecipeFile,
    overrides: Overrides = None,
    *,
    prompts: Annotated[int, typer.Option(help="Number of training prompts.")] = 2,
    rollouts: Annotated[int, typer.Option(help="Rollouts of each prompt.")] = 4,
    json: Json = False,
    traceback: Traceback = False,
) -> None:
    """Sample a few rollouts and print their rewards, advantages and seconds a call, before any training.

    Exit code 1 if the rewards of each group are equal, so that there is nothing to learn from.
    """
    resolved = load(recipe, overrides)
    from rl_launcher.run import try_reward as try_it

    trial = or_refuse(lambda: try_it(resolved, prompts=prompts, rollouts=rollouts), traceback=traceback)
    show(trial.text())
    if json:
        print_json(trial.figures())
    if trial.exit_code:
        raise typer.Exit(trial.exit_code)


ModelFolder = Annotated[
    str | None,
    typer.Option("--model", metavar="FOLDER", help="Measure this model: a folder or Hub id.", show_default=False),
]


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
    traceback: Traceback = False,
) -> None:
    """Measure a model on the held-out prompts: mean reward and pass@k, sampled and greedy, with intervals."""
    from rl_launcher.api import evaluate as measure

    measured = or_refuse(lambda: measure(subject, model=model, overrides=overrides or ()), traceback=traceback)
    show(measured.text())
    if json:
        print_json(measured.figures())


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN", help="Directories of runs.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Path of the comparison of several runs.")] = Path(
        "comparison.html"
    ),
    trace: Annotated[
        bool, typer.Option("--trace", help="Also write trace.json, for ui.perfetto.dev and chrome://tracing.")
    ] = False,
    json: Json = False,
) -> None:
    """Write the report of a run again, from its log; for several runs, one page that compares them."""
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
        Path, typer.Argument(metavar="FOLDER", help="The folder to write; it must not exist.", show_default=False)
    ],
    *,
    step: Annotated[
        int | None,
        typer.Option(help="Take the checkpoint after this many steps instead of the newest.", show_default=False),
    ] = None,
) -> None:
    """Write the model of a run, or of one of its checkpoints, as a Hugging Face folder."""
    from rl_launcher.checkpoints import export as export_model

    show(or_refuse(lambda: export_model(run, to, step=step)))

"""The command line: `rl-observe report|show|replay|diagnose|compare|import|trace|check|conditions`.

Exit codes: 0 it holds; 1 it does not (`check`, `replay`, `diagnose`); 2 refused or misused, and the reason is printed.
"""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from rl_observe.config import HealthConfig
from rl_observe.health import CONDITIONS, Watch, conditions_table
from rl_observe.log_files import read_events, read_metrics
from rl_observe.run_directory import RunDirectory

T = TypeVar("T")
EXIT_CODES = "Exit codes: 0 it holds; 1 it does not hold; 2 refused or misused."
Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run directory.", show_default=False)]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN RUN…", help="Run directories.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="End with one line of JSON that holds every figure.")]

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Look at training runs.",
    epilog=EXIT_CODES,
)


@app.command(epilog=EXIT_CODES)
def report(run: Run, *, as_json: Json = False) -> None:
    """Write report.html of a run, also of one that is still running or was killed."""
    from rl_observe.report import write_report

    opened = _or_refuse(lambda: RunDirectory.open(run))
    path = _or_refuse(lambda: write_report(opened))
    typer.echo(path)
    if as_json:
        summary = (
            _or_refuse(lambda: json.loads(opened.summary.read_text("utf-8"))) if opened.summary.is_file() else None
        )
        _print_json({"written": str(path), "summary": summary})


@app.command(epilog=EXIT_CODES)
def show(
    run: Run,
    *,
    step: Annotated[int | None, typer.Option(help="A recorded step; without it they are listed.")] = None,
    worst: Annotated[
        str | None, typer.Option(metavar="ORDER", help="Lowest first: reward, advantage, length, logp, gap or loss.")
    ] = None,
    best: Annotated[str | None, typer.Option(metavar="ORDER", help="Highest first.")] = None,
    row: Annotated[int | None, typer.Option(help="One rollout, token by token, with its group.")] = None,
    limit: Annotated[int, typer.Option(help="Rollouts to show at most; 0 shows all.")] = 10,
    stage: Annotated[str | None, typer.Option(help="A stage; by default the one recorded last.")] = None,
    as_json: Json = False,
) -> None:
    """Show recorded steps: which there are, the rollouts of one, or one rollout token by token."""
    from rich.console import Console

    from rl_observe import show as pages
    from rl_observe.recorded_steps import RecordedSteps

    if worst is not None and best is not None:
        _refuse("--worst and --best are two orders; give one of them")
    if step is None and (worst is not None or best is not None or row is not None):
        _refuse("--worst, --best and --row are of one step; give --step too")
    recorded = RecordedSteps(_or_refuse(lambda: RunDirectory.open(run)), stage)
    if not recorded:
        of_stage = f" of the stage {stage}" if stage else ""
        _refuse(f"{run} has no recorded steps{of_stage}; record some (logger.recorded_steps in a recipe, StepRecorder)")
    console = Console(soft_wrap=False)
    if step is None:
        console.print(pages.steps_table(recorded))
        if as_json:
            _print_json({"stage": recorded.stage, "steps": [*recorded]})
        return
    try:
        found = recorded[step]
    except KeyError as error:
        _refuse(str(error.args[0]))
    except ValueError as error:
        _refuse(str(error))
    if row is not None:
        console.print(_or_refuse(lambda: pages.rollout_page(found, row)))
        if as_json:
            _print_json({"step": found.step, "rollout": found.rows[row], "tokens": found.token_rows(row)})
        return
    order = worst or best
    rows = (
        found.rows
        if order is None
        else _or_refuse(lambda: pages.order_rollouts(found, order, descending=worst is None))
    )
    rows = rows[:limit] if limit else rows
    console.print(pages.rollouts_table(found, rows))
    if as_json:
        _print_json({"step": found.step, "version": found.version, "updates": found.updates, "rollouts": rows})


@app.command(epilog=EXIT_CODES)
def replay(
    run: Run,
    step: Annotated[int, typer.Argument(metavar="STEP", help="A recorded step.", show_default=False)],
    *,
    weights: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A Hugging Face folder with the weights before the step.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="A stage; by default the one recorded last.")] = None,
    as_json: Json = False,
) -> None:
    """Compute each stage of a recorded step again, and name the first that differs; exit code 1 if one does.

    Prompts, rewards and log-probabilities are computed by the trainer that is installed beside rl-observe, such as
    rl-launcher; without one, only advantages and losses are.
    """
    from contextlib import ExitStack
    from importlib.metadata import entry_points

    from rl_observe.recorded_steps import RecordedSteps
    from rl_observe.replay import replay as compute

    opened = _or_refuse(lambda: RunDirectory.open(run))
    try:
        recorded = RecordedSteps(opened, stage)[step]
    except (KeyError, ValueError) as error:
        _refuse(str(error.args[0]))
    with ExitStack() as stack:
        trainers = [*entry_points(group="rl_observe.recompute")]
        if weights is not None and not trainers:
            _refuse("--weights is for the trainer of the run, and none is installed here (pip install rl-launcher)")
        given: dict[str, Any] = {}
        for trainer in trainers:
            stages = functools.partial(trainer.load(), opened, recorded, weights=weights)
            given |= _or_refuse(lambda: stack.enter_context(stages()))  # noqa: B023 - called at once
        found = _or_refuse(lambda: compute(recorded, given))
    for result in found.results:
        typer.echo(result)
    first = found.first_difference
    typer.echo("every stage that was replayed agrees" if first is None else f"the first difference: {first}")
    if as_json:
        _print_json(found.plain())
    raise typer.Exit(0 if first is None else 1)


@app.command(epilog=EXIT_CODES)
def diagnose(
    run: Run,
    *,
    stage: Annotated[str | None, typer.Option(help="A stage; by default the one recorded last.")] = None,
    as_json: Json = False,
) -> None:
    """Rank the causes of trouble that the recorded steps and the log of a run show; exit code 1 if there are any."""
    from rl_observe.diagnose import diagnose as look

    found = _or_refuse(lambda: look(RunDirectory.open(run), stage=stage))
    for number, finding in enumerate(found.findings, 1):
        typer.echo(f"{number}. {finding}")
    if not found.findings:
        typer.echo("nothing found")
    steps = ", ".join(map(str, found.steps)) or "none"
    typer.echo(f"looked at the recorded steps {steps}, and at the log")
    for remark in found.remarks:
        typer.echo(f"not known: {remark}")
    if as_json:
        _print_json(found.plain())
    raise typer.Exit(1 if found.findings else 0)


@app.command(epilog=EXIT_CODES)
def compare(
    runs: Runs,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the page goes.")] = Path("comparison.html"),
    as_json: Json = False,
) -> None:
    """Write one page that compares several runs: their curves, their results, and how their settings differ.

    Of two runs it also prints the first step, stage, row and token where their recorded steps part, and which logged
    figures differ since when.
    """
    from rl_observe.compare import compare_records
    from rl_observe.report import compare_runs

    opened = _or_refuse(lambda: [RunDirectory.open(run) for run in runs])
    path = _or_refuse(lambda: compare_runs(opened, to=out))
    figures: dict[str, Any] = {"written": str(path), "runs": [str(each.path) for each in opened]}
    if len(opened) == 2:
        found = _or_refuse(lambda: compare_records(*opened))
        if found.steps:
            shared = ", ".join(map(str, found.steps))
            typer.echo(f"first difference: {found.first}" if found.first else f"the recorded steps {shared} are equal")
        else:
            typer.echo("no step is recorded in both runs")
        for remark in found.remarks:
            typer.echo(f"not compared: {remark}")
        if found.logged and not found.figures:
            typer.echo(f"every figure of {found.logged} logged steps is equal")
        for figure in found.figures[:12]:
            typer.echo(figure)
        figures |= found.plain()
    typer.echo(path)
    if as_json:
        _print_json(figures)


@app.command(name="import", epilog=EXIT_CODES)
def import_(
    trainer: Annotated[str, typer.Argument(help="verl, trl, nemo-rl or slime.", show_default=False)],
    source: Annotated[Path, typer.Argument(help="Its dump: a file, or the folder of all.", show_default=False)],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A new run directory.", show_default=False)],
    *,
    as_json: Json = False,
) -> None:
    """Make a run directory of the rollouts that another trainer dumped, for show, diagnose and compare."""
    from rl_observe.importers import import_run

    opened, lacks = _or_refuse(lambda: import_run(trainer, source, run))
    steps = [*opened.steps]
    typer.echo(f"{opened.path}: {len(steps)} steps of {trainer}")
    for lack in lacks:
        typer.echo(f"not in these files: {lack}")
    if as_json:
        _print_json({"run_dir": str(opened.path), "steps": steps, "lacks": lacks})


@app.command(epilog=EXIT_CODES)
def trace(run: Run) -> None:
    """Write trace.json of a run, for ui.perfetto.dev and chrome://tracing."""
    from rl_observe.trace import write_trace

    typer.echo(_or_refuse(lambda: write_trace(RunDirectory.open(run))))


@app.command(epilog=EXIT_CODES)
def check(run: Run, *, as_json: Json = False) -> None:
    """Look for unhealthy conditions in the log of a run, with the default limits; exit code 1 if there are any."""
    opened = _or_refuse(lambda: RunDirectory.open(run))
    rows = _or_refuse(lambda: read_metrics(opened))
    watch, found = Watch(HealthConfig()), []
    for row in rows:
        values = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        for event in watch.observe(str(row.get("stage")), values):
            found.append({"stage": row.get("stage"), "step": row.get("step"), "name": event.name})
            typer.echo(f"{event.name} at step {row.get('step')} of {row.get('stage')}: {event.message}")
    recorded = [{name: row.get(name) for name in ("stage", "step", "name")} for row in read_events(opened)]
    typer.echo(f"{len(rows)} steps logged, {len(found)} conditions found, {len(recorded)} events recorded by the run")
    if as_json:
        _print_json({"steps": len(rows), "found": found, "recorded": recorded, "holds": not found})
    raise typer.Exit(1 if found else 0)


@app.command(epilog=EXIT_CODES)
def conditions(*, as_json: Json = False) -> None:
    """Print the conditions that a run is checked for, what causes each, and what the run does."""
    typer.echo(conditions_table())
    if as_json:
        _print_json({each.name: {"cause": each.cause, "reaction": each.reaction} for each in CONDITIONS})


def main() -> None:
    """Run the command line."""
    app()


def _or_refuse(action: Callable[[], T]) -> T:
    try:
        return action()
    except (OSError, ValueError) as error:
        _refuse(str(error))


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"rl-observe: {reason}", err=True)
    raise typer.Exit(2)


def _print_json(figures: dict[str, Any]) -> None:
    typer.echo(json.dumps(_without_nan(figures), default=str))


def _without_nan(value: Any) -> Any:
    """The same plain data, with null for each number that is not finite: JSON has no other word for it."""
    if isinstance(value, dict):
        return {name: _without_nan(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value

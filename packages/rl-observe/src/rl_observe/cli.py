"""The command line: `rl-observe report|compare|trace|check|conditions`.

Exit codes: 0 it holds; 1 it does not hold (`check`); 2 refused or misused, and the reason is printed.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
def compare(
    runs: Runs,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where the page goes.")] = Path("comparison.html"),
    as_json: Json = False,
) -> None:
    """Write one page that compares several runs: their curves, their results, and how their settings differ."""
    from rl_observe.report import compare_runs

    opened = _or_refuse(lambda: [RunDirectory.open(run) for run in runs])
    path = _or_refuse(lambda: compare_runs(opened, to=out))
    typer.echo(path)
    if as_json:
        _print_json({"written": str(path), "runs": [str(each.path) for each in opened]})


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
        typer.echo(f"rl-observe: {error}", err=True)
        raise typer.Exit(2) from None


def _print_json(figures: dict[str, Any]) -> None:
    typer.echo(json.dumps(figures))

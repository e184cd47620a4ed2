"""`report` and `export`: what a run has left, to look at and to take along."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from rl_launcher.cli.arguments import Json
from rl_launcher.cli.console import or_refuse, print_json, show

__all__ = ["export", "report"]


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
    from rl_launcher.observe import RunDirectory, compare_runs, write_report, write_trace

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
    from rl_launcher.checkpointing import export as export_model

    show(or_refuse(lambda: export_model(run, to, step=step)))

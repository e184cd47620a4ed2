"""Write report.html: templates, style, scripts and data in one file that needs no network.

`write_report` makes the page of a run from templates/run.html.j2, `summary_html` the short version for a notebook.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections import Counter
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_bytes, format_percent
from rl_observe.report.breakdown import breakdown, phase_class
from rl_observe.report.curves import headline_chart, stage_charts
from rl_observe.report.gantt import gantt_legend, gantts
from rl_observe.report.outcome import outcome
from rl_observe.report.record import RunRecord, read_record, section, text
from rl_observe.report.refits import refits
from rl_observe.report.samples import before_after, conversations
from rl_observe.report.typeset import typeset_value
from rl_observe.run_directory import RunDirectory, RunDirectoryError, describe

__all__ = ["render", "summary_html", "write_page", "write_report"]

_MAX_EVENTS = 40  # of a run that goes wrong a thousand times, the first and the last


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` from the other files of the run, and return its path.

    A missing or broken file makes the report smaller, and the report says so. An earlier report is replaced
    atomically.

    Raises:
        RunDirectoryError: the page cannot be written.
    """
    record = read_record(run)
    charts = gantts(record)
    page = render(
        "run.html.j2",
        run=record,
        **outcome(record),
        headline=headline_chart(record),
        conditions=_conditions(record),
        samples=before_after(record),
        conversations=conversations(record),
        breakdown=breakdown(record),
        gantts=charts,
        gantt_legend=gantt_legend(charts),
        stages=stage_charts(record),
        refits=refits(record),
        machine=_machine(record),
        packages=section(record.versions, "packages"),
        origins={key: str(origin) for key, origin in record.origins.items() if origin != "default"},
    )
    return write_page(run.report, page)


def summary_html(run: RunDirectory) -> str:
    """The outcome of a run for a notebook: a sentence, the figures and the main curve, without a script.

    What is missing is left out; nothing that the run's files contain raises.
    """
    record = read_record(run)
    chart = headline_chart(record)
    lines = []
    if chart is not None:
        steps = [step for curve in chart.curves for step, _ in curve.points]
        values = [value for curve in chart.curves for _, value in curve.points if value is not None]
        left, width = min(steps), (max(steps) - min(steps)) or 1.0
        low, height = min(values), (max(values) - min(values)) or 1.0
        for curve in chart.curves:
            if curve.role in ("main", "held-out", "greedy"):
                known = [(step, value) for step, value in curve.points if value is not None]
                # In a box of 600 by 100 with the origin at the top left.
                path = [f"{600 * (x - left) / width:.1f},{100 - 100 * (y - low) / height:.1f}" for x, y in known]
                last = typeset_value(known[-1][1], chart.unit) if known else "–"
                lines.append({"label": curve.label, "role": curve.role, "path": " ".join(path), "last": last})
    template = _environment().get_template("summary.html.j2")
    return template.render(**outcome(record), remarks=record.remarks, chart=chart, lines=lines)


def render(template: str, **context: Any) -> str:
    """Fill a page template, with the style, the scripts and a policy that admits no other script.

    The Content-Security-Policy names the only script by its hash, so that nothing in a recipe or a response can run.
    """
    read = resources.files(__package__).joinpath
    license_comment = f"/*!\n{read('vendor/uplot/LICENSE').read_text(encoding='utf-8')}\n*/\n"
    scripts = [read(name).read_text(encoding="utf-8") for name in ("vendor/uplot/uPlot.iife.min.js", "report.js")]
    styles = [read(name).read_text(encoding="utf-8") for name in ("vendor/uplot/uPlot.min.css", "report.css")]
    script = license_comment + "\n".join(scripts)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Styles need 'unsafe-inline': bars and boxes are placed by style attributes.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return (
        _environment()
        .get_template(template)
        .render(script=Markup(script), style=Markup("\n".join(styles)), policy=policy, **context)  # noqa: S704 our own files
    )


def write_page(path: Path, page: str) -> Path:
    """Write the page atomically, and return its path.

    Raises:
        RunDirectoryError: it cannot be written; an earlier page is still there.
    """
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunDirectoryError(f"{path} cannot be written: {describe(error)}") from error
    return path


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("rl_observe.report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # `tojson` escapes <, > and &, so that JSON cannot end the script element that holds it.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "ensure_ascii": False, "separators": (",", ":")}
    environment.filters |= {"percent": format_percent, "phase_class": phase_class, "cell": _cell}
    return environment


def _conditions(record: RunRecord) -> dict[str, Any] | None:
    """The events of the run: how often each one occurred, and the rows to show."""
    counts = Counter(text(event, "name") or "event" for event in record.events)
    half = _MAX_EVENTS // 2
    shown = record.events if len(record.events) <= _MAX_EVENTS else [*record.events[:half], *record.events[-half:]]
    return {"counts": counts, "rows": shown, "are_all": shown is record.events} if shown else None


def _cell(value: object, unit: str) -> str:
    """A number or a text of a row as a table shows it; a dash for anything else."""
    if unit == "text":
        return value if isinstance(value, str) else "–"
    number = finite_number(value)
    return "–" if number is None else typeset_value(number, unit)


def _machine(record: RunRecord) -> dict[str, str]:
    """What the run was made with, except what the page shows on its own."""
    rows = {name: value for name, value in record.versions.items() if name not in ("packages", "gpus", "git_diff_stat")}
    gpus = record.versions.get("gpus")
    rows |= {"GPU": ", ".join(map(str, gpus))} if isinstance(gpus, list) and gpus else {}
    words = {None: "–", True: "yes", False: "no"}

    def cell(name: str, value: object) -> str:
        if value is None or isinstance(value, bool):
            return words[value]
        size = finite_number(value) if name.endswith("_bytes") else None
        return str(value) if size is None else format_bytes(size)

    return {name.replace("_", " "): cell(name, value) for name, value in rows.items()}

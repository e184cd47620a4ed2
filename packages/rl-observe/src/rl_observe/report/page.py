"""Self-contained HTML pages: templates, style, scripts and data in one file that needs no network.

`write_report` makes the page of a run, `compare_runs` that of several, `summary_html` the short version for a notebook.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import yaml

from rl_observe.glossary import finite_number, typeset_value
from rl_observe.log_files import flat
from rl_observe.report.curves import NUM_COLORS, headline_chart, overlay_charts, stage_charts
from rl_observe.report.record import read_record, section, text
from rl_observe.report.rollouts import browsable
from rl_observe.report.sections import before_after, conversations, outcome, predicted, refits
from rl_observe.report.times import breakdown, gantt_legend, gantts, phase_class
from rl_observe.run_directory import RunDirectory, write_text

# Where and when a run was made always differs, and explains nothing.
_ALWAYS_DIFFERENT = frozenset({"run_dir", "collected_at"})


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
        outcome=outcome(record),
        headline=headline_chart(record),
        conditions=Counter(text(event, "name") or "event" for event in record.events),
        samples=before_after(record),
        conversations=conversations(record),
        rollouts=browsable(run),
        breakdown=breakdown(record),
        gantts=charts,
        gantt_legend=gantt_legend(charts),
        predicted=predicted(record),
        stages=stage_charts(record),
        refits=refits(record),
        packages=section(record.versions, "packages"),
        origins={key: str(origin) for key, origin in record.origins.items() if origin != "default"},
    )
    return write_text(run.report, page)


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
                path = [
                    (round(600 * (x - left) / width, 1), round(100 - 100 * (y - low) / height, 1)) for x, y in known
                ]
                last = typeset_value(known[-1][1], chart.unit) if known else "–"
                lines.append({"label": curve.label, "role": curve.role, "path": path, "last": last})
    template = _environment().get_template("summary.html.j2")
    return template.render(outcome=outcome(record), remarks=record.remarks, chart=chart, lines=lines)


def compare_runs(runs: Sequence[RunDirectory], *, to: Path) -> Path:
    """Write one page about several runs to the file `to`, and return its path.

    Raises:
        ValueError: there are fewer than two runs, one is named twice, or there are more than a page can tell apart.
        RunDirectoryError: the page cannot be written.
    """
    if not 2 <= len(runs) <= 2 * NUM_COLORS:
        raise ValueError(f"{len(runs)} runs cannot be compared on a page; name 2 to {2 * NUM_COLORS} of them")
    twice = [str(run.path) for index, run in enumerate(runs) if run.path in [other.path for other in runs[:index]]]
    if twice:
        raise ValueError(f"a run is compared with itself: {', '.join(twice)}; name each once")
    names = _names([run.path for run in runs])
    records = [read_record(run) for run in runs]
    recipes = []
    for record in records:
        try:
            loaded = yaml.safe_load(record.recipe)
        except yaml.YAMLError:
            record.remarks.append("recipe.yaml could not be read (YAML): its keys are not compared.")
            loaded = None
        recipes.append(_texts(loaded) if isinstance(loaded, dict) else {})
    return write_text(
        to,
        render(
            "comparison.html.j2",
            title=f"{len(runs)} runs",
            names=names,
            remarks=[f"{name}: {each}" for name, record in zip(names, records, strict=True) for each in record.remarks],
            overlays=overlay_charts(names, [record.stages for record in records]),
            summaries=_table([_texts(record.summary) for record in records]),
            recipes=_table(recipes),
            machines=_table([_texts(record.versions) for record in records]),
        ),
    )


def render(template: str, **context: Any) -> str:
    """Fill a page template, with the style, the scripts and a policy that admits no other script.

    The Content-Security-Policy names the only script by its hash, so that nothing in a recipe or a response can run.
    """

    def read(name: str) -> str:
        return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")

    library = f"/*!\n{read('vendor/uplot/LICENSE')}\n*/\n{read('vendor/uplot/uPlot.iife.min.js')}"
    script = f"{library}\n{read('report.js')}\n{read('rollouts.js')}"
    style = f"{read('vendor/uplot/uPlot.min.css')}\n{read('report.css')}"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # Styles need 'unsafe-inline': bars and boxes are placed by style attributes.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return _environment().get_template(template).render(script=script, style=style, policy=policy, **context)


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
    environment.filters |= {"number": _number, "text": _text, "phase_class": phase_class}
    return environment


def _number(value: object, unit: str) -> str:
    """A number in one of the units of `glossary.Metric`; a dash for anything that is not a finite number."""
    number = finite_number(value)
    return "–" if number is None else typeset_value(number, unit)


def _text(value: object, otherwise: str = "–") -> str:
    return value if isinstance(value, str) else otherwise


def _names(paths: Sequence[Path]) -> list[str]:
    """As few of the last parts of each path as tell all of them apart."""
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _texts(data: Mapping[str, object]) -> dict[str, str]:
    """The leaves of nested mappings as text, by dotted name."""
    texts = {}
    for name, value in flat(data):
        if name not in _ALWAYS_DIFFERENT:
            word = f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
            texts[name] = value if isinstance(value, str) else word
    return texts


def _table(columns: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """One row per key, one column per run; a dash where a run lacks the key."""
    keys = dict.fromkeys(key for column in columns for key in column)
    return {key: [column.get(key, "–") for column in columns] for key in keys}

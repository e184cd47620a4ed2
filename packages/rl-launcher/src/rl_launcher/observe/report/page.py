"""The page: its sections in their order, with the style and the script that it carries inside.

A pure function of the run's files. The page reaches for nothing: no network, no font, no script but its own, which
its Content-Security-Policy names by hash.
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path

from rl_launcher.observe.report.breakdown import breakdown_section
from rl_launcher.observe.report.curves import curves_section, headline_section
from rl_launcher.observe.report.markup import Html, element, fragment
from rl_launcher.observe.report.outcome import cards, masthead, title
from rl_launcher.observe.report.provenance import refit_section, repeat_section
from rl_launcher.observe.report.record import RunRecord, read_record
from rl_launcher.observe.report.samples import samples_section
from rl_launcher.observe.run_directory import RunDirectory, RunDirectoryError, describe

__all__ = ["write_report"]


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` from the other files of the run, and return its path.

    A file that is missing or broken makes the report smaller, and the report says so. An earlier report is replaced
    in one move, so that a reader sees the old page or the new one.

    Raises:
        RunDirectoryError: the page cannot be written.
    """
    page = _page(read_record(run))
    unfinished = run.report.with_suffix(".html.unfinished")
    try:
        unfinished.write_text(page, encoding="utf-8")
        unfinished.replace(run.report)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise RunDirectoryError(f"{run.report} cannot be written: {describe(error)}") from error
    return run.report


def _page(record: RunRecord) -> str:
    script = _resource("report.js")
    # 'unsafe-inline' styles place the labels; scripts are only ours, so that nothing in a sample can ever run.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{_hash(script)}'"
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title(record)} · run report"),
        element("style", Html(_resource("report.css"))),
    )
    body = element("body", element("main", *_sections(record)), element("script", Html(script)))
    return "<!doctype html>\n" + element("html", head, body, lang="en") + "\n"


def _sections(record: RunRecord) -> list[Html]:
    sections = [
        masthead(record),
        _remarks(record),
        cards(record),
        headline_section(record),
        samples_section(record),
        breakdown_section(record),
        curves_section(record),
        refit_section(record),
        repeat_section(record),
        element(
            "footer",
            fragment(
                "Made by rl-launcher from the files beside it. For every number: metrics.jsonl, or ",
                element("code", "tensorboard --logdir tensorboard"),
                ".",
            ),
        ),
    ]
    return [section for section in sections if section is not None]


def _remarks(record: RunRecord) -> Html | None:
    if not record.remarks:
        return None
    items = [element("li", remark) for remark in record.remarks]
    return element("aside", element("h2", "What this report lacks"), element("ul", *items), class_="remarks")


def _resource(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()

"""The report of one run: its sections in their order. A pure function of the run's files."""

from __future__ import annotations

from pathlib import Path

from rl_observe.report.breakdown import breakdown_section
from rl_observe.report.conditions import conditions_section
from rl_observe.report.curves import curves_section, headline_section
from rl_observe.report.document import document, remarks_aside, write_page
from rl_observe.report.gantt import gantt_section
from rl_observe.report.markup import Html, element, fragment
from rl_observe.report.outcome import cards, masthead, title
from rl_observe.report.provenance import repeat_section
from rl_observe.report.record import RunRecord, read_record
from rl_observe.report.samples import samples_section
from rl_observe.report.token_view import tokens_section
from rl_observe.report.weights import refit_section
from rl_observe.run_directory import RunDirectory

__all__ = ["write_report"]


def write_report(run: RunDirectory) -> Path:
    """Write `report.html` from the other files of the run, and return its path.

    A file that is missing or broken makes the report smaller, and the report says so. An earlier report is replaced
    in one move, so that a reader sees the old page or the new one.

    Raises:
        RunDirectoryError: the page cannot be written.
    """
    record = read_record(run)
    return write_page(run.report, document(f"{title(record)} · run report", _sections(record)))


def _sections(record: RunRecord) -> list[Html]:
    sections = [
        masthead(record),
        remarks_aside(record.remarks),
        cards(record),
        headline_section(record),
        conditions_section(record),
        samples_section(record),
        tokens_section(record),
        breakdown_section(record),
        gantt_section(record),
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

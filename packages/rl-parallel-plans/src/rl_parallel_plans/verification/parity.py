"""The parity table: architectures by layouts, each cell the largest relative error of logits and of all gradients.

Every number comes from `verify` on real processes; a refusal is a footnote with its reason.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version

from rl_parallel_plans.verification.api import verify
from rl_parallel_plans.verification.judge import BAR
from rl_parallel_plans.verification.processes import Processes
from rl_parallel_plans.verification.report import VerifyReport

ARCHITECTURES = (
    "llama",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "mistral",
    "smollm3",
    "granite",
    "olmo2",
    "olmo3",
    "phi3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
    "glm4_moe",
    "gemma4_text",
    "qwen3_next",
    "qwen3_5_text",
    "llama4_text",
    "nemotron_h",
    "falcon_h1",
    "gemma3",
    "gemma4",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_5",
    "llama4",
    "llava",
    "mistral3",
)
ONCE, THRICE, DEFERRED = "forward and backward", "accumulation x3", "accumulation x3, deferred sync"
COLUMNS = ("TP2", "TP2+SP", "FSDP2×TP2", "FSDP2×TP2+SP", "accumulation ×3", "×3, deferred sync")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One architecture at one layout."""

    logits: float | None = None
    """Largest relative error of the logits; None where nothing ran."""
    gradients: float | None = None
    """Largest relative error of any gradient."""
    ok: bool = False
    """Whether both are within the bar, or within the unsharded model's own rounding where that is above it."""
    footnote: str = ""
    """Why it was refused, what is wrong, or what the model's own rounding is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One architecture."""

    model: str
    """Type of the model."""
    source: str
    """Which rule made its plan."""
    cells: tuple[Cell, ...]
    """In the order of `COLUMNS`."""


def measured(names: Sequence[str] = ARCHITECTURES, *, say: Callable[[str], None] = lambda _: None) -> list[Row]:
    """Verify every architecture at every layout; `say` is told each row when it is done."""
    rows = []
    with Processes() as processes:
        for name in names:
            row = _row(name, processes)
            rows.append(row)
            say(line(row, []))
    return rows


def _row(name: str, processes: Processes) -> Row:
    reports = [
        verify(name, dp=dp, sequence_parallel=sequence_parallel, only=tasks, full_size=False, processes=processes, tp=2)
        for dp, sequence_parallel, tasks in (
            (1, False, (ONCE,)),
            (1, True, (ONCE,)),
            (2, False, (ONCE, THRICE, DEFERRED)),
            (2, True, (ONCE,)),
        )
    ]
    cells = [_cell(report, ONCE) for report in reports]
    cells += [_cell(reports[2], THRICE), _cell(reports[2], DEFERRED)]
    return Row(model=name, source=reports[0].source, cells=tuple(cells))


def _cell(report: VerifyReport, task: str) -> Cell:
    if report.refused is not None:
        return Cell(footnote=f"refused: {' '.join(report.refused.split())}")
    checks = {check.name: check for check in report.checks}
    logits, gradients = checks.get(f"{task}: logits"), checks.get(f"{task}: gradients")
    if logits is None or gradients is None:
        wrong = next((check for check in report.checks if check.verdict == "WRONG"), None)
        said = wrong.culprits[0] if wrong else "skipped"
        return Cell(footnote=f"did not run: {re.sub(r'^rank [0-9]+: ', '', said)}")
    notes = [check for check in (logits, gradients) if check.culprits or (check.error or 0) > BAR]
    footnote = "; ".join(" ".join((check.detail, *check.culprits[:2])).strip() for check in notes)
    if task == ONCE:
        others = [c for c in report.checks if c.verdict == "WRONG" and not c.name.startswith(task)]
        footnote = "; ".join([footnote, *(f"{c.name}: {c.culprits[0] if c.culprits else ''}" for c in others)]).strip(
            "; "
        )
    ok = report.ok if task == ONCE and len(checks) < 12 else logits.verdict != "WRONG" and gradients.verdict != "WRONG"
    return Cell(logits=logits.error, gradients=gradients.error, ok=ok, footnote=footnote)


def line(row: Row, footnotes: list[str]) -> str:
    """One line of the table; its footnotes are added to `footnotes`."""
    cells = []
    for cell in row.cells:
        mark = ""
        if cell.footnote:
            if cell.footnote not in footnotes:
                footnotes.append(cell.footnote)
            mark = f" [{footnotes.index(cell.footnote) + 1}]"
        if cell.logits is None or cell.gradients is None:
            cells.append(f"–{mark}")
        else:
            cells.append(f"{'' if cell.ok else '**WRONG** '}{cell.logits:.0e} / {cell.gradients:.0e}{mark}")
    return f"| {row.model} | {' | '.join(cells)} |"


def document(rows: Sequence[Row]) -> str:
    """The table as Markdown, with where and when it was made."""
    footnotes: list[str] = []
    lines = [line(row, footnotes) for row in rows]
    today = datetime.now(tz=UTC).date().isoformat()
    return "\n".join(
        [
            "# Parity with the unsharded model",
            "",
            "Largest error of the logits / of any gradient, fp32, relative to the largest entry of that tensor of the",
            f"unsharded model; the bar is {BAR:.0e}. Two layers or one of each kind, every parameter moved away from",
            "its initial value, real processes over gloo; gradients are compared whole and on every rank. Accumulation",
            "is over three microbatches under FSDP2×TP2.",
            "",
            f"Made by `python -m rl_parallel_plans parity --write PARITY.md` on {today} with torch {version('torch')}",
            f"and transformers {version('transformers')}.",
            "",
            f"| model | {' | '.join(COLUMNS)} |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *lines,
            "",
            *(f"[{number}] {text}  " for number, text in enumerate(footnotes, 1)),
            "",
        ]
    )


def missed(rows: Sequence[Row]) -> Iterator[str]:
    """What is not exact: neither within the bar nor refused with a reason."""
    for row in rows:
        for column, cell in zip(COLUMNS, row.cells, strict=True):
            if not cell.ok and not cell.footnote.startswith("refused"):
                yield f"{row.model}, {column}: {cell.footnote}"

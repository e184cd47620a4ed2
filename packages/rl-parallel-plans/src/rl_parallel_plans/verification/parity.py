"""`rl-parallel-plans parity`: architectures by layouts, each cell the largest error of logits and of all gradients.

Every number comes from `verify` on real processes; a refusal is a footnote with its reason.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from rl_parallel_plans.verification.api import verify
from rl_parallel_plans.verification.processes import Processes
from rl_parallel_plans.verification.report import VerifyReport
from rl_parallel_plans.verification.tasks import BAR

ARCHITECTURES = (
    "llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "smollm3", "granite", "olmo2", "olmo3", "phi3",
    "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "gemma4_text", "qwen3_next", "qwen3_5_text",
    "llama4_text", "nemotron_h", "falcon_h1", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llama4",
    "llava", "mistral3",
)  # fmt: skip
ONCE, THRICE, DEFERRED = "forward and backward", "accumulation x3", "accumulation x3, deferred sync"
LAYOUTS = (
    (1, False, (ONCE,)),
    (1, True, (ONCE,)),
    (2, False, (ONCE, THRICE, DEFERRED)),
    (2, True, (ONCE,)),
)
"""dp, sequence_parallel and tasks of each `verify`."""
COLUMNS = {
    "TP2": (0, ONCE),
    "TP2+SP": (1, ONCE),
    "FSDP2×TP2": (2, ONCE),
    "FSDP2×TP2+SP": (3, ONCE),
    "accumulation ×3": (2, THRICE),
    "×3, deferred sync": (2, DEFERRED),
}
"""Column to its layout and task."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One architecture at one layout."""

    logits: float | None = None
    """Largest relative error of the logits; None if nothing ran."""
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
    """Verify every architecture at every layout; `say` is called with each row when it is complete."""
    rows = []
    with Processes() as processes:
        for name in names:
            reports = [
                verify(name, dp=dp, sequence_parallel=sp, only=tasks, full_size=False, processes=processes)
                for dp, sp, tasks in LAYOUTS
            ]
            cells = tuple(_cell(reports[layout], task) for layout, task in COLUMNS.values())
            rows.append(Row(model=name, source=reports[0].source, cells=cells))
            say(line(rows[-1], []))
    return rows


def _cell(report: VerifyReport, task: str) -> Cell:
    if report.refused is not None:
        return Cell(footnote=f"refused: {' '.join(report.refused.split())}")
    checks = {check.name: check for check in report.checks}
    logits, gradients = checks.get(f"{task}: logits"), checks.get(f"{task}: gradients")
    wrong = [check for check in report.checks if check.verdict == "WRONG"]
    if logits is None or gradients is None:
        reason = wrong[0].culprits[0] if wrong else "skipped"
        return Cell(footnote=f"did not run: {re.sub(r'^rank [0-9]+: ', '', reason)}")
    notes = [
        " ".join((check.detail, *check.culprits[:2])).strip()
        for check in (logits, gradients)
        if check.culprits or (check.error or 0) > BAR
    ]
    if task == ONCE:
        others = [check for check in wrong if not check.name.startswith(task)]
        notes += [f"{check.name}: {check.culprits[0] if check.culprits else ''}" for check in others]
    ok = report.ok if task == ONCE and len(checks) < 12 else logits.verdict != "WRONG" and gradients.verdict != "WRONG"
    return Cell(logits=logits.error, gradients=gradients.error, ok=ok, footnote="; ".join(notes).strip("; "))


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
    notes = "\n".join(f"[{number}] {text}  " for number, text in enumerate(footnotes, 1))
    return f"""# Parity with the unsharded model

Largest error of the logits / of any gradient, fp32, relative to the largest entry of that tensor of the
unsharded model; the bar is {BAR:.0e}. Two layers or one of each kind, every parameter moved away from
its initial value, real processes over gloo; gradients are compared whole and on every rank. Accumulation
is over three microbatches under FSDP2×TP2.

Made by `python -m rl_parallel_plans parity --write PARITY.md` on {today} with torch {version("torch")}
and transformers {version("transformers")}.

| model | {" | ".join(COLUMNS)} |
{"|---" * (len(COLUMNS) + 1)}|
{chr(10).join(lines)}

{notes}
"""


def missed(rows: Sequence[Row]) -> Iterator[str]:
    """What is not exact: neither within the bar nor refused with a reason."""
    for row in rows:
        for column, cell in zip(COLUMNS, row.cells, strict=True):
            if not cell.ok and not cell.footnote.startswith("refused"):
                yield f"{row.model}, {column}: {cell.footnote}"


# -- The command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rl-parallel-plans parity`."""
    parser.add_argument(
        "models", nargs="*", metavar="MODEL", help="types of model, folders or Hub names (default: all)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print or write the table; returns 0 if every cell is exact or refused with a reason, else 1."""
    rows = measured(arguments.models or ARCHITECTURES, say=lambda each: print(each, file=sys.stderr, flush=True))
    if arguments.write is not None:
        arguments.write.write_text(document(rows))
    else:
        print(document(rows))
    wrong = list(missed(rows))
    for each in wrong:
        print(f"not exact: {each}", file=sys.stderr)
    if arguments.json:
        print(json.dumps({"ok": not wrong, "rows": [asdict(row) for row in rows]}))
    return int(bool(wrong))

"""`rl-parallel-plans classes`: verify every class of transformers, in as many runs as it takes, and write the table.

The *plan* column is what `plan_for` and `check` make of the class's default configuration with few layers, on the meta
device: full sizes, no weights, no processes. Each *verified* column is `verify` of the small configuration on real
processes, with every check.

All cells take hours, so each result is appended to `--results` as one line, and the next run continues from there. A
result is valid for the releases and the source of this package that it was made with; others are measured again, or
kept and counted in the table with `--keep`.
"""

import argparse
import hashlib
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.strings import release
from rl_parallel_plans.hugging_face.translation import DROPPED, own_plan
from rl_parallel_plans.model_source import build
from rl_parallel_plans.plan.parallel_plan import plan_for
from rl_parallel_plans.plan.registry import qualified_name
from rl_parallel_plans.verification.api import verify
from rl_parallel_plans.verification.processes import Processes
from rl_parallel_plans.verification.report import NOISE, VerifyReport
from rl_parallel_plans.verification.tasks import BAR

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
COLUMNS: dict[str, dict[str, Any]] = {"TP2": {"tp": 2}, "TP2+SP": {"tp": 2, "sequence_parallel": True}}
"""The verified columns, each with the layout that `verify` is given."""
PLAN = "plan"
CHECKPOINT = "checkpoint"
"""What the names of the checks begin with that make the column of that name."""

KEPT = frozenset({"planned", "exact", "not built", "skipped"})
"""Outcomes that `keep` takes from another source; what was wrong or refused there may have changed."""

LAYERS = 4
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layer_types")
OTHERS: dict[str, object] = {"first_k_dense_replace": 1, "num_kv_shared_layers": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell: the outcome of one class in one column."""

    name: str
    """Name of the class."""
    column: str
    """`plan`, or one of `COLUMNS`."""
    outcome: str
    """Of the plan: `planned`, `refused` or `not built`. Of a layout: `exact`, `WRONG`, `refused` or `skipped`, where
    transformers cannot build or run the small model either. `crashed` is a defect of this package."""
    reason: str = ""
    """Why it is not planned, or not exact."""
    source: str = ""
    """The rule that made the plan."""
    own_plan: str = ""
    """How many rules of the class's own tp_plan were translated, or why none; empty if it has none."""
    checks: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    """Verdict and error of each check."""
    seconds: float = 0.0
    """Time that it took."""
    versions: str = ""
    """Releases of torch and transformers, and the digest of this package's source."""


def measured(name: str, column: str, processes: Processes) -> Result:
    """Plan or verify one class."""
    started = time.monotonic()
    try:
        config = _config(name)
        model = _built(config) if column == PLAN else None
    except Exception as error:  # noqa: BLE001 - whatever transformers raises: the class is listed with it
        outcome = "not built" if column == PLAN else "skipped"
        result = Result(name=name, column=column, outcome=outcome, reason=_one_line(error))
    else:
        result = _verified(config, processes, column=column) if model is None else plan_result(model)
    return replace(result, seconds=round(time.monotonic() - started, 1), versions=versions())


def plan_result(model: nn.Module, *, tp: int = 2) -> Result:
    """Whether `plan_for` and `check` make a plan for the model, refuse it by PlanError, or crash."""
    name, own = type(model).__name__, ""
    try:
        own = _own_rules(model)
        plan = plan_for(model, tp=tp)
        plan.check(model)
    except PlanError as refusal:
        return Result(name=name, column=PLAN, outcome="refused", reason=_short(model, str(refusal)), own_plan=own)
    except Exception as error:  # noqa: BLE001 - a defect, which the table must show
        return Result(name=name, column=PLAN, outcome="crashed", reason=_one_line(error), own_plan=own)
    return Result(name=name, column=PLAN, outcome="planned", source=plan.source, own_plan=own)


def _verified(config: Any, processes: Processes, *, column: str) -> Result:
    (name,) = config.architectures
    try:
        # Whether the plan fits the full sizes is in the column `plan`.
        report = verify(config, processes=processes, full_size=False, **COLUMNS[column])
    except Exception as error:  # noqa: BLE001 - a defect of verify, which the table must show
        return Result(name=name, column=column, outcome="crashed", reason=_one_line(error))
    return verified_result(name, column, report)


def verified_result(name: str, column: str, report: VerifyReport) -> Result:
    """The cell that a report leads to."""
    if report.refused is not None:
        outcome = "skipped" if report.unusable else "refused"
        return Result(name=name, column=column, outcome=outcome, reason=_short(None, report.refused))
    wrong = next((check for check in report.checks if check.verdict == "WRONG"), None)
    reason = "" if wrong is None else f"{wrong.name}: {(*wrong.culprits, wrong.detail)[0]}"
    return Result(
        name=name,
        column=column,
        outcome="exact" if wrong is None else "WRONG",
        reason=" ".join(reason.split())[:400],
        source=report.source,
        checks={check.name: (check.verdict, check.error) for check in report.checks},
    )


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """The last result of each cell in the file, whatever it was made with."""
    results: dict[tuple[str, str], Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):  # the line that an interruption cut short
            result = Result(**json.loads(line))
            results[result.name, result.column] = result
    return results


def is_current(result: Result, *, keep: bool = False) -> bool:
    """Whether a result is valid; with `keep` also a good one of other releases or another source."""
    return result.versions == versions() or (keep and result.outcome in KEPT)


@cache
def versions() -> str:
    """What a result depends on: the releases of torch and transformers, and the source of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"torch {torch.__version__}, transformers {release()}, source {digest.hexdigest()[:12]}"


def table(results: Iterable[Result]) -> str:
    """The results as Markdown, one row for each class."""
    cells = {(result.name, result.column): result for result in results}
    plans = {name: result for (name, column), result in sorted(cells.items()) if column == PLAN}
    verified = {name for (name, column), result in cells.items() if column != PLAN and result.checks}
    rows = {
        name: plan
        for name, plan in plans.items()
        if name in verified or (plan.outcome != "not built" and (plan.own_plan or plan.outcome != "refused"))
    }
    unbuilt = {name: plan for name, plan in plans.items() if name not in rows and plan.outcome == "not built"}
    others = [f"`{name}`" for name in plans if name not in rows and name not in unbuilt]
    footnotes: list[str] = []
    lines = [_row(plan, cells, footnotes) for plan in rows.values()]
    older = sum(result.versions != versions() for result in cells.values())
    summary = "; ".join(
        f"{column}: {counted(Counter(cells[name, column].outcome for name in rows if (name, column) in cells))}"
        for column in (PLAN, *COLUMNS)
    )
    mixed = f" {older} of {len(cells)} results were made with other releases or another source." if older else ""
    notes = "".join(f"[{number}] {text}  \n" for number, text in enumerate(footnotes, 1))
    reasons = "".join(f"- {name}: {plan.reason}\n" for name, plan in unbuilt.items())
    return f"""# Classes of transformers and what was verified of them

*plan*: what `plan_for` and `check` make of the default configuration with at most {LAYERS} layers at
tp=2, on the meta device: sizes fit, nothing ran.
*TP2*, *TP2+SP*: `verify` of the small configuration on two real processes: the largest relative error of
the logits / of any gradient, where every check holds: odd lengths, padding, accumulation, frozen, tied
parameters, an uneven vocabulary, `linear_logp`, norm, clipping and optimizer steps.
≈: above {BAR:.0e}, and no more than {NOISE:.0f} times what rounding the weights does unsharded.
*{CHECKPOINT}*: the round trip of a checkpoint, as far as `verify` makes it.
*skipped*: transformers cannot build or run the small model, sharded or not. –: not measured.

Made by `rl-parallel-plans classes --write CLASSES.md` with {versions()}.{mixed}

{len(rows)} classes that bring a tp_plan or get a plan. {summary}.

| class | plan | {" | ".join(COLUMNS)} | {CHECKPOINT} | its own tp_plan | reason |
{"|---" * (len(COLUMNS) + 5)}|
{chr(10).join(lines)}

{notes}
Neither bring a plan nor get one: {", ".join(others) or "none"}.

Built by transformers neither from their default configuration nor made small: {len(unbuilt)}.

{reasons}"""


def _row(plan: Result, cells: Mapping[tuple[str, str], Result], footnotes: list[str]) -> str:
    results = [cells.get((plan.name, column)) for column in COLUMNS]
    # The checkpoint column has the worst verdict of those checks in all layouts.
    verdicts = {
        verdict
        for result in results
        for name, (verdict, _) in (result.checks.items() if result is not None else ())
        if name.startswith(CHECKPOINT)
    }
    shown = {"WRONG": "**WRONG**", "note": "refused", "skipped": "skipped", "ok": "exact"}
    checkpoint = next((text for verdict, text in shown.items() if verdict in verdicts), "–")
    source = plan.source if plan.outcome == "planned" else plan.outcome
    verified = [_cell(result, plan, footnotes) for result in results]
    parts = (f"`{plan.name}`", source, *verified, checkpoint, plan.own_plan, plan.reason)
    return "| " + " | ".join(part.replace("|", "\\|") for part in parts) + " |"


def _cell(result: Result | None, plan: Result, footnotes: list[str]) -> str:
    if result is None:
        return "–"
    if result.outcome == "exact":
        errors = [
            max((error or 0.0 for check, (_, error) in result.checks.items() if check.endswith(f": {what}")), default=0)
            for what in ("logits", "gradients")
        ]
        return f"{'≈ ' if max(errors) > BAR else ''}{errors[0]:.0e} / {errors[1]:.0e}"
    text = f"**{result.outcome}**" if is_wrong(result) else result.outcome
    if not result.reason or result.reason == plan.reason:
        return text
    if result.reason not in footnotes:
        footnotes.append(result.reason)
    return f"{text} [{footnotes.index(result.reason) + 1}]"


def is_wrong(result: Result) -> bool:
    """Whether the cell shows a defect, and not a refusal."""
    return result.outcome in {"WRONG", "crashed"}


def counted(counts: Mapping[str, int]) -> str:
    """`3 exact, 1 refused`."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none"


def class_names() -> list[str]:
    """Every class of transformers for text, alone or with images."""
    mappings = import_module("transformers.models.auto.modeling_auto")
    names: set[str] = set()
    for mapping in MAPPINGS:
        for entry in getattr(mappings, mapping, {}).values():
            names.update([entry] if isinstance(entry, str) else entry)
    return list(names)


def _config(name: str) -> Any:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about defaults of its own
        config = getattr(transformers, name).config_class()
    config.architectures = [name]
    return config


def _built(config: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(_few_layers(config))


def _few_layers(config: Any, depth: int = 0) -> Any:
    """The configuration, and those inside it, with at most LAYERS layers and every kind of layer kept."""
    for inner in getattr(config, "sub_configs", None) or ():
        if depth < 3 and (part := _attribute(config, inner)) is not None:
            _few_layers(part, depth + 1)
    changes: dict[str, object] = {}
    for name in LAYER_COUNTS:
        if isinstance(count := _attribute(config, name), int) and count > LAYERS:
            changes[name] = LAYERS
    for name in LAYER_LISTS:
        if isinstance(kinds := _attribute(config, name), list) and len(kinds) > LAYERS:
            distinct = list(dict.fromkeys(kinds))
            changes[name] = (distinct + kinds)[:LAYERS] if len(distinct) <= LAYERS else kinds[:LAYERS]
    changes |= {name: value for name, value in OTHERS.items() if isinstance(_attribute(config, name), int)}
    for name, value in changes.items():
        with suppress(Exception):  # some are properties, which others above feed
            setattr(config, name, value)
    return config


def _attribute(config: Any, name: str) -> Any:
    with suppress(Exception):  # Gemma 4 raises for what differs from layer to layer
        return getattr(config, name, None)
    return None


def _own_rules(model: nn.Module) -> str:
    rules = len(getattr(model, "tp_plan", None) or ())
    if not rules:
        return ""
    try:
        notes = own_plan(model).notes
    except PlanError as refusal:
        return f"refused: {_short(model, str(refusal))}"
    dropped = sum(note.startswith(DROPPED) for note in notes)
    return f"{rules - dropped} rules translated" + (f", {dropped} name nothing here" if dropped else "")


def _short(model: nn.Module | None, refusal: str) -> str:
    """The last rule's reason, or the first problem of a plan, without the class that the row names anyway."""
    lines = [line.strip() for line in refusal.splitlines() if line.startswith("  ")]
    reasons = [line for line in lines if line.startswith("- ")]
    # What no tp_plan can do, and that there is none, are no reasons beside one that is the model's.
    telling = [each for each in reasons if ": a tp_plan " not in each and "no tp_plan of its own" not in each]
    chosen = (telling or reasons or lines or [refusal])[-1 if reasons else 0].removeprefix("- ")
    name = "" if model is None else f"{qualified_name(type(model))}, "
    for noise in ("; pass a plan of parallel styles as custom=", name, "1. "):
        chosen = chosen.replace(noise, "") if noise else chosen
    return " ".join(chosen.replace(f" (transformers {release()})", "").split())


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ is not None else error
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first[:160]}"


# -- The command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rl-parallel-plans classes`."""
    parser.add_argument("names", nargs="*", metavar="CLASS", help="these classes alone (default: all)")
    parser.add_argument(
        "--results", type=Path, default=Path("classes.jsonl"), metavar="FILE", help="one line a result, added to"
    )
    parser.add_argument("--seconds", type=float, metavar="S", help="begin no further cell after that time")
    parser.add_argument(
        "--keep",
        action="store_true",
        help="of other releases or another source, show results and measure only those again that are not good",
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there, as Markdown")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Measure what is not measured yet; returns 0 if nothing is wrong and 1 if a cell is."""
    wanted = sorted(arguments.names or class_names())
    keep = arguments.keep
    stored = read_results(arguments.results)
    results = {cell: result for cell, result in stored.items() if keep or is_current(result)}
    cells = [(name, column) for name in wanted for column in (PLAN, *COLUMNS)]
    todo = [cell for cell in cells if cell not in results or not is_current(results[cell], keep=keep)]
    todo.sort(key=lambda cell: (cell[1] != PLAN, "Conditional" in cell[0]))  # towers cost the most
    started = time.monotonic()
    with Processes() as processes:
        while todo and (arguments.seconds is None or time.monotonic() - started < arguments.seconds):
            name, column = todo.pop(0)
            result = results[name, column] = measured(name, column, processes)
            with arguments.results.open("a") as file:  # on a line of its own, whatever an interruption left
                file.write("\n" * (file.tell() > 0) + json.dumps(asdict(result)))
            print(f"{name}, {column}: {result.outcome} {result.reason[:120]}".rstrip(), file=sys.stderr, flush=True)
    of_wanted = [result for (name, _), result in results.items() if name in wanted]
    if arguments.write is not None:
        arguments.write.write_text(table(of_wanted))
    wrong = [f"{result.name}, {result.column}: {result.reason}" for result in of_wanted if is_wrong(result)]
    for each in wrong:
        print(f"wrong: {each}", file=sys.stderr)
    counts = {
        column: dict(Counter(result.outcome for result in of_wanted if result.column == column))
        for column in (PLAN, *COLUMNS)
    }
    print("; ".join(f"{column}: {counted(each)}" for column, each in counts.items()) + f"; {len(todo)} left")
    if arguments.json:
        print(json.dumps({"ok": not wrong, "left": len(todo), "counts": counts, "wrong": wrong}))
    return int(bool(wrong))

"""The table of the classes of transformers: what each plan is made from, and what `verify` measured of it.

    rl-parallel-plans classes [CLASS ...] [--results classes.jsonl] [--seconds 280] [--write CLASSES.md]

Two facts stand beside one another and are made in two ways. The *plan* is what `plan_for` and `check` make of the
class's default configuration with few layers, on the meta device: full sizes, no weights, no processes. Each *verified*
column is `verify` of the small configuration on real processes, every check of it.

That takes seconds a cell and an hour for all, so each result is written as one line of `--results` when it is made, and
the next run goes on from there: interrupt it, or give it `--seconds`. A result counts for the releases and the source
of this package that it was made with. Others are measured again, or kept and counted in the table with `--keep`.
"""

import hashlib
import json
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
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
from rl_parallel_plans.verification.judge import BAR, NOISE
from rl_parallel_plans.verification.processes import Processes
from rl_parallel_plans.verification.report import VerifyReport

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
    """One cell: what one class came to in one column."""

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
    """What became of the rules of the class's own tp_plan in translation, or why not; empty where it has none."""
    checks: Mapping[str, tuple[str, float | None]] = field(default_factory=dict)
    """Verdict and error of each check."""
    seconds: float = 0.0
    """Time that it took."""
    versions: str = ""
    """Releases of torch and transformers, and the digest of this package's source."""


def measured(name: str, column: str, processes: Processes) -> Result:
    """One cell."""
    started = time.monotonic()
    if column == PLAN:
        result = _planned(name)
    else:
        result = _verified(name, column, processes)
    return _with(result, seconds=round(time.monotonic() - started, 1), versions=versions())


def _planned(name: str) -> Result:
    try:
        model = _built(name)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises: the class is listed with it
        return Result(name=name, column=PLAN, outcome="not built", reason=_one_line(error))
    return plan_result(model)


def plan_result(model: nn.Module, *, tp: int = 2) -> Result:
    """What `plan_for` and `check` make of a model: planned, or refused by PlanError, or a defect."""
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


def _verified(name: str, column: str, processes: Processes) -> Result:
    try:
        config = _config(name)
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return Result(name=name, column=column, outcome="skipped", reason=_one_line(error))
    try:
        # Whether the plan fits the full sizes is the matter of the column `plan`.
        report = verify(config, processes=processes, full_size=False, **COLUMNS[column])
    except Exception as error:  # noqa: BLE001 - a defect of verify, which the table must show
        return Result(name=name, column=column, outcome="crashed", reason=_one_line(error))
    return verified_result(name, column, report)


def verified_result(name: str, column: str, report: VerifyReport) -> Result:
    """The cell of one report."""
    if report.refused is not None:
        outcome = "skipped" if report.unusable else "refused"
        return Result(name=name, column=column, outcome=outcome, reason=_short(None, report.refused))
    wrong = [check for check in report.checks if check.verdict == "WRONG"]
    first = wrong[0] if wrong else None
    said = "" if first is None else f"{first.name}: {(*first.culprits, first.detail)[0]}"
    return Result(
        name=name,
        column=column,
        outcome="WRONG" if wrong else "exact",
        reason=" ".join(said.split())[:400],
        source=report.source,
        checks={check.name: (check.verdict, check.error) for check in report.checks},
    )


def read_results(path: Path) -> dict[tuple[str, str], Result]:
    """The last result of each cell in the file, whatever it was made with."""
    found: dict[tuple[str, str], Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):  # the line that an interruption cut short
            result = Result(**json.loads(line))
            found[result.name, result.column] = result
    return found


def is_current(result: Result, *, keep: bool = False) -> bool:
    """Whether it need not be measured again; with `keep` also a good one of other releases or another source."""
    return result.versions == versions() or (keep and result.outcome in KEPT)


@cache
def versions() -> str:
    """What a result depends on: the releases of torch and transformers, and the source of this package."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return f"torch {torch.__version__}, transformers {release()}, source {digest.hexdigest()[:12]}"


def table(found: Iterable[Result]) -> str:
    """The results as Markdown, a row a class."""
    cells = {(result.name, result.column): result for result in found}
    plans = {name: result for (name, column), result in sorted(cells.items()) if column == PLAN}
    verified = {name for (name, column), result in cells.items() if column != PLAN and result.checks}
    rows = {name: plan for name, plan in plans.items() if name in verified or _has_plan(plan)}
    unbuilt = {name: plan for name, plan in plans.items() if name not in rows and plan.outcome == "not built"}
    others = {name: plan for name, plan in plans.items() if name not in rows and name not in unbuilt}
    footnotes: list[str] = []
    lines = [_row(plan, cells, footnotes) for plan in rows.values()]
    made_with = Counter(result.versions for result in cells.values())
    newest = versions()
    older = sum(count for each, count in made_with.items() if each != newest)
    summary = [
        f"{column}: {counted(Counter(cells[name, column].outcome for name in rows if (name, column) in cells))}"
        for column in (PLAN, *COLUMNS)
    ]
    return "\n".join(
        [
            "# Classes of transformers and what was verified of them",
            "",
            f"*plan*: what `plan_for` and `check` make of the default configuration with at most {LAYERS} layers at",
            "tp=2, on the meta device: sizes fit, nothing ran.",
            "*TP2*, *TP2+SP*: `verify` of the small configuration on two real processes: the largest relative error of",
            "the logits / of any gradient, where every check holds: odd lengths, padding, accumulation, frozen, tied",
            "parameters, an uneven vocabulary, `linear_logp`, norm, clipping and optimizer steps.",
            f"≈: above {BAR:.0e}, and no more than {NOISE:.0f} times what rounding the weights does unsharded.",
            f"*{CHECKPOINT}*: the round trip of a checkpoint, as far as `verify` makes it.",
            "*skipped*: transformers cannot build or run the small model, sharded or not. –: not measured.",
            "",
            f"Made by `rl-parallel-plans classes --write CLASSES.md` with {newest}."
            + (f" {older} of {len(cells)} results were made with other releases or another source." if older else ""),
            "",
            f"{len(rows)} classes that bring a tp_plan or get a plan. {'; '.join(summary)}.",
            "",
            f"| class | plan | {' | '.join(COLUMNS)} | {CHECKPOINT} | its own tp_plan | reason |",
            "|---" * (len(COLUMNS) + 5) + "|",
            *lines,
            "",
            *(f"[{number}] {text}  " for number, text in enumerate(footnotes, 1)),
            "",
            f"Neither bring a plan nor get one: {', '.join(f'`{name}`' for name in others) or 'none'}.",
            "",
            f"Built by transformers neither from their default configuration nor made small: {len(unbuilt)}.",
            "",
            *(f"- {name}: {plan.reason}" for name, plan in unbuilt.items()),
            "",
        ]
    )


def _has_plan(plan: Result) -> bool:
    return plan.outcome != "not built" and bool(plan.own_plan or plan.outcome != "refused")


def _row(plan: Result, cells: Mapping[tuple[str, str], Result], footnotes: list[str]) -> str:
    found = {column: cells.get((plan.name, column)) for column in COLUMNS}
    shown = [_cell(result, plan, footnotes) for result in found.values()]
    checkpoint = _checkpoint([result for result in found.values() if result is not None])
    made = plan.source if plan.outcome == "planned" else plan.outcome
    parts = (f"`{plan.name}`", made, *shown, checkpoint, plan.own_plan, plan.reason)
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
    said = f"**{result.outcome}**" if is_wrong(result) else result.outcome
    if not result.reason or result.reason == plan.reason:
        return said
    if result.reason not in footnotes:
        footnotes.append(result.reason)
    return f"{said} [{footnotes.index(result.reason) + 1}]"


def _checkpoint(results: Sequence[Result]) -> str:
    """The verdict of the checks of checkpoints in all layouts together."""
    verdicts = {
        verdict for result in results for name, (verdict, _) in result.checks.items() if name.startswith(CHECKPOINT)
    }
    worst = next((each for each in ("WRONG", "note", "skipped", "ok") if each in verdicts), "–")
    return {"WRONG": "**WRONG**", "ok": "exact", "note": "refused"}.get(worst, worst)


def is_wrong(result: Result) -> bool:
    """Whether the cell shows a defect, and not a refusal."""
    return result.outcome in {"WRONG", "crashed"}


def counted(counts: Mapping[str, int]) -> str:
    """`3 exact, 1 refused`."""
    return ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items())) or "none"


def _with(result: Result, **changes: Any) -> Result:
    return Result(**{**asdict(result), **changes})


def class_names() -> list[str]:
    """Every class that transformers has for text, alone or with images."""
    mappings = import_module("transformers.models.auto.modeling_auto")
    names: set[str] = set()
    for mapping in MAPPINGS:
        for found in getattr(mappings, mapping, {}).values():
            names.update([found] if isinstance(found, str) else found)
    return list(names)


def _config(name: str) -> Any:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about defaults of its own
        config = getattr(transformers, name).config_class()
    config.architectures = [name]
    return config


def _built(name: str) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return build(_few_layers(_config(name)))


def _few_layers(config: Any, depth: int = 0) -> Any:
    """The configuration, and those inside it, with at most LAYERS layers and every kind of layer kept."""
    for inner in getattr(config, "sub_configs", None) or ():
        found = _attribute(config, inner)
        if found is not None and depth < 3:
            _few_layers(found, depth + 1)
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
    telling = [reason for reason in reasons if ": a tp_plan " not in reason]  # what no tp_plan can do is no reason
    chosen = (telling or reasons or lines or [refusal])[-1 if reasons else 0].removeprefix("- ")
    name = "" if model is None else f"{qualified_name(type(model))}, "
    for noise in ("; pass a plan of parallel styles as custom=", name, "1. "):
        chosen = chosen.replace(noise, "") if noise else chosen
    return " ".join(chosen.replace(f" (transformers {release()})", "").split())


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ is not None else error
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first[:160]}"

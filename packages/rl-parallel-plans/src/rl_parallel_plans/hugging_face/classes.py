"""The table of the classes in transformers that bring a tensor-parallel plan: what `plan_for` makes of each.

    python -m rl_parallel_plans.hugging_face.classes [--tp 2] [--only NAME ...] [--write CLASSES.md]

Each class is built on the meta device from its default configuration with few layers: no weights, no processes. A class
is planned, or refused with the reason; anything else is a defect, and the command then ends with 1. Classes that
transformers itself cannot build so are listed apart.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.hugging_face.strings import release
from rl_parallel_plans.hugging_face.translation import DROPPED, own_plan
from rl_parallel_plans.lookup import plan_for
from rl_parallel_plans.model_source import build
from rl_parallel_plans.registry import qualified_name

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
LAYERS = 4
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "encoder_layers", "decoder_layers")
LAYER_LISTS = ("layer_types", "layers_block_type", "mlp_layer_types", "attn_layer_types")
OTHERS: dict[str, object] = {"first_k_dense_replace": 1, "num_kv_shared_layers": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What `plan_for` made of one class."""

    name: str
    """Name of the class."""
    outcome: str
    """`planned`, `refused`, `crashed` or `not built`."""
    source: str = ""
    """The rule that made the plan."""
    sequence_parallel: bool = False
    """Whether it can be planned with sequence parallelism too."""
    styles: str = ""
    """Kinds of styles that the plan uses."""
    reason: str = ""
    """Why it was refused, crashed or not built."""
    own_plan: str = ""
    """What became of the rules of the class's own plan in translation, or why not; empty where it has none."""


def verdicts(*, tp: int, only: Sequence[str] = ()) -> Iterator[Verdict]:
    """One for each class that transformers has for text, alone or with images, in the order of names."""
    for name in sorted(only or _class_names()):
        try:
            model = _built(name)
        except Exception as error:  # noqa: BLE001 - whatever transformers raises: the class is listed with it
            yield Verdict(name=name, outcome="not built", reason=_one_line(error))
        else:
            yield verdict(model, tp=tp)


def verdict(model: nn.Module, *, tp: int) -> Verdict:
    """What `plan_for` and `check` make of a model: planned, or refused by PlanError, or a defect."""
    name, own = type(model).__name__, ""
    try:
        own = _own_rules(model)
        plan = plan_for(model, tp=tp)
        plan.check(model)
        sequence_parallel = _with_sequence_parallelism(model, tp)
    except PlanError as refusal:
        return Verdict(name=name, outcome="refused", reason=_short(model, refusal), own_plan=own)
    except Exception as error:  # noqa: BLE001 - a defect, which the table must show
        return Verdict(name=name, outcome="crashed", reason=_one_line(error), own_plan=own)
    kinds = Counter(type(style).__name__ for style in plan.styles.values())
    return Verdict(
        name=name,
        outcome="planned",
        source=plan.source,
        sequence_parallel=sequence_parallel,
        styles=", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())),
        own_plan=own,
    )


def _own_rules(model: nn.Module) -> str:
    rules = len(getattr(model, "tp_plan", None) or ())
    if not rules:
        return ""
    try:
        notes = own_plan(model).notes
    except PlanError as refusal:
        return f"refused: {_short(model, refusal)}"
    dropped = sum(note.startswith(DROPPED) for note in notes)
    return f"{rules - dropped} rules translated" + (f", {dropped} name nothing here" if dropped else "")


def table(found: Iterable[Verdict], *, tp: int) -> str:
    """The verdicts as Markdown."""
    found = list(found)
    own = [v for v in found if v.own_plan]
    counts = Counter(v.outcome for v in own)
    others = [v for v in found if not v.own_plan and v.outcome == "planned"]
    unbuilt = [v for v in found if v.outcome == "not built"]
    conditions = (
        f"transformers {release()}, torch {torch.__version__.partition('+')[0]}, tp={tp}; default configurations with "
        f"at most {LAYERS} layers, on the meta device. Written by `python -m {__spec__.name}`."
    )
    summary = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
    return "\n".join(
        [
            "# Classes of transformers that bring a tensor-parallel plan",
            "",
            conditions,
            "",
            f"{len(own)} classes: {summary}.",
            "",
            "| class | verdict | source | with sequence parallelism | styles | its own plan | reason |",
            "|---|---|---|---|---|---|---|",
            *(_row(v) for v in own),
            "",
            f"Without a plan of their own, and planned all the same: {_names(others)}.",
            "",
            f"Not built by transformers from their default configuration: {len(unbuilt)}.",
            "",
            *(f"- {v.name}: {v.reason}" for v in unbuilt),
            "",
        ]
    )


def main() -> None:
    """Print the table, or write it."""
    parser = argparse.ArgumentParser(prog=f"python -m {__spec__.name}", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks that a layer is split over")
    parser.add_argument("--only", nargs="*", default=(), metavar="CLASS", help="these classes alone")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there instead of printing it")
    arguments = parser.parse_args()
    found = list(verdicts(tp=arguments.tp, only=arguments.only))
    text = table(found, tp=arguments.tp)
    if arguments.write is None:
        sys.stdout.write(text)
    else:
        arguments.write.write_text(text)
        sys.stdout.write(f"{arguments.write}: {len(found)} classes\n")
    crashed = [v for v in found if v.outcome == "crashed"]
    for v in crashed:
        sys.stderr.write(f"{v.name} crashed: {v.reason}\n")
    sys.exit(1 if crashed else 0)


def _class_names() -> list[str]:
    mappings = import_module("transformers.models.auto.modeling_auto")
    names: set[str] = set()
    for mapping in MAPPINGS:
        for found in getattr(mappings, mapping, {}).values():
            names.update([found] if isinstance(found, str) else found)
    return list(names)


def _built(name: str) -> nn.Module:
    transformers = import_module("transformers")
    transformers.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers, about defaults of its own
        config = _few_layers(getattr(transformers, name).config_class())
        config.architectures = [name]
        return build(config)


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


def _with_sequence_parallelism(model: nn.Module, tp: int) -> bool:
    try:
        plan_for(model, tp=tp, sequence_parallel=True).check(model)
    except PlanError:
        return False
    return True


def _short(model: nn.Module, refusal: PlanError) -> str:
    """The last rule's reason, or the first problem of a plan, without the class that the row names anyway."""
    lines = [line.strip() for line in str(refusal).splitlines() if line.startswith("  ")]
    reasons = [line for line in lines if line.startswith("- ")]
    chosen = (reasons[-1] if reasons else lines[0] if lines else str(refusal)).removeprefix("- ")
    for noise in ("; pass a plan of parallel styles as custom=", f"{qualified_name(type(model))}, ", "1. "):
        chosen = chosen.replace(noise, "")
    return chosen.replace(f" (transformers {release()})", "")


def _one_line(error: BaseException) -> str:
    cause = error.__cause__ if isinstance(error, PlanError) and error.__cause__ is not None else error
    first = next((line.strip() for line in str(cause).splitlines() if line.strip()), "")
    return f"{type(cause).__name__}: {first[:160]}"


def _row(v: Verdict) -> str:
    sequence = "" if v.outcome != "planned" else "yes" if v.sequence_parallel else "no"
    cells = (f"`{v.name}`", v.outcome, v.source, sequence, v.styles, v.own_plan, v.reason)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _names(found: Iterable[Verdict]) -> str:
    return ", ".join(f"`{v.name}` ({v.source})" for v in found) or "none"


if __name__ == "__main__":
    main()

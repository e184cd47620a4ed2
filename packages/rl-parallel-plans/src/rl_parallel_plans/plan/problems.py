"""Everything that would make a plan wrong for a model, found before any weight is touched.

Needs no mesh and no process group. Each finding is one sentence: what broke, with its numbers, then what to do.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.plan.rows import in_words, parameter_placements, shards_features
from rl_parallel_plans.structure import (
    around_layers,
    broken_tie,
    collapsed,
    direct_parameters,
    head_size,
    input_embedding,
    joined,
    matching_modules,
    output_head,
    source_of_forward,
    text_layers,
    tied_names,
)

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = Mapping[str, ParallelStyle]
    Styled = dict[str, ParallelStyle]
    Found = tuple[str, str]

KINDS = {
    "unmatched_pattern": "a pattern matches no module",
    "two_patterns": "two patterns match one module",
    "sharded_already": "parameters are DTensors before the plan is applied",
    "indivisible": "tp does not divide heads or features",
    "unsupported_module": "a style meets a module that it cannot shard",
    "head_norm": "a norm that sees only its rank's heads has a gradient that nothing sums",
    "broken_tie": "tied parameters are parted",
    "whole_stream": "a module that takes its part of the sequence is called where the residual stream is whole",
    "gathered_lm_head": "every rank would hold full logits",
    "quantized": "weights are not of a plain floating-point dtype",
    "nothing_sharded": "no rule shards any parameter",
    "local_lm_head": "each rank would return its own logits as if they were all",
    "large_replicated": "a large weight of a decoder layer stays whole on every rank",
}
"""What can be wrong with a plan, by the name under which `plan_for(allow=...)` accepts it."""
PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LARGE = 2**20
"""Elements of a weight in a decoder layer above which to leave it whole needs the caller's word: 2 MiB in bf16."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong with a plan."""

    kind: str
    """Key of `KINDS`."""
    message: str
    """What broke, with its numbers, then what to do."""

    def __str__(self) -> str:
        return self.message


def find_problems(model: nn.Module, styles: "Styles", tp: int, *, ep: int = 1) -> list[Problem]:
    """All problems, in the order in which one would fix them; the same place in every layer counts once."""
    if tp == 1 and ep == 1:
        return [Problem(kind="broken_tie", message=tie)] if (tie := broken_tie(model)) else []
    styled, assigned = _assign(model, styles)
    found = [
        *assigned,
        *_quantized(model),
        *(_nothing(model, styled) if tp > 1 else ()),
        *_sharded_already(model, styled, ep),
        *_features(model, styled, tp),
        *_attention(model, styled, tp),
        *(_ties(model, styled) if tp > 1 else ()),
        *_embedding(model, styled),
        *_stream(model, styled),
        *_head(model, styled, tp),
        *(_large(model, styled) if tp > 1 else ()),
    ]
    return list(dict.fromkeys(Problem(kind=kind, message=message) for kind, message in found))


def _assign(model: nn.Module, styles: "Styles") -> "tuple[Styled, list[Found]]":
    styled: Styled = {}
    by: dict[str, str] = {}
    found: list[Found] = []
    for pattern, style in styles.items():
        matches = matching_modules(model, pattern)
        if not matches:
            message = (
                f"pattern {pattern!r} ({type(style).__name__}) matches no module: correct it or remove it; the model's "
                f"top modules are {[name for name, _ in model.named_children()]}"
            )
            found.append(("unmatched_pattern", message))
        for name, _ in matches:
            if name in by:
                both = f"{by[name]!r} and by {pattern!r}"
                found.append(("two_patterns", f"{collapsed(name)} is matched by {both}: make the patterns disjoint"))
            styled[name], by[name] = style, pattern
    return styled, found


def _quantized(model: nn.Module) -> "Iterator[Found]":
    what = next((f"{name} is {p.dtype}" for name, p in model.named_parameters() if p.dtype not in PLAIN), None)
    if what is None and getattr(getattr(model, "config", None), "quantization_config", None):
        what = "its config has a quantization_config"
    if what is not None:
        yield "quantized", f"the model is quantized ({what}): a plan shards plain weights; load it dequantized"


def _nothing(model: nn.Module, styled: "Styled") -> "Iterator[Found]":
    placements = (parameter_placements(style, model.get_submodule(path)) for path, style in styled.items())
    if all(placed is not None and all(p.is_replicate() for p in placed.values()) for placed in placements):
        yield (
            "nothing_sharded",
            "no rule shards any parameter: every rank would do the same work; name some, or use tp=1",
        )


def _sharded_already(model: nn.Module, styled: "Styled", ep: int) -> "Iterator[Found]":
    # Experts are shared out before the rest is sharded.
    experts = {path for path, style in styled.items() if ep > 1 and getattr(style, "ep", 1) == ep}
    names = [name for name, p in model.named_parameters() if is_dtensor(p) and name.rpartition(".")[0] not in experts]
    if names:
        already = f"{len(names)} parameters are DTensors already, {names[0]} first"
        yield "sharded_already", f"{already}: shard over tp once, and before FSDP"


def _features(model: nn.Module, styled: "Styled", tp: int) -> "Iterator[Found]":
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for name, style in styled.items():
        module, where = model.get_submodule(name), collapsed(name)
        if hasattr(style, "problems") and not any(is_dtensor(p) for p in module.parameters(recurse=False)):
            yield from (("indivisible", f"{where} {problem}") for problem in style.problems(module, tp))
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        kind = type(style).__name__
        if not isinstance(module, nn.Linear | nn.Embedding):
            message = f"{where} is a {type(module).__name__}, and {kind} shards only nn.Linear and nn.Embedding"
            yield "unsupported_module", message
            continue
        if isinstance(style, ColwiseParallel):
            size = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
            cut = shards_features(style) and style.use_local_output
        else:
            size = module.in_features if isinstance(module, nn.Linear) else 0
            cut = isinstance(module, nn.Linear) and style.input_layouts[0].is_shard()
        if isinstance(style, ColwiseParallel) and cut and _is_fused(model, name, styled):
            message = f"{where} is several projections in one, and {kind} would cut one from another"
            yield "unsupported_module", f"{message}: give it a style that keeps each of them, or none"
        if cut and size % tp:
            message = f"{where} ({kind}) has {size} features, which tp={tp} does not divide: choose one that does"
            yield "indivisible", message


def _is_fused(model: nn.Module, name: str, styled: "Styled") -> bool:
    """[q | k | v] or [gate | up], by its name or by twice the features that its row-wise sibling takes."""
    from torch.distributed.tensor.parallel import RowwiseParallel

    path, _, own = name.rpartition(".")
    module = model.get_submodule(name)
    siblings = dict(model.get_submodule(path).named_children())
    rows = [s for n, s in siblings.items() if isinstance(styled.get(joined(path, n)), RowwiseParallel)]
    doubled = any(getattr(s, "in_features", 0) * 2 == getattr(module, "out_features", -1) for s in rows)
    return own in ("qkv_proj", "gate_up_proj") or (doubled and "gate" in own and "up" in own)


def _attention(model: nn.Module, styled: "Styled", tp: int) -> "Iterator[Found]":
    """What torch's own styles do not check of attention; ours have `problems()` of their own."""
    config = getattr(model, "config", None)
    for path, module in model.named_modules():
        children = dict(module.named_children())
        if not {"q_proj", "k_proj"} <= children.keys() or not shards_features(styled.get(joined(path, "q_proj"))):
            continue
        where, size = collapsed(path), head_size(module, config)
        for child, kind in (("q_proj", "query"), ("k_proj", "key/value")):
            rows = getattr(children[child], "out_features", None)
            if size is None or rows is None:
                continue
            if (heads := rows // size) % tp:
                message = (
                    f"{where}.{child} has {heads} {kind} heads ({rows} rows, {size} a head), which tp={tp} does not"
                )
                yield "indivisible", f"{message} divide: choose one that does"
        for child, submodule in children.items():
            norm = styled.get(joined(path, child))
            forgets = norm is None or getattr(norm, "partial_gradient", True) is False
            if "norm" in child and forgets and list(submodule.parameters()):
                message = f"{where}.{child} would see only its rank's heads and nothing would sum its gradient"
                yield "head_norm", f"{message}: give it ReplicatedParallel(partial_gradient=True)"


def _ties(model: nn.Module, styled: "Styled") -> "Iterator[Found]":
    def placement(name: str) -> str:
        path, _, parameter = name.rpartition(".")
        if path not in styled:
            return "Replicate"
        found = (parameter_placements(styled[path], model.get_submodule(path)) or {}).get(parameter)
        return f"unknown under {type(styled[path]).__name__}" if found is None else in_words(found)

    for names in tied_names(model):
        ends = {name: placement(name) for name in names}
        if len(set(ends.values())) > 1:
            where = ", ".join(f"{n}: {p}" for n, p in ends.items())
            message = f"tied parameters would be placed differently ({where}), which parts them"
            yield "broken_tie", f"{message}: shard both on the same dim or neither"
    if tie := broken_tie(model):
        yield "broken_tie", tie


def _embedding(model: nn.Module, styled: "Styled") -> "Iterator[Found]":
    """A model that indexes its embedding's weight itself would find only this rank's tokens."""
    path = input_embedding(model)
    if path is None or path not in styled:
        return
    name = path.rpartition(".")[2]
    for owner_path, owner in model.named_modules():
        if owner_path and not path.startswith(f"{owner_path}."):
            continue
        if re.search(rf"{name}\.weight\s*\[", source_of_forward(owner)):
            reads = f"{type(owner).__name__}.forward takes rows of {path}.weight itself"
            message = f"{reads}, where only a rank's words are"
            yield "unsupported_module", f"{message}: plan the language model inside of it, or use tp=1"


def _stream(model: nn.Module, styled: "Styled") -> "Iterator[Found]":
    """A module beside the layers would get the stream both whole and sharded along the sequence (NanoChat's norm)."""
    for path, style in styled.items():
        if type(style).__name__ != "SequenceShardedParallel":
            continue
        parent, _, name = path.rpartition(".")
        owner = model.get_submodule(parent)
        lists = [child for child, module in owner.named_children() if isinstance(module, nn.ModuleList)]
        around = {child: found for child in lists if (found := around_layers(owner, child)) is not None}
        for layers, found in around.items():
            if name in found.before and path not in around:
                message = f"{type(owner).__name__}.forward calls {path} before its {layers}, on the whole sequence, and"
                message += " the plan cuts the residual stream there"
                yield "whole_stream", f"{message}: plan with sequence_parallel=False, or make each layer a WholeLayer"


def _head(model: nn.Module, styled: "Styled", tp: int) -> "Iterator[Found]":
    from torch.distributed.tensor.parallel import ColwiseParallel

    head = output_head(model)
    style = None if head is None else styled.get(head)
    if head is None or not isinstance(style, ColwiseParallel):
        return
    remedy = "use ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"
    if not shards_features(style):
        words = getattr(model.get_submodule(head), "out_features", 0)
        message = f"{head} would gather its output: {words:,} logits a token on every rank, and not {words // tp:,}"
        yield "gathered_lm_head", f"{message}; {remedy}"
    elif style.use_local_output:
        message = f"{head} would return this rank's logits as a plain tensor, which nothing tells from all of them"
        yield "local_lm_head", f"{message}; {remedy}"


def _large(model: nn.Module, styled: "Styled") -> "Iterator[Found]":
    stack = text_layers(model)
    if stack is None:
        return
    for path, name, parameter in direct_parameters(model):
        if path.startswith(f"{stack[0]}.") and path not in styled and parameter.ndim > 1 and parameter.numel() >= LARGE:
            where = collapsed(joined(path, name))
            message = f"{where} {list(parameter.shape)} is named by no rule and would stay whole on every rank"
            yield "large_replicated", f"{message}: name it, or accept that by allow=['large_replicated']"

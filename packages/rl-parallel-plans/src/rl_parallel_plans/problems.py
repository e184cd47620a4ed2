"""Everything that would make a plan wrong for a model, found before any weight is touched.

Needs no mesh and no process group. Each finding is one sentence: what broke, with its numbers, then what to do.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.placements import in_words, parameter_placements, shards_features
from rl_parallel_plans.structure import collapsed, head_size, joined, matching_modules
from rl_parallel_plans.ties import broken_tie, tied_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle

    Styles = Mapping[str, ParallelStyle]
    Styled = dict[str, ParallelStyle]


def find_problems(model: nn.Module, styles: "Styles", tp: int) -> list[str]:
    """All problems, in the order in which one would mend them; the same place in every layer counts once."""
    if tp == 1:
        return [tie] if (tie := broken_tie(model)) else []
    styled, found = _assign(model, styles)
    found += _sharded_already(model)
    found += _features(model, styled, tp)
    found += _attention(model, styled, tp)
    found += _ties(model, styled)
    return list(dict.fromkeys(found))


def _assign(model: nn.Module, styles: "Styles") -> "tuple[Styled, list[str]]":
    styled: Styled = {}
    by: dict[str, str] = {}
    found = []
    for pattern, style in styles.items():
        matches = matching_modules(model, pattern)
        if not matches:
            found.append(
                f"pattern {pattern!r} ({type(style).__name__}) matches no module: correct it or remove it; the model's "
                f"top modules are {[name for name, _ in model.named_children()]}"
            )
        for name, _ in matches:
            if name in by:
                found.append(f"{name} is matched by {by[name]!r} and by {pattern!r}: make the patterns disjoint")
            styled[name], by[name] = style, pattern
    return styled, found


def _sharded_already(model: nn.Module) -> list[str]:
    names = [name for name, p in model.named_parameters() if is_dtensor(p)]
    if not names:
        return []
    return [f"{len(names)} parameters are DTensors already, {names[0]} first: shard over tp once, and before FSDP"]


def _features(model: nn.Module, styled: "Styled", tp: int) -> Iterator[str]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    for name, style in styled.items():
        module, where = model.get_submodule(name), collapsed(name)
        if not isinstance(style, ColwiseParallel | RowwiseParallel):
            continue
        kind = type(style).__name__
        if not isinstance(module, nn.Linear | nn.Embedding):
            yield f"{where} is a {type(module).__name__}, and {kind} shards only nn.Linear and nn.Embedding"
            continue
        if isinstance(style, ColwiseParallel):
            size = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
            cut = shards_features(style) and style.use_local_output
        else:
            size = module.in_features if isinstance(module, nn.Linear) else 0
            cut = isinstance(module, nn.Linear) and style.input_layouts[0].is_shard()
        if cut and size % tp:
            yield f"{where} ({kind}) has {size} features, which tp={tp} does not divide: choose one that does"


def _attention(model: nn.Module, styled: "Styled", tp: int) -> Iterator[str]:
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
                yield (
                    f"{where}.{child} has {heads} {kind} heads ({rows} rows, {size} a head), which tp={tp} does not "
                    "divide: choose one that does"
                )
        for child, submodule in children.items():
            if "norm" in child and joined(path, child) not in styled and list(submodule.parameters()):
                yield (
                    f"{where}.{child} would see only its rank's heads and nothing would sum its gradient: give it the "
                    "style 'replicated_with_grad_allreduce'"
                )


def _ties(model: nn.Module, styled: "Styled") -> Iterator[str]:
    for names in tied_names(model):
        ends = {name: _placement(model, styled, name) for name in names}
        if len(set(ends.values())) > 1:
            yield (
                f"tied parameters would be placed differently ({', '.join(f'{n}: {p}' for n, p in ends.items())}), "
                "which parts them: shard both on the same dim or neither"
            )
    if tie := broken_tie(model):
        yield tie


def _placement(model: nn.Module, styled: "Styled", name: str) -> str:
    path, _, parameter = name.rpartition(".")
    if path not in styled:
        return "untouched"
    placements = parameter_placements(styled[path], model.get_submodule(path)) or {}
    placement = placements.get(parameter)
    return f"unknown under {type(styled[path]).__name__}" if placement is None else in_words(placement)

"""A model's own Hugging Face plan (`model.tp_plan`) in torch's parallel styles, or a refusal.

It reads the attribute and imports no transformers. A string is translated only where a torch style does exactly the
same; the table does not depend on the release, for the names never changed their meaning, they were only renamed
(5.2: `*_rep` became `colwise_gather_output` and `rowwise_split_input`). All others (packed, expert and MLA styles) are
refused: a plan that skips one of them is silently wrong.

Three departures from the letter of the plan: the lm_head always ends as DTensor Shard(-1), never gathered;
an embedding that is tied to it is sharded with it; and patterns that transformers 4 repeats without the model's
prefix, where they match nothing, are dropped.
"""

from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.registry import qualified_name
from rl_parallel_plans.structure import collapsed, input_embedding, matching_modules, output_head
from rl_parallel_plans.ties import tied_names

if TYPE_CHECKING:
    from torch.distributed.tensor.parallel import ParallelStyle


def translate_parallel_style(style: str) -> "ParallelStyle":
    """A new torch style that does exactly what the Hugging Face style of this name does.

    Raises PlanError for a name without an exact equivalent.
    """
    table = _translations()
    if style not in table:
        raise PlanError(f"Hugging Face style {style!r} has no exact equivalent in torch: known are {sorted(table)}")
    return table[style]()


def get_hf_tp_plan(model: nn.Module) -> "dict[str, ParallelStyle]":
    """The model's own tensor-parallel plan, translated: pattern of module names to style.

    Raises PlanError where the model has none, and where a style cannot be translated, with the model, the pattern and
    the release of transformers.
    """
    plan: Mapping[str, str] | None = getattr(model, "tp_plan", None)
    if not plan:
        raise PlanError(f"{qualified_name(type(model))} has no tp_plan of its own (transformers {_transformers()})")
    prefix = getattr(model, "base_model_prefix", "")
    repeated = {pattern for pattern in plan if plan.get(f"{prefix}.{pattern}") == plan[pattern]}
    return translate_plan(model, {pattern: style for pattern, style in plan.items() if pattern not in repeated})


def translate_plan(model: nn.Module, plan: Mapping[str, str]) -> "dict[str, ParallelStyle]":
    """Translate a whole plan of style strings and see to its lm_head and to the embedding tied to it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {pattern: _translated(model, pattern, style) for pattern, style in plan.items()}
    head, embedding = output_head(model), input_embedding(model)
    if head is not None:
        styles = {p: s for p, s in styles.items() if not _names(model, p, head)}
        styles[head] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    tied = any({f"{head}.weight", f"{embedding}.weight"} <= set(names) for names in tied_names(model))
    if tied and embedding is not None and not any(_names(model, pattern, embedding) for pattern in styles):
        styles[embedding] = RowwiseParallel(input_layouts=Replicate())
    return styles


def _translated(model: nn.Module, pattern: str, style: str) -> "ParallelStyle":
    try:
        return translate_parallel_style(style)
    except PlanError as error:
        raise PlanError(
            f"{qualified_name(type(model))}, pattern {pattern!r} (transformers {_transformers()}): {error}; pass a "
            "plan of torch styles as custom="
        ) from error


def _names(model: nn.Module, pattern: str, name: str) -> bool:
    return any(collapsed(found) == collapsed(name) for found, _ in matching_modules(model, pattern))


def _translations() -> "dict[str, Callable[[], ParallelStyle]]":
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    from rl_parallel_plans.styles import ReplicatedParallel

    gathered = "colwise_gather_output", "colwise_rep"
    split = "rowwise_split_input", "rowwise_rep", "embedding_rowwise"
    return {
        "colwise": ColwiseParallel,
        "rowwise": RowwiseParallel,
        **{name: lambda: ColwiseParallel(output_layouts=Replicate()) for name in gathered},
        **{name: lambda: RowwiseParallel(input_layouts=Replicate()) for name in split},
        "replicated_with_grad_allreduce": lambda: ReplicatedParallel(partial_gradient=True),
    }


def _transformers() -> str:
    try:
        return version("transformers")
    except PackageNotFoundError:
        return "not installed"

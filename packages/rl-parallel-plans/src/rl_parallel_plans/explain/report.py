"""What text, JSON and HTML show of a plan over dp ranks: totals, what stays whole and where, what is communicated.

Also the stages of a pipeline over the plan, and how numbers and shapes are written.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan.rows import ParameterRow, parameter_rows

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan
    from rl_parallel_plans.plan.rows import CollectiveRow

# Rows of one module in a layer that are still shown one by one.
FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rows that belong together: all under one module."""

    where: str
    """Path of the module with `*` for an index, or of the one parameter."""
    rows: tuple[ParameterRow, ...]
    """The rows, in the model's order."""

    @property
    def count(self) -> int:
        """How many parameters they stand for."""
        return sum(row.count for row in self.rows)

    @property
    def is_tower(self) -> bool:
        """Whether they are shown as one: a tower that no rule names, or too many rows."""
        aside = "*" not in self.where and all(row.pattern is None for row in self.rows)
        return len(self.rows) > (1 if aside else FEW)

    @property
    def rank_bytes(self) -> int:
        """Their bytes on rank 0 of the tp axis, before FSDP."""
        return sum(row.rank_bytes for row in self.rows)

    def rank_bytes_over(self, dp: int) -> int:
        """Their bytes on rank 0 under FSDP over `dp` ranks."""
        return sum(row.rank_bytes_over(dp) for row in self.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A plan over `dp` ranks of FSDP, counted. Bytes are those of parameters alone, on rank 0."""

    plan: "ParallelPlan"
    """The plan itself."""
    dp: int
    """Ranks that FSDP shards each local tensor over."""
    elements: int
    """Elements of all parameters, unsharded; a tied one once."""
    global_bytes: int
    """Bytes of all parameters, unsharded."""
    tp_rank_bytes: int
    """Bytes on a rank of the tp axis before FSDP: also what it holds if FSDP gathered everything at once."""
    rank_bytes: int
    """Bytes on a rank under tp and FSDP together."""
    whole: tuple[Part, ...]
    """What every tp rank holds whole, by the largest module that holds nothing else; largest first. None at tp=1."""
    whole_bytes: int
    """Bytes of `whole` on a rank of the tp axis before FSDP."""
    partial_gradient_bytes: int
    """Bytes of the parameters of which each rank has one term of the gradient."""
    collectives: tuple["CollectiveRow", ...]
    """What is communicated over tp: by the kinds of decoder layers, then by the modules outside of them."""
    sent_bytes: int
    """Bytes per token that a rank sends over tp in one forward and backward, where collectives are rings."""
    problems: tuple[str, ...]
    """What `check` raises."""
    allowed: tuple[str, ...]
    """Problems that the caller has accepted."""
    parts: tuple[Part, ...]
    """The whole model by its familiar modules: embedding, attention, MLP; the largest first."""


def report(plan: "ParallelPlan", *, dp: int = 1) -> Report:
    """Count what `plan` puts on each rank where FSDP has `dp` ranks; PlanError for an impossible dp."""
    if not isinstance(dp, int) or dp < 1:
        raise PlanError(f"dp is {dp!r}: it must be a whole number of ranks, at least 1")
    rows = plan.parameters
    whole = _whole_parts(rows) if plan.tp > 1 else ()
    collectives = tuple(sorted(plan.collectives, key=lambda row: not row.in_layers))
    return Report(
        plan=plan,
        dp=dp,
        elements=sum(row.count * math.prod(row.shape) for row in rows),
        global_bytes=sum(row.global_bytes for row in rows),
        tp_rank_bytes=sum(row.rank_bytes for row in rows),
        rank_bytes=sum(row.rank_bytes_over(dp) for row in rows),
        whole=whole,
        whole_bytes=sum(part.rank_bytes for part in whole),
        partial_gradient_bytes=sum(row.rank_bytes for row in rows if row.partial_gradient),
        collectives=collectives,
        sent_bytes=sum(row.count * row.sent_bytes for row in collectives),
        problems=tuple(problem.message for problem in plan.problems if problem.kind not in plan.allow),
        allowed=tuple(problem.message for problem in plan.problems if problem.kind in plan.allow),
        parts=_familiar_parts(rows, whole),
    )


def _whole_parts(rows: Sequence[ParameterRow]) -> tuple[Part, ...]:
    """Whole rows by the shortest path under which nothing is sharded: a vision tower is one part."""

    def prefixes(name: str) -> list[str]:  # the modules around a parameter, the outermost first
        tokens = name.split(".")
        return [".".join(tokens[:length]) for length in range(1, len(tokens))]

    mixed = {prefix for row in rows if row.sharded for prefix in prefixes(row.name)}

    def outermost(row: ParameterRow) -> str:
        return next(prefix for prefix in (*prefixes(row.name), row.name) if prefix not in mixed)

    return _grouped([row for row in rows if not row.sharded], outermost)


def _familiar_parts(rows: Sequence[ParameterRow], whole: Sequence[Part]) -> tuple[Part, ...]:
    """`model.layers.*.mlp` for all that is in it; what is whole from top to bottom as one; else module by module."""
    towers = {row: part.where for part in whole if part.is_tower for row in part.rows}

    def where(row: ParameterRow) -> str:
        before, star, after = row.name.rpartition(".")[0].partition(".*.")
        return towers.get(row) or f"{before}{star}{after.partition('.')[0] if star else ''}" or row.name

    return _grouped(rows, where)


def _grouped(rows: Sequence[ParameterRow], key: Callable[[ParameterRow], str]) -> tuple[Part, ...]:
    """Rows by key, the group with the most bytes first."""
    groups: dict[str, list[ParameterRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    parts = [Part(where=where, rows=tuple(members)) for where, members in groups.items()]
    return tuple(sorted(parts, key=lambda part: -part.rank_bytes))


# -- Pipeline stages ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One pipeline stage, counted. Bytes are those of parameters alone, on the first of its ranks."""

    stage: int
    """Its number."""
    pp_rank: int
    """The rank of the pipeline that holds it."""
    holds: str
    """Its modules, in the order in which they run."""
    layers: int
    """How many layers it has."""
    elements: int
    """Elements of its parameters, unsharded."""
    global_bytes: int
    """Bytes of them."""
    rank_bytes: int
    """Bytes on a rank, under tp and FSDP."""
    sends: int
    """Features of the hidden states, per token, that it sends to the next stage; 0 in the last."""
    copies: tuple[str, ...]
    """Its parameters that an earlier stage holds too: their gradients are summed over both once a step."""


def stage_rows(model: nn.Module, plan: "ParallelPlan", *, pp: int, stages_per_rank: int, dp: int) -> list[StageRow]:
    """The stages of `model` over `pp` ranks. Raises PlanError where it cannot be split into so many."""
    from rl_parallel_plans.pipeline.schedule import plan_of_stage
    from rl_parallel_plans.pipeline.stages import boundary_of, split_stages

    for name, value in (("pp", pp), ("stages_per_rank", stages_per_rank), ("dp", dp)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise PlanError(f"{name} is {value!r}: it must be a whole number, at least 1")
    rows = []
    for stage in split_stages(model, pp * stages_per_rank):
        info = boundary_of(stage).info
        parameters = parameter_rows(stage, plan_of_stage(plan, stage).styles, plan.tp)
        rows.append(
            StageRow(
                stage=info.index,
                pp_rank=info.index % pp,
                holds=str(info),
                layers=len(info.layers),
                elements=sum(row.count * math.prod(row.shape) for row in parameters),
                global_bytes=sum(row.global_bytes for row in parameters),
                rank_bytes=sum(row.rank_bytes_over(dp) for row in parameters),
                sends=0 if info.is_last else boundary_of(stage).width,
                copies=tuple(sorted(info.copies)),
            )
        )
    return rows


STAGE_HEADER = ("pipeline stage", "on rank", "parameters", "bytes a rank", "holds")


def stage_cells(rows: Sequence[StageRow]) -> list[list[str]]:
    """A line for each stage, under `STAGE_HEADER`."""
    return [
        [f"{row.stage}", f"{row.pp_rank}", elements(row.elements).split(" par")[0], f"{row.rank_bytes:,}", row.holds]
        for row in rows
    ]


def stage_notes(rows: Sequence[StageRow]) -> Iterator[str]:
    """What goes from stage to stage, in sentences."""
    if len(rows) > 1:
        yield f"a stage sends {rows[0].sends} features a token to the next, and gets as many gradients back"
    for row in rows:
        for name in row.copies:
            yield f"{name} of stage {row.stage} is tied to one of an earlier stage: gradients of both are summed"
    most, least = (pick(row.rank_bytes for row in rows) for pick in (max, min))
    yield f"a rank of the largest stage holds {size(most)} of parameters, one of the smallest {size(least)}"


# -- Numbers and shapes as text ----------------------------------------------------------------------


def size(num_bytes: float) -> str:
    """Bytes with a binary unit and one decimal: `2.4 GiB`."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.1f} TiB"


def shape(sizes: tuple[int, ...]) -> str:
    """`[64, 128]`."""
    return f"[{', '.join(map(str, sizes))}]"


def share(part: float, whole: float) -> str:
    """`12.5%`."""
    return f"{part / whole:.1%}" if whole else "0.0%"


def counts(collectives: Mapping[str, int]) -> str:
    """`1 all-gather, 1 reduce-scatter`, or `none`."""
    return ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in collectives.items()) or "none"


def elements(count: int) -> str:
    """`8.03 B parameters` of a model."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit} parameters"
    return f"{count} parameters"

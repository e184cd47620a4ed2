"""The stages of a pipeline over a plan: what each holds, and its bytes on a rank. For text, JSON and HTML alike."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.explain.words import elements, size
from rl_parallel_plans.pipeline.schedule import plan_of_stage
from rl_parallel_plans.pipeline.stages import boundary_of, split_stages
from rl_parallel_plans.plan.rows import parameter_rows

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRow:
    """One stage, counted. Bytes are those of parameters alone, on the first of its ranks."""

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


HEADER = ("pipeline stage", "on rank", "parameters", "bytes a rank", "holds")


def stage_cells(rows: Sequence[StageRow]) -> list[list[str]]:
    """A line for each stage, under `HEADER`."""
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

"""A plan as JSON, for programs: stable keys, plain numbers, bytes always in bytes and of parameters alone.

    format                  1; another number where a key changed its meaning or went away. Keys may be added.
    model, source           class of the model, and which rule made the plan
    tp, dp                  ranks of each axis
    sequence_parallel       whether the residual stream is cut along the sequence over tp
    output_projections      rowwise or colwise: how o_proj and down_proj are cut
    parameters              one object for the same parameter in every layer:
        name, count             path with `*` for an index, and how many parameters have it
        pattern, style          the rule that decided; null where no rule names it
        placement               on the tp mesh, as torch names it
        partial_gradient        whether a rank has one term of the gradient, which backward sums over tp
        reordered               whether rows of a fused weight are put in the order of the ranks
        sharded                 whether a tp rank holds only a piece
        shape                   global, of one of them
        tp_rank_shape           on rank 0 of the tp axis
        rank_shape              on rank 0 under FSDP too
        dtype
        global_bytes, tp_rank_bytes, rank_bytes   of all of them together, for the three shapes
    total                   elements, global_bytes, tp_rank_bytes, rank_bytes, whole_bytes (on a tp rank),
                            partial_gradient_bytes
    whole                   what every tp rank holds whole: where, count, tp_rank_bytes, rank_bytes; the largest first
    collectives             over tp, one object for all layers or modules that communicate alike:
        where, parts, in_layers, count
        forward, backward       how often each of all_reduce, all_gather, reduce_scatter, all_to_all runs in one
        forward_bytes, backward_bytes, sent_bytes   per token: of the tensors; what a rank sends where they are rings
        untold                  styles that do not say what they communicate
    ties                    groups of names that are one parameter
    fsdp_units              what FSDP shards as one, in words
    stages                  of a pipeline, where that was asked for, else empty; one object for each:
        stage, pp_rank          its number, and the rank of the pipeline that holds it
        holds, layers           its modules in the order in which they run, in words; how many layers
        elements, global_bytes, rank_bytes   of its parameters
        sends                   features of the hidden states, per token, that it sends to the next stage
        copies                  names of its parameters that an earlier stage holds too
    passed_over             rules asked before `source`, each with why it has no plan
    notes                   where the plan departs from what its source says, and why
    problems                what is wrong with it: kind, message, and whether the caller has allowed it

A model without a plan is `{"format": 1, "refused": why}`.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rl_parallel_plans.explain.report import StageRow, report

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

FORMAT = 1


def as_json(plan: "ParallelPlan", *, dp: int = 1, stages: Sequence[StageRow] = ()) -> str:
    """The plan over `dp` ranks of FSDP as a JSON document, whose keys `explain.document` lists.

    stages: those of a pipeline, by `explain.report.stage_rows`.

    Raises PlanError where dp is no number of ranks.
    """
    told = report(plan, dp=dp)
    document = {
        "format": FORMAT,
        "model": plan.model_name,
        "source": plan.source,
        "tp": plan.tp,
        "dp": dp,
        "sequence_parallel": plan.sequence_parallel,
        "output_projections": plan.asked.output_projections,
        "parameters": [
            {
                "name": row.name,
                "count": row.count,
                "pattern": row.pattern,
                "style": row.style,
                "placement": row.placement,
                "partial_gradient": row.partial_gradient,
                "reordered": row.reordered,
                "sharded": row.sharded,
                "shape": list(row.shape),
                "tp_rank_shape": list(row.local_shape),
                "rank_shape": list(row.shape_over(dp)),
                "dtype": row.dtype,
                "global_bytes": row.global_bytes,
                "tp_rank_bytes": row.rank_bytes,
                "rank_bytes": row.rank_bytes_over(dp),
            }
            for row in plan.parameters
        ],
        "total": {
            "elements": told.elements,
            "global_bytes": told.global_bytes,
            "tp_rank_bytes": told.tp_rank_bytes,
            "rank_bytes": told.rank_bytes,
            "whole_bytes": told.whole_bytes,
            "partial_gradient_bytes": told.partial_gradient_bytes,
        },
        "whole": [
            {
                "where": part.where,
                "count": part.count,
                "tp_rank_bytes": part.rank_bytes,
                "rank_bytes": part.rank_bytes_over(dp),
            }
            for part in told.whole
        ],
        "collectives": [asdict(row) for row in told.collectives],
        "ties": [list(names) for names in plan.ties],
        "fsdp_units": plan.fsdp_units,
        "passed_over": list(plan.passed_over),
        "notes": list(plan.notes),
        "problems": [{**asdict(problem), "allowed": problem.kind in plan.allow} for problem in plan.problems],
        "stages": [asdict(stage) for stage in stages],
    }
    return _written(document)


def refusal_as_json(why: str) -> str:
    """The document of a model that has no plan."""
    return _written({"format": FORMAT, "refused": why})


def _written(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=1, ensure_ascii=False)

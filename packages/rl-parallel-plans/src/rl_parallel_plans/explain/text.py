"""A plan as text: aligned columns, about 120 wide, for a terminal or a log.

Many whole parameters under one module (a vision tower) are one line, unless every row is asked for.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_parallel_plans.explain.report import Part, Report, report
from rl_parallel_plans.explain.words import counts, elements, shape, share, size
from rl_parallel_plans.plan.rows import ParameterRow

if TYPE_CHECKING:
    from rl_parallel_plans.explain.stages import StageRow
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan


def as_text(plan: "ParallelPlan", *, dp: int = 1, every_row: bool = False, stages: "Sequence[StageRow]" = ()) -> str:
    """The plan over `dp` ranks of FSDP, for people.

    every_row: also one line for each parameter of a module that stays whole, such as a vision tower.
    stages: those of a pipeline, by `explain.stages.stage_rows`.

    Raises PlanError where dp is no number of ranks.
    """
    told = report(plan, dp=dp)
    table = _parameters(told, every_row=every_row)
    blocks = [_problems(told), _head(told), table, _totals(told), _collectives(told), _rest(told)]
    if stages:
        blocks.append(_stages(stages))
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block)))


def _problems(told: Report) -> Iterator[str]:
    """First, since nothing below is applied as long as there is one."""
    if told.problems:
        yield f"{len(told.problems)} problem(s): this plan is refused where it is applied"
    for problem in told.problems:
        yield f"PROBLEM: {_one_line(problem)}"


def _head(told: Report) -> Iterator[str]:
    plan = told.plan
    over = f", dp={told.dp}" if told.dp > 1 else ""
    yield f"plan for {plan.model_name}, {plan.asked}{over}"
    yield f"source: {plan.source}"
    for reason in plan.passed_over:
        yield f"  passed over: {_one_line(reason)}"
    for note in plan.notes:
        yield f"  note: {_one_line(note)}"


def _parameters(told: Report, *, every_row: bool) -> Iterator[str]:
    towers = {} if every_row else {row: part for part in told.whole if part.is_tower for row in part.rows}
    lines = [["parameter", "count", "placement", "shape", "on a tp rank", "bytes a rank", "dtype", "rule"]]
    heading, shown = "", set()
    for row in told.plan.parameters:
        part = towers.get(row)
        if part is None:
            name, cells = row.name, _cells(row, told.dp)
        elif part.where not in shown:
            shown.add(part.where)
            name, cells = f"{part.where}.*", _tower_cells(part, told.dp)
        else:
            continue
        before, star, after = name.partition(".*.")
        if star and before != heading:
            lines.append([f"{before}.*"])
        heading = before if star else ""
        lines.append([f"  {after}" if star else name, *cells])
    if len({row.dtype for row in told.plan.parameters}) == 1:
        lines = [[cell for i, cell in enumerate(line) if i != lines[0].index("dtype")] for line in lines]
    yield from _aligned(lines, right={1, 5})


def _tower_cells(part: Part, dp: int) -> list[str]:
    dtypes, rules = (
        ", ".join(dict.fromkeys(each)) for each in zip(*((r.dtype, _rule(r)) for r in part.rows), strict=True)
    )
    return [f"{part.count}", part.rows[0].placement, "", "", f"{part.rank_bytes_over(dp):,}", dtypes, rules]


def _cells(row: ParameterRow, dp: int) -> list[str]:
    marks = f"{row.placement}{', summed' if row.partial_gradient else ''}{', reordered' if row.reordered else ''}"
    return [
        f"{row.count}",
        marks,
        shape(row.shape),
        shape(row.local_shape),
        f"{row.rank_bytes_over(dp):,}",
        row.dtype,
        _rule(row),
    ]


def _rule(row: ParameterRow) -> str:
    """The style; and its pattern where that is more than the name of the parameter's module."""
    if row.pattern is None:
        return "no rule"
    own = row.name.rpartition(".")[0]
    return f"{row.style}" if row.pattern == own else f"{row.style} by {row.pattern!r}"


def _totals(told: Report) -> Iterator[str]:
    plan = told.plan
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in plan.parameters))
    yield f"total: {elements(told.elements)} in {dtypes}, {size(told.global_bytes)}"
    held = f"a rank holds {size(told.rank_bytes)} ({share(told.rank_bytes, told.global_bytes)})"
    if told.dp > 1:
        held += f": {size(told.tp_rank_bytes)} over tp={plan.tp}, which FSDP shards over dp={told.dp}"
    yield held
    if plan.tp == 1:
        return
    whole = share(told.whole_bytes, told.tp_rank_bytes)
    yield f"whole on every tp rank: {size(told.whole_bytes)} ({whole} of its bytes)"
    for part in told.whole:
        rows = f" in {part.count} parameters" if part.count > 1 else ""
        yield f"  {part.where}: {size(part.rank_bytes)}{rows}"
    if told.partial_gradient_bytes:
        yield (
            f"summed: {size(told.partial_gradient_bytes)} of gradients of which a rank has one term; one all-reduce at "
            "the end of a backward"
        )


def _collectives(told: Report) -> Iterator[str]:
    if not told.collectives:
        return
    lines = [["collectives over tp", "times", "forward", "backward", "bytes a token"]]
    for row in told.collectives:
        blocks = ", ".join(row.blocks)
        where = f"{row.where} ({blocks})" if blocks else row.where
        told_bytes = f"{row.forward_bytes:,} + {row.backward_bytes:,}"
        lines.append([where, f"{row.count}", counts(row.forward), counts(row.backward), told_bytes])
    yield from _aligned(lines, right={1, 4})
    yield f"a rank sends {size(told.sent_bytes)} a token in forward and backward, where collectives are rings"
    for style in dict.fromkeys(style for row in told.collectives for style in row.untold):
        yield f"not counted: what {style} communicates, for it does not tell (it has no collectives())"


def _rest(told: Report) -> Iterator[str]:
    plan = told.plan
    for names in plan.ties:
        yield f"tied: {' = '.join(names)}"
    yield f"FSDP units: {plan.fsdp_units}"
    for problem in told.allowed:
        yield f"allowed: {_one_line(problem)}"


def _stages(stages: "Sequence[StageRow]") -> Iterator[str]:
    from rl_parallel_plans.explain.stages import HEADER, stage_cells, stage_notes

    yield from _aligned([list(HEADER), *stage_cells(stages)], right={2, 3})
    yield from stage_notes(stages)


def _aligned(lines: Sequence[Sequence[str]], *, right: set[int]) -> Iterator[str]:
    """Columns two spaces apart; the last may be as long as it likes, and a line with one cell spans them all."""
    columns = max(map(len, lines))
    widths = [max(len(line[i]) for line in lines if i < len(line) and len(line) > 1) for i in range(columns)]
    for line in lines:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        yield "  ".join(cells).rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())

"""A plan as text: aligned columns, about 120 wide, for a terminal or a log."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rl_parallel_plans.explain import report as numbers
from rl_parallel_plans.explain.report import Report, StageRow, report, shape, share, size
from rl_parallel_plans.plan.rows import ParameterRow

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan


def as_text(plan: "ParallelPlan", *, dp: int = 1, every_row: bool = False, stages: Sequence[StageRow] = ()) -> str:
    """The plan over `dp` ranks of FSDP, for people.

    every_row: one line for each parameter. By default many whole parameters under one module, such as a vision tower,
        are one line.
    stages: those of a pipeline, by `explain.report.stage_rows`.

    Raises PlanError where dp is no number of ranks.
    """
    facts = report(plan, dp=dp)
    blocks = [
        _head(facts),
        _parameters(facts, every_row=every_row),
        _totals(facts),
        _collectives(facts),
        _rest(facts),
    ]
    if facts.problems:  # first, since nothing below is applied as long as there is one
        count = f"{len(facts.problems)} problem(s): this plan is refused where it is applied"
        blocks.insert(0, iter([count, *(f"PROBLEM: {_one_line(problem)}" for problem in facts.problems)]))
    if stages:
        table = _aligned([list(numbers.STAGE_HEADER), *numbers.stage_cells(stages)], right={2, 3})
        blocks.append(iter([*table, *numbers.stage_notes(stages)]))
    return "\n\n".join("\n".join(lines) for block in blocks if (lines := list(block)))


def _head(facts: Report) -> Iterator[str]:
    plan = facts.plan
    over = f", dp={facts.dp}" if facts.dp > 1 else ""
    yield f"plan for {plan.model_name}, {plan.asked}{over}"
    yield f"source: {plan.source}"
    for reason in plan.passed_over:
        yield f"  passed over: {_one_line(reason)}"
    for note in plan.notes:
        yield f"  note: {_one_line(note)}"


def _parameters(facts: Report, *, every_row: bool) -> Iterator[str]:
    towers = {} if every_row else {row: part for part in facts.whole if part.is_tower for row in part.rows}
    lines = [["parameter", "count", "placement", "shape", "on a tp rank", "bytes a rank", "dtype", "rule"]]
    heading, shown = "", set()
    for row in facts.plan.parameters:
        if (part := towers.get(row)) is None:
            marks = f"{', summed' if row.partial_gradient else ''}{', reordered' if row.reordered else ''}"
            name, cells = row.name, [f"{row.count}", f"{row.placement}{marks}", shape(row.shape)]
            cells += [shape(row.local_shape), f"{row.rank_bytes_over(facts.dp):,}", row.dtype, _rule(row)]
        elif part.where not in shown:
            shown.add(part.where)
            dtypes, rules = (", ".join(dict.fromkeys(map(each, part.rows))) for each in (lambda r: r.dtype, _rule))
            name, cells = f"{part.where}.*", [f"{part.count}", part.rows[0].placement, "", ""]
            cells += [f"{part.rank_bytes_over(facts.dp):,}", dtypes, rules]
        else:
            continue
        before, star, after = name.partition(".*.")
        if star and before != heading:
            lines.append([f"{before}.*"])
        heading = before if star else ""
        lines.append([f"  {after}" if star else name, *cells])
    if len({row.dtype for row in facts.plan.parameters}) == 1:
        lines = [[cell for i, cell in enumerate(line) if i != lines[0].index("dtype")] for line in lines]
    yield from _aligned(lines, right={1, 5})


def _rule(row: ParameterRow) -> str:
    """The style; and its pattern where that is more than the name of the parameter's module."""
    if row.pattern is None:
        return "no rule"
    own = row.name.rpartition(".")[0]
    return f"{row.style}" if row.pattern == own else f"{row.style} by {row.pattern!r}"


def _totals(facts: Report) -> Iterator[str]:
    plan = facts.plan
    dtypes = ", ".join(dict.fromkeys(row.dtype for row in plan.parameters))
    yield f"total: {numbers.elements(facts.elements)} in {dtypes}, {size(facts.global_bytes)}"
    held = f"a rank holds {size(facts.rank_bytes)} ({share(facts.rank_bytes, facts.global_bytes)})"
    if facts.dp > 1:
        held += f": {size(facts.tp_rank_bytes)} over tp={plan.tp}, which FSDP shards over dp={facts.dp}"
    yield held
    if plan.tp == 1:
        return
    whole = share(facts.whole_bytes, facts.tp_rank_bytes)
    yield f"whole on every tp rank: {size(facts.whole_bytes)} ({whole} of its bytes)"
    for part in facts.whole:
        rows = f" in {part.count} parameters" if part.count > 1 else ""
        yield f"  {part.where}: {size(part.rank_bytes)}{rows}"
    if facts.partial_gradient_bytes:
        summed = size(facts.partial_gradient_bytes)
        yield f"summed: {summed} of gradients of which a rank has one term; one all-reduce at the end of a backward"


def _collectives(facts: Report) -> Iterator[str]:
    if not facts.collectives:
        return
    lines = [["collectives over tp", "times", "forward", "backward", "bytes a token"]]
    for row in facts.collectives:
        where = f"{row.where} ({', '.join(row.blocks)})" if row.blocks else row.where
        each = f"{row.forward_bytes:,} + {row.backward_bytes:,}"
        lines.append([where, f"{row.count}", numbers.counts(row.forward), numbers.counts(row.backward), each])
    yield from _aligned(lines, right={1, 4})
    yield f"a rank sends {size(facts.sent_bytes)} a token in forward and backward, where collectives are rings"
    for style in dict.fromkeys(style for row in facts.collectives for style in row.untold):
        yield f"not counted: what {style} communicates, for it does not tell (it has no collectives())"


def _rest(facts: Report) -> Iterator[str]:
    for names in facts.plan.ties:
        yield f"tied: {' = '.join(names)}"
    yield f"FSDP units: {facts.plan.fsdp_units}"
    for problem in facts.allowed:
        yield f"allowed: {_one_line(problem)}"


def _aligned(lines: Sequence[Sequence[str]], *, right: set[int]) -> Iterator[str]:
    """Columns two spaces apart; the last may have any length, and a line with one cell spans them all."""
    columns = max(map(len, lines))
    widths = [max(len(line[i]) for line in lines if i < len(line) and len(line) > 1) for i in range(columns)]
    for line in lines:
        cells = [c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=False))]
        yield "  ".join(cells).rstrip()


def _one_line(text: str) -> str:
    return " ".join(text.split())

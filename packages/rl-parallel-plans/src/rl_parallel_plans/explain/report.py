"""What there is to say about a plan over dp ranks: totals, what stays whole and where, what is communicated.

Everything is counted here, once; text, JSON and HTML only write it down. Knows plans and rows, and neither models nor
styles.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan.rows import ParameterRow

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan
    from rl_parallel_plans.plan.rows import CollectiveRow

# Rows of one module in a layer that are still told one by one.
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
        """Whether they are told as one: a tower that no rule names, or too many."""
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
    """The plan itself, for what is only repeated."""
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
    layers: tuple["CollectiveRow", ...]
    """What the kinds of decoder layers communicate over tp."""
    outside: tuple["CollectiveRow", ...]
    """What the modules outside the layers communicate over tp."""
    problems: tuple[str, ...]
    """What `check` raises."""
    allowed: tuple[str, ...]
    """Problems that the caller has accepted."""
    parts: tuple[Part, ...]
    """The whole model by the modules that one thinks in: embedding, attention, MLP; the largest first."""

    @property
    def collectives(self) -> tuple["CollectiveRow", ...]:
        """`layers` and `outside`."""
        return self.layers + self.outside

    @property
    def sent_bytes(self) -> int:
        """Bytes per token that a rank sends over tp in one forward and backward, where collectives are rings."""
        return sum(row.count * row.sent_bytes for row in self.collectives)


def report(plan: "ParallelPlan", *, dp: int = 1) -> Report:
    """Count what `plan` puts on each rank where FSDP has `dp` ranks; PlanError for an impossible dp."""
    if not isinstance(dp, int) or dp < 1:
        raise PlanError(f"dp is {dp!r}: it must be a whole number of ranks, at least 1")
    rows = plan.parameters
    whole = _largest_first(_whole_parts(rows)) if plan.tp > 1 else ()
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
        layers=tuple(row for row in plan.collectives if row.in_layers),
        outside=tuple(row for row in plan.collectives if not row.in_layers),
        problems=tuple(problem.message for problem in plan.problems if problem.kind not in plan.allow),
        allowed=tuple(problem.message for problem in plan.problems if problem.kind in plan.allow),
        parts=_largest_first(_familiar_parts(rows, whole)),
    )


def _whole_parts(rows: Sequence[ParameterRow]) -> list[Part]:
    """Whole rows by the shortest path under which nothing is sharded: a vision tower is one part."""
    mixed = {prefix for row in rows if row.sharded for prefix in _prefixes(row.name)}

    def outermost(row: ParameterRow) -> str:
        return next(prefix for prefix in (*_prefixes(row.name), row.name) if prefix not in mixed)

    return _grouped([row for row in rows if not row.sharded], outermost)


def _prefixes(name: str) -> list[str]:
    """Paths of the modules around a parameter, the outermost first."""
    tokens = name.split(".")
    return [".".join(tokens[:length]) for length in range(1, len(tokens))]


def _familiar_parts(rows: Sequence[ParameterRow], whole: Sequence[Part]) -> list[Part]:
    """`model.layers.*.mlp` for whatever lies in it; what is whole from top to bottom as one; else module by module."""
    towers = {row: part.where for part in whole if part.is_tower for row in part.rows}

    def where(row: ParameterRow) -> str:
        before, star, after = row.name.rpartition(".")[0].partition(".*.")
        return towers.get(row) or f"{before}{star}{after.partition('.')[0] if star else ''}" or row.name

    return _grouped(rows, where)


def _grouped(rows: Sequence[ParameterRow], key: Callable[[ParameterRow], str]) -> list[Part]:
    groups: dict[str, list[ParameterRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return [Part(where=where, rows=tuple(members)) for where, members in groups.items()]


def _largest_first(parts: list[Part]) -> tuple[Part, ...]:
    return tuple(sorted(parts, key=lambda part: -part.rank_bytes))

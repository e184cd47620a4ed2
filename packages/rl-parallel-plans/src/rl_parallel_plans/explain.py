"""A plan as text for people. Knows rows and sentences; knows neither models nor styles."""

from collections.abc import Sequence

from rl_parallel_plans.parameter_rows import ParameterRow


def explanation(
    rows: tuple[ParameterRow, ...],
    *,
    title: str,
    source: str,
    passed_over: Sequence[str],
    ties: Sequence[Sequence[str]],
    fsdp_units: str,
    problems: Sequence[str],
) -> str:
    """The text of `ParallelPlan.explain`, from its fields."""
    whole = [row for row in rows if not row.sharded]
    total, rank = (sum(getattr(row, what) for row in rows) for what in ("global_bytes", "rank_bytes"))
    whole_bytes = sum(row.rank_bytes for row in whole)
    lines = [
        title,
        f"source: {source}",
        *(f"  passed over: {reason}" for reason in passed_over),
        "",
        *_table(rows),
        "",
        f"total: {_size(total)}, a rank holds {_size(rank)} ({rank / max(total, 1):.1%})",
        f"whole on every rank: {_size(whole_bytes)} ({whole_bytes / max(rank, 1):.1%} of a rank's bytes)",
        *(f"tied: {' = '.join(names)}" for names in ties),
        f"FSDP units: {fsdp_units}",
        *(f"PROBLEM: {problem}" for problem in problems),
    ]
    return "\n".join(lines)


def _table(rows: tuple[ParameterRow, ...]) -> list[str]:
    header = ("parameter", "count", "placement", "global shape", "on a rank", "dtype", "bytes a rank")
    cells = [
        (r.name, f"{r.count}", r.placement, _shape(r.shape), _shape(r.local_shape), r.dtype, f"{r.rank_bytes:,}")
        for r in rows
    ]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    right = {1, len(header) - 1}
    return [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in (header, *cells)
    ]


def _shape(shape: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _size(num_bytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:,.0f} bytes" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError("unreachable")

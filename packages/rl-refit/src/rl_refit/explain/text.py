"""A plan as text of one screen: what is fed, in what pieces, and every rank beside its lower bound.

Knows plans and their figures; does not know checkpoints, axes or the command line.
"""

from __future__ import annotations

import math
from statistics import median

from rl_refit.buckets import DEFAULT_BUCKET_BYTES
from rl_refit.explain.figures import PlanFigures, Spread, figures_of
from rl_refit.explain.names import fold_names
from rl_refit.layout import Layout
from rl_refit.manifest import TensorMeta
from rl_refit.plan import RefitPlan

__all__ = ["DEFAULT_SLOTS", "describe_layout", "explain_plan", "human_size", "plan_lines"]

DEFAULT_SLOTS = 2
"""Buckets that each side holds at once."""

_MAX_LINES = 20
_NAME_WIDTH = 52


def explain_plan(plan: RefitPlan, *, bucket_bytes: int | None = None) -> str:
    """The plan as text: what is fed and tied, how much in how many buckets, and the ranks beside their lower bound.

    Args:
        plan: What to explain.
        bucket_bytes: Size of a bucket; that of a default refit where left out.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    figures = figures_of(plan, bucket_bytes=bucket_bytes or DEFAULT_BUCKET_BYTES, slots=DEFAULT_SLOTS)
    return "\n".join(plan_lines(plan, figures))


def plan_lines(plan: RefitPlan, figures: PlanFigures) -> list[str]:
    """The lines of `explain_plan`."""
    return [*_counts(figures), "", *_tensor_table(plan), "", *_byte_table(figures), "", *_memory(figures)]


def human_size(nbytes: float) -> str:
    """Bytes in decimal units, as bandwidths have them: `12.3 GB`."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        # Below what would be printed as 1000.
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if nbytes >= 100 or unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError(nbytes)


def describe_layout(layout: Layout, num_dims: int) -> str:
    """In how many pieces each dim is cut, and on how many ranks each piece lies: `dim 0 / 8, 2 copies`."""
    if layout.boxes is not None:
        return f"boxes of {len(layout.ranks)} rank" + "s" * (len(layout.ranks) > 1)
    pieces = [
        math.prod(n for n, d in zip(layout.mesh_shape, layout.sharded_dims, strict=True) if d == dim)
        for dim in range(num_dims)
    ]
    cuts = [f"dim {dim} / {number}" for dim, number in enumerate(pieces) if number > 1] or ["whole"]
    copies = len(layout.ranks) // math.prod(pieces)
    return ", ".join(cuts + [f"{copies} copies"] * (copies > 1))


def _counts(figures: PlanFigures) -> list[str]:
    boxes = f" ({figures.in_boxes} in several boxes a rank: fused, stacked or permuted)" * bool(figures.in_boxes)
    rest = f"{figures.tied} tied, {figures.derived} derived, {figures.constant} constant, 0 unmatched"
    way = f"{human_size(figures.weights)} from {figures.sends.ranks} ranks to {figures.receives.ranks}"
    pieces = f"{figures.routes} routes in {figures.buckets} buckets of at most {_bucket_size(figures)}"
    return [f"{figures.fed} tensors fed{boxes}, {rest}", f"{way}: {pieces}"]


def _tensor_table(plan: RefitPlan) -> list[str]:
    keyed = [(meta.name, _row_key(plan, meta)) for meta in plan.sink.tensors]
    folded = fold_names(keyed)
    shown = [(_shorten(pattern), len(names), plan.sink.by_name[names[0]]) for pattern, _, names in folded[:_MAX_LINES]]
    width = max((len(pattern) for pattern, _, _ in shown), default=0)
    lines = [f"{'':>6}  {'tensor':<{width}}  {'shape':<16}  {'dtype':<8}  source → sink"]
    for pattern, count, meta in shown:
        shape = f"[{', '.join(map(str, meta.shape))}]"
        lines.append(f"{count:>6}  {pattern:<{width}}  {shape:<16}  {meta.dtype:<8}  {_way(plan, meta)}")
    hidden = folded[_MAX_LINES:]
    if hidden:
        lines.append(f"{sum(len(names) for _, _, names in hidden):>6}  … in {len(hidden)} more patterns")
    return lines


def _shorten(pattern: str) -> str:
    return pattern if len(pattern) <= _NAME_WIDTH else f"…{pattern[-_NAME_WIDTH + 1 :]}"


def _row_key(plan: RefitPlan, meta: TensorMeta) -> tuple[object, ...]:
    source = plan.source.by_name[meta.name].layout if meta.travels else None
    return meta.shape, meta.dtype, meta.feeding, meta.tied_to, source, meta.layout


def _way(plan: RefitPlan, meta: TensorMeta) -> str:
    if meta.tied_to is not None:
        return f"tied to {meta.tied_to}"
    if not meta.travels:
        return meta.feeding
    sides = (plan.source.by_name[meta.name].layout, meta.layout)
    return " → ".join(describe_layout(layout, len(meta.shape)) for layout in sides)


def _byte_table(figures: PlanFigures) -> list[str]:
    rows = [("a sink rank receives", figures.receives), ("  its lower bound", figures.bound)]
    rows += [("a source rank sends", figures.sends)]
    rows += [("a sink rank relays", figures.relays)] if figures.relays.most else []
    lines = [f"{'bytes':<32}{'least':>10}{'median':>10}{'most':>10}{'in all':>10}  busiest"]
    lines += [_spread_line(title, spread) for title, spread in rows]
    lines += _node_lines(figures)
    above = "no rank receives more than its bound"
    if figures.above_bound:
        above = f"a rank receives up to {human_size(figures.above_bound)} more than its bound"
    lines.append(f"{above}; the busiest source sends {figures.sends.balance:.2f} × the mean")
    return lines


def _node_lines(figures: PlanFigures) -> list[str]:
    lines = []
    for title, column in (("enter a node of the sink", 0), ("  if each rank pulled its own", 1)):
        into = sorted((both[column], node) for node, both in figures.into_nodes.items())
        if into:
            sizes = [size for size, _ in into]
            values = (sizes[0], median(sizes), sizes[-1], sum(sizes))
            lines.append(f"{title:<32}" + "".join(f"{human_size(n):>10}" for n in values) + f"  {into[-1][1]}")
    return lines


def _spread_line(title: str, spread: Spread) -> str:
    sizes = "".join(f"{human_size(n):>10}" for n in (spread.least, spread.median, spread.most, spread.total))
    return f"{title:<32}{sizes}  rank {spread.busiest}"


def _memory(figures: PlanFigures) -> list[str]:
    stage = f"a staged sink holds its new weights too, {human_size(figures.stage)} at most"
    return [f"extra memory: {figures.slots} slots of {_bucket_size(figures)} on every rank; {stage}"]


def _bucket_size(figures: PlanFigures) -> str:
    kibibytes = figures.bucket_bytes / 2**10
    return f"{kibibytes / 2**10:g} MiB" if kibibytes >= 2**10 else f"{kibibytes:g} KiB"

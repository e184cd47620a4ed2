"""A plan in figures, and as text of one screen: what is fed, in what pieces, and every rank beside its lower bound.

Knows plans and reads no weights. `docs/tools/refit_tools.py explain` makes one from a checkpoint's headers, before
there are two sides.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from statistics import median

from rl_refit.buckets import DEFAULT_BUCKET_BYTES
from rl_refit.layout import Layout
from rl_refit.manifest import TensorMeta
from rl_refit.plan import RefitPlan
from rl_refit.schedule import make_schedule

__all__ = [
    "DEFAULT_SLOTS",
    "PlanFigures",
    "Spread",
    "describe_layout",
    "explain_plan",
    "figures_of",
    "fold_names",
    "human_size",
    "plan_lines",
]

DEFAULT_SLOTS = 2
"""Buckets that each side holds at once."""

_MAX_LINES = 20
_MAX_RUNS = 3
_NAME_WIDTH = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One number a rank, over all ranks of a side."""

    least: int
    median: float
    most: int
    total: int

    busiest: int
    """The lowest rank that has `most`; -1 where there are no ranks."""

    ranks: int
    """How many there are."""

    @property
    def balance(self) -> float:
        """The most over the mean; 1 where all have the same."""
        return self.most * self.ranks / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFigures:
    """What a plan costs. Bytes, unless a name says otherwise."""

    fed: int
    """Tensors that are sent."""

    tied: int
    """Tensors that share the memory of another."""

    derived: int
    """Tensors that the engine recomputes."""

    constant: int
    """Tensors that never change."""

    in_boxes: int
    """Tensors of which some sink rank holds more than one box: fused, stacked or permuted storage."""

    weights: int
    """All fed tensors, once."""

    routes: int
    """Boxes that are sent."""

    buckets: int
    """Buckets of all streams, when each sink rank gets what it needs."""

    bucket_bytes: int
    """Size of a bucket."""

    slots: int
    """Buckets that a rank holds at once."""

    receives: Spread
    """By a sink rank, from sources and relays."""

    bound: Spread
    """By a sink rank at least, whatever the plan."""

    above_bound: int
    """Most that any sink rank receives above its lower bound."""

    sends: Spread
    """By a source rank."""

    relays: Spread
    """By a sink rank, to others of its node."""

    into_nodes: dict[str, tuple[int, int]]
    """Node of the sink → what enters it from other nodes, with relays and if each rank pulled; empty where unknown."""

    ring: int
    """Slots of buckets, on each rank of both sides."""

    stage: int
    """Most that a sink rank holds beside, if it is staged: all that it is fed."""

    link: int
    """Most bytes through one rank's link to other nodes: no refit by this plan is faster than that link."""

    link_without_relays: int
    """The same, if every sink rank pulled its own copy."""


def figures_of(plan: RefitPlan, *, bucket_bytes: int, slots: int) -> PlanFigures:
    """Count.

    Raises:
        ValueError: `bucket_bytes` is not a positive multiple of 512.
    """
    schedule = make_schedule(plan, bucket_bytes=bucket_bytes)
    sources, sinks = plan.source.ranks, plan.sink.ranks
    fed = [meta for meta in plan.sink.tensors if meta.travels]
    rest = Counter("tied" if meta.tied_to else meta.feeding for meta in plan.sink.tensors if not meta.travels)
    bound = _spread(sinks, plan.lower_bound)
    into_nodes, link, link_without_relays = _between_nodes(plan)
    return PlanFigures(
        fed=len(fed),
        tied=rest["tied"],
        derived=rest["derived"],
        constant=rest["constant"],
        in_boxes=sum(any(len(boxes) > 1 for boxes in meta.layout.boxes or ()) for meta in fed),
        weights=sum(meta.total_bytes for meta in fed),
        routes=plan.num_routes,
        buckets=schedule.num_buckets,
        bucket_bytes=bucket_bytes,
        slots=slots,
        receives=_spread(sinks, plan.bytes_received),
        bound=bound,
        above_bound=max((plan.bytes_received(rank) - plan.lower_bound(rank) for rank in sinks), default=0),
        sends=_spread(sources, plan.bytes_sent),
        relays=_spread(sinks, plan.bytes_relayed),
        into_nodes=into_nodes,
        ring=slots * bucket_bytes,
        stage=bound.most,
        link=link,
        link_without_relays=link_without_relays,
    )


def _between_nodes(plan: RefitPlan) -> tuple[dict[str, tuple[int, int]], int, int]:
    """`into_nodes`, `link` and `link_without_relays`; without a topology every rank is a node of its own."""
    topology = plan.topology
    into = {} if topology is None else {topology.sink_nodes[rank]: (0, 0) for rank in plan.sink.ranks}
    relayed: Counter[tuple[str, int]] = Counter()
    pulled: Counter[tuple[str, int]] = Counter()
    for (source_rank, sink_ranks), nbytes in plan.bytes_by_way.items():
        if topology is not None:
            node = topology.sink_nodes[sink_ranks[0]]
            if topology.source_nodes[source_rank] == node:
                continue
            into[node] = into[node][0] + nbytes, into[node][1] + nbytes * len(sink_ranks)
        relayed.update({("source", source_rank): nbytes, ("sink", sink_ranks[0]): nbytes})
        pulled.update({("source", source_rank): nbytes * len(sink_ranks)} | {("sink", r): nbytes for r in sink_ranks})
    return into, max(relayed.values(), default=0), max(pulled.values(), default=0)


def _spread(ranks: Iterable[int], bytes_of: Callable[[int], int]) -> Spread:
    each = {rank: bytes_of(rank) for rank in ranks}
    if not each:
        return Spread(least=0, median=0, most=0, total=0, busiest=-1, ranks=0)
    most = max(each.values())
    return Spread(
        least=min(each.values()),
        median=median(each.values()),
        most=most,
        total=sum(each.values()),
        busiest=min(rank for rank, nbytes in each.items() if nbytes == most),
        ranks=len(each),
    )


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
    kibibytes = figures.bucket_bytes / 2**10
    bucket = f"{kibibytes / 2**10:g} MiB" if kibibytes >= 2**10 else f"{kibibytes:g} KiB"
    boxes = f" ({figures.in_boxes} in several boxes a rank: fused, stacked or permuted)" * bool(figures.in_boxes)
    rest = f"{figures.tied} tied, {figures.derived} derived, {figures.constant} constant, 0 unmatched"
    way = f"{human_size(figures.weights)} from {figures.sends.ranks} ranks to {figures.receives.ranks}"
    pieces = f"{figures.routes} routes in {figures.buckets} buckets of at most {bucket}"
    stage = f"a staged sink holds its new weights too, {human_size(figures.stage)} at most"
    memory = f"extra memory: {figures.slots} slots of {bucket} on every rank; {stage}"
    counts = [f"{figures.fed} tensors fed{boxes}, {rest}", f"{way}: {pieces}"]
    return [*counts, "", *_tensor_table(plan), "", *_byte_table(figures), "", memory]


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


def _tensor_table(plan: RefitPlan) -> list[str]:
    def key(meta: TensorMeta) -> tuple[object, ...]:
        source = plan.source.by_name[meta.name].layout if meta.travels else None
        return meta.shape, meta.dtype, meta.feeding, meta.tied_to, source, meta.layout

    def way(meta: TensorMeta) -> str:
        if not meta.travels:
            return meta.feeding if meta.tied_to is None else f"tied to {meta.tied_to}"
        layouts = plan.source.by_name[meta.name].layout, meta.layout
        return " → ".join(describe_layout(layout, len(meta.shape)) for layout in layouts)

    folded = fold_names([(meta.name, key(meta)) for meta in plan.sink.tensors])
    shown, hidden = folded[:_MAX_LINES], folded[_MAX_LINES:]
    patterns = [name if len(name) <= _NAME_WIDTH else f"…{name[-_NAME_WIDTH + 1 :]}" for name, _, _ in shown]
    width = max(map(len, patterns), default=0)
    lines = [f"{'':>6}  {'tensor':<{width}}  {'shape':<16}  {'dtype':<8}  source → sink"]
    for pattern, (_, _, names) in zip(patterns, shown, strict=True):
        meta = plan.sink.by_name[names[0]]
        shape = f"[{', '.join(map(str, meta.shape))}]"
        lines.append(f"{len(names):>6}  {pattern:<{width}}  {shape:<16}  {meta.dtype:<8}  {way(meta)}")
    if hidden:
        lines.append(f"{sum(len(names) for _, _, names in hidden):>6}  … in {len(hidden)} more patterns")
    return lines


def _byte_table(figures: PlanFigures) -> list[str]:
    rows = [("a sink rank receives", figures.receives), ("  its lower bound", figures.bound)]
    rows += [("a source rank sends", figures.sends)]
    rows += [("a sink rank relays", figures.relays)] if figures.relays.most else []
    table = [(title, (each.least, each.median, each.most, each.total), f"rank {each.busiest}") for title, each in rows]
    for column, title in enumerate(("enter a node of the sink", "  if each rank pulled its own")):
        into = sorted((both[column], node) for node, both in figures.into_nodes.items())
        if into:
            sizes = [size for size, _ in into]
            table.append((title, (sizes[0], median(sizes), sizes[-1], sum(sizes)), into[-1][1]))
    lines = [f"{'bytes':<32}{'least':>10}{'median':>10}{'most':>10}{'in all':>10}  busiest"]
    lines += [f"{title:<32}{''.join(f'{human_size(n):>10}' for n in sizes)}  {who}" for title, sizes, who in table]
    above = "no rank receives more than its bound"
    if figures.above_bound:
        above = f"a rank receives up to {human_size(figures.above_bound)} more than its bound"
    return [*lines, f"{above}; the busiest source sends {figures.sends.balance:.2f} × the mean"]


def fold_names(names: Iterable[tuple[str, Hashable]]) -> list[tuple[str, Hashable, tuple[str, ...]]]:
    """Fold names that differ in numbers between dots alone and come with equal keys: `layers.{0..35}.up_proj.weight`.

    Returns:
        The pattern, the key and the names, in the order of the first name of each.
    """
    groups: dict[tuple[tuple[str, ...], Hashable], list[str]] = {}
    for name, key in names:
        template = tuple("#" if part.isdecimal() else part for part in name.split("."))
        groups.setdefault((template, key), []).append(name)
    folded: list[tuple[str, Hashable, tuple[str, ...]]] = []
    for (template, key), members in groups.items():
        columns = zip(*(name.split(".") for name in members), strict=True)
        parts = (
            _span(sorted({int(part) for part in column})) if fixed == "#" else fixed
            for fixed, column in zip(template, columns, strict=True)
        )
        folded.append((".".join(parts), key, tuple(members)))
    return folded


def _span(numbers: list[int]) -> str:
    """Sorted numbers as runs: `7`, `{0..35}`, `{0..2,5,7..9,…}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(numbers) == 1:
        return str(numbers[0])
    shown = ["..".join(map(str, run)) for run in runs[:_MAX_RUNS]]
    return "{" + ",".join(shown + ["…"] * (len(runs) > _MAX_RUNS)) + "}"

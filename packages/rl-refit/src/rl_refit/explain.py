"""A plan as text of one screen: what is fed, in what pieces, and every rank beside its lower bound.

Knows plans and reads no weights. `docs/tools/refit_tools.py explain` makes a plan from a checkpoint's headers, before
there are two sides.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from statistics import median

from rl_refit.buckets import DEFAULT_BUCKET_BYTES
from rl_refit.layout import Layout
from rl_refit.manifest import TensorMeta
from rl_refit.plan import RefitPlan
from rl_refit.schedule import make_schedule

__all__ = ["describe_layout", "explain_plan", "human_size"]

_SLOTS = 2
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
    bucket_bytes = bucket_bytes or DEFAULT_BUCKET_BYTES
    num_buckets = make_schedule(plan, bucket_bytes=bucket_bytes).num_buckets
    kibibytes = bucket_bytes / 2**10
    bucket = f"{kibibytes / 2**10:g} MiB" if kibibytes >= 2**10 else f"{kibibytes:g} KiB"
    fed = [meta for meta in plan.sink.tensors if meta.travels]
    rest = Counter("tied" if meta.tied_to else meta.feeding for meta in plan.sink.tensors if not meta.travels)
    in_boxes = sum(any(len(boxes) > 1 for boxes in meta.layout.boxes or ()) for meta in fed)
    boxes = f" ({in_boxes} in several boxes a rank: fused, stacked or permuted)" * bool(in_boxes)
    weights = human_size(sum(meta.total_bytes for meta in fed))
    bounds = [plan.lower_bound(rank) for rank in plan.sink.ranks]
    stage = f"a staged sink holds its new weights too, {human_size(max(bounds, default=0))} at most"
    others = f"{rest['tied']} tied, {rest['derived']} derived, {rest['constant']} constant, 0 unmatched"
    way = f"{weights} from {len(plan.source.ranks)} ranks to {len(plan.sink.ranks)}"
    lines = [
        f"{len(fed)} tensors fed{boxes}, {others}",
        f"{way}: {plan.num_routes} routes in {num_buckets} buckets of at most {bucket}",
        "",
        *_tensor_table(plan),
        "",
        *_byte_table(plan),
        "",
        f"extra memory: {_SLOTS} slots of {bucket} on every rank; {stage}",
    ]
    return "\n".join(lines)


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
    """A line for each kind of tensor: those whose names differ in numbers alone, and that go the same way."""

    def way(meta: TensorMeta) -> str:
        if not meta.travels:
            return meta.feeding if meta.tied_to is None else f"tied to {meta.tied_to}"
        layouts = plan.source.by_name[meta.name].layout, meta.layout
        return " → ".join(describe_layout(layout, len(meta.shape)) for layout in layouts)

    kinds = Counter(
        (re.sub(r"(?<=\.)\d+(?=\.|$)", "*", meta.name), f"[{', '.join(map(str, meta.shape))}]", meta.dtype, way(meta))
        for meta in plan.sink.tensors
    )
    shown = [*kinds.items()][:_MAX_LINES]
    names = [f"…{name[1 - _NAME_WIDTH :]}" if len(name) > _NAME_WIDTH else name for (name, *_), _ in shown]
    width = max(map(len, names), default=0)
    lines = [f"{'':>6}  {'tensor':<{width}}  {'shape':<16}  {'dtype':<8}  source → sink"]
    for name, ((_, shape, dtype, how), count) in zip(names, shown, strict=True):
        lines.append(f"{count:>6}  {name:<{width}}  {shape:<16}  {dtype:<8}  {how}")
    if rest := len(kinds) - len(shown):
        lines.append(f"{sum(kinds.values()) - sum(count for _, count in shown):>6}  … in {rest} more patterns")
    return lines


def _byte_table(plan: RefitPlan) -> list[str]:
    sends = {f"rank {rank}": plan.bytes_sent(rank) for rank in plan.source.ranks}
    rows: list[tuple[str, Mapping[str, int]]] = [
        ("a sink rank receives", {f"rank {rank}": plan.bytes_received(rank) for rank in plan.sink.ranks}),
        ("  its lower bound", {f"rank {rank}": plan.lower_bound(rank) for rank in plan.sink.ranks}),
        ("a source rank sends", sends),
    ]
    relays = {f"rank {rank}": plan.bytes_relayed(rank) for rank in plan.sink.ranks}
    if any(relays.values()):
        rows.append(("a sink rank relays", relays))
    if plan.topology is not None:
        nodes = plan.topology.sink_nodes
        entering = {nodes[rank]: 0 for rank in plan.sink.ranks}
        pulled = dict(entering)
        for (source_rank, sink_ranks), nbytes in plan.bytes_by_way.items():
            if plan.topology.source_nodes[source_rank] != (node := nodes[sink_ranks[0]]):
                entering[node] += nbytes
                pulled[node] += nbytes * len(sink_ranks)
        rows += [("enter a node of the sink", entering), ("  if each rank pulled its own", pulled)]
    lines = [f"{'bytes':<32}{'least':>10}{'median':>10}{'most':>10}{'in all':>10}  busiest"]
    for title, each in rows:
        sizes = sorted(each.values()) or [0]
        figures = (sizes[0], median(sizes), sizes[-1], sum(sizes))
        busiest = max(each, key=lambda who: each[who], default="none")
        lines.append(f"{title:<32}{''.join(f'{human_size(size):>10}' for size in figures)}  {busiest}")
    excess = max((plan.bytes_received(rank) - plan.lower_bound(rank) for rank in plan.sink.ranks), default=0)
    above = f"a rank receives up to {human_size(excess)} more than its bound" * bool(excess)
    balance = max(sends.values()) * len(sends) / sum(sends.values()) if any(sends.values()) else 1.0
    verdict = above or "no rank receives more than its bound"
    return [*lines, f"{verdict}; the busiest source sends {balance:.2f} × the mean"]

"""`refit_tools.py explain`: what a refit of a checkpoint would move between two layouts, before anything runs.

Reads headers, not weights, and starts no process. Exit codes: 0 it can be planned, 1 a tensor is not covered (all are
listed), 2 misuse.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path

from refit_explainer.checkpoint import read_checkpoint
from refit_explainer.layouts import AXES, RULES, read_side
from rl_refit.buckets import DEFAULT_BUCKET_BYTES
from rl_refit.errors import CoverageError
from rl_refit.explain import human_size
from rl_refit.manifest import Manifest
from rl_refit.plan import RefitPlan, Topology, plan_refit

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    axes = "; ".join(f"{name}: {meaning}" for name, meaning in AXES.items())
    parser.add_argument(
        "checkpoint", type=Path, metavar="CHECKPOINT", help="a Hugging Face folder of safetensors, or a saved manifest"
    )
    parser.add_argument(
        "--source", metavar="AXES", help=f"the trainer, as fsdp=4,tp=2, outermost axis first, or a manifest. {axes}"
    )
    parser.add_argument("--sink", metavar="AXES", required=True, help="the engine, as tp=2,dp=2, or a manifest")
    parser.add_argument(
        "--nodes",
        metavar="N[,M]",
        help="nodes of the source and of the sink, each with equally many ranks; one number: both share them",
    )
    parser.add_argument(
        "--bucket-mb", type=float, default=DEFAULT_BUCKET_BYTES / 2**20, help="MiB of a bucket (%(default)g)"
    )
    parser.add_argument(
        "--bandwidth-gbps", type=float, default=400.0, help="Gb/s of one rank's link to other nodes (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")


def run(arguments: argparse.Namespace) -> int:
    """Explain, and return the exit code.

    Raises:
        ValueError: A number or a name is not what it should be, or the checkpoint is not.
        OSError: There is no checkpoint.
    """
    for name in ("bucket_mb", "bandwidth_gbps"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive; got {getattr(arguments, name):g}")
    checkpoint = read_checkpoint(arguments.checkpoint)
    source, source_name = checkpoint.manifest, "the manifest as saved"
    if arguments.source is not None or not checkpoint.saved:
        source, source_name = read_side(arguments.source or "fsdp=1", checkpoint)
    sink, sink_name = read_side(arguments.sink, checkpoint, replicate_kv_heads=True)
    topology = _topology(arguments.nodes, source, sink)
    print(f"source  {source_name}: {len(source.ranks)} ranks\nsink    {sink_name}: {len(sink.ranks)} ranks")
    print("\n".join(RULES), end="\n\n")
    try:
        plan = plan_refit(source, sink, topology)
    except CoverageError as error:
        print(error)
        if arguments.json:
            lists = {"unfed": error.unfed, "unmapped": error.unmapped, "mismatched": error.mismatched}
            print(json.dumps({"holds": False, **lists}))
        return 1
    link, without_relays = (busiest_link(plan, relays=relays) for relays in (True, False))
    text = plan.explain(bucket_bytes=round(arguments.bucket_mb * 2**20))
    gbps = arguments.bandwidth_gbps
    seconds, slower = (nbytes * 8 / (gbps * 1e9) for nbytes in (link, without_relays))
    busiest = f"if nothing but the busiest link takes time ({human_size(link)})"
    more = f"; {slower:.3g} s without relays" * (slower > seconds)
    print(f"{text}\nat {gbps:g} Gb/s a rank: {seconds:.3g} s, {busiest}{more}")
    if arguments.json:
        figures = {
            "routes": plan.num_routes,
            "bytes": plan.total_bytes,
            "link": link,
            "link_without_relays": without_relays,
            "bandwidth_gbps": gbps,
            "seconds": seconds,
            "seconds_without_relays": slower,
            "plan_hash": plan.hash(),
        }
        print(json.dumps({"holds": True, **figures}))
    return 0


def busiest_link(plan: RefitPlan, *, relays: bool) -> int:
    """Most bytes through one rank's link to other nodes; without a topology every rank is a node of its own.

    With `relays` what several ranks of a node need enters it once.
    """
    moved: Counter[tuple[str, int]] = Counter()
    for (source, sinks), nbytes in plan.bytes_by_way.items():
        topology = plan.topology
        if topology is None or topology.source_nodes[source] != topology.sink_nodes[sinks[0]]:
            entering = sinks[:1] if relays else sinks
            moved["source", source] += nbytes * len(entering)
            moved.update({("sink", rank): nbytes for rank in entering})
    return max(moved.values(), default=0)


def _topology(given: str | None, source: Manifest, sink: Manifest) -> Topology | None:
    if given is None:
        return None
    numbers = given.split(",")
    if len(numbers) > 2 or not all(number.strip().isdecimal() and int(number) > 0 for number in numbers):
        raise ValueError(f"--nodes is one number of nodes, or two with a comma; got {given!r}")
    prefixes = ("trainer-node-", "engine-node-") if len(numbers) == 2 else ("node-", "node-")
    sides = []
    for side, ranks, prefix, number in zip(
        ("source", "sink"), (source.ranks, sink.ranks), prefixes, (int(numbers[0]), int(numbers[-1])), strict=True
    ):
        count = ranks[-1] + 1 if ranks else 0
        if count % number:
            raise ValueError(f"--nodes: {count} ranks of the {side} do not fit {number} nodes evenly; change either")
        sides.append(tuple(f"{prefix}{rank * number // count}" for rank in range(count)))
    return Topology(source_nodes=sides[0], sink_nodes=sides[1])

"""`python -m rl_refit explain`: what a refit of a checkpoint would move between two layouts, before anything runs.

Reads headers, not weights, and starts no process. Exit codes: 0 it can be planned, 1 a tensor is not covered (all are
listed), 2 misuse.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rl_refit.buckets import DEFAULT_BUCKET_BYTES
from rl_refit.errors import CoverageError
from rl_refit.explain.checkpoint import Checkpoint, read_checkpoint
from rl_refit.explain.figures import PlanFigures, figures_of
from rl_refit.explain.layouts import AXES, count_usually_fused, read_side, rules_in_words
from rl_refit.explain.text import DEFAULT_SLOTS, human_size, plan_lines
from rl_refit.manifest import Manifest
from rl_refit.plan import Topology, plan_refit

__all__ = ["add_arguments", "run"]

_PROGRAM = "rl-refit explain"


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
    parser.add_argument("--slots", type=int, default=DEFAULT_SLOTS, help="buckets held at once (%(default)s)")
    parser.add_argument(
        "--bandwidth-gbps", type=float, default=400.0, help="Gb/s of one rank's link to other nodes (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")


def run(arguments: argparse.Namespace) -> int:
    """Explain, and return the exit code."""
    try:
        _check_numbers(arguments)
        return _explain(arguments)
    except (ValueError, OSError) as error:
        print(f"{_PROGRAM}: {error}", file=sys.stderr)
        return 2


def _explain(arguments: argparse.Namespace) -> int:
    checkpoint = read_checkpoint(arguments.checkpoint)
    source, source_name = _source(arguments.source, checkpoint)
    sink, sink_name = read_side(arguments.sink, checkpoint, replicate_kv_heads=True)
    topology = _topology(arguments.nodes, source, sink)
    print(f"source  {source_name}: {len(source.ranks)} ranks\nsink    {sink_name}: {len(sink.ranks)} ranks")
    print("\n".join(rules_in_words()))
    fused = count_usually_fused(sink)
    print(f"engines usually fuse q, k, v and gate, up: {fused} of the names, each a box of its own all the same\n")
    try:
        plan = plan_refit(source, sink, topology)
    except CoverageError as error:
        print(error)
        if arguments.json:
            lists = {"unfed": error.unfed, "unmapped": error.unmapped, "mismatched": error.mismatched}
            print(json.dumps({"holds": False, **lists}))
        return 1
    figures = figures_of(plan, bucket_bytes=round(arguments.bucket_mb * 2**20), slots=arguments.slots)
    print("\n".join([*plan_lines(plan, figures), _prediction(figures, arguments.bandwidth_gbps)]))
    if arguments.json:
        plain = _plain(figures, arguments.bandwidth_gbps)
        print(json.dumps({**plain, "usually_fused": fused, "plan_hash": plan.hash()}))
    return 0


def _source(given: str | None, checkpoint: Checkpoint) -> tuple[Manifest, str]:
    if given is None and checkpoint.manifest is not None:
        return checkpoint.manifest, "the manifest as saved"
    return read_side(given or "fsdp=1", checkpoint)


def _check_numbers(arguments: argparse.Namespace) -> None:
    for name in ("bucket_mb", "slots", "bandwidth_gbps"):
        if not getattr(arguments, name) > 0:
            raise ValueError(f"--{name.replace('_', '-')} must be positive; got {getattr(arguments, name):g}")


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


def _seconds(nbytes: int, bandwidth_gbps: float) -> float:
    return nbytes * 8 / (bandwidth_gbps * 1e9)


def _prediction(figures: PlanFigures, gbps: float) -> str:
    line = (
        f"at {gbps:g} Gb/s a rank: {_seconds(figures.link, gbps):.3g} s, if nothing but the busiest link takes time ("
    )
    line += f"{human_size(figures.link)})"
    if figures.link_without_relays > figures.link:
        line += f"; {_seconds(figures.link_without_relays, gbps):.3g} s without relays"
    return line


def _plain(figures: PlanFigures, gbps: float) -> dict[str, object]:
    return {
        "holds": True,
        **figures.to_plain(),
        "balance": figures.sends.balance,
        "bandwidth_gbps": gbps,
        "seconds": _seconds(figures.link, gbps),
        "seconds_without_relays": _seconds(figures.link_without_relays, gbps),
    }

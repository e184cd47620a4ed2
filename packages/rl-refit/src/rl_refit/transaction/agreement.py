"""What all parties agree on before the first byte: both manifests, and the plan that follows from them.

In one process both sides are asked directly; over several, every rank posts what it holds, the leader merges it, and
everybody makes the same plan from the same two manifests, and compares its hash. Names travel now, and never again:
later refits compare hashes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_refit.contracts import WeightSink
from rl_refit.errors import RefitError
from rl_refit.manifest import Manifest, merge_manifests
from rl_refit.plan import RefitPlan, plan_refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.topology import Topology
from rl_refit.transaction.control import Control
from rl_refit.transaction.shared import SharedSource
from rl_refit.transaction.sides import Sides
from rl_refit.transports.base import Watch

__all__ = ["Agreement", "agree", "agree_in_process"]


@dataclass(frozen=True, slots=True)
class Agreement:
    """The plan, and this process's own part of both manifests, to see that they do not change."""

    plan: RefitPlan
    source: Manifest | None
    sink: Manifest | None


def agree_in_process(sides: Sides) -> Agreement:
    """Plan between a source and a sink of this process, whatever ranks they call themselves.

    Raises:
        CoverageError: Source and sink do not hold the same tensors.
    """
    assert sides.source is not None
    assert sides.sink is not None
    source = sides.source.manifest()
    sink = _ask_sink(sides.sink, source)
    return Agreement(plan_refit(source, sink), source, sink)


def agree(control: Control, sides: Sides, *, settings: dict[str, Any], watch: Watch) -> Agreement:
    """Meet, exchange manifests, and plan.

    Args:
        control: Not met yet.
        sides: What this process has.
        settings: What must be alike at all parties: the transport, the buckets.
        watch: In phase "prepare".

    Raises:
        CoverageError: Source and sink do not hold the same tensors.
        RefitError: Parties differ in their settings, or ranks of one side contradict one another.
    """
    rendezvous = control.rendezvous
    control.meet(watch)
    if "settings" not in control.begin({"settings": settings} if rendezvous.leads else None, watch):
        raise RefitError(f"{rendezvous.leader} has planned without this party; all make a new Refit, of another name")
    source = None if sides.source is None else _own(sides.source.manifest(), rendezvous.source_rank, rendezvous)
    _require_alike(control, settings, watch)
    merged_source = _merge(control, "source", source, watch=watch)
    sink = None
    if sides.sink is not None:
        sink = _own(_ask_sink(sides.sink, merged_source), rendezvous.sink_rank, rendezvous)
    merged_sink = _merge(control, "sink", sink, watch=watch)
    topology = _topology(rendezvous, control.processes)
    if isinstance(sides.source, SharedSource):
        plan = sides.source.plan(merged_source, merged_sink, topology)
    else:
        plan = plan_refit(merged_source, merged_sink, topology)
    hashes = control.gather("plan", dict.fromkeys(rendezvous.mine, plan.hash()), watch)
    if hashes is not None and len(set(hashes.values())) > 1:
        raise RefitError(f"parties made different plans: {hashes}; they run different releases of rl-refit or torch")
    control.announce("planned", plan.hash(), watch)
    return Agreement(plan, source, sink)


def _ask_sink(sink: WeightSink, source: Manifest) -> Manifest:
    try:
        return sink.prepare(source).sink
    finally:
        sink.abort()


def _own(manifest: Manifest, rank: int | None, rendezvous: Rendezvous) -> Manifest:
    """A rank's manifest in the numbers of its side."""
    assert rank is not None
    manifest = manifest.on_rank(rank)
    if rank not in manifest.ranks and manifest.tensors:
        raise RefitError(
            f"{' and '.join(rendezvous.mine)} has tensors on ranks {list(manifest.ranks)}, and rank {rank} is none "
            f"of them; number the ranks of a side as its torch.distributed ranks",
            phase="prepare",
        )
    return manifest


def _require_alike(control: Control, settings: dict[str, Any], watch: Watch) -> None:
    said = control.gather("settings", dict.fromkeys(control.rendezvous.mine, settings), watch)
    for party, other in (said or {}).items():
        if other != settings:
            differing = {
                key: (settings.get(key), other.get(key)) for key in settings if settings[key] != other.get(key)
            }
            raise RefitError(
                f"{party} has other settings than {control.rendezvous.leader}: "
                + ", ".join(f"{key} {theirs!r}, not {ours!r}" for key, (ours, theirs) in differing.items()),
                peer=party,
            )


def _merge(control: Control, side: str, mine: Manifest | None, *, watch: Watch) -> Manifest:
    """One side's manifest: its ranks post theirs, the leader merges them, all read the result."""
    rendezvous = control.rendezvous
    if mine is not None:
        rank = rendezvous.source_rank if side == "source" else rendezvous.sink_rank
        control.post(f"manifest/{side} {rank}", mine.to_json())
    merged = None
    if rendezvous.leads:
        ranks = [party for party in rendezvous.parties if party.startswith(side)]
        said = {party: control.read(f"manifest/{party}", watch, peer=party) for party in ranks}
        read = {text: Manifest.from_json(text) for text in said.values()}  # most ranks say the same
        merged = merge_manifests([read[said[party]] for party in ranks])
    text = control.announce(f"manifest/{side}", None if merged is None else merged.to_json(), watch)
    return merged or Manifest.from_json(text)


def _topology(rendezvous: Rendezvous, processes: dict[str, Any]) -> Topology:
    hosts = {party: process["host"] for party, process in processes.items()}
    return Topology(
        source_nodes=tuple(hosts[f"source {rank}"] for rank in range(rendezvous.num_sources)),
        sink_nodes=tuple(hosts[f"sink {rank}"] for rank in range(rendezvous.num_sinks)),
    )

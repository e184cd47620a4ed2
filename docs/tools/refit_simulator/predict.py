"""Seconds of a refit, term by term, beside what physics allows.

Terms that move bytes overlap one another, so that the slowest counts; what a CPU does for each tensor, message or party
does not overlap them, as the published rows show, and adds up:

    predicted = max(gather, wire, NVLink, HBM, PCIe) + tensors + messages + control + apply + delta
    bound     = max(bytes into a node / its cards, bytes into a rank / (card + NVLink), bytes out / the trainer's cards)

The bound assumes full bandwidth, no software, and slices with relays: it is the same for every scheme.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from refit_simulator.costs import Costs
from refit_simulator.floor import Floor, floor_of
from refit_simulator.hardware import Hardware
from refit_simulator.schemes import Scheme
from refit_simulator.traffic import Traffic, traffic_of
from refit_simulator.workload import Workload

__all__ = ["Options", "Simulation", "predict"]

_DELTA_RATIO = 3.0  # a changed bfloat16 travels as its value and an int32 index: 6 bytes for 2
_SAMPLED = 16  # one chunk in so many is digested


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a refit may choose."""

    bucket_bytes: int = 256 * 2**20
    """Bytes of a bucket: fewer messages and calls, more memory."""

    slots: int = 2
    """Buckets in memory on each side."""

    changed: float | None = None
    """Share of the elements that changed, where only those are sent; None sends all."""

    verify: bool = True
    """Whether digests of a sixteenth of the bytes are compared, in our scheme."""

    num_tensors: int | None = None
    """Tensors that travel, where a publication counts them otherwise than the checkpoint does."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1 or self.slots < 1:
            raise ValueError(f"bucket_bytes and slots must be at least 1; got {self.bucket_bytes} and {self.slots}")
        if self.changed is not None and not 0 < self.changed <= 1:
            raise ValueError(f"changed is a share of the elements, more than 0 and at most 1; got {self.changed}")


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A predicted refit."""

    workload: Workload
    hardware: Hardware
    scheme: Scheme
    options: Options
    costs: Costs
    floor: Floor
    traffic: Traffic | None
    """Of the plan; None where whole tensors are sent, which needs no plan."""

    overlapped: dict[str, float]
    """Seconds of each term that moves bytes; they run at once."""

    serial: dict[str, float]
    """Seconds of each term that a CPU works through; they add up, on top."""

    bound_seconds: float
    """What no scheme can beat on this hardware."""

    @property
    def total_seconds(self) -> float:
        """Predicted seconds."""
        return max(self.overlapped.values()) + sum(self.serial.values())

    @property
    def percent_of_bound(self) -> float:
        """100 is as fast as physics allows."""
        return 100 * self.bound_seconds / self.total_seconds

    @property
    def dominating(self) -> str:
        """The term that costs most."""
        terms = {**self.overlapped, **self.serial}
        return max(terms, key=terms.__getitem__)

    @cached_property
    def extra_bytes(self) -> dict[str, int]:
        """Bytes beside the weights, on the fullest rank of each side."""
        buckets = self.options.slots * self.options.bucket_bytes
        largest = max(tensor.numel * 2 for tensor in self.workload.model.tensors)
        trainer = buckets + largest * self.scheme.gathers
        bank = self.floor.rank_bytes * self.scheme.transaction
        return {"trainer": trainer, "engine": buckets + bank}

    def explain(self) -> str:
        """The prediction as text: terms, bound, busiest ranks, crossovers, memory."""
        from refit_simulator.report import as_text

        return as_text(self)

    def as_dict(self) -> dict[str, Any]:
        """Every figure of `explain`, in seconds and bytes."""
        from refit_simulator.report import as_dict

        return as_dict(self)


def predict(workload: Workload, scheme: Scheme, hardware: Hardware, *, costs: Costs, options: Options) -> Simulation:
    """Predict one refit.

    Raises:
        ValueError: The scheme needs both sides on the same GPUs, and they are not.
    """
    if scheme.routing == "ipc" and not workload.colocated:
        raise ValueError(f"scheme {scheme.name!r} hands memory over on one GPU: both sides must be colocated")
    if options.changed is not None and scheme.routing != "slices":
        raise ValueError(f"scheme {scheme.name!r} sends whole tensors; changed={options.changed} needs one of slices")
    floor = floor_of(workload)
    traffic = traffic_of(workload, relays=scheme.relays) if scheme.routing == "slices" else None
    case = _Case(workload, scheme, hardware, costs, options, floor, traffic)
    ratio = 1.0 if options.changed is None else _DELTA_RATIO * options.changed
    return Simulation(
        workload=workload,
        hardware=hardware,
        scheme=scheme,
        options=options,
        costs=costs,
        floor=floor,
        traffic=traffic,
        overlapped=_slices_bytes(case, ratio) if traffic else _whole_bytes(case),
        serial=_slices_serial(case, ratio) if traffic else _whole_serial(case),
        bound_seconds=ratio * bound(workload, scheme, hardware),
    )


def bound(workload: Workload, scheme: Scheme, hardware: Hardware) -> float:
    """Seconds at full bandwidth, with nothing but the bytes that must move."""
    floor = floor_of(workload)
    nic, nvlink, pcie = (1e9 * gb_s for gb_s in (hardware.nic_gb_s, hardware.nvlink_gb_s, hardware.pcie_gb_s))
    into_node = max(node.missing / (node.gpus * nic) for node in floor.nodes)
    if scheme.from_host:  # nothing is on a GPU yet: it comes from this node's host, or from others over the cards
        into_gpus = max(node.needed / (node.gpus * (pcie + nic)) for node in floor.nodes)
        return max(into_node, into_gpus)
    into_rank = floor.rank_missing / (nic + nvlink)
    return max(into_node, into_rank, floor.leaves / (workload.train.gpus * nic))


@dataclass(frozen=True, slots=True)
class _Case:
    workload: Workload
    scheme: Scheme
    hardware: Hardware
    costs: Costs
    options: Options
    floor: Floor
    traffic: Traffic | None

    @property
    def nic(self) -> float:
        return self.hardware.nic_gb_s * 1e9 * self.costs.nic_share

    @property
    def nvlink(self) -> float:
        return self.hardware.nvlink_gb_s * 1e9 * self.costs.nvlink_share

    @property
    def hbm(self) -> float:
        return self.hardware.hbm_gb_s * 1e9 * self.costs.hbm_share

    @property
    def num_tensors(self) -> int:
        return self.options.num_tensors or self.workload.num_tensors

    def cards(self) -> int:
        """Cards of the smallest node: whole tensors enter every node through its own."""
        topology = self.workload.topology
        return min((*Counter(topology.source_nodes).values(), *Counter(topology.sink_nodes).values()))


def _slices_bytes(case: _Case, ratio: float) -> dict[str, float]:
    traffic, costs = case.traffic, case.costs
    assert traffic is not None
    # pack (read, write), then unpack or stage (read, write); ours reads a sample on both sides for the digests
    passes = 2 * ratio * max(traffic.sent, traffic.received)
    if case.scheme.transaction and case.options.verify:
        passes += 2 * traffic.received / _SAMPLED
    return {
        "wire": ratio * max(traffic.sent, traffic.entered) / case.nic,
        "nvlink": ratio * traffic.handed / case.nvlink,
        "hbm": passes / case.hbm,
        "pcie": traffic.sent / (case.hardware.pcie_gb_s * 1e9 * costs.pcie_share) if case.scheme.from_host else 0.0,
    }


def _slices_serial(case: _Case, ratio: float) -> dict[str, float]:
    traffic, costs, workload = case.traffic, case.costs, case.workload
    assert traffic is not None
    messages = traffic.ways + math.ceil(ratio * traffic.received / case.options.bucket_bytes)
    apply = 0.0
    if case.scheme.transaction:  # a copy from the bank, in the engine, of every tensor that the rank holds
        apply = 2 * case.floor.rank_bytes / case.hbm + case.floor.rank_tensors * costs.copy_s
        parties = workload.train.gpus + workload.engine.gpus
        operations = costs.operations_per_party * parties
        operations += costs.operations_per_pair * traffic.pairs * case.options.verify
        control = operations * costs.store_operation_s
    else:  # a controller starts the refit at every worker, and ends it
        control = 2 * workload.engine.gpus * costs.call_worker_s
    source_bytes = workload.total_bytes / workload.train.gpus
    return {
        "tensors": max(traffic.pieces_sent, traffic.pieces_received) * costs.piece_s,
        "messages": messages * costs.message_s,
        "control": control,
        "apply": apply,
        "delta": 0.0 if case.options.changed is None else source_bytes / costs.delta_bytes_s,
    }


def _whole_bytes(case: _Case) -> dict[str, float]:
    workload, total = case.workload, case.workload.total_bytes
    nodes = len(set(workload.topology.source_nodes))
    across = total / (case.cards() * case.nic)
    crosses = not workload.colocated or nodes > 1
    terms = {
        "gather": (across if nodes > 1 else total / case.nvlink) if case.scheme.gathers else 0.0,
        "wire": across if case.scheme.routing == "broadcast" and crosses else 0.0,
        "nvlink": total / case.nvlink,
        "hbm": 2 * total / case.hbm,
        "pcie": 0.0,
    }
    if case.scheme.from_host:
        pcie = case.hardware.pcie_gb_s * 1e9 * case.costs.pcie_share
        terms["pcie"] = total / workload.train.gpus / pcie
    return terms


def _whole_serial(case: _Case) -> dict[str, float]:
    costs, scheme, workload, tensors = case.costs, case.scheme, case.workload, case.num_tensors
    per_tensor = costs.load_tensor_s + costs.gather_tensor_s * scheme.gathers
    if not scheme.packed:
        per_tensor += costs.handle_s if scheme.routing == "ipc" else costs.collective_tensor_s
    buckets = math.ceil(workload.total_bytes / case.options.bucket_bytes)
    calls = buckets if scheme.routing == "ipc" else 2  # ipc: the controller calls every worker for each bucket
    control = calls * workload.engine.gpus * costs.call_worker_s
    control += tensors * costs.metadata_tensor_s * scheme.metadata_each_time
    lists = scheme.fan_out * (1 if scheme.packed else 2)  # metadata of every tensor, and a handle of every tensor
    control += lists * tensors * workload.engine.replica_size**2 * costs.fan_out_entry_s
    messages = buckets if scheme.packed else tensors
    return {
        "tensors": tensors * per_tensor,
        "messages": messages * costs.message_s,
        "control": control,
        "apply": 0.0,
        "delta": 0.0,
    }

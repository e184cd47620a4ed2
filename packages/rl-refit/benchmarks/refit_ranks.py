"""A refit between sharded ranks over gloo, beside what others do: gather every tensor, and broadcast it from rank 0.

A trainer of two FSDP-like ranks feeds an engine of one rank, and one of two tensor-parallel ranks, all on this machine.
Three ways are measured in turns, in every round, and the medians of the rounds are compared:

* `SlotStream` over gloo, through `Refit`, into a second set of tensors, without digests;
* `full_tensor()` on the trainer, a broadcast of each tensor, and a copy of the rank's part into the engine.

Every round changes all tensors; after each way each element of the engine is compared. Bytes are those that a rank of
the engine receives, beside the bytes of its own tensors, which is the least that it must receive.

    python benchmarks/refit_ranks.py --megabytes 64 --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from rl_refit import ModuleSink, ModuleSource, Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.transports.stream import SlotStream

NUM_SOURCES = 2
NUM_TENSORS = 160
COLUMNS = 1024
TRANSPORTS = {"messages": partial(SlotStream, share_memory=False)}
BASELINE = "gather, broadcast each"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Who a process is."""

    process: int
    num_sinks: int
    folder: Path

    @property
    def source_rank(self) -> int | None:
        return self.process if self.process < NUM_SOURCES else None

    @property
    def sink_rank(self) -> int | None:
        return None if self.process < NUM_SOURCES else self.process - NUM_SOURCES

    @cached_property
    def store(self) -> FileStore:
        return FileStore(str(self.folder / "store"), -1)


def build(shard: Shard, ranks: int, rows: int) -> nn.Module:
    """This rank's part of a model: of every five tensors, four matrices and a norm."""
    module, mesh = nn.Module(), init_device_mesh("cpu", (ranks,))
    for i in range(NUM_TENSORS):
        full = torch.zeros((rows, COLUMNS) if i % 5 < 4 else (COLUMNS,), dtype=torch.bfloat16)
        placed = distribute_tensor(full, mesh, [shard if full.ndim > shard.dim else Shard(0)])
        module.register_parameter(f"w{i}", nn.Parameter(placed, requires_grad=False))
    return module


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def value(number: int, i: int) -> int:
    return (number * 31 + i * 7) % 251 - 125


def change(module: nn.Module, number: int) -> None:
    for i, parameter in enumerate(module.parameters()):
        local(parameter).fill_(value(number, i))


def require_arrived(module: nn.Module, number: int) -> None:
    for i, (name, parameter) in enumerate(module.named_parameters()):
        if not bool((local(parameter) == value(number, i)).all()):
            raise SystemExit(f"{name} did not arrive in round {number}")


class Baseline:
    """Gather each tensor among the trainer's ranks; its rank 0 broadcasts it; each engine rank copies its part."""

    def __init__(self, place: Place, module: nn.Module) -> None:
        self.module, self.place, self.received = module, place, 0
        self.group = None
        if place.process == 0 or place.sink_rank is not None:
            rank = 0 if place.process == 0 else place.sink_rank + 1
            store = PrefixStore("baseline", place.store)
            self.group = ProcessGroupGloo(store, rank, place.num_sinks + 1, timedelta(seconds=60))
        self.scratch = [torch.empty(p.shape, dtype=p.dtype) for p in module.parameters() if place.sink_rank is not None]

    def __call__(self, version: int) -> None:
        self.received = 0
        for i, parameter in enumerate(self.module.parameters()):
            if self.place.source_rank is not None:
                full = parameter.full_tensor()
                if self.group is not None:
                    self.group.broadcast(full, 0).wait()
            else:
                full = self.scratch[i]
                self.group.broadcast(full, 0).wait()
                self.received += full.nbytes
                shard = parameter.placements[0]
                part = full.chunk(self.place.num_sinks, shard.dim)[self.place.sink_rank]
                local(parameter).copy_(part)


class ByRefit:
    """One transport."""

    def __init__(self, place: Place, module: nn.Module, name: str) -> None:
        self.place, self.transport = place, TRANSPORTS[name]()
        self.refit = Refit(
            ModuleSource(module) if place.source_rank is not None else None,
            ModuleSink(module, mode="swap") if place.sink_rank is not None else None,
            self.transport,
            rendezvous=Rendezvous(
                PrefixStore(name, place.store),
                num_sources=NUM_SOURCES,
                num_sinks=place.num_sinks,
                source_rank=place.source_rank,
                sink_rank=place.sink_rank,
            ),
            verify="off",
        )

    def __call__(self, version: int) -> None:
        if self.place.source_rank is not None:
            self.refit(version=version)
        else:
            self.refit.receive()

    @property
    def received(self) -> int:
        return self.transport.traffic.received


def take_part(place: Place, *, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median seconds and received bytes by way, as this process saw them."""
    side = "trainer" if place.source_rank is not None else "engine"
    size = NUM_SOURCES if side == "trainer" else place.num_sinks
    rank = place.source_rank if side == "trainer" else place.sink_rank
    dist.init_process_group("gloo", store=PrefixStore(side, place.store), rank=rank, world_size=size)
    module = build(Shard(0) if side == "trainer" else Shard(1), size, rows)
    ways = {name: ByRefit(place, module, name) for name in TRANSPORTS}
    ways[BASELINE] = Baseline(place, module)
    together = ProcessGroupGloo(
        PrefixStore("together", place.store), place.process, NUM_SOURCES + place.num_sinks, timedelta(seconds=60)
    )
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    number = 0
    for _ in range(rounds + 1):  # the first plans, connects and touches every page once
        for name, way in ways.items():
            number += 1
            if place.source_rank is not None:
                change(module, number)
            together.barrier().wait()
            began = time.perf_counter()
            way(number)
            together.barrier().wait()
            seconds[name].append(time.perf_counter() - began)
            if place.sink_rank is not None:
                require_arrived(module, number)
    least = sum(local(parameter).nbytes for parameter in module.parameters())
    return {
        name: {"seconds": statistics.median(seconds[name][1:]), "received": way.received, "least": least}
        for name, way in ways.items()
    }


def run(num_sinks: int, *, rows: int, rounds: int) -> dict[str, dict[str, float]]:
    """The figures of the engine's rank 0, of a world of its own."""
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for process in range(NUM_SOURCES + num_sinks):
            child = os.fork()
            if not child:
                _run_child(Place(process=process, num_sinks=num_sinks, folder=Path(folder)), rows=rows, rounds=rounds)
            children.append(child)
        statuses = [os.waitpid(child, 0)[1] for child in children]
        if any(statuses):
            sys.exit("a process failed: see above")
        return json.loads((Path(folder) / f"{NUM_SOURCES}.json").read_text())


def _run_child(place: Place, *, rows: int, rounds: int) -> None:
    status = 1
    try:
        torch.set_num_threads(1)
        (place.folder / f"{place.process}.json").write_text(json.dumps(take_part(place, rows=rows, rounds=rounds)))
        status = 0
    except BaseException:  # noqa: BLE001  (the child ends here, whatever happened)
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=64.0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rows = int(arguments.megabytes * 1e6 / 2 / COLUMNS / (NUM_TENSORS * 4 / 5)) // 2 * 2
    figures: dict[str, object] = {"megabytes": arguments.megabytes, "torch": torch.__version__, "cpus": os.cpu_count()}
    print(f"{arguments.megabytes:g} MB in {NUM_TENSORS} tensors, {arguments.rounds} rounds, {platform.machine()}")
    print(f"{'ranks':<8}{'way':<26}{'ms':>8}{'× best':>9}{'MB received':>14}{'× least':>9}")
    for num_sinks in (1, 2):
        found = run(num_sinks, rows=rows, rounds=arguments.rounds)
        best = min(way["seconds"] for way in found.values())
        for name, way in found.items():
            print(
                f"{f'{NUM_SOURCES}→{num_sinks}':<8}{name:<26}{way['seconds'] * 1e3:>8.0f}{way['seconds'] / best:>9.2f}"
                f"{way['received'] / 1e6:>14.1f}{way['received'] / way['least']:>9.2f}"
            )
        figures[f"{NUM_SOURCES}to{num_sinks}"] = found
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

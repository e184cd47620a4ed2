"""Time to bring weights into another process of the same host, over the time of one memcpy of the same tensors.

Two processes, a trainer with a policy and an engine with a model of its own. Every path ends with the policy's bytes in
the engine's own tensors; before each run every tensor of the policy changes, and after it the engine compares every
byte. All paths run one after the other in every round, the memcpy too, and the medians of the rounds are compared.

    memcpy               the policy's tensors into others of the same process, one after the other
    arena                Refit with SlotStream(hold=policy), the policy's parameters living in the arena;
                         ModuleSink("staged")
    arena, copied        the same with parameters elsewhere: one copy more
    ring                 Refit with SlotStream(); ModuleSink("swap")
    … and digests        the same with verify="sampled", the default, instead of "off"
    gloo                 torch.distributed.broadcast of every tensor
    safetensors          a file in shared memory, written and read anew each time
    pickle               a pickled dict of tensors through a pipe
    vLLM reload          with --vllm: `vllm_reload.py`, over its own memcpy; needs vllm, and minutes

Milliseconds of processor time stand beside those of the clock, for the trainer and the engine: the slower of the two
bounds what an idle machine can do, whatever else runs on this one.

    python benchmarks/refit_same_host.py                      300 tensors, 1 GB; takes a minute and 9 GB of memory
    python benchmarks/refit_same_host.py --megabytes 100 --paths arena ring
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import pickle
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit, Rendezvous
from rl_refit.transports.stream import SlotStream

REFITS = ("arena", "arena and digests", "arena, copied", "ring", "ring and digests")
OTHERS = ("gloo", "safetensors", "pickle")
BARS = {"arena": 1.25, "ring": 1.6}


@dataclass(frozen=True)
class Settings:
    """What both processes know."""

    tensors: int
    megabytes: float
    threads: int
    bucket_bytes: int
    buckets: int
    paths: tuple[str, ...]
    directory: str
    """In shared memory, for the safetensors file and for the stores."""


def build(settings: Settings) -> nn.Module:
    """A model in bfloat16 whose tensors are like a transformer's: of every five, four matrices and a norm."""
    module = nn.Module()
    num_matrices = settings.tensors - settings.tensors // 5
    rows = int(settings.megabytes * 1e6 / 2 / 1024 / num_matrices)
    for i in range(settings.tensors):
        shape = (1024,) if i % 5 == 4 else (rows, 1024)
        module.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
    return module


def change(module: nn.Module, number: int) -> None:
    """New values everywhere, others for each number."""
    for i, parameter in enumerate(module.parameters()):
        parameter.fill_((number * 31 + i) % 251 + 1)
        parameter.view(-1)[:: max(1, parameter.numel() // 7)] = -(number % 256)


def require_arrived(module: nn.Module, number: int) -> None:
    """Compare every byte with what `change` makes of `number`."""
    expected = nn.Module()
    for i, (name, parameter) in enumerate(module.named_parameters()):
        expected.register_parameter("one", nn.Parameter(torch.empty_like(parameter), requires_grad=False))
        expected.one.fill_((number * 31 + i) % 251 + 1)
        expected.one.view(-1)[:: max(1, parameter.numel() // 7)] = -(number % 256)
        if not torch.equal(expected.one, parameter):
            raise SystemExit(f"{name} did not arrive")


def rendezvous(settings: Settings, path: str, **rank: int) -> Rendezvous:
    address = f"file://{settings.directory}/{path.replace(', ', '_').replace(' ', '_')}"
    return Rendezvous(address, num_sources=1, num_sinks=1, **rank)


def refit_options(settings: Settings, path: str) -> dict[str, Any]:
    return {
        "verify": "sampled" if path.endswith("digests") else "off",
        "bucket_bytes": settings.bucket_bytes,
        "buckets": settings.buckets,
    }


def start_gloo(settings: Settings, rank: int) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{settings.directory}/gloo", rank=rank, world_size=2)


# -- The engine's process --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """One run of one path."""

    seconds: float
    """Until the engine has everything."""

    trainer_cpu: float
    engine_cpu: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    """Of a refit, as the engine reports them."""


@dataclass
class Engine:
    settings: Settings
    pipe: Connection
    model: nn.Module = field(init=False)
    swapped: dict[str, nn.Module] = field(default_factory=dict)
    """By path, a model whose tensors are exchanged by each refit: one sink knows them again, of two none would."""

    refits: dict[str, Refit] = field(default_factory=dict)

    def serve(self) -> None:
        """Do what the trainer says until it closes the pipe."""
        torch.set_num_threads(self.settings.threads)
        self.model = build(self.settings)
        if "gloo" in self.settings.paths:
            start_gloo(self.settings, 1)
        while True:
            path, number = self.pipe.recv()
            if path is None:
                return
            cpu = time.process_time()
            phases = self.receive(path)
            self.pipe.send((time.process_time() - cpu, phases))
            require_arrived(self.model_of(path), number)
            self.pipe.send("arrived")

    def model_of(self, path: str) -> nn.Module:
        if not path.startswith("ring"):
            return self.model
        if path not in self.swapped:
            self.swapped[path] = build(self.settings)
        return self.swapped[path]

    def receive(self, path: str) -> dict[str, float]:
        if path in REFITS:
            if path not in self.refits:
                arena = path.startswith("arena")
                self.refits[path] = Refit(
                    sink=ModuleSink(self.model_of(path), mode="staged" if arena else "swap"),
                    transport=SlotStream(arena=arena),
                    rendezvous=rendezvous(self.settings, path, sink_rank=0),
                    **refit_options(self.settings, path),
                )
            return dict(self.refits[path].receive().seconds)
        if path == "gloo":
            import torch.distributed as dist

            for parameter in self.model.parameters():
                dist.broadcast(parameter, src=0)
        elif path == "safetensors":
            from safetensors import safe_open

            self.pipe.recv()  # it is written
            with safe_open(f"{self.settings.directory}/weights.safetensors", framework="pt") as file:
                for name, parameter in self.model.named_parameters():
                    parameter.copy_(file.get_tensor(name))
        elif path == "pickle":
            tensors = pickle.loads(self.pipe.recv_bytes())
            for name, parameter in self.model.named_parameters():
                parameter.copy_(tensors[name])
        return {}


# -- The trainer's process -------------------------------------------------------------------------------------------


@dataclass
class Trainer:
    settings: Settings
    pipe: Connection
    policies: dict[str, nn.Module] = field(default_factory=dict)
    """The policy; and one more for each path whose arena its parameters live in."""

    target: nn.Module | None = None
    refits: dict[str, Refit] = field(default_factory=dict)

    def policy_of(self, path: str) -> nn.Module:
        home = path if path.startswith("arena") and "copied" not in path else "memory of its own"
        if home not in self.policies:
            self.policies[home] = build(self.settings)
        return self.policies[home]

    def run(self, path: str, number: int) -> Round:
        """Change the policy, bring it to the engine, and have it compared."""
        policy = self.policy_of(path)
        change(policy, number)
        if path == "memcpy":
            self.target = self.target or build(self.settings)
            start, cpu = time.perf_counter(), time.process_time()
            for target, parameter in zip(self.target.parameters(), policy.parameters(), strict=True):
                target.copy_(parameter)
            return Round(time.perf_counter() - start, time.process_time() - cpu)
        if path in REFITS and path not in self.refits:
            self.refits[path] = self.make_refit(path, policy)
        start, cpu = time.perf_counter(), time.process_time()
        self.pipe.send((path, number))
        self.send(path, policy, number)
        engine_cpu, phases = self.pipe.recv()
        spent = Round(time.perf_counter() - start, time.process_time() - cpu, engine_cpu, phases)
        if self.pipe.recv() != "arrived":
            raise SystemExit(f"{path}: not arrived")
        return spent

    def make_refit(self, path: str, policy: nn.Module) -> Refit:
        arena = path.startswith("arena")
        hold = None if "copied" in path else policy
        return Refit(
            source=ModuleSource(policy),
            transport=SlotStream(arena=arena, hold=hold if arena else None),
            rendezvous=rendezvous(self.settings, path, source_rank=0),
            **refit_options(self.settings, path),
        )

    def send(self, path: str, policy: nn.Module, number: int) -> None:
        if path in REFITS:
            self.refits[path](version=number)
        elif path == "gloo":
            import torch.distributed as dist

            for parameter in policy.parameters():
                dist.broadcast(parameter, src=0)
        elif path == "safetensors":
            from safetensors.torch import save_file

            save_file(dict(policy.named_parameters()), f"{self.settings.directory}/weights.safetensors")
            self.pipe.send("written")
        elif path == "pickle":
            self.pipe.send_bytes(pickle.dumps({name: p.data for name, p in policy.named_parameters()}))


def measure(settings: Settings, rounds: int) -> dict[str, list[Round]]:
    """Every round, by path."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_engine, args=(settings, there))
    process.start()
    there.close()
    if "gloo" in settings.paths:
        start_gloo(settings, 0)
    trainer = Trainer(settings, here)
    measured: dict[str, list[Round]] = {path: [] for path in ("memcpy", *settings.paths)}
    numbers = iter(range(1, 10**9))
    for number in range(rounds + 2):  # the first two warm up: they touch every page once, of both banks
        for path, spent in measured.items():
            one = trainer.run(path, next(numbers))
            if number >= 2:
                spent.append(one)
    here.send((None, 0))
    process.join()
    return measured


def run_engine(settings: Settings, pipe: Connection) -> None:
    Engine(settings, pipe).serve()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--megabytes", type=float, default=1000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--bucket-bytes", type=int, default=4 * 2**20)
    parser.add_argument("--buckets", type=int, default=2)
    parser.add_argument("--paths", nargs="+", choices=(*REFITS, *OTHERS), default=(*REFITS, *OTHERS))
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM's reload of a checkpoint")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    paths = tuple(arguments.paths)
    if "safetensors" in paths and importlib.util.find_spec("safetensors") is None:
        print("safetensors is not installed: left out")
        paths = tuple(path for path in paths if path != "safetensors")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        settings = Settings(
            tensors=arguments.tensors,
            megabytes=arguments.megabytes,
            threads=arguments.threads,
            bucket_bytes=arguments.bucket_bytes,
            buckets=arguments.buckets,
            paths=paths,
            directory=directory,
        )
        load = os.getloadavg()[0]
        measured = measure(settings, arguments.rounds)
        vllm = measure_vllm(settings, arguments.rounds) if arguments.vllm else None
    report(settings, measured, load, vllm)


def measure_vllm(settings: Settings, rounds: int) -> dict[str, float]:
    """What the program beside this one says: vllm changes the process that it is imported into."""
    program = Path(__file__).with_name("vllm_reload.py")
    command = [sys.executable, program, "--megabytes", str(settings.megabytes), "--rounds", str(rounds)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def report(settings: Settings, measured: dict[str, list[Round]], load: float, vllm: dict[str, float] | None) -> None:
    nbytes = sum(parameter.nbytes for parameter in build(settings).parameters())
    memcpy = measured["memcpy"]
    figures = {path: figures_of(rounds, memcpy) for path, rounds in measured.items()}
    print(
        f"{settings.tensors} tensors, {nbytes / 1e6:.0f} MB, {settings.threads} thread a process, medians of "
        f"{len(memcpy)} rounds; {os.cpu_count()} processors, load {load:.1f} before the first round"
    )
    print(f"{'':18s}{'ms':>9s}{'GB/s':>7s}{'× memcpy':>10s}{'bar':>6s}{'cpu ms':>14s}   phases, ms")
    for path, row in figures.items():
        bar = f"{BARS[path]:.2f}" if path in BARS else ""
        cpu = f"{row['trainer_cpu_ms']:.0f} + {row['engine_cpu_ms']:.0f}"
        speed = nbytes / row["ms"] / 1e6
        parts = median_phases(measured[path]) if path in REFITS else ""
        print(f"{path:18s}{row['ms']:9.1f}{speed:7.1f}{row['over_memcpy']:10.2f}{bar:>6s}{cpu:>14s}   {parts}")
    if vllm is not None:
        print(f"{'vLLM reload':18s}{vllm['reload_ms']:9.1f}{'':7s}{vllm['over_memcpy']:10.2f}")
    print(
        json.dumps(
            {
                "benchmark": "refit_same_host",
                "tensors": settings.tensors,
                "bytes": nbytes,
                "rounds": len(memcpy),
                "threads": settings.threads,
                "bucket_bytes": settings.bucket_bytes,
                "buckets": settings.buckets,
                "load_before": round(load, 2),
                "paths": figures,
                "bars": {path: bar for path, bar in BARS.items() if path in figures},
                "vllm": vllm,
                "torch": torch.__version__,
                "python": platform.python_version(),
            }
        )
    )


def figures_of(rounds: list[Round], memcpy: list[Round]) -> dict[str, float]:
    seconds = statistics.median(one.seconds for one in rounds)
    return {
        "ms": round(1e3 * seconds, 2),
        "over_memcpy": round(seconds / statistics.median(one.seconds for one in memcpy), 3),
        "lowest_over_memcpy": round(min(a.seconds / b.seconds for a, b in zip(rounds, memcpy, strict=True)), 3),
        "trainer_cpu_ms": round(1e3 * statistics.median(one.trainer_cpu for one in rounds), 2),
        "engine_cpu_ms": round(1e3 * statistics.median(one.engine_cpu for one in rounds), 2),
    }


def median_phases(rounds: list[Round]) -> str:
    names = list(rounds[0].phases)
    return ", ".join(f"{name} {1e3 * statistics.median(one.phases[name] for one in rounds):.1f}" for name in names)


if __name__ == "__main__":
    main()

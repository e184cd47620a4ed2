"""Time of a refit in process over the time of one memcpy of the same tensors, by how much of it is verified.

Both are measured side by side, one after the other in every round, and the medians of the rounds are compared. Before
each round every tensor of the policy changes; after each refit every tensor of the engine is compared with it.

    python benchmarks/refit_in_process.py                     300 tensors, 256 MB
    python benchmarks/refit_in_process.py --megabytes 1000    a model of 0.5 B in bfloat16; needs 7 GB of memory
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time

import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit

PATHS = {"memcpy": None, "refit": "sampled", "refit, every byte digested": "full", "refit, no digest": "off"}
"""What is measured, and how much of it is verified."""


def build(num_tensors: int, megabytes: float) -> nn.Module:
    """A model in bfloat16 whose tensors are like a transformer's: of every five, four matrices and a norm."""
    module = nn.Module()
    num_matrices = num_tensors - num_tensors // 5
    rows = int(megabytes * 1e6 / 2 / 1024 / num_matrices)
    for i in range(num_tensors):
        shape = (1024,) if i % 5 == 4 else (rows, 1024)
        module.register_parameter(f"w{i}", nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False))
    return module


def change(module: nn.Module, number: int) -> None:
    for i, parameter in enumerate(module.parameters()):
        parameter.fill_((number * 31 + i) % 251 + 1)
        parameter.view(-1)[:: max(1, parameter.numel() // 7)] = -number


def require_equal(module: nn.Module, other: nn.Module) -> None:
    for (name, one), two in zip(module.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(one, two):
            raise SystemExit(f"{name} did not arrive")


def measure(policy: nn.Module, *, rounds: int) -> dict[str, list[float]]:
    """Seconds of every round, by path, and the phases of the verified refit."""
    engines = [build_like(policy) for _ in PATHS]
    versions = iter(range(1, 10**9))
    refits = [
        None if verify is None else Refit(ModuleSource(policy), ModuleSink(engine), verify=verify)
        for engine, verify in zip(engines, PATHS.values(), strict=True)
    ]
    seconds: dict[str, list[float]] = {path: [] for path in PATHS}
    for number in range(rounds + 1):  # the first warms up: it touches every page once, and digests every byte
        change(policy, number + 1)
        for path, engine, refit in zip(PATHS, engines, refits, strict=True):
            start = time.perf_counter()
            if refit is None:
                for target, parameter in zip(engine.parameters(), policy.parameters(), strict=True):
                    target.copy_(parameter)
            else:
                report = refit(version=next(versions))
            elapsed = time.perf_counter() - start
            require_equal(policy, engine)
            if number:
                seconds[path].append(elapsed)
                if path == "refit":
                    for phase, spent in report.seconds.items():
                        seconds.setdefault(phase, []).append(spent)
    return seconds


def build_like(module: nn.Module) -> nn.Module:
    other = nn.Module()
    for name, parameter in module.named_parameters():
        other.register_parameter(name, nn.Parameter(torch.zeros_like(parameter), requires_grad=False))
    return other


def small_refit_ms(*, rounds: int) -> float:
    """Median milliseconds of a refit of 25 tensors in float32, 1.6 MB: the model of the quickstart."""
    policy = nn.Module()
    for i in range(25):
        policy.register_parameter(f"w{i}", nn.Parameter(torch.randn(125, 128), requires_grad=False))
    refit = Refit(ModuleSource(policy), ModuleSink(build_like(policy)))
    spent = []
    for version in range(rounds):
        start = time.perf_counter()
        refit(version=version)
        spent.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=300)
    parser.add_argument("--megabytes", type=float, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    policy = build(arguments.tensors, arguments.megabytes)
    nbytes = sum(parameter.nbytes for parameter in policy.parameters())
    median = {path: statistics.median(spent) for path, spent in measure(policy, rounds=arguments.rounds).items()}
    memcpy = median["memcpy"]
    size = f"{arguments.tensors} tensors, {nbytes / 1e6:.0f} MB"
    print(f"{size}, {arguments.threads} thread, medians of {arguments.rounds} rounds")
    print(f"{'':28s}{'ms':>9s}{'GB/s':>8s}{'× memcpy':>10s}")
    for path, spent in median.items():
        label = path if path in PATHS else f"  {path}"
        print(f"{label:28s}{1e3 * spent:9.1f}{nbytes / spent / 1e9:8.1f}{spent / memcpy:10.2f}")
    small = small_refit_ms(rounds=100)
    print(f"25 tensors, 1.6 MB: {small:.2f} ms a refit")
    figures = {
        "benchmark": "refit_in_process",
        "tensors": arguments.tensors,
        "bytes": nbytes,
        "rounds": arguments.rounds,
        "threads": arguments.threads,
        **{f"{path.replace(', ', '_').replace(' ', '_')}_ms": round(1e3 * spent, 2) for path, spent in median.items()},
        "refit_over_memcpy": round(median["refit"] / memcpy, 3),
        "refit_every_byte_over_memcpy": round(median["refit, every byte digested"] / memcpy, 3),
        "refit_no_digest_over_memcpy": round(median["refit, no digest"] / memcpy, 3),
        "small_refit_ms": round(small, 3),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

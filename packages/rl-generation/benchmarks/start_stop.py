"""Starts and stops each engine again and again, and says what it did not give back; exits 1 if there is anything.

Looked at: threads, open files, processes, ports, shared memory, temporary files, environment variables, memory, objects
that outlive their engine, and processes that outlive the program. Every kind of engine has a program of its own, which
generates in each cycle and stops with requests under way. What libraries keep once, however often an engine starts, is
shown as `once` and is no leak.

    python benchmarks/start_stop.py                              50 cycles of the embedded one, 5 of vLLM; minutes
    python benchmarks/start_stop.py --kinds embedded --cycles 500
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from workloads import ENVIRONMENT, has_vllm, show_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "programs"))
import leaks
import saved_model

CYCLES = {"embedded": 50, "vllm": 5}
GROWTH_BYTES = {"embedded": 8 << 20, "vllm": 64 << 20}
"""Of vLLM: less than one cache of all those that there were."""


def measure(kind: str, cycles: int, model: str):
    """What is left of one kind of engine, and figures."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        found = leaks.run(kind, cycles, model=model, temporary=Path(folder), environment=ENVIRONMENT)
        seconds = time.perf_counter() - start
    before, first, last = found["before"], found["after"][0], found["after"][-1]
    once = {name: sum(first[name].values()) - sum(before[name].values()) for name in ("threads", "files")}
    return {
        "cycles": cycles,
        "seconds": seconds,
        "once": once,
        "growth_bytes_a_cycle": (last["resident_bytes"] - first["resident_bytes"]) / max(1, cycles - 1),
        "leaks": leaks.leaks(found, growth_bytes=GROWTH_BYTES[kind]),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kinds", nargs="+", choices=CYCLES, default=list(CYCLES))
    parser.add_argument("--cycles", type=int, help="of each; by default {embedded} and {vllm}".format(**CYCLES))
    arguments = parser.parse_args()
    missing = [] if has_vllm() else [kind for kind in arguments.kinds if kind != "embedded"]
    figures = {}
    print(f"{'engine':14}{'cycles':>7}{'s a cycle':>11}{'KB more a cycle':>17}{'once: threads, files':>22}{'leaks':>7}")
    with tempfile.TemporaryDirectory() as folder:
        model = str(saved_model.save(Path(folder), tokenizer=False))
        for kind in arguments.kinds:
            if kind in missing:
                print(f"{kind:14}vLLM is not installed")
                continue
            row = figures[kind] = measure(kind, arguments.cycles or CYCLES[kind], model)
            once = f"{row['once']['threads']}, {row['once']['files']}"
            print(
                f"{kind:14}{row['cycles']:7}{row['seconds'] / row['cycles']:11.2f}"
                f"{row['growth_bytes_a_cycle'] / 1e3:17.1f}{once:>22}{len(row['leaks']):7}",
                flush=True,
            )
            for complaint in row["leaks"]:
                print(f"    {complaint}")
    holds = not any(row["leaks"] for row in figures.values())
    show_json({"benchmark": "start_stop", "holds": holds, "not_installed": missing, "kinds": figures})
    return int(not holds)


if __name__ == "__main__":
    sys.exit(main())

"""What recorded steps cost the quickstart: the same run twice, with and without them, a batch at a time in turns.

Both runs are processes of their own with the same seeds, so that their batches are the same to the bit, and what else
the machine does meets both alike. A turn lasts from the end of a batch's generation to the end of the next batch's, so
that what is written behind the loop counts towards the batch that it is about.

    python packages/rl-launcher/benchmarks/recorded_steps.py [--batches 120]

The last line is JSON with every figure, and whether the bar of 1 % of a batch's wall time holds.
"""

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
OVERRIDES = ["evaluation.every=0", "evaluation.max_prompts=64"]
SIDES = {"recorded": [], "not": ["logger.recorded_steps.last=0", "logger.recorded_steps.every=0"]}
WARM_UP = 4
"""Batches that are not counted."""
CLOCKS = ("wall", "cpu", "loop", "thread", "writer")
"""Wall time; CPU time of the process, of its training thread, of its thread that hands steps over, and of the process
that writes them."""
COMPARED = ("wall", "cpu", "loop")
BAR = 0.01


def one_side(side: str, *, batches: int) -> None:
    """Run, and tell of each turn in a line; the next one begins when a line comes in."""
    from rl_launcher.recipe_files import load_recipe
    from rl_launcher.run import run
    from rl_launcher.run.stages import grpo
    from rl_launcher.run.step_recording import StepRecording
    from rl_launcher.schema import Recipe

    parent = sys.stdout
    begin: dict[str, float] = {}

    class InTurns(StepRecording):
        def on_rollouts(self, rollouts: Any) -> None:
            end = clocks(self._recorder)
            told = {name: end[name] - begin.get(name, end[name]) for name in CLOCKS}
            print(json.dumps(told | {"tokens": int(rollouts.lengths.sum())}), file=parent, flush=True)
            sys.stdin.readline()
            begin.update(clocks(self._recorder))
            super().on_rollouts(rollouts)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        steps = [f"grpo.max_num_steps={4 * (batches + WARM_UP + 1)}", f"run_dir={folder}/run"]
        with mock.patch.object(grpo, "StepRecording", InTurns):
            run(load_recipe(RECIPE, schema=Recipe, overrides=[*OVERRIDES, *SIDES[side], *steps]))


def clocks(recorder: Any) -> dict[str, float]:
    """In seconds."""
    found = dict.fromkeys(CLOCKS, 0.0)
    found |= {"wall": time.perf_counter(), "cpu": time.process_time(), "loop": time.thread_time()}
    if (thread := recorder._thread) is not None:
        found["thread"] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    if (writer := recorder._writer) is not None:
        found["writer"] = time.clock_gettime(~writer.process.pid << 3 | 2)  # what clock_getcpuclockid(3) gives
    return found


def pairs(batches: int) -> list[dict[str, dict[str, float]]]:
    """The turns of both sides, batch by batch."""
    order, found = random.Random(0), list[dict[str, dict[str, float]]]()
    with contextlib.ExitStack() as stack:
        asking: dict[str, Any] = {}
        for side in SIDES:
            command = [sys.executable, __file__, "--side", side, "--batches", str(batches)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
            stack.callback(process.wait)
            stack.callback(process.kill)
            asking[side] = process
        for process in asking.values():
            process.stdout.readline()  # it has its first rollouts
        for _ in range(batches + WARM_UP):
            turn: dict[str, dict[str, float]] = {}
            for side in order.sample([*SIDES], 2):
                print(file=asking[side].stdin, flush=True)
                turn[side] = json.loads(asking[side].stdout.readline())
            tokens = {each.pop("tokens") for each in turn.values()}
            assert len(tokens) == 1, f"the batches differ: {tokens} tokens"
            found.append(turn)
    return found[WARM_UP:]


def more(ratios: list[float]) -> tuple[float, float, float]:
    """Median of the ratios less 1, and its 95 % interval over ratios drawn again."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(ratios, k=len(ratios))) - 1 for _ in range(2000))
    return statistics.median(ratios) - 1, medians[50], medians[1949]


def main() -> None:
    """Run, print a table in milliseconds, then everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=120, help="of each side")
    parser.add_argument("--side", choices=[*SIDES], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.side:
        one_side(chosen.side, batches=chosen.batches)
        return
    found = pairs(chosen.batches)
    figures: dict[str, Any] = {"batches": len(found)}
    for name in CLOCKS:
        medians = {side: statistics.median(turn[side][name] for turn in found) for side in SIDES}
        figures[name] = {side: round(1000 * value, 2) for side, value in medians.items()}
        line = f"{name:>7}: {figures[name]['recorded']:8.2f} ms recorded, {figures[name]['not']:8.2f} ms not"
        if name in COMPARED:
            told = more([turn["recorded"][name] / turn["not"][name] for turn in found])
            figures[name] |= dict(zip(("more", "low", "high"), (round(each, 4) for each in told), strict=True))
            line += ", {:+.2f} % ({:+.2f} to {:+.2f})".format(*(100 * each for each in told))
        print(line)
    print(json.dumps({**figures, "bar": BAR, "holds": figures["wall"]["more"] <= BAR}))


if __name__ == "__main__":
    main()

"""What recorded steps cost the quickstart: one run, in which one of each two batches is recorded.

A batch's turn lasts from the end of its generation to the end of the next batch's, so that what is written behind the
loop counts towards the batch that it is about. While a turn is not recorded, the stage has the policy without anything
around it. Other programs on the machine meet both kinds of turns alike; CPU seconds are told beside wall time because
they change wall time more.

    python packages/rl-launcher/benchmarks/recorded_steps.py [--batches 240] [--runs 1]

The last line is JSON with every figure, and whether the bar of 1 % of a batch's wall time holds.
"""

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.run.stages import grpo
from rl_launcher.run.step_recording import StepRecording
from rl_launcher.schema import Recipe

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
OVERRIDES = ["evaluation.every=0", "evaluation.max_prompts=64"]
WARM_UP = 4
"""Batches that are not counted."""
CLOCKS = ("wall", "cpu", "loop", "writer")
BAR = 0.01


class InTurns(StepRecording):
    """Records every second batch on average, and notes what the clocks say when a turn begins."""

    marks: list[tuple[bool, dict[str, float]]]
    """Of each turn: whether it is recorded, and the clocks at its begin, in seconds."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        type(self).marks = self.marks = []
        self._order, self._coming = random.Random(0), list[bool]()
        self.turn = False

    def observed(self, policy: Any) -> Any:
        return _Either(policy, super().observed(policy), self)

    def on_rollouts(self, rollouts: Any) -> None:
        if not self._coming:
            self._coming = self._order.sample([True, False], 2)
        self.turn = self._coming.pop()
        thread = self._recorder._thread
        clocks = {"wall": time.perf_counter(), "cpu": time.process_time(), "loop": time.thread_time(), "writer": 0.0}
        if thread is not None:
            clocks["writer"] = time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
        self.marks.append((self.turn, clocks))
        super().on_rollouts(rollouts)

    def record(self, *given: Any, **options: Any) -> None:
        if self.turn:
            super().record(*given, **options)
        else:
            self._expect()


class _Either:
    """The policy as it is, or observed, whichever the turn asks for."""

    def __init__(self, policy: Any, observed: Any, turns: InTurns) -> None:
        self._policy, self._observed, self._turns = policy, observed, turns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._observed if self._turns.turn else self._policy, name)


def one_run(batches: int) -> dict[bool, list[dict[str, float]]]:
    """Seconds of the turns of one run, those that were recorded and those that were not."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        overrides = [*OVERRIDES, f"grpo.max_num_steps={4 * (batches + WARM_UP + 1)}", f"run_dir={folder}/run"]
        with mock.patch.object(grpo, "StepRecording", InTurns):
            run(load_recipe(RECIPE, schema=Recipe, overrides=overrides))
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    marks = InTurns.marks[WARM_UP:]
    for (recorded, begin), (_, end) in itertools.pairwise(marks):
        found[recorded].append({name: end[name] - begin[name] for name in CLOCKS})
    return found


def more(differences: list[float]) -> tuple[float, float, float]:
    """Median of the differences of neighbouring turns, and its 95 % interval over differences drawn again."""
    draws = random.Random(0)
    medians = sorted(statistics.median(draws.choices(differences, k=len(differences))) for _ in range(2000))
    return statistics.median(differences), medians[50], medians[1949]


def main() -> None:
    """Run, print a table in milliseconds, then everything as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=240, help="of each run, recorded and not recorded together")
    parser.add_argument("--runs", type=int, default=1)
    chosen = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    for _ in range(chosen.runs):
        for recorded, turns in one_run(chosen.batches).items():
            found[recorded] += turns
    figures: dict[str, Any] = {"batches": len(found[True]) + len(found[False])}
    for name in CLOCKS:
        on, off = ([turn[name] for turn in found[recorded]] for recorded in (True, False))
        medians = {"recorded": statistics.median(on), "not": statistics.median(off)}
        figures[name] = {key: round(1000 * value, 2) for key, value in medians.items()}
        line = f"{name:>7}: {figures[name]['recorded']:8.2f} ms recorded, {figures[name]['not']:8.2f} ms not"
        if name != "writer":
            found_more = [each / medians["not"] for each in more([a - b for a, b in zip(on, off, strict=False)])]
            figures[name] |= dict(zip(("more", "low", "high"), (round(each, 4) for each in found_more), strict=True))
            line += ", {:+.2f} % ({:+.2f} to {:+.2f})".format(*(100 * each for each in found_more))
        print(line)
    print(json.dumps({**figures, "bar": BAR, "holds": figures["wall"]["more"] <= BAR}))


if __name__ == "__main__":
    main()

"""Measure how much code one GRPO step runs through: frames down to the loss, files and functions entered by a step.

    python scripts/step_depth.py [--steps 6] [--list]

Runs the quickstart in this process under `sys.setprofile` and counts only the code of our own packages. The last line
printed is JSON. A step lasts from one optimizer update to the next, with one update for each batch of rollouts, so it
holds the log line, the refit, generation, rewards, forward, backward and the update; the first steps are skipped.
Comprehensions and lambdas belong to the function that they are written in.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

INLINE = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<lambda>", "<module>")
WARM_UP = 3  # steps that are not counted: caches fill and modules are imported
OURS = ("rl_algorithms", "rl_backends", "rl_generation", "rl_launcher", "rl_observe", "rl_parallel_plans", "rl_refit")


class StepProfile:
    """A profiler for `sys.setprofile`: the deepest stack at the loss, and the code that one step enters."""

    def __init__(self) -> None:
        self.frames: list[str] = []
        """Our own frames from the command line to the loss, outermost first."""
        self.steps: list[set[CodeType]] = []
        """The functions entered by each step, from one optimizer update to the next."""
        self._entered: set[CodeType] | None = None
        self._names: dict[CodeType, str | None] = {}

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        """Count one call."""
        if event != "call" or (name := self.name(frame.f_code)) is None:
            return
        if name == "rl_backends/dtensor/backend.py:DTensorBackend.optim_step":
            if self._entered is not None:
                self.steps.append(self._entered)
            self._entered = set()
        if self._entered is not None:
            self._entered.add(frame.f_code)
        if name == "rl_algorithms/policy_gradient.py:loss":
            stack: list[str] = []
            outer: FrameType | None = frame
            while outer is not None:
                if (each := self.name(outer.f_code)) is not None:
                    stack.append(each)
                outer = outer.f_back
            if len(stack) > len(self.frames):
                self.frames = stack[::-1]

    def name(self, code: CodeType) -> str | None:
        """`package/file.py:function` of our own code, None of everything else."""
        if code not in self._names:
            _, package, inside = code.co_filename.partition("/src/")
            ours = bool(package) and inside.split("/")[0] in OURS and code.co_name not in INLINE
            self._names[code] = f"{inside}:{code.co_qualname}" if ours else None
        return self._names[code]


def measure(num_steps: int) -> StepProfile:
    """Run the quickstart's GRPO stage for `num_steps` under the profiler."""
    from rl_launcher.cli import main

    profile = StepProfile()
    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["rl-launcher", "run", "quickstart", f"run_dir={folder}/run", "sft=null", "evaluation.every=0"]
        sys.argv += [f"grpo.max_num_steps={num_steps}", "grpo.steps_per_generation=1"]
        # A policy that was not trained before is seldom right: another environment gives each batch its signal.
        sys.argv += ["grpo.optimizer.warmup_steps=1", f"env.reward={Path(__file__).resolve()}:number_of_kinds"]
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return profile


def number_of_kinds(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs within nearly every group: how many different characters a response has."""
    return [float(len(set(text))) for text in completions]


def main() -> None:
    """Print the figures, the last line as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=6, help=f"steps to run, more than {WARM_UP + 1}")
    parser.add_argument("--list", action="store_true", help="print every function that a step enters")
    arguments = parser.parse_args()
    profile = measure(arguments.steps)
    # The last step of a stage is followed by what ends the run, and is not whole here either.
    entered = min(profile.steps[WARM_UP:], key=len)
    functions = sorted({str(profile.name(code)) for code in entered})
    files = sorted({name.partition(":")[0] for name in functions})
    if arguments.list:
        print("\n".join(functions))
    print(f"from the command line to the loss: {len(profile.frames)} frames")
    print("\n".join(f"  {name}" for name in profile.frames))
    print(f"one step enters {len(files)} files and {len(functions)} functions")
    by_package = {name: sum(each.startswith(f"{name}/") for each in functions) for name in OURS}
    print("  " + ", ".join(f"{name} {count}" for name, count in by_package.items()))
    figures = {"frames": len(profile.frames), "files": len(files), "functions": len(functions)}
    print(json.dumps({**figures, "functions_by_package": by_package}))


if __name__ == "__main__":
    main()

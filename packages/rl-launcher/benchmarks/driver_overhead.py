"""What the launcher costs: the share of a GRPO step that is neither generation, training nor refit.

Runs the quickstart's recipe for forty batches without evaluations: in this process; where Ray is installed, over Ray
with two ranks and an engine in processes of their own; and where vLLM is installed, the same with vLLM. What is left
over is the driver's: prompts, the reward, laying rollouts out, logs, TensorBoard, the live view. Over Ray, what calls
and transfers take counts towards the phase that they are made in.

    python benchmarks/driver_overhead.py [--runtimes in_process ray ray_vllm] [--steps 160]

The last line is JSON with every figure, and whether the bars hold: 2 % where vLLM samples, and 5 % elsewhere.
"""

import argparse
import contextlib
import json
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe

RECIPES = Path(__file__).parents[3] / "recipes"
RUNTIMES: dict[str, tuple[str, list[str], tuple[str, ...]]] = {  # recipe, what is changed in it, what it needs
    "in_process": ("quickstart.yaml", [], ()),
    "ray": ("quickstart-ray.yaml", [], ("ray",)),
    "ray_vllm": ("quickstart-ray.yaml", ["policy.generation.backend=vllm"], ("ray", "vllm")),
}
OVERRIDES = ["evaluation.every=0", "evaluation.max_prompts=64"]
NOT_THE_DRIVER = ("generate", "train", "refit", "checkpoint")  # the last: once, at the end of the stage
BARS = {"in_process": 0.05, "ray": 0.05, "ray_vllm": 0.02}


def shares(runtime: str, *, steps: int) -> dict[str, Any]:
    """One run, and where the time of its GRPO steps went."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        recipe, changes, _ = RUNTIMES[runtime]
        overrides = [*OVERRIDES, *changes, f"grpo.max_num_steps={steps}", f"run_dir={folder}/run"]
        summary = run(load_recipe(RECIPES / recipe, schema=Recipe, overrides=overrides))
    phases = summary["phase_share"]
    driver = 1.0 - sum(phases.get(name, 0.0) for name in NOT_THE_DRIVER)
    return {"phase_share": phases, "driver_share": round(driver, 4), "low_enough": driver <= BARS[runtime]}


def main() -> None:
    """Run, print the shares as a table, then as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    installed = [name for name, (_, _, needs) in RUNTIMES.items() if all(find_spec(each) for each in needs)]
    parser.add_argument("--runtimes", nargs="+", choices=list(RUNTIMES), default=installed)
    parser.add_argument(
        "--steps", type=int, default=160, help="optimizer steps, four to a batch of rollouts; more than 40"
    )
    chosen = parser.parse_args()
    figures = {name: shares(name, steps=chosen.steps) for name in chosen.runtimes}
    for name, each in figures.items():
        for phase, share in each["phase_share"].items():
            print(f"{name:>10} {phase:>10} {100 * share:6.2f} %")
        print(f"{name:>10} {'driver':>10} {100 * each['driver_share']:6.2f} %   (the bar is {100 * BARS[name]:.0f} %)")
    print(json.dumps({**figures, "bars": BARS, "holds": all(each["low_enough"] for each in figures.values())}))


if __name__ == "__main__":
    main()

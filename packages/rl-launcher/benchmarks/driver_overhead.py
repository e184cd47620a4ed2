"""What the launcher costs: the share of a GRPO step that is neither generation, reward, training nor refit.

Runs the quickstart's recipe for forty batches without evaluations, so that only the driver is left over. The last line
is JSON with every figure.
"""

import contextlib
import json
import sys
import tempfile
from pathlib import Path

from rl_launcher.recipe import load_recipe
from rl_launcher.recipe_schema import Recipe
from rl_launcher.running import run

RECIPE = Path(__file__).parents[3] / "recipes" / "quickstart.yaml"
OVERRIDES = ["grpo.max_num_steps=160", "evaluation.every=0", "evaluation.max_prompts=64"]


def main() -> None:
    """Run, print the shares as a table, then as JSON."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        summary = run(load_recipe(RECIPE, schema=Recipe, overrides=[*OVERRIDES, f"run_dir={folder}/run"]))
    for phase, share in summary["phase_share"].items():
        print(f"{phase:>10} {100 * share:6.2f} %")
    print(json.dumps({"phase_share": summary["phase_share"], "driver_share": summary["phase_share"]["other"]}))


if __name__ == "__main__":
    main()

"""How good a model is on held-out prompts: of a recipe, of a run, or of any folder. Trains nothing, writes nothing."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_launcher.errors import LauncherError
from rl_launcher.evaluating import HeldOut
from rl_launcher.recipe import Resolved, load_recipe
from rl_launcher.recipe_schema import HOW_TO_JUDGE, Recipe

__all__ = ["Measured", "measure", "measured_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found."""

    model: str
    held_out: HeldOut
    num_prompts: int
    samples_per_prompt: int
    num_failed: int

    def text(self) -> str:
        """For people."""
        asked = f"{self.num_prompts} held-out prompts, {self.samples_per_prompt} sampled and 1 greedy answer each"
        return f"{self.model}: {asked}; intervals hold the truth 95 times in 100\n{self.held_out.table()}"

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model,
            "prompts": self.num_prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "failed": self.num_failed,
            **self.held_out.metrics(),
        }


def measured_recipe(subject: Path, *, overrides: Sequence[str] = (), model: str | None = None) -> Resolved[Recipe]:
    """The recipe of `subject`, with the model that is to be measured in the place of its policy's.

    Raises:
        ValueError: it is no recipe and no run, or the run has left no model.
    """
    is_run = subject.is_dir()
    file = subject / "recipe.yaml" if is_run else subject
    if is_run and not file.is_file() and (subject / "config.json").is_file():
        raise LauncherError(
            f"{subject} is a model, and what it is asked stands in a recipe: rl-launcher evaluate RECIPE --model "
            f"{subject}"
        )
    if is_run and not file.is_file():
        raise LauncherError(f"{subject} is no run: it holds no recipe.yaml; give a run's directory, or a recipe")
    if is_run and model is None:
        model = str(subject / "model")
        if not Path(model).is_dir():
            raise LauncherError(
                f"{subject} has no model: it did not end well. Take one out of a checkpoint with `rl-launcher export "
                f"{subject} FOLDER`, and measure it with --model FOLDER"
            )
    named = [] if model is None else [f"policy.model_name={json.dumps(model)}", "policy.revision=null"]
    return load_recipe(file, schema=Recipe, overrides=[*overrides, *named])


def measure(resolved: Resolved[Recipe]) -> Measured:
    """Ask the held-out prompts.

    Raises:
        ValueError: whatever a part refuses.
    """
    from rl_launcher import preflight
    from rl_launcher.building import build
    from rl_launcher.evaluating import Evaluator

    asked = resolved.value
    if asked.env is None:
        raise LauncherError(
            f"evaluate asks held-out prompts, and env, which judges the answers, is missing; {HOW_TO_JUDGE}"
        )
    preflight.check(replace(asked, sft=None, grpo=None, dpo=None, distill=None), new_run=False)
    with tempfile.TemporaryDirectory(prefix="rl-launcher-evaluate-") as folder:
        # Parts that must write, on Ray, write where nobody looks; the stages are asked for their turns alone.
        parts = build(replace(asked, run_dir=folder, sft=None, distill=None))
        try:
            parts.weight_sync(version=0)
            evaluator = Evaluator(parts, asked)
            held_out = evaluator.both()
        finally:
            parts.close()
    return Measured(
        model=asked.policy.model_name,
        held_out=held_out,
        num_prompts=evaluator.size,
        samples_per_prompt=asked.evaluation.samples_per_prompt,
        num_failed=held_out.sampled.num_failed + held_out.greedy.num_failed,
    )

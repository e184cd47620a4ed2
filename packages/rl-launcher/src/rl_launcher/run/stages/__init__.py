"""One file per stage of a run: each hands the parts to a loop of `rl_algorithms` and records what the loop yields."""

from rl_launcher.run.evaluate import Evaluator
from rl_launcher.run.record import Recorder
from rl_launcher.run.stages import distill, dpo, grpo, sft
from rl_launcher.run_parts import Parts
from rl_launcher.schema import Recipe

__all__ = ["run_stage"]

_RUN = {"sft": sft.run, "grpo": grpo.run, "dpo": dpo.run, "distill": distill.run}


def run_stage(name: str, *, recipe: Recipe, parts: Parts, evaluator: Evaluator, recorder: Recorder) -> None:
    """Carry out the stage that the recipe calls `name`, or what is left of it."""
    run = _RUN[name]
    run(recipe.stages[name], recipe=recipe, parts=parts, evaluator=evaluator, recorder=recorder)  # type: ignore[operator]

"""Train language models with GRPO, DPO, SFT and distillation, from a recipe or from Python objects.

`train`, `resume`, `evaluate` and `explain` do what the commands of those names do.
"""

from rl_launcher.api import evaluate, explain, load_recipe, resume, train
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.run_result import RunResult

__all__ = ["Refusal", "RunResult", "RunStoppedError", "evaluate", "explain", "load_recipe", "resume", "train"]

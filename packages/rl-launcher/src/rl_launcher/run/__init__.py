"""Carry out a recipe: `run`, `resume`, `evaluate` and `try_reward`.

    run.py              a run from its first step to its summary, with restarts
    stages/             sft, grpo, dpo, distill: one file each
    record.py           what is logged after each step, when to save and when to stop; the summary
    evaluate.py         held-out prompts, during a run or of a finished model
    try_reward.py       a few rollouts and their rewards before training
    signals.py          Ctrl-C and SIGTERM
"""

from rl_launcher.run.evaluate import Evaluation, evaluated_recipe
from rl_launcher.run.evaluate import evaluate as evaluate
from rl_launcher.run.run import Run, find_resumption, resume
from rl_launcher.run.run import run as run
from rl_launcher.run.try_reward import TrialResult
from rl_launcher.run.try_reward import try_reward as try_reward

__all__ = [
    "Evaluation",
    "Run",
    "TrialResult",
    "evaluate",
    "evaluated_recipe",
    "find_resumption",
    "resume",
    "run",
    "try_reward",
]

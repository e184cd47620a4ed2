"""Carry out a recipe: run and resume it, measure a model on held-out prompts, try its reward.

`run.py` holds a run from its first step to its summary, with restarts; `stages/` one file for each of sft, grpo, dpo
and distill; `record.py` what is logged after each step, when to save and when to stop; `evaluate.py` held-out prompts;
`try_reward.py` a few rollouts before training; `signals.py` Ctrl-C and SIGTERM.
"""

from rl_algorithms.evaluation import Measured
from rl_algorithms.reward_trial import TrialResult
from rl_launcher.run.evaluate import measure, measured_recipe
from rl_launcher.run.run import Run, find_resumption, resume
from rl_launcher.run.run import run as run
from rl_launcher.run.try_reward import try_reward as try_reward

__all__ = [
    "Measured",
    "Run",
    "TrialResult",
    "find_resumption",
    "measure",
    "measured_recipe",
    "resume",
    "run",
    "try_reward",
]

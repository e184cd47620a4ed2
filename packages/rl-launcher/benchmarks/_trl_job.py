"""What both sides of `against_trl.py` are told: one task, one start, one set of numbers. Knows neither side."""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

GROUP, PROMPTS, STEPS_PER_BATCH = 8, 32, 4
BATCH = GROUP * PROMPTS
LEARNING_RATE, BETAS, WARMUP_STEPS, MAX_GRAD_NORM = 3e-4, (0.9, 0.99), 20, 1.0
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
ADVANTAGE_EPSILON = 1e-4  # what TRL adds to the std of a group, where it cannot be chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learnt, and how far imitation goes before."""

    source: str
    max_new_tokens: int
    sft_steps: int
    batches: int
    """Of `BATCH` rollouts, in a run that is not quick."""
    bar: float
    """How many times as many samples a second as TRL are promised."""


TASKS = {
    "short": Task(
        source="rl_launcher.quickstart.sort_digits:dataset", max_new_tokens=9, sft_steps=100, batches=50, bar=3.0
    ),
    "long tail": Task(source="_long_tail:dataset", max_new_tokens=96, sft_steps=120, batches=30, bar=6.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One GRPO run of one side."""

    task: str
    seed: int
    batches: int
    start: str
    """Folder of the weights that it begins with."""
    out: str
    """Folder that it leaves its weights in."""
    without_signal: Literal["keep", "drop"] = "keep"
    """What our side does with groups whose rewards are all equal. TRL trains on them, to no effect but on the mean."""

    @property
    def steps(self) -> int:
        return self.batches * STEPS_PER_BATCH

    def to_argument(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_arguments(cls) -> "Job":
        return cls(**json.loads(sys.argv[1]))


def sft_overrides(task: Task, run_dir: Path) -> list[str]:
    """The quickstart's recipe without its GRPO, on `task`."""
    return [
        f"run_dir={run_dir}",
        f"data.source={task.source}",
        f"policy.generation.max_new_tokens={task.max_new_tokens}",
        f"sft.max_num_steps={task.sft_steps}",
        "evaluation.every=0",
        "evaluation.max_prompts=1",
        "grpo=null",
    ]


def grpo_overrides(job: Job) -> list[str]:
    """The quickstart's recipe without its SFT, on `job`. What TRL has no word for is left as it is there."""
    task = TASKS[job.task]
    optimizer = {
        "lr": LEARNING_RATE,
        "betas": list(BETAS),
        "warmup_steps": WARMUP_STEPS,
        "final_lr_ratio": 0.0,  # TRL's "linear" goes down to 0
        "max_grad_norm": MAX_GRAD_NORM,
    }
    return [
        f"run_dir={job.out}",
        f"seed={job.seed}",
        f"policy.model_name={job.start}",
        f"policy.generation.max_new_tokens={task.max_new_tokens}",
        f"data.source={task.source}",
        "env.reward=_trl_turns:reward",
        "evaluation.every=0",
        "evaluation.max_prompts=1",  # neither before nor after is of interest here
        "sft=null",
        f"grpo.max_num_steps={job.steps}",
        f"grpo.steps_per_generation={STEPS_PER_BATCH}",
        f"grpo.num_prompts={PROMPTS}",
        f"grpo.num_generations_per_prompt={GROUP}",
        f"grpo.optimizer={json.dumps(optimizer)}",
        f"grpo.objective.ratio.clip_low={CLIP_LOW}",
        f"grpo.objective.ratio.clip_high={CLIP_HIGH}",
        f"grpo.objective.advantage.epsilon={ADVANTAGE_EPSILON}",
        f"grpo.objective.selection.groups_without_signal={job.without_signal}",
    ]

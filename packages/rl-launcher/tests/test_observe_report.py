"""The report, made from a synthetic run. `python test_observe_report.py FOLDER` leaves one there to look at."""

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_launcher.observe import RunDirectory, RunDirectoryError, write_report
from rl_launcher.observe.report.markup import element
from rl_launcher.observe.report.scale import linear_scale, log_scale
from rl_launcher.observe.report.series import smooth, thin

RECIPE = """\
task: sort_digits
seed: 0
model:
  hidden_size: 128
  num_hidden_layers: 2
stages:
  - sft: {max_num_steps: 100, batch_size: 128, learning_rate: 2.0e-3}
  - grpo: {max_num_steps: 120, num_prompts: 32, num_generations_per_prompt: 8, learning_rate: 3.0e-4}
  - dpo: {max_num_steps: 60, batch_size: 64, beta: 0.5}
"""


def synthetic_run(path: Path, *, stages: tuple[str, ...] = ("sft", "grpo", "dpo"), steps: int = 120) -> RunDirectory:
    """What a run of the quickstart leaves, with curves of about its shape."""
    run = RunDirectory.create(path)
    generator = random.Random(0)
    makers = {"sft": _sft_rows, "grpo": _grpo_rows, "dpo": _dpo_rows}
    clock_s = 0.0
    with run.metrics.open("w") as lines:
        for stage in stages:
            for step, row in enumerate(makers[stage](steps, generator), start=1):
                clock_s += sum(value for name, value in row.items() if name.startswith("phase_s/"))
                lines.write(json.dumps({"stage": stage, "step": step, "time_s": round(clock_s, 3), **row}) + "\n")
    run.recipe.write_text(RECIPE)
    run.samples.write_text("".join(json.dumps(sample) + "\n" for sample in _samples(generator)))
    run.versions.write_text(
        json.dumps(
            {
                "collected_at": "2026-11-21T09:30:00+00:00",
                "python": "3.11.7",
                "platform": "Linux-6.1-x86_64",
                "cpu_count": 2,
                "torch": "2.13.0+cpu",
                "transformers": "5.19.0",
                "rl-launcher": "0.1.0",
                "git_commit": "4f1c0de9a7b35c2e8d6f4f1c0de9a7b35c2e8d6f",
                "git_dirty": False,
            }
        )
    )
    run.summary.write_text(
        json.dumps(
            {
                "run_dir": str(path),
                "task": "sort digits",
                "algorithm": " → ".join(stages),
                "held_out_sampled_before": 0.33,
                "held_out_sampled_after": 0.909,
                "held_out_greedy_before": 0.718,
                "held_out_greedy_after": 0.961,
                "held_out_size": 1000,
                "steps": steps * len(stages),
                "wall_s": clock_s + 4.2,
                "interrupted": False,
                "phase_share": {"generate": 0.35, "train": 0.6, "other": 0.05},
                "refit": {"count": steps, "tensors": 26, "bytes": 1_612_800, "digest": "9f2a" * 16, "version": steps},
            }
        )
    )
    return run


def _sft_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        row = {
            "loss": 0.55 + 3.1 * math.exp(-step / (steps / 6)) + generator.gauss(0, 0.03),
            "grad_norm": 0.5 + 2.4 * math.exp(-step / (steps / 5)) + generator.gauss(0, 0.05),
            "learning_rate": 2e-3 * min(1.0, step / 20),
            "tokens_per_s": 14_200 + generator.gauss(0, 400),
            "trained_tokens": 900,
            "phase_s/train": 0.068 + generator.random() * 0.01,
            "phase_s/other": 0.0008,
        }
        if step == steps:
            row |= {"held_out_sampled": 0.33, "held_out_greedy": 0.718, "phase_s/evaluate": 1.1}
        yield row


def _grpo_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-step / (steps / 3.2))
        row: dict[str, float | None] = {
            "reward": min(1.0, 0.3 + 0.65 * learnt + generator.gauss(0, 0.022)),
            "groups_with_signal": 0.85 - 0.46 * learnt + generator.gauss(0, 0.03),
            "response_tokens": 7.1 + generator.gauss(0, 0.06),
            "truncated": abs(generator.gauss(0, 0.01)),
            "sampled_tokens": 1818,
            "tokens_per_s": 5200 + generator.gauss(0, 250),
            "clip_fraction": 0.03 + generator.gauss(0, 0.006),
            "kl_engine": generator.gauss(0, 4e-8),
            "token_mult_prob_error": 1 + 10 ** generator.gauss(-6, 0.15),
            "entropy": 0.09 + 0.5 * (1 - learnt) + generator.gauss(0, 0.012),
            "loss": generator.gauss(-0.01, 0.006),
            "grad_norm": 0.35 + generator.gauss(0, 0.05),
            "learning_rate": 3e-4 * min(1.0, step / 10) * (1 - 0.8 * step / steps),
            "version": step,
            "refit_bytes": 1_612_800,
            "refit_s": 0.0021 + generator.random() * 0.0006,
            "phase_s/generate": 0.107 + generator.random() * 0.02,
            "phase_s/reward": 0.004,
            "phase_s/train": 0.15 * (0.55 + 0.45 * (1 - learnt)) + generator.random() * 0.01,
            "phase_s/refit": 0.0034,
            "phase_s/other": 0.004,
        }
        if step == 7:
            row |= {"loss": None, "grad_norm": None}
        if step % max(1, steps // 6) == 0:
            row |= {"held_out_sampled": 0.31 + 0.63 * learnt, "held_out_greedy": 0.72 + 0.26 * learnt}
            row["phase_s/evaluate"] = 0.22
        yield row


def _dpo_rows(steps: int, generator: random.Random) -> Iterator[dict[str, float | None]]:
    for step in range(1, steps + 1):
        learnt = 1 - math.exp(-step / (steps / 3))
        row = {
            "loss": 0.69 - 0.45 * learnt + generator.gauss(0, 0.02),
            "nll": 0.4 - 0.1 * learnt,
            "margin": 2.5 * learnt + generator.gauss(0, 0.1),
            "pair_accuracy": min(1.0, 0.72 + 0.24 * learnt + generator.gauss(0, 0.02)),
            "chosen_logratio": 0.5 * learnt + generator.gauss(0, 0.03),
            "rejected_logratio": -2.2 * learnt + generator.gauss(0, 0.08),
            "phase_s/train": 0.2,
            "phase_s/reference": 2.1 if step == 1 else 0.0,
        }
        if step % max(1, steps // 4) == 0:
            row |= {"held_out_margin": 2.3 * learnt, "held_out_pair_accuracy": 0.74 + 0.21 * learnt}
        yield row


def _samples(generator: random.Random) -> Iterator[dict[str, object]]:
    for index in range(10):
        digits = "".join(generator.choice("0123456789") for _ in range(generator.randint(4, 8)))
        right = "".join(sorted(digits))
        wrong = right[:2] + right[3:] + ("" if index % 2 else right[2])
        for when, response in (("before", right if index % 4 == 0 else wrong), ("after", wrong if index == 7 else right)):
            yield {
                "when": when,
                "stage": "grpo",
                "prompt": f"Sort {digits}",
                "expected": right,
                "response": response,
                "reward": float(response == right),
                "truncated": index == 7 and when == "after",
            }


if __name__ == "__main__":
    print(write_report(synthetic_run(Path(sys.argv[1]))))

"""The quickstart as a user starts it, in another process: it learns, verifies each refit, and reports it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[1] / "recipes"


def run_recipe(name: str, run_dir: Path, *overrides: str) -> dict:
    command = [sys.executable, "-m", "rl_launcher", "run", str(RECIPES / name), f"run_dir={run_dir}", *overrides]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert finished.returncode == 0, finished.stderr
    return json.loads(finished.stdout.splitlines()[-1])


def metrics(run_dir: Path, stage: str) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["stage"] == stage and line["step"] > 0]


@pytest.fixture(scope="module")
def grpo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    run_dir = tmp_path_factory.mktemp("quickstart") / "run"
    return run_recipe("quickstart.yaml", run_dir, "seed=11"), run_dir


def test_grpo_repairs_what_imitation_left_wrong(grpo_run: tuple[dict, Path]) -> None:
    summary, run_dir = grpo_run
    assert 0.1 < summary["held_out_sampled_before"] < 0.45
    assert summary["held_out_sampled_after"] >= 0.80
    assert summary["held_out_greedy_after"] >= 0.92
    rewards = [line["reward"] for line in metrics(run_dir, "grpo")]
    assert len(rewards) == 120
    assert sum(rewards[-20:]) / 20 > sum(rewards[:20]) / 20 + 0.25


def test_trainer_and_engine_agree_before_every_batch(grpo_run: tuple[dict, Path]) -> None:
    """A refit that were skipped or torn would show here: the engine would sample from other weights."""
    _, run_dir = grpo_run
    errors = [line["token_mult_prob_error"] for line in metrics(run_dir, "grpo") if "token_mult_prob_error" in line]
    assert max(errors) <= 1.0001


def test_every_step_was_refitted_and_the_driver_costs_little(grpo_run: tuple[dict, Path]) -> None:
    summary, run_dir = grpo_run
    versions = [line["version"] for line in metrics(run_dir, "grpo")]
    assert versions == list(range(104, 581, 4))
    assert summary["refit"]["version"] == summary["steps"] == 580
    assert set(summary["phase_share"]) == {"generate", "reward", "train", "refit", "evaluate", "other"}


def test_the_saved_model_answers_as_the_run_said(grpo_run: tuple[dict, Path]) -> None:
    """Read the folder with plain transformers, without our code: it has the trained weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    summary, run_dir = grpo_run
    model = AutoModelForCausalLM.from_pretrained(run_dir / "model")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "model", padding_side="left")
    questions = ["40213>", "9981>", "73187191>", "55501>", "862074>", "10293847>", "3141592>", "27182>"]
    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in questions
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False, return_token_type_ids=False)
    answers = model.generate(**batch, max_new_tokens=9, do_sample=False)[:, batch["input_ids"].shape[1] :]
    texts = tokenizer.batch_decode(answers, skip_special_tokens=True)
    right = sum(text == "".join(sorted(question[:-1])) for text, question in zip(texts, questions, strict=True))
    assert summary["held_out_greedy_after"] >= 0.92
    assert right >= 6


@pytest.mark.slow
def test_dpo_from_the_same_sft_model_raises_margin_and_accuracy(tmp_path: Path) -> None:
    summary = run_recipe("quickstart-dpo.yaml", tmp_path / "run", "seed=11")
    assert summary["held_out_sampled_after"] > summary["held_out_sampled_before"] + 0.15
    assert summary["held_out_greedy_after"] > summary["held_out_greedy_before"] + 0.05
    measured = [line for line in metrics(tmp_path / "run", "dpo") if "held_out_margin" in line]
    assert measured[-1]["held_out_margin"] > measured[0]["held_out_margin"] + 0.5
    assert measured[-1]["held_out_pair_accuracy"] > 0.9
    assert measured[-1]["chosen_logratio"] > 0.0  # the trap of plain DPO: chosen answers that become unlikelier

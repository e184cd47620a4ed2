"""What may be relied on: the names, and that importing them costs torch and nothing else."""

import importlib
import subprocess
import sys

import pytest

PAGES = {
    "grpo": {
        "Examples",
        "GRPOConfig",
        "clipped_surrogate",
        "group_advantage",
        "has_signal",
        "prepare",
        "step",
        "train",
    },
    "sft": {"Examples", "SFTConfig", "prepare", "step", "train"},
    "dpo": {
        "DPOConfig",
        "Examples",
        "Pair",
        "margins",
        "pairs_from_rollouts",
        "prepare",
        "step",
        "train",
        "with_reference",
    },
    "evaluation": {"Accuracy", "evaluate"},
    "environments": {"RewardError", "RewardFunctionEnvironment"},
    "rollouts": {"Rollouts", "collect"},
    "data": {"DataError", "Dataset", "Row", "batches", "make_row", "read_jsonl", "split_held_out"},
    "chat": {"Chat", "Demonstration", "Prompt", "PromptFormat", "Tokenizer"},
}


@pytest.mark.parametrize("page", PAGES)
def test_each_page_has_its_names(page):
    module = importlib.import_module(f"rl_algorithms.{page}")
    assert set(module.__all__) == PAGES[page]
    assert all(hasattr(module, name) for name in module.__all__)


def test_importing_every_page_imports_no_engine_and_no_trainer():
    code = (
        f"import sys, importlib\n"
        f"for page in {list(PAGES)}: importlib.import_module('rl_algorithms.' + page)\n"
        f"heavy = {{'transformers', 'vllm', 'ray', 'pydantic', 'rl_backends', 'rl_generation', 'rl_refit'}}\n"
        f"assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""What may be relied on: the names, that each algorithm is one page, and that importing a loss costs torch alone."""

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import rl_algorithms

PAGES = ("grpo", "async_grpo", "ppo", "sft", "dpo", "online_dpo", "kto", "orpo", "reward_model", "distill")
"""Each algorithm whole, from what it is given to the step it takes, for somebody who reads it once."""

MODULES = {
    "advantages": {"gae", "gdpo", "group_advantage", "has_signal", "overlong_penalty", "returns_to_go", "whiten"},
    "corrections": {
        "CorrectionConfig",
        "geometric_mean",
        "importance_weight",
        "mask_outside",
        "sequence_error",
        "truncate",
    },
    "kl": {"k1", "k2", "k3", "k3_unbiased", "kl_estimate"},
    "pieces": {"KINDS", "Piece", "find", "piece", "registered"},
    "presets": {"preset", "preset_arguments", "preset_names"},
    "losses": {
        "Counts",
        "cispo",
        "clipped_surrogate",
        "dual_clip",
        "importance_ratio",
        "reinforce",
        "token_weights",
        "value_loss",
    },
    "objective": {"AdvantageConfig", "KLConfig", "Objective", "OverlongConfig", "RatioConfig", "SelectionConfig"},
    "grpo": {"Examples", "GRPOConfig", "dapo", "gspo", "prepare", "rloo", "step", "train"},
    "ppo": {"PPOConfig", "train"},
    "async_grpo": {"AsyncGRPOConfig", "train"},
    "sft": {"Examples", "SFTConfig", "explain", "prepare", "step", "train"},
    "dpo": {"DPOConfig", "Examples", "explain", "margins", "prepare", "step", "train", "with_reference"},
    "online_dpo": {"train"},
    "kto": {"KTOConfig", "train"},
    "orpo": {"ORPOConfig", "train"},
    "reward_model": {"RewardModelConfig", "train"},
    "distill": {"train"},
    "observation": {"NumberedExamples", "ObservedPolicy", "ObservedStep", "number_rows"},
    "policy_gradient": {"Examples", "loss", "prepare"},
    "rollouts": {"Rollouts", "collect", "concatenate"},
    "evaluation": {"Accuracy", "evaluate"},
    "environments": {"RewardError", "RewardFunctionEnvironment"},
    "data": {"DataError", "Dataset", "Row", "batches", "make_row", "read_jsonl", "split_held_out"},
    "chat": {"Chat", "Demonstration", "Prompt", "PromptFormat", "Tokenizer"},
}

ALLOWED = {"torch", "jaxtyping", "rl_algorithms"}


def every_module():
    return [module.name for module in pkgutil.walk_packages(rl_algorithms.__path__, "rl_algorithms.")]


@pytest.mark.parametrize("name", MODULES)
def test_each_module_has_its_names(name):
    module = importlib.import_module(f"rl_algorithms.{name}")
    assert set(module.__all__) >= MODULES[name]
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("page", PAGES)
def test_an_algorithm_is_one_page(page):
    source = Path(importlib.import_module(f"rl_algorithms.{page}").__file__).read_text()
    assert source.count("\n") <= 220


def packages_after(code):
    """Names of the distributions' top-level packages that are loaded beyond torch's own and the standard library."""
    program = (
        "import sys, torch, jaxtyping\n"
        "before = set(sys.modules)\n"
        f"{code}\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(' '.join(sorted(new - set(sys.stdlib_module_names))))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("page", ["losses", "policy_gradient", "grpo", "dpo"])
def test_importing_a_loss_costs_torch_and_nothing_else(page):
    assert packages_after(f"import rl_algorithms.{page}") <= ALLOWED


@pytest.mark.parametrize(
    ("page", "without"),
    [
        ("losses", {"advantages", "contracts", "objective", "chat", "rows"}),
        ("policy_gradient", {"presets", "data", "environments", "evaluation"}),
        ("grpo", {"data", "environments", "evaluation", "preferences", "dpo", "async_grpo", "tokenized_data"}),
    ],
)
def test_a_page_loads_only_what_it_needs(page, without):
    program = (
        f"import sys, rl_algorithms.{page}; print(*(name for name in sys.modules if name[:14] == 'rl_algorithms.'))"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    loaded = {name.split(".")[1] for name in done.stdout.split()}
    assert page in loaded
    assert not loaded & without


def test_importing_all_of_it_does_too():
    """The extras (datasets, pyarrow, math-verify, gymnasium and the like) are imported where they are used."""
    program = "import importlib\n" + "\n".join(f"importlib.import_module({name!r})" for name in every_module())
    assert packages_after(program) <= ALLOWED

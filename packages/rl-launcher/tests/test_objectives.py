"""A recipe names published objectives and pieces of the user's own, and everything that reads it sees them."""

import hashlib
import json

import pytest

import rl_launcher
from rl_algorithms import presets
from rl_launcher.checks.preflight import check_files
from rl_launcher.errors import Refusal
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.recipe_files import RecipeError, json_schema, load_recipe
from rl_launcher.recipe_files.shipped import find_recipe
from rl_launcher.schema import Recipe
from rl_launcher.user_code import changed_code, code_digests, named_code

GMPO = '''import torch


def gmpo(log_ratio, advantage, mask, *, clip_low, clip_high):
    """-A times the geometric mean of the clipped ratio (arXiv:2507.20673)"""
    held = log_ratio.clamp(-clip_low, clip_high)
    kept = torch.where(advantage > 0, torch.minimum(log_ratio, held), torch.maximum(log_ratio, held))
    mean = torch.where(mask, kept, 0.0).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)
    return -advantage * mean.exp()
'''
OWN = {"ratio": {"surrogate": "gmpo.py:gmpo", "clip_low": 0.4, "clip_high": 0.4}, "aggregation": "seq-mean-token-mean"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gmpo.py").write_text(GMPO)
    return tmp_path


def load(objective, **overrides):
    return load_recipe(find_recipe("grpo"), schema=Recipe, overrides={"grpo.objective": objective, **overrides})


NEEDS_MORE = {"gdpo"}
"""A preset that this recipe cannot have: it compares named rewards."""


@pytest.mark.parametrize("name", [name for name in presets.preset_names() if name not in NEEDS_MORE])
def test_a_preset_in_a_recipe_is_the_preset_in_python(name):
    needed = {"max_length": 77} if name == "dr_grpo" else {}
    assert load({"preset": name, **needed}).value.grpo.objective == presets.preset(name, **needed)


def test_a_presets_arguments_and_other_keys_change_it_and_the_notes_say_which():
    resolved = load({"preset": "gspo", "clip_high": 5e-4, "kl": {"weight": 0.01}})
    objective = resolved.value.grpo.objective
    assert objective == presets.preset("gspo", clip_high=5e-4, kl={"weight": 0.01})
    assert "grpo.objective.kl change it" in resolved.notes[0]
    assert "preset gspo" in resolved.notes[0]
    again = load_recipe(json.loads(json.dumps({"defaults": "grpo"})), schema=Recipe, overrides=["run_dir=x"])
    assert again.value.grpo.objective != objective


@pytest.mark.parametrize("surrogate", ["reinforce", "sapo", "gmpo.py:gmpo"])
def test_another_surrogate_leaves_the_presets_numbers_behind_that_it_does_not_have(surrogate, folder):
    objective = load({"preset": "gspo", "ratio": {"surrogate": surrogate}}).value.grpo.objective
    assert objective == presets.preset("gspo", ratio={"surrogate": surrogate})
    assert objective.ratio.clip_low == (3e-4 if surrogate == "gmpo.py:gmpo" else 0.2)


def test_the_recorded_recipe_of_a_preset_loads_as_the_same_objective(folder):
    resolved = load({"preset": "vespo", "k_positive": 1.5})
    (folder / "recipe.yaml").write_text(resolved.to_yaml())
    assert load_recipe(folder / "recipe.yaml", schema=Recipe).value == resolved.value


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"preset": "gspoo"}, "there is no preset 'gspoo'; did you mean 'gspo'"),
        ({"preset": "gspo", "clip_low": -1.0}, "clip_low=-1.0 must be between 0 and 1"),
        ({"preset": "gspo", "clip_lo": 1.0}, "clip_lo: unknown key"),
        ({"preset": "dr_grpo"}, "preset 'dr_grpo' needs max_length"),
        ({"ratio": {"surrogate": "gmpo.py:gmp"}}, "no function 'gmp'; did you mean 'gmpo'"),
        ({"ratio": {"surrogate": "gmop.py:gmpo"}}, "there is no file gmop.py in .*; did you mean gmpo.py"),
        ({"ratio": {"surrogate": "clop"}}, "did you mean 'clip'"),
    ],
)
def test_what_a_recipe_misspells_is_refused_with_the_nearest(objective, words, folder):
    with pytest.raises(RecipeError, match=words):
        load(objective)


def test_a_loss_of_the_users_file_is_explained_and_its_digest_is_recorded(folder):
    recipe = load(OWN).value
    assert (
        "l = gmpo(log_ratio, advantage, mask, clip_low=0.4, clip_high=0.4): -A times the geometric mean"
        in recipe.grpo.objective.explain()
    )
    key = "grpo.objective.ratio.surrogate"
    assert named_code(recipe)[key] == "gmpo.py:gmpo"
    digests = code_digests(recipe)
    assert changed_code(recipe, {**digests, key: "other"}, digests) == [f"gmpo.py ({key}) has changed since"]
    (folder / "reward.py").write_text("")
    (folder / "gmpo.py").unlink()
    with pytest.raises(Refusal, match=r"grpo.objective.ratio.surrogate=gmpo.py:gmpo: there is no file gmpo.py"):
        check_files(recipe, new_run=False)


def test_editors_know_the_presets_and_their_arguments():
    properties = json_schema(Recipe)["$defs"]["Objective"]["properties"]
    assert {"preset", "clip_high", "tau_negative", "aggregation"} <= set(properties)


@pytest.mark.parametrize("objective", [OWN, {"preset": "remax"}], ids=["a loss of the user's file", "remax"])
def test_a_run_trains_with_any_objective_of_a_recipe(folder, objective):
    model, tokenizer = build(0)
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    result = rl_launcher.train(
        "grpo",
        model=model,
        tokenizer=tokenizer,
        data=rows,
        reward=lambda completions, **_: [len(text) / 9 for text in completions],
        cpu_threads=1,
        policy={"generation": {"max_new_tokens": 3}},
        evaluation={"max_prompts": 2, "every": 0, "samples": 1},
        logger={"tensorboard_enabled": False},
        grpo={
            "max_num_steps": 2,
            "num_prompts": 8,
            "optimizer": {"lr": 1e-3, "warmup_steps": 1},
            "objective": objective,
        },
    )
    assert [line["step"] for line in result.metrics if "loss" in line] == [1, 2]
    assert ("reward_greedy" in result.metrics[-1]) == (objective != OWN)
    assert ("gmpo.py:gmpo" in (result.run_dir / "recipe.yaml").read_text()) == (objective == OWN)
    code = json.loads((result.run_dir / "versions.json").read_text())["user_code"]
    digest = hashlib.sha256((folder / "gmpo.py").read_bytes()).hexdigest()
    found = code.get("grpo.objective.ratio.surrogate")
    assert found == ({"named": "gmpo.py:gmpo", "sha256": digest} if objective == OWN else None)

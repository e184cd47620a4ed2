"""Every shipped recipe is valid, can be placed and explained without its weights; those for a CPU run, made small."""

import json
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from rl_launcher.bundled_recipes import SCHEMA_FILE, about, copy_recipe, shipped_recipes
from rl_launcher.checks.explain import explain
from rl_launcher.cli import app
from rl_launcher.recipe_files import json_schema, load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe

RECIPES = shipped_recipes()
MAX_LINES = 40
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
}
# What makes a recipe small enough for a test, beside its own model and data.
SHORT = {
    "quickstart": ["sft.max_num_steps=2", "grpo.max_num_steps=4"],
    "quickstart-dpo": ["sft.max_num_steps=40", "dpo.max_num_steps=2", "dpo.num_prompts=64"],
    "multi-turn": ["sft.max_num_steps=8", "grpo.max_num_steps=4"],
}


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """Configurations of each family without weights, rows, and a reward."""
    folder = tmp_path_factory.mktemp("mine")
    experts = {"num_experts": 128, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    for name, config in {
        "qwen2": Qwen2Config(**SMALL),
        "qwen3": Qwen3Config(**SMALL, head_dim=8),
        "qwen3_moe": Qwen3MoeConfig(**SMALL, head_dim=8, **experts),
    }.items():
        config.save_pretrained(folder / name)
    rows = [{"prompt": f"{number}+0=", "answer": str(number)} for number in range(40)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pairs = [{"prompt": row["prompt"], "chosen": row["answer"], "rejected": "no"} for row in rows]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "reward.py").write_text("def score(completions, answer):\n    return [0.0] * len(completions)\n")
    return folder


def of_ones_own(recipe, folder):
    """Overrides that put local files in the place of what is on the hub or beside the user's recipe."""
    changed = []
    names = {"policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        names["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    for key, name in names.items():
        if "/" in name:
            family = "qwen3_moe" if "A22B" in name else "qwen3" if "Qwen3" in name else "qwen2"
            changed.append(f"{key}={folder}/{family}")
    if ":" not in recipe.data.source:
        name = "pairs" if recipe.dpo is not None and recipe.dpo.pairs == "data" else "rows"
        changed += [f"data.source={folder}/{name}.jsonl", "data.name=null", "data.split=null", "data.columns=null"]
    if recipe.env is not None and recipe.env.reward == "reward.py:score":
        changed.append(f"env.reward={folder}/reward.py:score")
    return [change.replace("data.columns=null", "data.columns={prompt: prompt}") for change in changed]


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_is_valid_short_and_known_to_editors(name):
    path = RECIPES[name]
    lines = path.read_text().splitlines()
    assert len(lines) < MAX_LINES
    assert lines[0] == "# yaml-language-server: $schema=recipe.schema.json"
    assert 0 < len(about(path)) < 140
    resolved = load_recipe(path, schema=Recipe)
    assert resolved.value.run_dir == f"runs/{name}"
    again = yaml.safe_load(resolved.to_yaml())
    assert again["run_dir"] == f"runs/{name}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_is_explained_without_weights_and_without_a_gpu(name, mine):
    plain = load_recipe(RECIPES[name], schema=Recipe)
    resolved = load_recipe(RECIPES[name], schema=Recipe, overrides=of_ones_own(plain.value, mine))
    explained = explain(resolved)
    text = explained.text()
    assert "policy.model_name" in text
    assert explained.figures["ranks"] >= 1
    assert explained.figures["rank_peak_bytes"] > 0
    assert explained.figures["engine_weight_bytes"] > 0
    assert f"{explained.figures['ranks']} training rank" in text or "everything is in this process" in text


def test_a_model_that_cannot_be_had_is_said_to_be_unknown_and_the_rest_is_explained(monkeypatch, mine):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = load_recipe(RECIPES["grpo-8gpu-async"], schema=Recipe)
    others = [change for change in of_ones_own(plain.value, mine) if not change.startswith("policy.model_name")]
    nobodys = "policy.model_name=nobody/has-this-model"
    text = explain(load_recipe(RECIPES["grpo-8gpu-async"], schema=Recipe, overrides=[*others, nobodys])).text()
    assert text.count("not known without the model: ") == 1  # the hub's own words, in one place of three
    assert "4 training ranks and 4 engines on 1 x 8 GPUs" in text


@pytest.mark.parametrize("name", SHORT)
def test_a_shipped_recipe_for_a_cpu_runs(name, tmp_path):
    short = [*SHORT[name], f"run_dir={tmp_path}/run", "evaluation.every=0", "evaluation.max_prompts=8"]
    warm = [f"{stage}.optimizer.warmup_steps=0" for stage in load_recipe(RECIPES[name], schema=Recipe).value.stages]
    summary = run(load_recipe(RECIPES[name], schema=Recipe, overrides=[*short, *warm]))
    assert summary["steps"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_the_schema_for_editors_is_the_recipes():
    written = json.loads(SCHEMA_FILE.read_text())
    assert written == json.loads(json.dumps(json_schema(Recipe))), "rl-launcher schema --out it"


@pytest.mark.parametrize("name", ["grpo-8gpu-async", "dapo"])
def test_a_copied_recipe_has_all_that_it_starts_from(name, tmp_path):
    copied = copy_recipe(name, tmp_path)
    assert (
        load_recipe(tmp_path / f"{name}.yaml", schema=Recipe).value == load_recipe(RECIPES[name], schema=Recipe).value
    )
    assert all(path.is_file() for path in copied)
    again = CliRunner().invoke(app, ["recipes", "copy", name, str(tmp_path)])
    assert again.exit_code == 2
    assert "nothing is overwritten" in " ".join(again.output.split())


def test_the_folder_at_the_root_is_that_of_the_package(request):
    root = request.config.rootpath / "recipes"
    if not root.exists():
        pytest.skip("only the repository has it; an unpacked package has its own folder alone")
    assert root.resolve() == Path(SCHEMA_FILE).parent.resolve()

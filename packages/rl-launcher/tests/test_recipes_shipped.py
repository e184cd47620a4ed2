"""Every shipped recipe is valid, can be placed and explained without its weights; those for a CPU run, made small."""

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml
from transformers import Qwen2Config, Qwen3Config, Qwen3MoeConfig
from typer.testing import CliRunner

from rl_launcher.checks.explain import explain
from rl_launcher.cli import app
from rl_launcher.recipe_files import RecipeError, json_schema, load_recipe, reference
from rl_launcher.recipe_files.problems import DEFAULT
from rl_launcher.recipe_files.shipped import SCHEMA_FILE, about, copy_recipe, shipped_recipes
from rl_launcher.recipe_files.yaml_source import compose
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
    "quickstart": ["sft.max_num_steps=20", "grpo.max_num_steps=4"],
    "quickstart-dpo": ["sft.max_num_steps=40", "dpo.max_num_steps=2", "dpo.num_prompts=64"],
    "quickstart-ppo": [
        *("sft.max_num_steps=8", "reward_model.max_num_steps=4", "ppo.max_num_steps=4", "ppo.num_prompts=8"),
    ],
    "quickstart-kto": ["sft.max_num_steps=8", "kto.max_num_steps=2", "kto.batch_size=8"],
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
    labelled = [{"prompt": row["prompt"], "completion": row["answer"], "label": row["answer"] < "3"} for row in rows]
    (folder / "labelled.jsonl").write_text("\n".join(map(json.dumps, labelled)))
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
        name = {"preferences": "pairs", "labelled": "labelled"}.get(recipe.form or "", "rows")
        changed += [f"data.source={folder}/{name}.jsonl", "data.name=null", "data.split=null", "data.columns=null"]
        changed.append("data.held_out_split=null")
    judged_by = recipe.reward_model and recipe.reward_model.data
    if judged_by and judged_by.source == "pairs.jsonl":
        changed.append(f"reward_model.data.source={folder}/pairs.jsonl")
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


EXPLAINED = {"quickstart", "sft", "dpo", "ppo", "grpo-8gpu-colocated", "grpo-megatron-8gpu", "distill", "evaluate"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EXPLAINED else pytest.mark.slow) for name in RECIPES]
)
def test_a_shipped_recipe_is_explained_without_weights_and_without_a_gpu(name, mine):
    plain = load_recipe(RECIPES[name], schema=Recipe)
    resolved = load_recipe(RECIPES[name], schema=Recipe, overrides=of_ones_own(plain.value, mine))
    explained = explain(resolved)
    text = explained.text()
    assert "policy.model_name" in text
    assert explained.figures["ranks"] >= 1
    assert explained.figures["rank_peak_bytes"] > 0
    assert (explained.figures["engine_weight_bytes"] > 0) == (explained.figures["engines"] > 0) == plain.value.generates
    assert f"{explained.figures['ranks']} training rank" in text or "everything is in this process" in text


def test_a_model_that_cannot_be_had_is_said_to_be_unknown_and_the_rest_is_explained(monkeypatch, mine):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    plain = load_recipe(RECIPES["grpo-8gpu-async"], schema=Recipe)
    others = [change for change in of_ones_own(plain.value, mine) if not change.startswith("policy.model_name")]
    nobodys = "policy.model_name=nobody/has-this-model"
    text = explain(load_recipe(RECIPES["grpo-8gpu-async"], schema=Recipe, overrides=[*others, nobodys])).text()
    assert text.count("unknown without the model: ") == 1  # the hub's own words, in one place of three
    assert "4 training ranks and 4 engines on 1 x 8 GPUs" in text


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "multi-turn" else pytest.mark.slow) for name in SHORT],
)
def test_a_shipped_recipe_for_a_cpu_runs(name, tmp_path):
    short = [*SHORT[name], f"run_dir={tmp_path}/run", "evaluation.every=0", "evaluation.max_prompts=8"]
    summary = run(load_recipe(RECIPES[name], schema=Recipe, overrides=short))
    assert summary["steps"] > 0
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_conversations_are_measured_although_no_stage_says_how_long_they_may_be(tmp_path):
    short = [*SHORT["multi-turn"], "grpo=null", f"run_dir={tmp_path}/run", "evaluation.max_prompts=8"]
    short = [each for each in short if not each.startswith("grpo.")]
    summary = run(load_recipe(RECIPES["multi-turn"], schema=Recipe, overrides=short))
    assert summary["algorithm"] == "sft"
    assert summary["held_out_sampled_after"] is not None


TRAINING = [name for name in RECIPES if name != "evaluate"]


@pytest.mark.parametrize("name", TRAINING)
def test_a_short_smoke_run_of_a_shipped_recipe_is_valid_and_a_shortened_warm_up_is_said(name):
    stages = load_recipe(RECIPES[name], schema=Recipe).value.stages
    for steps in (1, 2):
        short = [f"{stage}.max_num_steps={steps}" for stage in stages]
        resolved = load_recipe(RECIPES[name], schema=Recipe, overrides=short)
        for stage, before in stages.items():
            after, batch = resolved.value.stages[stage], getattr(before, "steps_per_generation", 1)
            assert after.max_num_steps == max(steps, batch)
            warmup = before.optimizer.warmup_steps
            assert after.optimizer.warmup_steps == (
                warmup if warmup < after.max_num_steps else after.max_num_steps // 2
            )
            said = "\n".join(resolved.notes)
            raised = [note for note in resolved.notes if note.startswith(f"{stage}.max_num_steps={steps} ")]
            assert len(raised) == (batch > steps)
            shortened = f"{stage}.optimizer.warmup_steps={warmup} (shipped "
            assert (shortened in said) == (after.optimizer.warmup_steps != warmup)


def test_a_run_is_not_made_shorter_than_a_batch_of_rollouts_where_the_user_set_both():
    overrides = ["grpo.max_num_steps=2", "grpo.steps_per_generation=4"]
    with pytest.raises(RecipeError, match="max_num_steps=2 must be a multiple of steps_per_generation=4"):
        load_recipe(RECIPES["quickstart"], schema=Recipe, overrides=overrides)


def test_validate_and_explain_say_that_a_warm_up_was_shortened():
    result = CliRunner().invoke(app, ["validate", "quickstart", "sft.max_num_steps=2", "grpo.max_num_steps=2"])
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "grpo.optimizer.warmup_steps=40 (shipped quickstart.yaml:37) is shortened to 2, since" in said
    assert 'grpo.max_num_steps=2 (override "grpo.max_num_steps=2")' in said
    assert "is raised to 4, the optimizer steps of one batch of rollouts" in said
    assert said.index("OK: quickstart") > said.index("is shortened")


@pytest.mark.parametrize(
    ("overrides", "blamed"),
    [
        (["grpo.max_num_steps=4", "grpo.optimizer.warmup_steps=9"], "grpo.optimizer.warmup_steps=9"),
        (["grpo.optimizer.warmup_steps=9000"], "grpo.optimizer.warmup_steps=9000"),
    ],
)
def test_a_warm_up_that_the_user_made_too_long_is_refused_with_the_override_and_the_remedy(overrides, blamed):
    result = CliRunner().invoke(app, ["validate", "quickstart", *overrides])
    assert result.exit_code == 2
    said = " ".join(result.output.split())
    assert f'override "{blamed}": grpo.optimizer.warmup_steps: {blamed} must be less than' in said
    assert "; set grpo.optimizer.warmup_steps=" in said


def test_a_recipe_of_ones_own_may_shorten_what_it_starts_from_but_not_contradict_itself(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: grpo\ngrpo: {max_num_steps: 4}\n")
    resolved = load_recipe(file, schema=Recipe)
    assert resolved.value.grpo.optimizer.warmup_steps == 2
    assert str(resolved.origins["grpo.optimizer.warmup_steps"]) == f"{file}:2"
    file.write_text("defaults: grpo\ngrpo: {max_num_steps: 4, optimizer: {warmup_steps: 4}}\n")
    with pytest.raises(
        RecipeError, match=r"mine.yaml:2:\d+: grpo.optimizer.warmup_steps: .* set grpo.optimizer.warmup_steps=2"
    ):
        load_recipe(file, schema=Recipe)


FOREIGN = compose(
    (Path(__file__).parents[1] / "src/rl_launcher/schema/foreign_keys.yaml").read_text(), lambda *_: DEFAULT
)


def test_every_key_that_a_foreign_key_is_answered_with_exists():
    table, problems = FOREIGN
    assert problems == []  # such as a key that is written twice
    valid = [row.split("`")[1] for row in reference(Recipe).splitlines()[2:]]
    for theirs, entry in table.plain().items():
        keys = entry["keys"] if isinstance(entry, dict) else entry
        for key in [keys] if isinstance(keys, str) else keys:
            fitting = [each for each in valid if fnmatch(each, key)]
            assert fitting, f"{theirs}: {key}"
        assert theirs not in valid, f"{theirs} is a key of ours"


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("grpo.rollouts_per_prompt=4", "did you mean grpo.num_generations_per_prompt?"),
        ("num_generations=4", "did you mean grpo.num_generations_per_prompt?"),
        ("rollout.n=4", "did you mean grpo.num_generations_per_prompt?"),
        ("actor_rollout_ref.rollout.n=4", "did you mean grpo.num_generations_per_prompt?"),
        ("grpo.max_completion_length=9", "did you mean policy.generation.max_new_tokens?"),
        ("grpo.max_new_tokens=9", "did you mean policy.generation.max_new_tokens?"),
        ("grpo.temperature=0.9", "did you mean policy.generation.temperature?"),
        ("grpo.learning_rate=1e-5", "did you mean grpo.optimizer.lr?"),
        ("learning_rate=1e-5", "did you mean sft.optimizer.lr or grpo.optimizer.lr?"),
        ("grpo.beta=0.1", "did you mean grpo.objective.kl.weight?"),
        ("algorithm.kl_ctrl.kl_coef=0.1", "did you mean grpo.objective.kl.weight?"),
        ("grpo.epsilon=0.2", "did you mean grpo.objective.ratio.clip_low and grpo.objective.ratio.clip_high?"),
        ("clip_ratio=0.2", "did you mean grpo.objective.ratio.clip_low and grpo.objective.ratio.clip_high?"),
        ("per_device_train_batch_size=2", "did you mean policy.dtensor_cfg.micro_batch_size?"),
        ("grpo.num_train_epochs=2", "did you mean grpo.max_num_epochs?"),
    ],
)
def test_keys_of_trl_and_verl_are_answered_with_the_right_ones(override, hint):
    with pytest.raises(RecipeError) as caught:
        load_recipe(RECIPES["quickstart"], schema=Recipe, overrides=[override])
    (problem,) = caught.value.problems
    assert hint in problem.hint


def test_the_schema_for_editors_is_the_recipes():
    written, made = json.loads(SCHEMA_FILE.read_text()), json.loads(json.dumps(json_schema(Recipe)))
    if "description" not in made:  # pydantic 2.11 reads none from dataclasses; the file is a newer one's
        for section in (written, *written["$defs"].values()):
            section.pop("description", None)
    assert written == made, "rl-launcher schema --out it"


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


@pytest.mark.parametrize("name", ["grpo-8gpu-colocated", "grpo-8gpu-separate", "grpo-1gpu-vllm", "distill"])
def test_a_file_of_ones_own_is_not_read_as_the_data_set_of_the_recipe(name):
    """The command of the README: what a shipped recipe says of its own data set does not apply to another one."""
    path = shipped_recipes()[name]
    overrides = ["data.source=rows.jsonl", "env.reward=reward.py:score", "policy.model_name=./my-model"]
    resolved = load_recipe(path, schema=Recipe, overrides=overrides)
    data = resolved.value.data
    assert (data.split, data.name, data.columns, data.held_out_split) == (None, None, {}, None)
    assert "data.split, data.name, data.columns, data.held_out_split" in "\n".join(resolved.notes)
    overrides.append("data.columns={prompt: q}")
    assert load_recipe(path, schema=Recipe, overrides=overrides).value.data.columns == {"prompt": "q"}
    assert load_recipe(path, schema=Recipe).value.data.split == "train"

"""Reward models, critics, KTO and ORPO in recipes, on a CPU: they learn, chain, resume exactly, and refuse by name."""

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from rl_launcher.errors import RunStoppedError
from rl_launcher.recipe_files import RecipeError, load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe
from rl_observe.glossary import metric_of

LOG_FIELDS = {"stage", "step", "time_s"}
PAIRS = "reward_model={{data: {{source: {folder}/pairs.jsonl}}, max_num_steps: {steps}, optimizer: {{lr: 0.02}}}}"
PPO = (
    "ppo={max_num_steps: 8, steps_per_generation: 4, num_prompts: 4, num_generations_per_prompt: 2, "
    "objective: {kl: {weight: 0.05}}, optimizer: {lr: 0.01}, critic: {optimizer: {lr: 0.02}}}"
)
CHAIN = ["grpo=null", "sft.max_num_steps=3", "evaluation={every: 4, samples: 2}", PPO]


def with_pairs(tmp_path):
    """Write pairs of which the longer response is the better one, and the same one by one; return the folder."""
    draw = random.Random(0)
    pairs, labelled = [], []
    for number in range(48):
        prompt, digit = f"{number // 8 % 8}+{number % 8}=", str(draw.randrange(10))
        pairs.append({"prompt": prompt, "chosen": digit * 4, "rejected": digit})
        labelled += [{"prompt": prompt, "completion": digit * size, "label": size > 1} for size in (1, 4)]
    for name, rows in (("pairs", pairs), ("labelled", labelled)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


@pytest.fixture
def folder(recipe):
    """The folder of the recipe, with pairs."""
    return with_pairs(recipe.parent)


@pytest.fixture(scope="module")
def whole_chain(write_recipe, tmp_path_factory):
    """The run of a chain that nobody stopped."""
    folder = with_pairs(write_recipe(tmp_path_factory.mktemp("whole")).parent)
    run_recipe(folder, *of_chain(folder))
    return folder / "run"


def of_chain(folder, steps=10):
    return [*CHAIN, PAIRS.format(folder=folder, steps=steps)]


def run_recipe(folder, *overrides):
    return run(load_recipe(folder / "recipe.yaml", schema=Recipe, overrides=overrides))


def lines(run_dir, stage):
    logged = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    unknown = {name for line in logged for name in line if metric_of(name) is None} - LOG_FIELDS
    assert not unknown
    return [line for line in logged if line["stage"] == stage]


def test_a_reward_model_learns_which_response_is_better_and_scores_those_of_ppo(folder):
    speaks = ["sft.max_num_steps=30", "ppo.optimizer.lr=1e-4"]  # digits, not the special tokens that no row may spell
    summary = run_recipe(folder, *of_chain(folder, steps=30), *speaks, "env=null")
    assert (summary["algorithm"], summary["steps"]) == ("ppo", 30 + 30 + 8)
    learned = [line for line in lines(folder / "run", "reward_model") if "held_out_pair_accuracy" in line]
    assert learned[-1]["held_out_pair_accuracy"] == 1.0
    assert learned[-1]["held_out_score_margin"] > learned[0]["held_out_score_margin"]
    logged = lines(folder / "run", "ppo")
    assert [line["step"] for line in logged] == [0, 4, 8]
    assert all(line["refit_verified"] == 1.0 and line["value_loss"] >= 0 for line in logged[1:])
    # A reward is the reward model's own score, as transformers reads it from the folder.
    sample = next(
        each
        for each in map(json.loads, (folder / "run" / "samples.jsonl").read_text().splitlines())
        if each["when"] == "before" and not each["truncated"]
    )
    model = AutoModelForSequenceClassification.from_pretrained(folder / "run" / "reward_model")
    assert model.config.num_labels == 1
    from rl_launcher.quickstart.tiny_model import character_tokenizer

    tokenizer = character_tokenizer()
    messages = [
        {"role": "user", "content": sample["prompt"]},
        {"role": "assistant", "content": sample["response"]},
    ]
    tokens = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
    with torch.no_grad():
        score = model(**tokens).logits.item()
    assert sample["reward"] == pytest.approx(score, abs=1e-4)
    AutoModelForCausalLM.from_pretrained(folder / "run" / "model")


def test_beside_a_reward_model_env_measures_and_does_not_teach(folder):
    summary = run_recipe(folder, *of_chain(folder))
    assert 0.0 <= summary["held_out_greedy_after"] <= 1.4  # of env; scores of the reward model are of any size
    measured = lines(folder / "run", "ppo")[0]["held_out_sampled"]
    assert measured * 5 * 2 == pytest.approx(round(measured * 5 * 2))  # two held-out prompts, a fifth of a whole number


@pytest.mark.parametrize("steps", [14, *(pytest.param(steps, marks=pytest.mark.slow) for steps in (2, 8, 13))])
def test_a_chain_that_is_stopped_anywhere_resumes_bit_for_bit(
    whole_chain, folder, curve, stop_after, monkeypatch, steps
):
    overrides = of_chain(folder)
    with monkeypatch.context() as stopped:
        stop_after(stopped, steps)
        with pytest.raises(RunStoppedError):
            run_recipe(folder, *overrides)
    resume(folder / "run")
    assert curve(folder / "run") == curve(whole_chain)
    for name in ("model", "reward_model"):
        files = [each / name / "model.safetensors" for each in (folder / "run", whole_chain)]
        assert files[0].read_bytes() == files[1].read_bytes()


def test_a_reward_model_alone_is_the_model_of_its_run(folder):
    alone = ["grpo=null", "sft.max_num_steps=2", "env=null", f"data.source={folder}/pairs.jsonl"]
    summary = run_recipe(folder, *alone, "reward_model={max_num_steps: 20, optimizer: {lr: 0.02}}")
    assert summary["held_out_pair_accuracy_after"] == 1.0
    AutoModelForSequenceClassification.from_pretrained(folder / "run" / "model")
    AutoModelForCausalLM.from_pretrained(folder / "run" / "policy")
    assert not (folder / "run" / "reward_model").exists()


def test_ppo_with_a_reward_function_needs_no_reward_model(folder):
    summary = run_recipe(folder, *CHAIN, "ppo.max_num_steps=4")
    assert summary["steps"] == 7
    assert not (folder / "run" / "reward_model").exists()


def test_kto_learns_from_single_responses_and_resumes_bit_for_bit(folder, curve, stop_after, monkeypatch):
    kto = "kto={max_num_steps: 12, batch_size: 16, optimizer: {lr: 0.01}}"
    changed = ["grpo=null", "sft.max_num_steps=2", "env=null", f"data.source={folder}/labelled.jsonl", kto]
    summary = run_recipe(folder, *changed, f"run_dir={folder}/whole")
    assert summary["held_out_margin_before"] == pytest.approx(0.0, abs=1e-5)
    assert summary["held_out_margin_after"] > 0.01
    assert lines(folder / "whole", "kto")[-1]["held_out_desirable_logratio"] > 0
    with monkeypatch.context() as stopped:
        stop_after(stopped, 7)
        with pytest.raises(RunStoppedError):
            run_recipe(folder, *changed)
    resume(folder / "run")
    assert curve(folder / "run") == curve(folder / "whole")


def test_orpo_separates_pairs_without_a_reference(folder):
    orpo = "orpo={max_num_steps: 12, batch_size: 16, odds_ratio_weight: 1.0, optimizer: {lr: 0.01}}"
    summary = run_recipe(folder, "grpo=null", "sft=null", "env=null", f"data.source={folder}/pairs.jsonl", orpo)
    logged = lines(folder / "run", "orpo")
    assert logged[-1]["held_out_log_odds_ratio"] > logged[0]["held_out_log_odds_ratio"]
    assert summary["held_out_pair_accuracy_after"] is not None


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["grpo=null", PPO, "env=null"], ["ppo learns from rewards", "add a stage reward_model"]),
        (["reward_model={max_num_steps: 2, optimizer: {lr: 0.1}}"], ["reward_model.data is missing", "pairs.jsonl"]),
        (["grpo=null", "{pairs}"], ["reward_model.data is for a recipe that goes on", "move its keys to data"]),
        (
            ["grpo=null", "reward_model={max_num_steps: 2, optimizer: {lr: 0.1}}"],
            ["env scores responses", "set env=null"],
        ),
        (
            ["grpo=null", "{pairs}", "dpo={pairs: data, max_num_steps: 2, optimizer: {lr: 0.1}}"],
            ["grpo or ppo", "dpo has no use for it"],
        ),
        (
            ["{pairs}", "grpo.async_grpo={max_staleness: 3}"],
            ["grpo.async_grpo", "reward model is on the ranks that train"],
        ),
        (
            ["grpo=null", PPO, "ppo.critic.start_from=reward_model"],
            ["no stage reward_model", "ppo.critic.start_from=policy"],
        ),
        (["grpo=null", PPO, "{pairs}", "ppo.max_turns=2"], ["ppo.max_turns=2", "the reward model ends every"]),
        (["grpo=null", PPO, "policy.dtensor_cfg.lora_cfg={rank: 2}"], ["ppo train", "lora_cfg"]),
        (
            ["grpo=null", PPO, "ppo.critic.optimizer.warmup_steps=8"],
            ["ppo.critic.optimizer.warmup_steps=8", "set ppo.critic.optimizer.warmup_steps=4"],
        ),
        (
            ["{pairs}", "reward_model.objective=regression"],
            ["objective=regression learns from scored responses", "bradley-terry"],
        ),
        (["grpo=null", PPO, "ppo.objective={advantage: {baseline: group_mean}}"], ["the critic compares"]),
    ],
)
def test_what_means_nothing_together_is_refused_with_the_keys(folder, overrides, said):
    pairs = PAIRS.format(folder=folder, steps=2)
    with pytest.raises(RecipeError) as refused:
        load_recipe(
            folder / "recipe.yaml", schema=Recipe, overrides=[each.replace("{pairs}", pairs) for each in overrides]
        )
    for words in said:
        assert words in str(refused.value)


def test_a_file_of_pairs_that_is_missing_is_refused_by_its_own_key(folder):
    from rl_launcher.checks import preflight

    Path(folder / "pairs.jsonl").rename(folder / "pair.jsonl")
    recipe = load_recipe(folder / "recipe.yaml", schema=Recipe, overrides=of_chain(folder)).value
    with pytest.raises(ValueError, match=r"reward_model.data.source=.*did you mean .*pair.jsonl"):
        preflight.check_files(recipe, new_run=True)

"""How responses are sampled in training and in evaluation, on which sets they are measured, and when a stage ends."""

import json

import pytest

from rl_launcher.build.build import build
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import RecipeError, load_recipe, reference
from rl_launcher.run import measure, run
from rl_launcher.run.evaluate import Evaluator
from rl_launcher.schema import Recipe
from rl_observe.glossary import metric_of

RECOMPUTED = "grpo.objective.ratio.proximal=recomputed"
SHORT = ["sft.max_num_steps=2", "grpo.max_num_steps=2", "evaluation.every=2"]


@pytest.fixture
def other_sets(tmp_path):
    """Two files of prompts that the recipe does not train on, and overrides that measure on them."""
    for name, digits in (("easy", "12"), ("hard", "345")):
        rows = [{"question": f"{digit}*1=", "answer": digit} for digit in digits]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return [
        f"evaluation.sets.easy={{source: {tmp_path}/easy.jsonl, columns: {{prompt: question}}}}",
        f"evaluation.sets.hard={{source: {tmp_path}/hard.jsonl, columns: {{prompt: question}}, samples_per_prompt: 4}}",
    ]


def load(recipe, *overrides):
    return load_recipe(recipe, schema=Recipe, overrides=overrides)


def lines(folder, stage):
    logged = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert not {name for line in logged for name in line if metric_of(name) is None} - {"stage", "step", "time_s"}
    return [line for line in logged if line["stage"] == stage]


def test_every_setting_of_the_sampling_reaches_the_engine(recipe):
    given = {"top_p": 0.9, "top_k": 20, "min_p": 0.05, "stop": ["8"], "stop_token_ids": [7]}
    changed = [f"policy.generation.{name}={json.dumps(value)}" for name, value in given.items()]
    how = load(recipe, *changed, RECOMPUTED).value.policy.generation.sampling()
    assert (how.top_p, how.top_k, how.min_p, how.stop, how.stop_token_ids) == (0.9, 20, 0.05, ("8",), (7,))


def test_a_response_ends_at_its_stop_string_and_at_its_stop_tokens(recipe):
    loaded = load(recipe, "policy.generation.stop=['1', '2', '3', '4']", "policy.generation.stop_token_ids=[10]").value
    parts = build(loaded)
    try:
        parts.weight_sync(version=0)
        measured = Evaluator(parts, loaded).both().sampled.rollouts
        five = parts.tokenizer.convert_tokens_to_ids("5")
    finally:
        parts.close()
    assert five == 10
    assert 10 in parts.data.chat.stop_token_ids
    for answer in measured.answers:
        assert not set(answer[:-1]) & set("12345"), answer


def test_no_response_ends_before_its_fewest_tokens(recipe):
    fewest, most = "policy.generation.min_new_tokens=4", "policy.generation.max_new_tokens=6"
    with pytest.raises(RecipeError, match=r"min_new_tokens=4.*set grpo.objective.ratio.proximal=recomputed"):
        load(recipe, fewest, most)
    with pytest.raises(RecipeError, match=r"min_new_tokens must be at most max_new_tokens=3"):
        load(recipe, fewest, "policy.generation.max_new_tokens=3", RECOMPUTED)
    with pytest.raises(RecipeError, match=r"evaluation.max_new_tokens=2 is less than .*min_new_tokens=4"):
        load(recipe, fewest, most, "evaluation.max_new_tokens=2", RECOMPUTED)
    loaded = load(recipe, fewest, most, RECOMPUTED).value
    parts = build(loaded)
    try:
        parts.weight_sync(version=0)
        rollouts = Evaluator(parts, loaded).both().sampled.rollouts
    finally:
        parts.close()
    assert int(rollouts.response.sum(dim=1).min()) >= 4


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=4", "min_p=0.1"])
def test_cut_distributions_are_refused_where_the_ratio_would_compare_them_with_whole_ones(recipe, cut):
    with pytest.raises(RecipeError, match=r"set grpo.objective.ratio.proximal=recomputed, or cut for evaluation alone"):
        load(recipe, f"policy.generation.{cut}")
    load(recipe, f"policy.generation.{cut}", RECOMPUTED)
    load(recipe, f"evaluation.{cut}")


@pytest.mark.parametrize("wrong", ["top_p=0", "top_k=-1", "min_p=2", "stop=['']"])
def test_a_setting_that_no_engine_takes_is_refused_by_its_name(recipe, wrong):
    with pytest.raises(RecipeError, match=wrong.partition("=")[0]):
        load(recipe, f"policy.generation.{wrong}")


def test_evaluation_has_a_sampling_of_its_own(recipe):
    own = ["evaluation.temperature=0.3", "evaluation.top_k=1", "evaluation.max_new_tokens=2", "evaluation.every=0"]
    loaded = load(recipe, *own, "evaluation.samples_per_prompt=3").value
    parts = build(loaded)
    try:
        parts.weight_sync(version=0)
        evaluator = Evaluator(parts, loaded)
        sampled, greedy = evaluator.both().sampled.rollouts, evaluator.both().greedy.rollouts
    finally:
        parts.close()
    assert int(sampled.response.sum(dim=1).max()) <= 2
    assert [*greedy.answers] == [*sampled.answers[::3]]  # the likeliest token alone is greedy


def test_while_training_samples_can_be_measured_in_the_place_of_greedy_responses(recipe, tmp_path):
    sampled = ["evaluation.while_training=sampled", "evaluation.greedy=false", "evaluation.samples_per_prompt=2"]
    summary = run(load(recipe, *SHORT, *sampled, "evaluation.pass_at=[1, 2]"))
    (measured,) = [line for line in lines(tmp_path, "grpo") if line["step"] == 2]
    assert {"held_out_sampled", "held_out_pass@2"} <= measured.keys()
    assert "held_out_greedy" not in measured
    assert (summary["held_out_greedy_after"], summary["held_out_sampled_after"] is None) == (None, False)
    with pytest.raises(RecipeError, match=r"evaluation.greedy=false with while_training=sampled never measures it"):
        load(recipe, *sampled, "checkpointing.keep_top_k=1")


def test_further_sets_are_measured_before_during_and_after_training(recipe, tmp_path, other_sets):
    run(load(recipe, *SHORT, *other_sets))
    before, during = lines(tmp_path, "grpo")
    assert before.keys() >= {f"validation/{name}/{how}" for name in ("easy", "hard") for how in ("sampled", "greedy")}
    assert during.keys() >= {"validation/easy/greedy", "validation/hard/greedy", "held_out_greedy"}
    assert "validation/easy/sampled" not in during


def test_evaluate_measures_further_sets(recipe, other_sets):
    measured = measure(load(recipe, *other_sets))
    assert measured.sets.keys() == {"easy", "hard"}
    assert len(measured.sets["hard"].sampled.rollouts.answers) == 3 * 4
    assert "\nhard\n" in measured.text()
    assert "validation/easy/sampled" in measured.figures()


def test_a_set_that_is_also_trained_on_is_refused_by_the_row(recipe, tmp_path):
    rows = [{"prompt": f"{digit}+0=", "answer": str(digit)} for digit in range(8)]
    (tmp_path / "same.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"same.jsonl:\d+: the prompt .* of evaluation.sets.same is also trained on"):
        build(load(recipe, f"evaluation.sets.same={{source: {tmp_path}/same.jsonl}}").value)


def test_a_set_without_a_reward_is_refused(recipe, tmp_path, other_sets):
    with pytest.raises(Refusal, match=r"evaluation.sets names easy, hard, whose responses need a reward"):
        build(load(recipe, "grpo=null", "env=null", *other_sets).value)


def test_a_wrong_key_of_a_set_is_refused_with_the_nearest_one(recipe, other_sets):
    with pytest.raises(RecipeError) as refused:
        load(recipe, *other_sets, "evaluation.sets.easy.sorce=x")
    assert "evaluation.sets.easy.sorce" in str(refused.value)
    assert "| `evaluation.sets.NAME.source` | `str` | required |" in reference(Recipe)


def test_a_stage_ends_after_its_epochs(recipe, tmp_path):
    # 8 prompts, of which 2 are held out: 3 passes over 6 rows in batches of 4 are 4 steps; 2 passes of 4 prompts
    # are 3 batches of rollouts with 2 steps each.
    summary = run(
        load(recipe, "sft.max_num_epochs=3", "sft.max_num_steps=100", "grpo.max_num_epochs=2", "evaluation.every=0")
    )
    assert [line["step"] for line in lines(tmp_path, "sft")][-1] == 4
    assert [line["step"] for line in lines(tmp_path, "grpo")][-1] == 6
    assert summary["steps"] == 10


def test_epochs_alone_are_enough(recipe, tmp_path):
    (tmp_path / "alone.yaml").write_text(recipe.read_text().replace("  max_num_steps: 8\n", "  max_num_epochs: 1\n"))
    summary = run(load(tmp_path / "alone.yaml", "sft=null", "evaluation.every=0"))
    assert summary["steps"] == 2


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["sft.max_num_epochs=0"], "sft.max_num_epochs=0.0 must be null or > 0"),
        (
            ["grpo=null", "dpo={max_num_epochs: 1, max_num_steps: 2, optimizer: {lr: 0.1}}"],
            "pairs=sampled makes its own",
        ),
    ],
)
def test_epochs_that_mean_nothing_are_refused(recipe, overrides, said):
    with pytest.raises(RecipeError) as refused:
        load(recipe, *overrides)
    assert said in str(refused.value)


def test_a_warm_up_longer_than_the_epochs_is_refused(recipe):
    with pytest.raises(
        Refusal, match=r"sft.optimizer.warmup_steps=9 must be less than .*sft.max_num_epochs set these steps"
    ):
        run(load(recipe, "sft.max_num_epochs=3", "sft.max_num_steps=100", "sft.optimizer.warmup_steps=9"))

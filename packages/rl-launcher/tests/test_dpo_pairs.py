"""DPO on given pairs: read, compared with the reference once, learnt, measured on held-out ones, gone on with."""

import json
import textwrap
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from rl_algorithms import dpo
from rl_algorithms.data import PreferenceRow, read_rows, split_held_out
from rl_algorithms.preferences.dpo_pairs import DPOPairs
from rl_algorithms.preferences.pairs import pairs_from_rows
from rl_launcher.build.build import build
from rl_launcher.checks.explain import explain
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import RecipeError, load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe

RECIPE = """
    run_dir: {folder}/run
    cpu_threads: 1
    policy:
      model_name: {folder}/model.py:build
      generation: {{max_new_tokens: 4, temperature: 0.7}}
    data: {{source: {folder}/pairs.jsonl, held_out_share: 0.25}}
    evaluation: {{every: 3, samples: 2}}
    dpo:
      pairs: data
      max_num_steps: 8
      batch_size: 4
      beta: 0.5
      optimizer: {{lr: 0.01}}
"""
PAIRS = [{"prompt": f"{digit}+0=", "chosen": "11", "rejected": "2"} for digit in range(10)] + [
    {"prompt": "0+0=", "chosen": "1", "rejected": "22"}  # a second pair of a prompt that is there
]


def write_pairs(folder, rows, name="pairs.jsonl"):
    (folder / name).write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def preferences(recipe, tmp_path):
    """The path of a recipe of DPO alone, without a reward, whose pairs lie beside it."""
    write_pairs(tmp_path, PAIRS)
    recipe.write_text(textwrap.dedent(RECIPE).format(folder=tmp_path))
    return recipe


def load(file, *overrides):
    return load_recipe(file, schema=Recipe, overrides=overrides)


def built(file, *overrides):
    parts = build(load(file, *overrides).value)
    parts.close()
    return parts


def logged(folder, name, stage="dpo"):
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line[name] for line in lines if line["stage"] == stage and name in line}


def test_the_policy_comes_to_prefer_held_out_answers_of_the_chosen_kind(preferences, tmp_path):
    summary = run(load(preferences))
    accuracy, margin = (logged(tmp_path, f"held_out_{name}") for name in ("pair_accuracy", "margin"))
    assert [*accuracy] == [*margin] == [0, 3, 6, 8]
    assert (accuracy[0], margin[0]) == (0.0, 0.0)  # the policy is its own reference
    assert accuracy[8] == 1.0
    assert margin[8] > margin[3] > 0.0
    assert summary["steps"] == summary["refit"]["version"] == 8
    assert (summary["held_out_pair_accuracy_before"], summary["held_out_pair_accuracy_after"]) == (0.0, 1.0)
    assert (summary["held_out_margin_before"], summary["held_out_margin_after"]) == (0.0, margin[8])
    report = (tmp_path / "run" / "report.html").read_text()
    assert "made the chosen response gain on the rejected one in <strong>100" in report
    assert "of 2 held-out pairs" in report


def test_with_a_reward_answers_to_held_out_prompts_are_judged_too(preferences, tmp_path):
    summary = run(load(preferences, f"env.reward={tmp_path}/reward.py:score", "dpo.max_num_steps=3"))
    assert summary["held_out_greedy_after"] is not None  # by a reward that asks for `answer`: the chosen one
    assert summary["held_out_pair_accuracy_after"] is not None
    assert [*logged(tmp_path, "held_out_greedy")] == [0, 3]


SIMPO = ["dpo.loss=simpo", "dpo.beta=2.0"]


@pytest.mark.parametrize(
    ("steps", "overrides"),
    [(8, []), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, []), (2, SIMPO), (8, SIMPO)))],
)
def test_a_run_that_goes_on_is_the_uninterrupted_run_bit_for_bit(
    preferences, tmp_path, monkeypatch, curve, stop_after, newest, overrides, steps
):
    whole, parts = ([*overrides, f"run_dir={tmp_path}/{name}"] for name in ("whole", "parts"))
    run(load(preferences, *whole))
    with monkeypatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(RunStoppedError, match="rl-launcher resume"):
            run(load(preferences, *parts))
    kept = {name for name in load_file(newest(tmp_path / "parts") / "progress.safetensors") if name.startswith("kept/")}
    assert kept == (set() if overrides else {"kept/train/logp_ref", "kept/held_out/logp_ref"})  # and no tokens
    resume(tmp_path / "parts")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")
    weights = [load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parts")]
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_given_answers_are_read_at_temperature_1_whatever_samples_have(preferences, tmp_path):
    for temperature in (0.7, 1.0):
        asked = f"policy.generation.temperature={temperature}"
        run(load(preferences, "dpo.max_num_steps=3", asked, f"run_dir={tmp_path}/{temperature}/run"))
    margins = [logged(tmp_path / str(temperature), "held_out_margin") for temperature in (0.7, 1.0)]
    assert margins[0] == margins[1]
    assert margins[0][3] > 0


def given(parts, tensors=()):
    return DPOPairs.given(parts.data.pairs.train, parts.data.pairs.held_out, max_held_out=256, tensors=dict(tensors))


def test_the_examples_are_those_of_rl_algorithms(preferences, tmp_path):
    recipe = load(preferences).value
    parts = build(recipe)
    try:
        rows = split_held_out(read_rows(tmp_path / "pairs.jsonl", kind=PreferenceRow), share=0.25, seed=0)
        theirs = [dpo.prepare(pairs_from_rows(part, parts.data.chat)) for part in rows]
        parts.policy.start_training(recipe.dpo.optimizer, num_steps=8)
        theirs = [dpo.with_reference(parts.policy, examples) for examples in theirs]
        compared = given(parts).compared(parts.policy)
        again = given(parts, compared.tensors(given=True))
    finally:
        parts.close()
    for pairs in (compared, again):
        for ours, expected in zip((pairs.train, pairs.held_out), theirs, strict=True):
            for name in ("tokens", "lengths", "trainable", "logp_ref"):
                torch.testing.assert_close(getattr(ours, name), getattr(expected, name), rtol=0, atol=0)


def test_a_reference_that_is_asked_in_pieces_says_the_same_and_signals_are_heard_between(preferences):
    recipe = load(preferences).value
    parts = build(recipe)
    heard = []
    try:
        parts.policy.start_training(recipe.dpo.optimizer, num_steps=8)
        found = given(parts)
        whole = found.compared(parts.policy)
        pieces = found.compared(parts.policy, between=lambda: heard.append(1), rows_at_once=4)
    finally:
        parts.close()
    torch.testing.assert_close(pieces.train.logp_ref, whole.train.logp_ref)
    count = [-(-len(examples.tokens) // 4) for examples in (found.train, found.held_out)]
    assert len(heard) == sum(count) > 2


def as_messages(row):
    asked = [{"role": "user", "content": row["prompt"]}]
    return {
        "prompt": asked,
        **{name: [{"role": "assistant", "content": row[name]}] for name in ("chosen", "rejected")},
    }


def with_the_prompt_inside(row):
    messages = as_messages(row)
    return {name: [*messages["prompt"], *messages[name]] for name in ("chosen", "rejected")}


def under_other_names(row):
    return {"question": row["prompt"], "meta": {"better": row["chosen"]}, "worse": row["rejected"]}


FORMS = {
    "messages": (as_messages, []),
    "messages that hold the prompt": (with_the_prompt_inside, []),
    "other names": (
        under_other_names,
        ["data.columns={prompt: question, chosen: meta.better, rejected: worse}"],
    ),
}


@pytest.mark.parametrize(("change", "overrides"), FORMS.values(), ids=FORMS)
def test_pairs_in_any_form_are_the_same_pairs(preferences, tmp_path, change, overrides):
    expected = built(preferences)
    write_pairs(tmp_path, map(change, PAIRS), "theirs.jsonl")
    found = built(preferences, f"data.source={tmp_path}/theirs.jsonl", *overrides)
    assert found.data.pairs.digest() == expected.data.pairs.digest()
    assert [prompt.tokens for prompt in found.data.held_out] == [prompt.tokens for prompt in expected.data.held_out]
    assert len({prompt.tokens for prompt in found.data.held_out}) == len(found.data.held_out)


def test_sft_before_it_imitates_the_chosen_answers(preferences, tmp_path):
    sft = "sft={max_num_steps: 3, batch_size: 4, optimizer: {lr: 0.01}}"
    parts = built(preferences, sft)
    learnt = [
        [token for token, mark in zip(d.tokens, d.trainable, strict=True) if mark] for d in parts.data.demonstrations
    ]
    chosen = parts.data.pairs.train
    expected = [chosen.tokens[row][chosen.trainable[row]].tolist() for row in range(0, len(chosen.tokens), 2)]
    assert learnt == expected
    summary = run(load(preferences, sft))
    assert summary["steps"] == 11
    assert logged(tmp_path, "held_out_pair_accuracy")[0] == 0.0  # of the policy that sft left
    assert [*logged(tmp_path, "held_out_loss", "sft")] == [3]


def test_a_loss_without_a_reference_asks_for_none(preferences, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the reference was asked")

    monkeypatch.setattr(dpo, "with_reference", refuse)
    run(load(preferences, "dpo.loss=simpo", "dpo.beta=2.0", "dpo.max_num_steps=6"))
    accuracy = logged(tmp_path, "held_out_pair_accuracy")
    assert accuracy[6] >= accuracy[0]
    with pytest.raises(RunStoppedError, match="the reference was asked"):
        run(load(preferences, f"run_dir={tmp_path}/other"))


BAD = {
    "a missing answer": ({"prompt": "1+0=", "chosen": "1"}, r"pairs\.jsonl:12: field 'rejected' is missing"),
    "the same answer": (
        {"prompt": "1+0=", "chosen": "1", "rejected": "1"},
        r"pairs\.jsonl:12: field 'chosen' is the same as the rejected one",
    ),
    "the same tokens": (
        {"prompt": "1+0=", "chosen": [{"role": "assistant", "content": "1"}], "rejected": "1"},
        r"pairs\.jsonl:12: 'chosen' and 'rejected' are the same tokens",
    ),
    "no text": (
        {"prompt": "1+0=", "chosen": 1, "rejected": "2"},
        r"pairs\.jsonl:12: field 'chosen' must be text or a list of messages",
    ),
    "too long": (
        {"prompt": "1+0=", "chosen": "1", "rejected": "2" * 40},
        r"pairs\.jsonl:12: field 'rejected': prompt and response have \d+ tokens, and the model's context is 32",
    ),
}


@pytest.mark.parametrize(("row", "said"), BAD.values(), ids=BAD)
def test_a_bad_row_is_named_before_anything_is_trained(preferences, tmp_path, row, said):
    write_pairs(tmp_path, [*PAIRS, row])
    with pytest.raises(ValueError, match=said):
        run(load(preferences, "data.held_out_share=0.1"))
    assert not (tmp_path / "run").exists()


def test_bad_rows_are_left_out_where_the_recipe_says_so_and_the_others_are_those_of_a_file_without_them(
    preferences, tmp_path
):
    write_pairs(tmp_path, [*PAIRS, *(row for row, _ in BAD.values())])
    summary = run(load(preferences, "data.on_bad_row=skip", "dpo.max_num_steps=1", f"run_dir={tmp_path}/skipped"))
    assert summary["rows_skipped"] == len(BAD)
    samples = (tmp_path / "skipped" / "samples.jsonl").read_text()
    write_pairs(tmp_path, PAIRS)
    assert run(load(preferences, "dpo.max_num_steps=1"))["rows_skipped"] == 0
    assert (tmp_path / "run" / "samples.jsonl").read_text() == samples


def test_a_run_does_not_go_on_with_other_pairs(preferences, tmp_path, monkeypatch, stop_after):
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RunStoppedError):
            run(load(preferences))
    write_pairs(tmp_path, [{**row, "rejected": "3"} for row in PAIRS])
    with pytest.raises(Refusal, match="the data have changed since the run"):
        resume(tmp_path / "run")


@pytest.mark.parametrize("key", ["num_prompts", "num_generations_per_prompt", "pairs_per_prompt"])
def test_keys_of_sampling_are_refused_beside_given_pairs(preferences, key):
    with pytest.raises(RecipeError, match=rf"{key}=6 concerns responses sampled to make pairs, .* leave {key} out"):
        load(preferences, f"dpo.{key}=6")
    assert getattr(load(preferences, f"dpo.{key}=6", "dpo.pairs=sampled", "env.reward=a.py:b").value.dpo, key) == 6


def test_pairs_of_a_function_and_sampled_pairs_without_a_reward_are_refused(preferences):
    with pytest.raises(
        Refusal, match=r"returned Dataset, and must return a rl_algorithms.data.PreferenceData, which dpo learns from"
    ):
        run(load(preferences, "data.source=rl_launcher.quickstart.sort_digits:dataset", "data.held_out_share=null"))
    with pytest.raises(RecipeError, match=r"dpo\.pairs=data"):
        load(preferences, "dpo.pairs=sampled")


ONLINE = ["dpo.pairs=online", "dpo.num_prompts=4", "dpo.num_generations_per_prompt=4", "dpo.max_num_steps=4"]


@pytest.fixture
def online(preferences, tmp_path):
    """The same recipe, whose pairs are sampled before each step and judged by length."""
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"prompt": f"{digit}+0="}) for digit in range(8)))
    (tmp_path / "length.py").write_text("def score(completions, **_): return [len(each) / 4 for each in completions]\n")
    text = preferences.read_text().replace("      batch_size: 4\n", "").replace("  batch_size: 4\n", "")
    preferences.write_text(text.replace("pairs.jsonl", "rows.jsonl"))
    return [preferences, *ONLINE, f"env.reward={tmp_path}/length.py:score"]


def test_online_pairs_are_sampled_before_each_step_and_go_on_bit_for_bit(
    online, tmp_path, monkeypatch, curve, stop_after, newest
):
    file, *overrides = online
    assert load(file, *overrides).value.dpo.keeps_reference
    run(load(file, *overrides, f"run_dir={tmp_path}/whole"))
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["stage"] == "dpo" and "pairs" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["staleness_max"] == 0.0 for line in steps)
    assert sum(line["pairs"] for line in steps) > 0
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RunStoppedError):
            run(load(file, *overrides, f"run_dir={tmp_path}/parts"))
    resume(tmp_path / "parts")
    assert curve(tmp_path / "parts") == curve(tmp_path / "whole")


def test_online_pairs_have_no_batch_size_and_need_a_reward(online):
    file, *overrides = online
    with pytest.raises(RecipeError, match=r"batch_size=5 .* leave batch_size out"):
        load(file, *overrides, "dpo.batch_size=5")
    with pytest.raises(RecipeError, match=r"dpo\.pairs=data takes given pairs"):
        load(file, *ONLINE)


def test_they_are_explained(preferences):
    text = explain(load(preferences)).text()
    assert "pairs to train on" in text
    assert "log sigmoid(0.5 delta)" in text


def test_the_digest_is_of_tokens_and_of_which_are_answers(preferences):
    pairs = built(preferences).data.pairs
    other = replace(pairs, train=replace(pairs.train, trainable=~pairs.train.trainable))
    assert other.digest() != pairs.digest() == replace(pairs).digest()

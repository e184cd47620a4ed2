"""Claims about recorded steps of a run: they hold what was trained on, bit for bit, also of a run that failed."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from rl_algorithms import stepping
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.run.replay_step import recompute
from rl_launcher.schema import Recipe
from rl_observe import RunDirectory, read_metrics
from rl_observe.diagnose import diagnose
from rl_observe.replay import replay


def start(recipe, *overrides):
    resolved = load_recipe(recipe, schema=Recipe, overrides=["sft=null", "evaluation.every=0", *overrides])
    return run(resolved), RunDirectory(recipe.parent / "run")


def test_a_grpo_run_records_its_last_steps_as_they_were_trained_on(recipe):
    _, directory = start(recipe, "logger.recorded_steps.last=3")
    assert [*directory.steps] == [4, 6, 8]
    logged = {row["step"]: row for row in read_metrics(directory) if row["stage"] == "grpo"}
    for step, each in directory.steps.items():
        assert each.columns["rewards"].mean() == pytest.approx(logged[step]["reward"])
        assert [update["step"] for update in each.updates] == [step - 1, step]
        losses = [update["loss"] for update in each.updates]
        assert sum(losses) / 2 == pytest.approx(logged[step]["loss"], abs=1e-6)
        for number, loss in enumerate(losses):
            rows = each.columns["update"] == number
            assert np.nansum(each.padded("loss")[rows]) == pytest.approx(loss, abs=1e-6)
        # The first update is taken by the weights that sampled: engine and trainer agree.
        gaps = (each.padded("logp") - each.padded("logp_old"))[each.columns["update"] == 0]
        assert np.nanmax(np.abs(gaps)) < 1e-4
        assert each.version == step - 2
        versions = each.padded("versions")
        assert (versions[each.response] == each.version).all()
        assert {line["source"] for line in each.shared} <= {f"{recipe.parent}/rows.jsonl:{n}" for n in range(1, 9)}
        assert each.data["refit"]["digest"]


def test_nothing_is_recorded_where_the_recipe_keeps_no_step(recipe):
    _, directory = start(recipe, "logger.recorded_steps={last: 0, around_events: 0}", "grpo.max_num_steps=2")
    assert not directory.recorded_steps.exists()


def test_the_batch_that_ended_a_run_is_recorded_with_the_error_and_the_tokens(recipe, monkeypatch):
    """The weights become NaN within the third batch: its second step is refused, and its bundle says why."""
    real, calls = stepping.finite_step, []

    def break_weights(policy, sums):
        norm = real(policy, sums)
        calls.append(norm)
        if len(calls) == 5:
            with torch.no_grad():
                next(iter(policy.model.parameters())).fill_(float("nan"))
        return norm

    monkeypatch.setattr("rl_algorithms.grpo.finite_step", break_weights)
    with pytest.raises(RunStoppedError):
        start(recipe)
    directory = RunDirectory(recipe.parent / "run")
    steps, remarks = directory.steps.readable()
    assert remarks == []
    assert "error" in steps[-1].data or any("error" in update for update in steps[-1].updates)


def test_a_resumed_run_records_the_same_steps(recipe, tmp_path, stop_after, monkeypatch):
    _, whole = start(recipe, f"run_dir={tmp_path}/whole")
    whole = RunDirectory(tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 2)
        with pytest.raises(RunStoppedError):
            start(recipe)
    resume(recipe.parent / "run")
    resumed = RunDirectory(recipe.parent / "run")
    assert [*resumed.steps] == [*whole.steps]
    for step, each in whole.steps.items():
        other = resumed.steps[step]
        for name, column in each.columns.items():
            assert np.array_equal(column, other.columns[name], equal_nan=True), (step, name)
        assert json.dumps(each.updates) == json.dumps(other.updates)


def test_a_clean_step_is_replayed_bit_for_bit_and_nothing_is_found_in_it(recipe):
    _, directory = start(recipe, "checkpointing={save_period: 4, ft_keep_latest_k: 2}")
    assert [each.cause for each in diagnose(directory).findings] == []
    step = directory.steps[6]  # it began with the weights of version 4, of which there is a checkpoint
    with recompute(directory, step) as stages:
        found = replay(step, stages)
    assert {each.stage: each.outcome for each in found.results} == dict.fromkeys(
        ("prompt", "reward", "advantage", "logp_old", "logp", "loss", "gradient"), "same"
    )


def test_a_step_whose_weights_are_gone_says_so_and_replays_the_rest(recipe):
    _, directory = start(recipe)
    step = directory.steps[8]
    rewards = step.columns["rewards"].copy()
    rewards[3] += 1.0  # as if another reward function had given it
    step = dataclasses.replace(step, columns={**step.columns, "rewards": rewards})
    with recompute(directory, step) as stages:
        replayed = replay(step, stages)
    found = {each.stage: each for each in replayed.results}
    assert found["prompt"].outcome == "same"
    assert "version 6" in found["logp"].reason
    first = replayed.first_difference
    assert (first.stage, first.row, first.recorded - first.recomputed) == ("reward", 3, pytest.approx(1.0))


def test_a_run_of_another_program_is_replayed_as_far_as_no_model_is_needed(recipe):
    _, directory = start(recipe)
    directory.origins.unlink()
    directory.recipe.write_text("learning_rate: 0.1\n")
    step = directory.steps[8]
    with recompute(directory, step) as stages:
        found = {each.stage: each.outcome for each in replay(step, stages).results}
    assert found["advantage"] == "same"
    assert found["logp"] == "not replayed"
    with pytest.raises(Refusal, match="another program"), recompute(directory, step, weights=directory.path):
        pass


def test_an_advantage_of_greedy_responses_says_that_they_are_gone_and_the_rest_is_replayed(recipe):
    _, directory = start(
        recipe, "grpo.objective={preset: remax}", "grpo.max_num_steps=2", "grpo.steps_per_generation=1"
    )
    step = directory.steps[1]
    with recompute(directory, step) as stages:
        found = {each.stage: each for each in replay(step, stages).results}
    assert {found[stage].outcome for stage in ("prompt", "reward", "logp_old")} == {"same"}
    assert "greedy responses" in found["advantage"].reason


# -- Every stage ---------------------------------------------------------------------------------------------------

PAIRS = [{"prompt": f"{digit}+0=", "chosen": str(digit), "rejected": str(9 - digit)} for digit in range(10)]
LABELLED = [{"prompt": f"{digit}+0=", "completion": str(digit), "label": digit % 2 == 0} for digit in range(10)]
BATCHES = "max_num_steps: 4, steps_per_generation: 2, num_prompts: 4, optimizer: {lr: 0.01}"
STAGES = {
    "sft": ([], "sft={max_num_steps: 4, batch_size: 4, optimizer: {lr: 0.01}}"),
    "ppo": (
        [],
        "ppo={num_generations_per_prompt: 2, critic: {optimizer: {lr: 0.01}}, {batches}}",
    ),
    "distill": (
        [],
        "distill={k: 8, teacher: {model_name: '{folder}/model.py:build'}, {batches}}",
    ),
    "dpo, sampled": (
        [],
        "dpo={max_num_steps: 4, batch_size: 4, num_prompts: 6, pairs: sampled, optimizer: {lr: 0.01}}",
    ),
    "dpo, online": ([], "dpo={max_num_steps: 4, num_prompts: 4, pairs: online, optimizer: {lr: 0.01}}"),
    "dpo, given": (PAIRS, "dpo={max_num_steps: 4, batch_size: 4, pairs: data, optimizer: {lr: 0.01}}"),
    "orpo": (PAIRS, "orpo={max_num_steps: 4, batch_size: 4, optimizer: {lr: 0.01}}"),
    "kto": (LABELLED, "kto={max_num_steps: 4, batch_size: 4, optimizer: {lr: 0.01}}"),
    "reward_model": (PAIRS, "reward_model={max_num_steps: 4, batch_size: 4, optimizer: {lr: 0.01}}"),
}
SAMPLED = {"prompt", "reward", "advantage", "logp_old", "logp", "loss", "gradient"}
GIVEN = {"prompt", "logp", "loss", "gradient"}
REPLAYED = {
    "sft": GIVEN, "orpo": GIVEN, "kto": GIVEN, "dpo, given": GIVEN, "dpo, sampled": GIVEN - {"prompt"},
    "dpo, online": GIVEN - {"prompt"}, "ppo": SAMPLED, "distill": SAMPLED - {"advantage"},
}  # fmt: skip
"""Which stages of a step are computed again."""


@pytest.mark.parametrize("name", STAGES)
def test_steps_of_every_stage_are_recorded_clean_and_replayed_bit_for_bit(recipe, name):
    """Nothing is found in them; what cannot be computed again says why, and the rest has the recorded bits."""
    rows, stage = STAGES[name]
    keys = ["grpo=null", stage.replace("{folder}", str(recipe.parent)).replace("{batches}", BATCHES)]
    if rows:
        (recipe.parent / "given.jsonl").write_text("\n".join(map(json.dumps, rows)))
        keys += ["env=null", f"data.source={recipe.parent}/given.jsonl"]
    overrides = ["evaluation.every=0", "checkpointing={save_period: 2, ft_keep_latest_k: 4}", *keys]
    run(load_recipe(recipe, schema=Recipe, overrides=["sft=null", *overrides] if name != "sft" else overrides))
    directory = RunDirectory(recipe.parent / "run")
    steps = directory.steps
    assert steps.stage == name.split(",")[0]
    assert [*steps] == ([2, 4] if name in {"ppo", "distill"} else [1, 2, 3, 4])
    logged = {row["step"]: row for row in read_metrics(directory) if row["stage"] == steps.stage}
    for number, step in steps.items():
        losses = [update["loss"] for update in step.updates]
        assert sum(losses) / len(losses) == pytest.approx(logged[number]["loss"], rel=1e-5, abs=1e-7)
        if step.has("loss"):
            assert np.nansum(step.padded("loss")) == pytest.approx(sum(losses), rel=1e-4, abs=1e-6)
        if name != "reward_model":
            assert np.isfinite(step.padded("logp")[step.trainable]).any()
        assert step.data["layers"]
    assert [str(each) for each in diagnose(directory).findings] == []
    if name == "reward_model":
        with pytest.raises(Refusal, match="reward_model"), recompute(directory, steps[4]):
            pass
        return
    step = steps[4] if len(steps) == 2 else steps[3]  # there is a checkpoint of the weights before it
    with recompute(directory, step) as stages:
        found = replay(step, stages)
    outcomes = {each.stage: each.outcome for each in found.results}
    assert {stage for stage, outcome in outcomes.items() if outcome == "same"} == REPLAYED[name], found.results
    assert all(each.reason for each in found.results if each.outcome == "not replayed")


def test_with_weights_that_are_not_those_of_the_step_the_layer_is_named(recipe):
    """The step's own weights agree; one parameter of the second of three layers is changed, and that layer is named."""
    model = recipe.parent / "model.py"
    model.write_text(model.read_text().replace("num_hidden_layers=1", "num_hidden_layers=3"))
    _, directory = start(recipe, "grpo.max_num_steps=2")
    step = directory.steps[2]
    namespace = {}
    exec(model.read_text(), namespace)
    built, tokenizer = namespace["build"](0)
    outcomes = []
    for factor in (1.0, 300.0):
        with torch.no_grad():
            built.model.layers[1].mlp.down_proj.weight.mul_(factor)
        folder = recipe.parent / f"weights-{factor}"
        built.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        with recompute(directory, step, weights=folder) as stages:
            outcomes.append({each.stage: each for each in replay(step, stages).results}["logp"])
    assert [each.outcome for each in outcomes] == ["same", "differs"]
    assert outcomes[1].layer == "model.layers.1"
    assert (outcomes[1].row, outcomes[1].token) != (None, None)
    assert "in layer model.layers.1" in str(outcomes[1])

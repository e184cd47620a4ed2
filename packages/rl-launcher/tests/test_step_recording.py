"""Claims about recorded steps of a run: they hold what was trained on, bit for bit, also of a run that failed."""

import dataclasses
import json

import numpy as np
import pytest
import torch

from rl_algorithms import stepping
from rl_launcher.errors import RunStoppedError
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

"""Replay agrees with a step that was computed right, and names the first stage, row and token of one that was not."""

import dataclasses
import math

import numpy as np
import pytest

from rl_observe.recorded_steps import RecordedStep, StepRollouts
from rl_observe.replay import NotReplayable, replay

OBJECTIVE = {
    "advantage": {"baseline": "group_mean", "scale": "group_std", "whiten": "none", "estimator": None, "epsilon": 1e-6},
    "ratio": {
        "surrogate": "clip", "level": "token", "proximal": "sampler", "clip_low": 0.2, "clip_high": 0.28,
        "dual_clip": None,
    },
    "aggregation": "token-mean", "overlong": {"max_length": None}, "kl": {"weight": 0.0}, "entropy_weight": 0.0,
}  # fmt: skip


def make_step(objective=OBJECTIVE, **changes):
    """Two rollouts of one group, written out by hand: rewards 1 and 0, ratios 1, 1.5 and 0.5."""
    std = math.sqrt(0.5) + 1e-6
    up, down = 0.5 / std, -0.5 / std
    nan = math.nan
    given = {
        "tokens": [[5, 6, 7, 8], [5, 6, 9, 0]],
        "lengths": [4, 3],
        "response": [[0, 0, 1, 1], [0, 0, 1, 0]],
        "logp_old": [[0, 0, -1.0, -1.0], [0, 0, -1.0, 0]],
        "logp": [[nan, nan, -1.0, -1.0 + math.log(1.5)], [nan, nan, -1.0 + math.log(0.5), nan]],
        "advantage": [[nan, nan, up, up], [nan, nan, down, nan]],
        # Of 3 trainable tokens: 1 A, 1.28 A (clipped above), and for A < 0 at least 0.8 A.
        "loss": [[nan, nan, -up / 3, -1.28 * up / 3], [nan, nan, -0.8 * down / 3, nan]],
        "rewards": [1.0, 0.0],
        "groups": [0, 0],
    } | changes  # fmt: skip
    rollouts = StepRollouts(**{name: np.array(value) for name, value in given.items()})
    about = {"objective": objective, "precision": "float32"}
    return RecordedStep.of("grpo", 1, rollouts, updates=[{"step": 1, "grad_norm": 2.0}], about=about)


def outcomes(found):
    return {each.stage: each.outcome for each in found.results}


def test_a_step_that_was_computed_right_agrees():
    found = replay(make_step())
    replayed = {name: outcome for name, outcome in outcomes(found).items() if outcome != "not replayed"}
    assert {*replayed} == {"advantage", "loss"}
    assert {*replayed.values()} <= {"same", "within"}
    assert found.first_difference is None
    assert found.plain()["holds"] is True
    assert all(each.largest < 1e-6 for each in found.results)


def test_the_first_stage_row_and_token_that_differ_are_named():
    step = make_step(loss=[[math.nan, math.nan, -0.2357, 9.0], [math.nan, math.nan, 0.18856, math.nan]])
    first = replay(step).first_difference
    assert (first.stage, first.row, first.token, first.recorded) == ("loss", 0, 3, 9.0)
    wrong = make_step(advantage=[[math.nan, math.nan, 0.1, 0.1], [math.nan, math.nan, -0.1, math.nan]])
    first = replay(wrong).first_difference
    assert (first.stage, first.row, first.token) == ("advantage", 0, 2)


def test_functions_of_the_program_that_trained_are_asked_for_the_other_stages():
    step = make_step()
    given = {
        "prompt": lambda step: np.array([[5, 6, -1, -1], [5, 7, -1, -1]]),
        "reward": lambda step: np.array([1.0, 0.0]),
        "logp_old": lambda step: step.padded("logp_old"),
        "logp": lambda step: step.padded("logp") + np.float32(1e-5),
        "gradient": lambda step: np.array([2.5]),
    }
    found = replay(step, given)
    expected = {"prompt": "differs", "reward": "same", "logp_old": "same", "logp": "within", "gradient": "differs"}
    assert {name: outcomes(found)[name] for name in expected} == expected
    first = found.first_difference
    assert (first.stage, first.row, first.token, first.recorded, first.recomputed) == ("prompt", 1, 1, 6, 7)


def test_the_bound_is_that_of_the_dtype():
    step = make_step()
    off = {"logp": lambda step: step.padded("logp") + np.float32(0.05)}
    assert outcomes(replay(step, off))["logp"] == "differs"
    half = dataclasses.replace(step, data={**step.data, "precision": "bfloat16"})
    assert outcomes(replay(half, off))["logp"] == "within"


def test_later_updates_are_not_compared_with_weights_that_nobody_has():
    step = make_step(update=[0, 1])
    found = {each.stage: each for each in replay(step, {"logp": lambda step: np.full((2, 4), -1.0)}).results}
    assert found["logp"].compared == 2
    assert (found["logp"].outcome, found["logp"].row, found["logp"].token) == ("differs", 0, 3)


def test_what_cannot_be_replayed_says_why():
    gdpo = {
        **OBJECTIVE,
        "advantage": {**OBJECTIVE["advantage"], "estimator": "opo"},
        "aggregation": "seq-mean-token-sum",
    }
    found = {each.stage: each for each in replay(make_step(gdpo)).results}
    assert "estimator=opo" in found["advantage"].reason
    assert "aggregation=seq-mean-token-sum" in found["loss"].reason

    def refuse(step):
        raise NotReplayable("no checkpoint has the weights of version 7")

    found = {each.stage: each for each in replay(make_step(), {"logp": refuse}).results}
    assert "version 7" in str(found["logp"])
    with pytest.raises(ValueError, match="rewards is no stage"):
        replay(make_step(), {"rewards": refuse})

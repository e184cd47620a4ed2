"""Each cause is named first where it was put in, with its place; and nothing is found in steps that are right.

A policy is a table of logits by the last token and the place, so that engine and trainer are known in closed form.
"""

import dataclasses
import json
import math

import numpy as np
import pytest

from rl_observe import RunDirectory
from rl_observe.diagnose import CAUSES, diagnose, diagnose_steps, mismatch_of, monitor_step
from rl_observe.recorded_steps import RecordedStep, StepRollouts
from rl_observe.step_recorder import StepRecorder

V, P, T, GROUP, PROMPTS = 24, 4, 12, 4, 8
STOP, BOS = 2, 1
OBJECTIVE = {
    "advantage": {
        "baseline": "group_mean", "scale": "group_std", "whiten": "none", "normalize_each_reward": False,
        "estimator": None, "epsilon": 1e-6,
    },
    "overlong": {"max_length": None}, "kl": {"weight": 0.0}, "selection": {"tokens": None, "mask_truncated": False},
}  # fmt: skip


def log_softmax(z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


class World:
    """Makes recorded steps. Every keyword of `step` puts one fault in."""

    def __init__(self, seed=0):
        self.rng = np.random.default_rng(seed)
        self.table = self.rng.normal(0, 1.5, (V, V))
        self.before = self.table.copy()  # the weights of the update before

    def logits(self, table, tokens, shift=0.0):
        return table[tokens] + shift

    def step(
        self, number=1, *, temperature=1.0, top_p=1.0, stale=0.0, half_stale=False, noise=0.0, bfloat16=False,
        other_prompt=False, turns=False, retokenised=False, mixture=False, logit_noise=0.0, faint_prompt=False,
        about=None, **changes,
    ):  # fmt: skip
        rng, B = self.rng, PROMPTS * GROUP
        prompts = rng.integers(3, V, (PROMPTS, P))
        prompts[:, 0] = BOS
        tokens = np.zeros((B, P + T), dtype=np.int64)
        tokens[:, :P] = np.repeat(prompts, GROUP, axis=0)
        logp_old, logp = np.zeros((B, P + T)), np.full((B, P + T), np.nan)
        lengths = np.full(B, P + T)
        engine = self.table + stale * np.random.default_rng(99).normal(0, 1, self.table.shape)
        if half_stale:
            engine = self.table.copy()
            engine[: V // 2] += np.random.default_rng(98).normal(0, 0.3, (V // 2, V))
        for row in range(B):
            for t in range(P, P + T):
                last = tokens[row, t - 1]
                z = engine[last].copy()
                if other_prompt:
                    z = z + np.random.default_rng(7 + t).normal(0, 0.4, V)
                if faint_prompt:  # matters after some tokens, and hardly after others
                    z = z + np.random.default_rng(7 + t).normal(0, 0.25 if last % 8 == 0 else 0.005, V)
                if logit_noise:
                    z = z + rng.normal(0, logit_noise, V)
                if retokenised and t >= P + T // 2:
                    z = z + np.random.default_rng(int(last)).normal(0, 0.5, V)
                if mixture and rng.random() < 0.1:
                    z = z + rng.normal(0, 0.8, V)
                lp = log_softmax(z / temperature)
                if top_p < 1:
                    order = np.argsort(-lp)
                    keep = order[: 1 + np.searchsorted(np.exp(lp[order]).cumsum(), top_p)]
                    cut = np.full(V, -np.inf)
                    cut[keep] = lp[keep]
                    lp = cut - np.log(np.exp(cut[keep]).sum())
                token = int(rng.choice(V, p=np.exp(lp) / np.exp(lp).sum()))
                tokens[row, t] = token
                logp_old[row, t] = lp[token]
                logp[row, t] = log_softmax(self.table[last])[token] + rng.normal(0, 1e-6)
                if token == STOP and not turns:
                    lengths[row] = t + 1
                    break
        places = np.arange(P + T)
        filled = places < lengths[:, None]
        response = filled & (places >= P)
        logp_old = np.where(response, logp_old + rng.normal(0, 1, logp_old.shape) * noise, 0.0).astype(np.float32)
        if bfloat16:
            logp_old = (logp_old.view(np.uint32) + 0x8000 & 0xFFFF0000).view(np.float32)
        rewards = rng.integers(0, 2, B).astype(float)
        given = {
            "tokens": np.where(filled, tokens, 0), "lengths": lengths, "response": response, "logp_old": logp_old,
            "logp": np.where(response, logp, np.nan), "rewards": rewards, "groups": np.arange(B) // GROUP,
            "turns": np.where(response, np.where(turns & (places >= P + T // 2), 1, 0), -1),
            "versions": np.where(response, number - 1, -1),
            "truncated": lengths == P + T, "failed": np.zeros(B, bool), "update": np.zeros(B, int),
            "loss": np.where(response, 0.1, np.nan),
            "sources": [f"rows.jsonl line {number * 100 + row // GROUP}" for row in range(B)],
            "prompts": [f"prompt {number}-{row // GROUP}" for row in range(B)],
            "responses": [f"text {number} {row}" for row in range(B)],
        }  # fmt: skip
        given |= {name: change(given) if callable(change) else change for name, change in changes.items()}
        if "advantage" not in given:
            given["advantage"] = np.where(given["response"], advantages(given["rewards"])[:, None], np.nan)
        constant = {
            "version": number - 1, "precision": "float32", "objective": OBJECTIVE, "stop_token_ids": [STOP],
            "special_token_ids": {"bos": BOS}, "mixture": mixture,
        }  # fmt: skip
        updates = [{"step": number, "loss": 0.1, "grad_norm": 1.0}]
        return RecordedStep.of("grpo", number, StepRollouts(**given), updates=updates, about=constant | (about or {}))


def advantages(rewards):
    grouped = rewards.reshape(-1, GROUP)
    centered = grouped - grouped.mean(1, keepdims=True)
    spread = grouped.std(1, ddof=1, keepdims=True)
    return np.where(np.ptp(grouped, axis=1, keepdims=True) > 0, centered / (spread + 1e-6), 0.0).ravel()


def log_of(error_at_start, steps=6, **columns):
    """Lines of metrics.jsonl."""
    rows = [
        {
            "stage": "grpo", "step": n + 1, "token_mult_prob_error": error_at_start if n == 0 else 1.3,
            "reward": 0.4 + n / 50, "groups_with_signal": 0.9, "grad_norm": 1.0, "entropy": 2.0 - n / 10,
            "reward_std": 0.5,
        }
        for n in range(steps)
    ]  # fmt: skip
    for name, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def first(found):
    assert found.findings, "nothing was found"
    return found.findings[0]


AGREES = {"token_mult_prob_error": [1.0] * 6}
CLEAN_LOG = log_of(1.0, **AGREES)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_found_where_nothing_is_wrong(seed):
    world = World(seed)
    steps = [world.step(n + 1, turns=seed % 3 == 0) for n in range(3)]
    assert diagnose_steps(steps, log=CLEAN_LOG).findings == []


MISMATCHES = {
    "cooler engine": ({"temperature": 0.7}, 1.4, "temperature"),
    "warmer engine": ({"temperature": 1.3}, 1.4, "temperature"),
    "output layer doubled in the engine": ({"temperature": 0.5}, 1.6, "temperature"),
    "output layer doubled in the trainer": ({"temperature": 2.0}, 1.6, "temperature"),
    "nucleus": ({"top_p": 0.9}, 1.1, "truncated_sampling"),
    "small nucleus": ({"top_p": 0.5}, 1.5, "truncated_sampling"),
    "old weights": ({"stale": 0.3}, 1.0, "stale_weights"),
    "partly old weights": ({"half_stale": True}, 1.0, "stale_weights"),
    "bfloat16 head": ({"bfloat16": True}, 1.003, "precision"),
    "noise of a dtype": ({"noise": 0.01}, 1.01, "precision"),
    "noise of a dtype in the logits": ({"logit_noise": 0.03}, 1.02, "precision"),
    "little noise of a dtype": ({"logit_noise": 0.003}, 1.0025, "precision"),
    "a BOS twice, which changes little": ({"faint_prompt": True}, 1.03, "template_drift"),
    "another prompt": ({"other_prompt": True}, 1.5, "template_drift"),
    "another tokenisation of the second turn": ({"turns": True, "retokenised": True}, 1.2, "retokenised_turn"),
    "routers": ({"mixture": True}, 1.1, "router_drift"),
}


@pytest.mark.parametrize(("fault", "start", "cause"), MISMATCHES.values(), ids=MISMATCHES.keys())
@pytest.mark.parametrize("seed", range(3))
def test_what_makes_engine_and_trainer_differ_is_named(fault, start, cause, seed):
    world = World(seed)
    turns = {"turns": fault.get("turns", False)}
    clean = world.step(1, **turns) if start == 1.0 else world.step(1, **fault)
    found = first(diagnose_steps([clean, world.step(2, **fault)], log=log_of(start)))
    assert found.cause == cause, str(found)
    assert found.step == (2 if start == 1.0 else 1)
    assert found.row is not None
    assert found.token is not None
    assert (found.token >= P + T // 2) == (cause == "retokenised_turn") or cause == "router_drift"


def test_tokens_of_the_probability_1_are_no_mask_that_begins_early():
    """A small nucleus leaves one token where the policy is sure, also at the start of every response."""

    def sure(given):
        logp_old = given["logp_old"].copy()
        logp_old[np.arange(len(logp_old)), P] = 0.0
        logp_old[:, P + 2 : P + 5] = 0.0
        return np.where(given["response"], np.maximum(logp_old, given["logp"]), 0.0)

    world = World()
    world.table[3:, :] += 4 * np.eye(V)[(np.arange(V) * 7) % V][3:]
    found = first(diagnose_steps([world.step(1, top_p=0.7, logp_old=sure)], log=log_of(1.3)))
    assert found.cause == "truncated_sampling", str(found)


def test_rows_that_were_permuted_are_named_though_their_lengths_differ():
    def permuted(given):
        return np.where(given["response"], given["logp_old"][np.arange(PROMPTS * GROUP)[::-1]], 0.0)

    found = first(diagnose_steps([World(2).step(1, logp_old=permuted)], log=log_of(3.0)))
    assert (found.cause, found.row) == ("swapped_rows", 0), str(found)


def test_old_weights_need_an_agreement_that_was_better_by_far():
    """Noise that is a little larger than at the first step of the run is noise."""
    step = World().step(3, logit_noise=0.01)
    found = first(diagnose_steps([step], log=log_of(1.006)))
    assert found.cause == "precision"


def test_a_mismatch_that_was_logged_and_is_not_recorded_is_told():
    errors = [1.0, 1.3, 1.0, 1.0, 1.0, 1.0]
    found = diagnose_steps([World().step(6)], log=log_of(1.0, token_mult_prob_error=errors)).findings
    assert [(each.cause, each.step) for each in found] == [("logp_mismatch", 2)]
    assert found[0].token == P
    older = log_of(1.0, token_mult_prob_error=errors, staleness=[0.0, 0.8, 1.0, 1.0, 1.0, 1.0])
    assert diagnose_steps([World().step(6)], log=older).findings == []  # of an asynchronous run


def test_a_temperature_is_known_from_the_responses_to_one_prompt():
    """Where no other group has a signal, two responses are trained on in each of the updates."""
    trained = np.arange(PROMPTS * GROUP) < 2 * GROUP
    given = {
        "trainable": lambda g: g["response"] & trained[:, None],
        "update": np.where(trained, np.arange(32) // 2 % 4, -1),
        "rewards": np.where(trained, np.arange(32) % 2.0, 0.0),
    }  # fmt: skip
    step = World(4).step(1, temperature=2.0, **given)
    assert first(diagnose_steps([step], log=log_of(2.0))).cause == "temperature"


def test_a_monitor_that_saw_the_first_step_tells_old_weights_from_noise():
    world = World()
    agreed, old = world.step(1), world.step(2, half_stale=True)
    assert mismatch_of(agreed) == pytest.approx(1.0, abs=1e-4)
    assert monitor_step(agreed, start=mismatch_of(agreed)) == []
    assert [each.cause for each in monitor_step(old, start=mismatch_of(agreed))] == ["stale_weights"]
    noisy = world.step(3, logit_noise=0.01)
    assert [each.cause for each in monitor_step(noisy, start=mismatch_of(noisy))] == ["precision"]


def exchange(given, name):
    """Rows 1 and 2, and 5 and 6, of a column change places; made equally long before."""
    column = np.array(given[name])
    column[[1, 2, 5, 6]] = column[[2, 1, 6, 5]]
    return column


def test_log_probabilities_of_other_rows_are_named_with_the_first_row():
    world = World()
    step = world.step(1, turns=True, logp_old=lambda given: exchange(given, "logp_old"))
    found = first(diagnose_steps([step], log=log_of(1.2)))
    assert (found.cause, found.row) == ("swapped_rows", 1)
    assert found.token >= P  # rows of one group may begin with the same tokens


@pytest.mark.parametrize("by", [1, -1])
def test_log_probabilities_off_by_one_token_are_named(by):
    def shifted(given):
        return np.where(given["response"], np.roll(given["logp_old"], by, axis=1), 0.0)

    found = first(diagnose_steps([World().step(1, turns=True, logp_old=shifted)], log=log_of(1.5)))
    assert found.cause == "logp_off_by_one"


def test_a_trained_token_of_the_prompt_is_named():
    def early(given):
        mask = given["response"].copy()
        mask[:, P - 1] = True
        return mask

    found = first(diagnose_steps([World().step(1, trainable=early)]))
    assert (found.cause, found.row, found.token) == ("mask_off_by_one", 0, P - 1)


def test_a_sampled_token_that_is_not_trained_on_is_named():
    def late(given):
        mask = given["response"].copy()
        mask[:, P] = False
        return mask

    found = first(diagnose_steps([World().step(1, trainable=late)]))
    assert (found.cause, found.row, found.token) == ("mask_off_by_one", 0, P)


def test_a_response_mask_that_begins_late_is_named():
    def late(given):
        mask = given["response"].copy()
        mask[:, P] = False
        return mask

    found = first(diagnose_steps([World().step(1, response=late)]))
    assert (found.cause, found.token) == ("mask_off_by_one", P)


def test_a_stop_token_outside_of_the_mask_is_named():
    def short(given):
        mask = given["response"].copy()
        for row, length in enumerate(given["lengths"]):
            mask[row, length - 1] = given["truncated"][row]
        return mask

    found = first(diagnose_steps([World().step(1, response=short)]))
    assert found.cause == "mask_off_by_one"


def test_a_mask_that_begins_late_is_named_where_most_first_tokens_are_the_same():
    """Only the responses to two prompts begin with different tokens."""

    def same_start(given):
        tokens = given["tokens"].copy()
        tokens[: -2 * GROUP, P] = 5
        return tokens

    def late(given):
        mask = given["response"].copy()
        mask[:, P] = False
        return mask

    found = first(diagnose_steps([World().step(1, tokens=same_start, response=late)]))
    assert (found.cause, found.token) == ("mask_off_by_one", P)


def test_padding_that_is_trained_on_is_named():
    def padded(given):
        return given["response"] | (np.arange(P + T) >= given["lengths"][:, None])

    step = World(1).step(1, trainable=padded)
    row = int((step.columns["lengths"] < P + T).argmax())
    found = first(diagnose_steps([step]))
    assert (found.cause, found.row, found.token) == ("mask_off_by_one", row, step.columns["lengths"][row])
    assert "padding" in found.evidence


def without_stops(given):
    """The last token of the responses that end with a stop token is lost."""
    return given["lengths"] - (~given["truncated"]).astype(int)


def test_stop_tokens_that_were_lost_are_named_and_stop_strings_end_responses_too():
    def lost(sampling):
        def shorter(name, empty):
            def change(given):
                return np.where(np.arange(P + T) < without_stops(given)[:, None], given[name], empty)

            return change

        columns = {"response": False, "logp_old": 0.0, "logp": np.nan, "advantage": np.nan, "tokens": 0}
        changes = {name: shorter(name, empty) for name, empty in columns.items() if name != "advantage"}
        ends = {}

        def lengths(given):
            ends["lengths"] = without_stops(given)
            return ends["lengths"]

        return World(3).step(1, **changes, lengths=lengths, about={"sampling": sampling})

    found = diagnose_steps([lost({"temperature": 1.0, "stop": []})]).findings
    assert [each.cause for each in found] == ["mask_off_by_one"]
    assert "do not end with a stop token" in found[0].evidence
    assert diagnose_steps([lost({"temperature": 1.0, "stop": [";"]})]).findings == []
    assert diagnose_steps([lost({"stop": [], "stop_token_ids": [*range(V)]})]).findings == []  # of the recipe
    assert diagnose_steps([lost(None)]).findings == []  # it is not known how it was sampled


@pytest.mark.parametrize(
    "groups",
    [np.arange(32) % PROMPTS, np.roll(np.arange(32) // GROUP, 1), np.arange(32) // GROUP // 2],
    ids=["interleaved", "by one row", "two prompts in one"],
)
def test_groups_of_several_prompts_are_named(groups):
    found = first(diagnose_steps([World().step(1, groups=groups, sources=[], prompts=[])]))
    assert (found.cause, found.stage) == ("wrong_groups", "advantage")
    assert found.token is not None


PLAIN = {
    **OBJECTIVE, "ratio": {"surrogate": "clip", "level": "token", "proximal": "sampler", "clip_low": 0.2,
    "clip_high": 0.28, "dual_clip": None}, "aggregation": "token-mean", "entropy_weight": 0.0,
    "correction": {"off_policy_threshold": None},
}  # fmt: skip


@pytest.mark.parametrize(("times", "found"), [(1.0, []), (-1.0, ["loss_mismatch"]), (0.5, ["loss_mismatch"])])
def test_losses_of_another_sign_or_divisor_are_named(times, found):
    def losses(given):
        ratio = np.exp(np.where(given["response"], given["logp"] - given["logp_old"], 0.0))
        advantage = np.where(given["response"], advantages(given["rewards"])[:, None], 0.0)
        return np.where(given["response"], -times * ratio * advantage / given["response"].sum(), np.nan)

    findings = diagnose_steps([World().step(1, loss=losses, about={"objective": PLAIN})], log=CLEAN_LOG).findings
    assert [each.cause for each in findings] == found
    assert all((each.stage, each.row) == ("loss", 0) and each.token >= P for each in findings)


def test_a_reference_that_is_trained_or_is_another_model_is_named():
    log = log_of(1.0, token_mult_prob_error=[1.0] * 6, learning_rate=[1e-3] * 6)

    def off(by):
        return lambda given: np.where(given["response"], given["logp"] + by, np.nan)

    world = World()
    right = [world.step(1, logp_ref=off(0.0)), world.step(2, logp_ref=off(0.01)), world.step(3, logp_ref=off(0.02))]
    assert diagnose_steps(right, log=log).findings == []
    trained = first(
        diagnose_steps([right[0], world.step(2, logp_ref=off(0.0)), world.step(3, logp_ref=off(0.0))], log=log)
    )
    assert (trained.cause, trained.stage, trained.step) == ("wrong_reference", "logp_ref", 3)
    another = first(diagnose_steps([world.step(1, logp_ref=off(0.1)), right[1]], log=log))
    assert (another.cause, another.step) == ("wrong_reference", 1)


def test_what_was_wrong_first_comes_before_what_it_led_to():
    """Another prompt in the engine makes every response wrong, and the reward constant: the prompt is named."""
    constant = log_of(
        1.5, groups_with_signal=[0.9] * 2 + [0.0] * 4, reward=[0.3, 0.2, 0, 0, 0, 0], reward_std=[0.4] * 2 + [0.0] * 4
    )
    found = diagnose_steps([World().step(1, other_prompt=True)], log=constant).findings
    assert [each.cause for each in found] == ["template_drift", "reward_constant"]


def test_the_first_value_that_is_not_finite_is_the_source():
    def nan_at(name, row, token):
        def change(given):
            column = np.array(given[name], dtype=float)
            column[row, token] = math.nan
            return column

        return change

    found = first(diagnose_steps([World().step(1, logp=nan_at("logp", 3, P + 2), loss=nan_at("loss", 0, P))]))
    assert (found.cause, found.stage, found.row, found.token) == ("nan", "logp", 3, P + 2)
    infinite = np.where(np.arange(PROMPTS * GROUP) == 5, np.inf, 0.0)
    found = first(diagnose_steps([World().step(1, rewards=infinite, advantage=np.zeros(PROMPTS * GROUP))]))
    assert (found.cause, found.stage, found.row) == ("nan", "reward", 5)


def test_advantages_of_other_groups_are_named():
    def rolled(given):
        return np.where(given["response"], np.roll(advantages(given["rewards"]), 1)[:, None], np.nan)

    found = first(diagnose_steps([World().step(1, advantage=rolled)]))
    assert (found.cause, found.stage) == ("advantage_mismatch", "advantage")


def test_one_group_that_makes_the_gradient_is_named():
    unscaled = {**OBJECTIVE, "advantage": {**OBJECTIVE["advantage"], "scale": "none"}}

    def large(given):
        rewards = given["rewards"] * 0 + np.arange(PROMPTS * GROUP) % 2
        rewards[8:12] *= 100
        return rewards

    def centered(given):
        grouped = large(given).reshape(-1, GROUP)
        return np.where(given["response"], (grouped - grouped.mean(1, keepdims=True)).reshape(-1, 1), np.nan)

    step = World().step(1, rewards=large, advantage=centered, about={"objective": unscaled})
    found = first(diagnose_steps([step]))
    assert found.cause == "group_dominates"
    assert 8 <= found.row < 12


def test_a_clip_that_stops_most_tokens_is_named():
    found = first(diagnose_steps([World().step(1, clipped=lambda given: given["response"])]))
    assert found.cause == "clipping_saturated"


def test_a_ratio_of_whole_responses_may_be_clipped_more_often():
    def half(given):
        return given["response"] & (np.arange(PROMPTS * GROUP) % 2 == 0)[:, None]

    of_responses = {**OBJECTIVE, "ratio": {"level": "sequence"}}
    assert diagnose_steps([World().step(1, clipped=half, about={"objective": of_responses})]).findings == []
    assert first(diagnose_steps([World().step(1, clipped=half)])).cause == "clipping_saturated"


def test_a_policy_that_broke_in_one_update_is_named_and_not_the_reward_that_is_constant_since():
    broke = log_of(
        1.0, token_mult_prob_error=[1.0] * 6, reward=[0.3, 0.3, 0, 0, 0, 0], groups_with_signal=[0.9, 0.9, 0, 0, 0, 0],
        reward_std=[0.4, 0.4, 0, 0, 0, 0], response_tokens=[6.0, 6.1, 9, 9, 9, 9], truncated=[0, 0, 0.9, 1, 1, 1],
    )  # fmt: skip
    found = diagnose_steps([], log=broke).findings
    assert [(each.cause, each.step) for each in found] == [("learning_rate", 3), ("reward_constant", 3)]


def test_a_loss_that_exploded_is_named_though_it_falls_again():
    step = World().step(6, about={"given_rows": True})
    losses = [3.8, 9.0, 13.0, 12.0, 5.0, 2.4]
    log = [{"stage": "sft", "step": n + 1, "loss": loss, "grad_norm": 5.0} for n, loss in enumerate(losses)]
    found = first(diagnose_steps([step], log=log))
    assert (found.cause, found.step) == ("learning_rate", 2)
    assert "of step 6" in found.evidence  # what begins at a step that is gone is shown at the first that is there


def test_updates_that_move_the_policy_far_are_named():
    later = {"update": np.arange(PROMPTS * GROUP) % 2}

    def far(given):
        return given["logp"] - 2.0 * (np.arange(PROMPTS * GROUP) % 2)[:, None]

    found = first(diagnose_steps([World().step(1, logp=far, **later)]))
    assert found.cause == "learning_rate"


def test_a_reward_that_is_no_function_of_the_response_is_named():
    world = World()
    rows = np.arange(PROMPTS * GROUP)
    same = {
        "responses": [f"text {row % 8}" for row in rows],
        "prompts": ["p"] * len(rows),
        "sources": ["rows.jsonl line 1"] * len(rows),
        "tokens": lambda given: np.where(np.arange(P + T) < P, 5, given["tokens"]),
    }
    assert first(diagnose_steps([world.step(1, **same)])).cause == "reward_inconsistent"
    drifting = [world.step(n, **same, rewards=rows % 8 / 8 + (n > 2) * 0.5) for n in (1, 2, 3)]
    assert first(diagnose_steps(drifting)).cause == "reward_drift"


def test_rewards_for_length_and_for_repetition_are_named():
    def by_length(given):
        return given["response"].sum(1).astype(float)

    steps = [World(1).step(n, rewards=by_length) for n in (1, 2, 3)]
    longer = log_of(1.0, token_mult_prob_error=[1.0] * 6, response_tokens=[4, 4, 5, 7, 8, 9])
    assert first(diagnose_steps(steps, log=longer)).cause == "reward_hacked_length"
    as_long = log_of(1.0, token_mult_prob_error=[1.0] * 6, response_tokens=[8] * 6)
    assert diagnose_steps(steps, log=as_long).findings == []  # some tasks need long answers

    def by_repetition(given):
        rows = [given["tokens"][row][given["response"][row]] for row in range(PROMPTS * GROUP)]
        return np.array([1 - len(set(row.tolist())) / len(row) for row in rows])

    found = first(diagnose_steps([World(1).step(n, turns=True, rewards=by_repetition) for n in (1, 2, 3)]))
    assert found.cause == "reward_hacked_repetition"


def test_a_reward_for_characters_that_are_no_tokens_is_named_as_length():
    generator = np.random.default_rng(0)
    characters = [generator.integers(1, 9, PROMPTS * GROUP) * (1 + n) for n in range(3)]
    steps = [
        World(1).step(
            n + 1, responses=["x" * int(count) for count in counts], rewards=lambda _, c=counts: c.astype(float)
        )
        for n, counts in enumerate(characters)
    ]
    longer = log_of(1.0, token_mult_prob_error=[1.0] * 6, response_tokens=[4, 4, 5, 7, 8, 9])
    assert first(diagnose_steps(steps, log=longer)).cause == "reward_hacked_length"


def test_a_few_tokens_of_a_mixture_that_differ_are_its_routers_though_the_first_step_agreed():
    step = World().step(3, mixture=True)
    rows = np.arange(PROMPTS * GROUP) % 8 == 0  # in an eighth of the rows
    logp_old, logp = step.padded("logp_old"), step.padded("logp")
    agreed = np.where(rows[:, None] | ~step.response, logp_old, logp).astype(np.float32)
    found = first(diagnose_steps([World().step(3, mixture=True, logp_old=agreed)], log=log_of(1.0)))
    assert found.cause == "router_drift"


def test_gold_answers_that_get_less_than_others_are_named():
    gold = {"expected": [f"text 1 {row}" if row % GROUP == 0 else f"text 1 {row - row % GROUP}" for row in range(32)]}
    step = World().step(1, rewards=lambda g: (np.arange(32) % GROUP > 0).astype(float), **gold)
    assert first(diagnose_steps([step])).cause == "reward_hacked_format"


def gold_answers(step, share=0.5):
    """Changes under which some responses are the gold answer."""
    gold = np.arange(PROMPTS * GROUP) % GROUP < GROUP * share
    responses = [f"{step}-{row // GROUP}" if gold[row] else f"wrong {step} {row}" for row in range(len(gold))]
    return gold, {"responses": responses, "expected": [f"{step}-{row // GROUP}" for row in range(len(gold))]}


def test_a_judge_that_drifts_is_known_by_the_gold_answers_though_no_prompt_comes_twice():
    def steps(rewards):
        made = []
        for number, reward in enumerate(rewards, start=1):
            gold, texts = gold_answers(number)
            made.append(World(number).step(number, rewards=gold * reward, **texts))
        return made

    found = first(diagnose_steps(steps([1.0, 1.0, 0.5, 0.5])))
    assert (found.cause, found.step, found.row) == ("reward_drift", 3, 0)
    assert diagnose_steps(steps([1.0, 1.0, 1.0])).findings == []
    assert diagnose_steps(steps([1.0, 1.0, 0.0, 0.0])).findings == []  # nothing but 0: that is a constant reward
    # Before the first step the held-out responses say what a gold answer got.
    samples = [
        {"stage": "grpo", "when": "before", "prompt": f"q{n}", "expected": "7", "response": "7", "reward": 1.0}
        for n in range(2)
    ]
    later = steps([0.5, 0.5])
    assert first(diagnose_steps(later, samples=samples)).cause == "reward_drift"
    mixed = World(1).step(1, rewards=(np.arange(32) % 4 < 2) - (np.arange(32) == 0) / 2, **gold_answers(1)[1])
    few = [{**samples[0], "reward": 0.5}]
    assert "reward_drift" not in {each.cause for each in diagnose_steps([mixed], samples=few).findings}


def test_the_highest_rewards_without_a_gold_answer_are_named():
    gold, texts = gold_answers(1, share=0.25)
    begins = first(diagnose_steps([
        World(n).step(n, rewards=np.where(gold, 0.8, 1.0) - (np.arange(32) % 8 == 7), **texts) for n in (1, 2)
    ], samples=[]))  # fmt: skip
    assert begins.cause == "reward_hacked_format"
    judged = [World(n).step(n, rewards=gold.astype(float), **texts) for n in (1, 2)]
    assert diagnose_steps(judged).findings == []
    # Responses that have the gold answer in them, and more: nothing is wrong with their reward.
    longer = {**texts, "responses": [f"{row} times {each}" for row, each in enumerate(texts["expected"])]}
    assert diagnose_steps([World(n).step(n, rewards=np.arange(32) % 2.0, **longer) for n in (1, 2)]).findings == []


def test_responses_that_are_cut_off_ever_more_often_are_a_sign_of_a_reward_for_length():
    def by_length(given):
        return given["response"].sum(1).astype(float)

    steps = [World(1).step(n, rewards=by_length) for n in (1, 2, 3)]
    cut = {"token_mult_prob_error": [1.0] * 6, "response_tokens": [7.5, 8, 8, 8.5, 9, 9]}
    found = first(diagnose_steps(steps, log=log_of(1.0, truncated=[0.0, 0.1, 0.3, 0.6, 0.9, 1.0], **cut)))
    assert found.cause == "reward_hacked_length"
    assert diagnose_steps(steps, log=log_of(1.0, truncated=[0.1] * 6, **cut)).findings == []


def test_a_constant_reward_is_named_and_a_solved_task_is_not():
    constant = log_of(
        1.0, token_mult_prob_error=[1.0] * 6, groups_with_signal=[0.0] * 6, reward=[0.0] * 6, reward_std=[0.0] * 6
    )
    assert first(diagnose_steps([], log=constant)).cause == "reward_constant"
    solved = log_of(
        1.0,
        **AGREES,
        groups_with_signal=[0.9] * 3 + [0.0] * 3,
        reward=[0.2, 0.6, 0.9, 1, 1, 1],
        reward_std=[0.4] * 3 + [0.0] * 3,
    )
    assert diagnose_steps([], log=solved).findings == []
    broke = log_of(
        1.0,
        **AGREES,
        groups_with_signal=[0.9] * 3 + [0.0] * 3,
        reward=[0.2, 0.6, 0.9, 0, 0, 0],
        reward_std=[0.4] * 3 + [0.0] * 3,
    )
    found = first(diagnose_steps([], log=broke))
    assert (found.cause, found.step) == ("reward_constant", 4)


def test_an_entropy_that_collapses_without_learning_is_named():
    entropy = [2.0, 1.0, 0.5, 0.01, 0.01, 0.01]
    flat = log_of(1.0, **AGREES, entropy=entropy, reward=[0.3, 0.3, 0.2, 0.2, 0.2, 0.2])
    assert first(diagnose_steps([], log=flat)).cause == "entropy_collapse"
    assert (
        diagnose_steps([], log=log_of(1.0, **AGREES, entropy=entropy, reward=[0.3, 0.5, 0.7, 0.9, 1.0, 1.0])).findings
        == []
    )


def test_duplicated_and_leaked_prompts_are_named():
    step = World().step(1)
    samples = [{"prompt": "prompt 1-3", "response": "x"}]
    found = first(diagnose_steps([step], samples=samples))
    assert (found.cause, found.row) == ("leaked_data", 12)
    twice = {"prompts": [f"prompt {row // GROUP // 2}" for row in range(32)]}
    assert first(diagnose_steps([World().step(1, **twice)])).cause == "duplicated_data"


def test_a_bos_that_stands_twice_is_named():
    doubled = World().step(1, tokens=lambda g: np.where(np.arange(P + T) == 1, BOS, g["tokens"]))
    found = first(diagnose_steps([doubled]))
    assert (found.cause, found.stage, found.token) == ("template_drift", "prompt", 1)


def test_a_reward_that_is_no_number_is_named_where_the_run_ended_over_it_or_left_it_out(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.metrics.touch()
    event = {
        "name": "failed",
        "stage": "grpo",
        "step": 4,
        "message": "the reward function f returned nan, which is not a finite number",
    }
    run.events.write_text(json.dumps(event) + "\n")
    found = first(diagnose(run))
    assert (found.cause, found.stage, found.step) == ("nan", "reward", 4)
    run.events.write_text(json.dumps(event | {"message": "the nanny of the finance office failed"}) + "\n")
    assert diagnose(run).findings == []
    failed = np.arange(PROMPTS * GROUP) == 7
    failures = ["it returned nan, which is not a finite number" if each else None for each in failed]
    given = {"failed": failed, "failures": failures, "trainable": lambda g: g["response"] & ~failed[:, None]}
    left_out = World().step(1, **given, advantage=np.full((32, P + T), np.nan))
    found = first(diagnose_steps([left_out]))
    assert (found.cause, found.stage, found.row) == ("nan", "reward", 7)


def test_what_could_not_be_looked_at_is_said():
    step = World().step(1)
    columns = {name: column for name, column in step.columns.items() if name != "logp"}
    found = diagnose_steps([dataclasses.replace(step, columns=columns)])
    assert found.findings == []
    assert any("trainer's log-probabilities (logp) are not recorded" in remark for remark in found.remarks)


def test_a_run_directory_is_diagnosed(tmp_path):
    run = RunDirectory.create(tmp_path / "run")
    run.metrics.touch()
    recorder = StepRecorder(run)
    step = World().step(1)
    given = {name: step.padded(name) for name in ("logp_old", "logp", "advantage")}
    recorder.record(
        "grpo", 1,
        StepRollouts(
            tokens=np.where(step.filled, step.padded("tokens"), 0), lengths=step.columns["lengths"],
            response=step.response, rewards=step.columns["rewards"], groups=step.columns["groups"],
            **(given | {"logp_old": np.roll(given["logp_old"], 4, axis=0)}),
        ),
        about={"version": 0},
    )  # fmt: skip
    recorder.close()
    found = diagnose(run)
    assert found.steps == [1]
    assert found.plain()["holds"] is False
    assert {each.cause for each in found.findings} <= {*CAUSES}

"""Each cause is named first where it was put in, with its place; and nothing is found in steps that are right.

A policy is a table of logits by the last token and the place, so that engine and trainer are known in closed form.
"""

import dataclasses
import math

import numpy as np
import pytest

from rl_observe import RunDirectory
from rl_observe.diagnose import CAUSES, diagnose, diagnose_steps
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
        other_prompt=False, turns=False, retokenised=False, mixture=False, about=None, **changes,
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


CLEAN_LOG = log_of(1.0, token_mult_prob_error=[1.0] * 6)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_found_where_nothing_is_wrong(seed):
    world = World(seed)
    steps = [world.step(n + 1, turns=seed % 3 == 0) for n in range(3)]
    assert diagnose_steps(steps, log=CLEAN_LOG).findings == []


MISMATCHES = {
    "cooler engine": ({"temperature": 0.7}, 1.4, "temperature"),
    "warmer engine": ({"temperature": 1.3}, 1.4, "temperature"),
    "nucleus": ({"top_p": 0.9}, 1.1, "truncated_sampling"),
    "old weights": ({"stale": 0.3}, 1.0, "stale_weights"),
    "partly old weights": ({"half_stale": True}, 1.0, "stale_weights"),
    "bfloat16 head": ({"bfloat16": True}, 1.003, "precision"),
    "noise of a dtype": ({"noise": 0.01}, 1.01, "precision"),
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


def test_a_constant_reward_is_named_and_a_solved_task_is_not():
    constant = log_of(
        1.0, token_mult_prob_error=[1.0] * 6, groups_with_signal=[0.0] * 6, reward=[0.0] * 6, reward_std=[0.0] * 6
    )
    assert first(diagnose_steps([], log=constant)).cause == "reward_constant"
    solved = log_of(
        1.0, groups_with_signal=[0.9] * 3 + [0.0] * 3, reward=[0.2, 0.6, 0.9, 1, 1, 1], reward_std=[0.4] * 3 + [0.0] * 3
    )
    assert diagnose_steps([], log=solved).findings == []
    broke = log_of(
        1.0, groups_with_signal=[0.9] * 3 + [0.0] * 3, reward=[0.2, 0.6, 0.9, 0, 0, 0], reward_std=[0.4] * 3 + [0.0] * 3
    )
    found = first(diagnose_steps([], log=broke))
    assert (found.cause, found.step) == ("reward_constant", 4)


def test_an_entropy_that_collapses_without_learning_is_named():
    entropy = [2.0, 1.0, 0.5, 0.01, 0.01, 0.01]
    flat = log_of(1.0, entropy=entropy, reward=[0.3, 0.3, 0.2, 0.2, 0.2, 0.2])
    assert first(diagnose_steps([], log=flat)).cause == "entropy_collapse"
    assert diagnose_steps([], log=log_of(1.0, entropy=entropy, reward=[0.3, 0.5, 0.7, 0.9, 1.0, 1.0])).findings == []


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

"""Claims about GRPO's loop: it learns under every preset, and a batch without a signal moves nothing."""

import dataclasses
import itertools

import pytest
import torch

from rl_algorithms import grpo
from rl_algorithms.async_grpo import AsyncGRPOConfig
from rl_algorithms.contracts import EnvironmentReturn
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.objective import KLConfig, Objective, RatioConfig, SelectionConfig

PRESETS = {
    "default": Objective(),
    "deepseek_grpo": grpo.deepseek_grpo(),
    "leave_one_out_grpo": grpo.leave_one_out_grpo(),
    "dr_grpo": grpo.dr_grpo(max_length=3),
    "dapo": grpo.dapo(max_length=4, overlong_buffer=1, max_generation_batches=3),
    "gspo": grpo.gspo(),
    "cispo": grpo.cispo(),
    "rloo": grpo.rloo(kl_weight=0.01),
    "reinforce_plus_plus": grpo.reinforce_plus_plus(),
    "reinforce_plus_plus_baseline": grpo.reinforce_plus_plus_baseline(),
    "on-policy ratio with TIS": Objective(
        ratio=RatioConfig(proximal="current"), correction=CorrectionConfig(weight="token")
    ),
    "recomputed with IcePop": Objective(
        ratio=RatioConfig(proximal="recomputed"),
        correction=CorrectionConfig(weight="token", low=0.5, high=5.0, outside="mask"),
    ),
    "entropy bonus": Objective(entropy_weight=0.01),
    "k2": Objective(kl=KLConfig(weight=0.01, estimator="k2")),
}


def share_of_threes(completions):
    return [completion.count("3") / 3 for completion in completions]


def run(table, engine, chat, rows, *, config, reward=share_of_threes, **options):
    return list(
        grpo.train(
            policy=table,
            engine=engine,
            weight_sync=engine,
            environment=RewardFunctionEnvironment(reward=reward),
            prompts=itertools.repeat([chat.prompt(row) for row in rows]),
            chat=chat,
            sampling=3,
            config=config,
            **options,
        )
    )


def test_the_rollouts_of_each_batch_can_be_looked_at_before_they_are_trained_on(make_table, make_engine, chat, rows):
    table, seen = make_table(lr=1.0), []
    config = grpo.GRPOConfig(max_num_steps=2, num_prompts=len(rows), num_generations_per_prompt=4)
    engine = make_engine(table)
    looked = lambda rollouts: seen.append((table.version, rollouts))  # noqa: E731
    metrics = run(table, engine, chat, rows, config=config, on_rollouts=looked)
    assert [rollouts.rewards.mean().item() for _, rollouts in seen] == [each["reward"] for each in metrics]
    assert [version for version, _ in seen] == [0, 1]


@pytest.mark.parametrize("objective", PRESETS.values(), ids=PRESETS.keys())
def test_a_table_learns_under_every_preset(make_table, make_engine, chat, rows, objective):
    lr = 2.0
    if objective.aggregation == "seq-mean-token-sum-norm":
        lr = 4.0
    elif objective.advantage.scale == "none" and objective.advantage.whiten == "none":
        lr = 3.0
    table = make_table(lr=lr)
    engine = make_engine(table)
    config = grpo.GRPOConfig(max_num_steps=60, num_prompts=4, objective=objective)
    log = run(table, engine, chat, rows, config=config, reference=make_table())
    assert log[0]["reward"] < 0.3
    assert sum(line["reward"] for line in log[-5:]) / 5 > 0.75
    assert engine.version == table.version == log[-1]["version"]
    torch.testing.assert_close(engine.logits, table.logits.detach())


@pytest.mark.parametrize("steps_per_generation", [1, 4])
def test_trainer_and_engine_agree_before_each_batch_however_many_steps_it_serves(
    make_table, make_engine, chat, rows, steps_per_generation
):
    table = make_table()
    config = grpo.GRPOConfig(max_num_steps=20, steps_per_generation=steps_per_generation, num_prompts=4)
    log = run(table, make_engine(table), chat, rows, config=config)
    assert len(log) == 20 // steps_per_generation
    assert [line["version"] for line in log] == list(range(steps_per_generation, 21, steps_per_generation))
    for line in log:
        assert line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)
        assert line["staleness_max"] == 0.0
        assert {"reward", "grad_norm", "loss", "clip_fraction", "entropy", "response_tokens", "truncated"} <= set(line)


def test_a_batch_without_a_signal_takes_no_step_and_says_so(make_table, make_engine, chat, rows):
    table = make_table()
    before = table.logits.detach().clone()
    log = run(
        table,
        make_engine(table),
        chat,
        rows,
        config=grpo.GRPOConfig(max_num_steps=2, num_prompts=4),
        reward=lambda completions: [0.3] * len(completions),
    )
    assert [line["version"] for line in log] == [0, 0]
    assert all(line["groups_with_signal"] == 0.0 and "loss" not in line for line in log)
    assert torch.equal(table.logits, before)


def test_groups_without_a_signal_that_are_kept_make_the_step_smaller(make_table, make_engine, chat, rows):
    """Two prompts of four are rewarded whatever is said."""
    norms = {}
    for kept in ("keep", "drop"):
        table = make_table()
        objective = Objective(selection=SelectionConfig(groups_without_signal=kept))
        log = run(
            table,
            make_engine(table),
            chat,
            rows,
            config=grpo.GRPOConfig(max_num_steps=1, num_prompts=4, objective=objective),
            reward=lambda completions, prompts: [
                1.0 if prompt in "01" else completion.count("3")
                for completion, prompt in zip(completions, prompts, strict=True)
            ],
        )
        norms[kept] = log[0]["grad_norm"]
    assert norms["keep"] == pytest.approx(norms["drop"] / 2, rel=0.2)


def test_dynamic_sampling_asks_until_enough_groups_differ(make_table, make_engine, chat, rows):
    """Half of the prompts never have a signal: two batches of four fill one, three if the third prompt is unlucky."""
    table = make_table()
    log = run(
        table,
        make_engine(table),
        chat,
        rows,
        config=grpo.GRPOConfig(max_num_steps=4, num_prompts=4, objective=grpo.dapo(max_generation_batches=5)),
        reward=lambda completions, prompts: [
            1.0 if prompt in "01" else completion.count("3") / 3
            for completion, prompt in zip(completions, prompts, strict=True)
        ],
    )
    assert all(2 <= line["environment/generation_batches"] <= 3 for line in log)
    assert all(line["environment/groups_too_many"] <= 2 for line in log)


def test_dynamic_sampling_gives_up_where_it_was_told_to(make_table, make_engine, chat, rows):
    table = make_table()
    log = run(
        table,
        make_engine(table),
        chat,
        rows,
        config=grpo.GRPOConfig(max_num_steps=1, num_prompts=4, objective=grpo.dapo(max_generation_batches=3)),
        reward=lambda completions: [1.0] * len(completions),
    )
    assert log[0]["environment/generation_batches"] == 3
    assert log[0]["version"] == 0


def test_a_run_that_is_resumed_takes_the_steps_that_were_left(make_table, make_engine, chat, rows):
    config = grpo.GRPOConfig(max_num_steps=6, steps_per_generation=2, num_prompts=4)
    table = make_table()
    whole = run(table, make_engine(table), chat, rows, config=config)
    again = make_table()
    engine = make_engine(again)
    run(again, engine, chat, rows, config=dataclasses.replace(config, max_num_steps=4))
    rest = run(again, engine, chat, rows, config=config, version=4, steps_taken=4)
    assert len(whole) == 3
    assert len(rest) == 1
    assert torch.equal(table.logits, again.logits)


def test_an_entropy_bonus_asks_the_policy_for_entropies(make_table, make_engine, chat, rows):
    """And holds the distribution open that the reward would close."""
    entropies = {}
    for weight in (0.0, 1.0):
        table = make_table()
        config = grpo.GRPOConfig(max_num_steps=40, num_prompts=4, objective=Objective(entropy_weight=weight))
        entropies[weight] = run(table, make_engine(table), chat, rows, config=config)[-1]["entropy"]
    assert entropies[1.0] > entropies[0.0] + 0.5


def test_a_kl_holds_the_policy_to_the_reference(make_table, make_engine, chat, rows):
    rewards = {}
    for weight in (0.0, 3.0):
        table = make_table()
        objective = Objective(kl=KLConfig(weight=weight, estimator="k3"))
        log = run(
            table,
            make_engine(table),
            chat,
            rows,
            config=grpo.GRPOConfig(max_num_steps=40, num_prompts=4, objective=objective),
            reference=make_table(),
        )
        rewards[weight] = log[-1]["reward"]
    assert rewards[3.0] < rewards[0.0] - 0.2
    assert 0 < log[-1]["kl_reference"] < 1


def test_the_kl_to_the_reference_is_reported_wherever_it_stands(make_table, make_engine, chat, rows):
    for place, estimator in (("loss", "k2"), ("reward", "k1")):
        table = make_table()
        objective = Objective(kl=KLConfig(weight=0.1, estimator=estimator, place=place))
        log = run(
            table,
            make_engine(table),
            chat,
            rows,
            config=grpo.GRPOConfig(max_num_steps=3, num_prompts=4, objective=objective),
            reference=make_table(),
        )
        figures = [line["kl_reference"] for line in log]
        assert figures[0] == pytest.approx(0.0, abs=1e-12)
        assert figures[2] > figures[1] > 0


class EngineWithGreedy:
    """A table's engine whose sampling options are a number of tokens, negative for greedy responses."""

    def __init__(self, engine):
        self.engine, self.asked = engine, []

    def __call__(self, *, version):
        return self.engine(version=version)

    def generate(self, prompts, sampling):
        self.asked.append((len(prompts), sampling))
        if sampling > 0:
            return self.engine.generate(prompts, sampling)
        sampled, self.engine.logits = self.engine.logits, 1e3 * self.engine.logits
        try:
            return self.engine.generate(prompts, -sampling)
        finally:
            self.engine.logits = sampled


def test_remax_samples_a_greedy_response_to_each_prompt_and_compares_with_its_reward(
    make_table, make_engine, chat, rows
):
    table, seen = make_table(lr=1.0), []
    engine = EngineWithGreedy(make_engine(table))
    config = grpo.GRPOConfig(max_num_steps=60, num_prompts=4, num_generations_per_prompt=2, objective=grpo.remax())
    log = run(table, engine, chat, rows, config=config, greedy=-3, on_rollouts=seen.append)
    assert engine.asked[:2] == [(8, 3), (4, -3)]
    first = seen[0]
    by_group = dict(zip(first.groups.tolist(), first.greedy_rewards.tolist(), strict=True))
    assert first.greedy_rewards.tolist() == [by_group[group] for group in first.groups.tolist()]
    advantage = grpo.prepare(first, config.objective).advantage
    compared = (first.rewards - first.greedy_rewards).float()
    torch.testing.assert_close(advantage, compared[:, None].expand(advantage.shape))
    assert log[0]["reward_greedy"] == pytest.approx(first.greedy_rewards.mean().item())
    assert sum(line["reward"] for line in log[-5:]) / 5 > 0.75


def test_rows_whose_greedy_response_cannot_be_judged_have_no_baseline_and_fail(make_table, make_engine, chat, rows):
    class FailsWithGreedy:
        def step(self, conversations):
            greedy = len(conversations) == len(rows)
            return [
                EnvironmentReturn(reward=0.5, terminated=True, failed="no judge" if greedy and index == 1 else None)
                for index in range(len(conversations))
            ]

    seen = []
    engine = EngineWithGreedy(make_engine(make_table()))
    config = grpo.GRPOConfig(max_num_steps=1, num_prompts=4, num_generations_per_prompt=3, objective=grpo.remax())
    loop = grpo.train(
        policy=make_table(),
        engine=engine,
        weight_sync=engine,
        environment=FailsWithGreedy(),
        prompts=itertools.repeat([chat.prompt(row) for row in rows]),
        chat=chat,
        sampling=3,
        config=config,
        greedy=-3,
        on_rollouts=seen.append,
    )
    assert next(loop)["failed"] == pytest.approx(3 / 12)
    assert seen[0].groups[seen[0].failed].tolist() == [1, 1, 1]
    assert seen[0].failures[3] == "the greedy response to its prompt failed: no judge"


def test_remax_without_greedy_responses_is_refused(make_table, make_engine, chat, rows):
    config = grpo.GRPOConfig(max_num_steps=1, num_prompts=4, num_generations_per_prompt=1, objective=grpo.remax())
    table = make_table()
    with pytest.raises(ValueError, match=r"estimator='remax' compares with the greedy response.*give.*greedy="):
        run(table, make_engine(table), chat, rows, config=config)
    with pytest.raises(ValueError, match="this loop samples none"):
        AsyncGRPOConfig(max_num_steps=1, num_generations_per_prompt=2, objective=grpo.remax(), max_staleness=2)


@pytest.mark.parametrize(("num_groups", "steps"), [(8, 4), (3, 4), (6, 4), (1, 3)])
def test_rows_of_a_group_are_in_one_step_where_equal_shares_allow_it(num_groups, steps):
    groups = torch.arange(num_groups).repeat(4)  # the rows of a group need no order
    trainable = torch.ones(len(groups), 3, dtype=torch.bool)
    trainable[groups == 0] = torch.tensor([False, True, False])
    trainable[0] = False  # has nothing to train on
    filled = torch.zeros(trainable.shape)
    examples = grpo.Examples(
        tokens=torch.arange(len(groups))[:, None].expand(trainable.shape),  # a row's own number
        lengths=torch.full((len(groups),), 3),
        trainable=trainable,
        **dict.fromkeys(("advantage", "logp_old", "logp_proximal", "logp_ref"), filled),
    )
    config = grpo.GRPOConfig(max_num_steps=steps, steps_per_generation=steps)
    parts = [part.tokens[:, 0].tolist() for part in grpo.minibatches(examples, config, groups=groups, seed=3)]
    assert sorted(row for part in parts for row in part) == list(range(1, len(groups)))
    assert len(parts) == steps
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    shared = sum(len({int(groups[row]) for row in part}) for part in parts)
    assert shared <= num_groups + steps - 1, "each cut parts one group at most"

    def dealt(seed):
        dealing = grpo.minibatches(examples, config, groups=groups, seed=seed)
        return tuple(tuple(part.tokens[:, 0].tolist()) for part in dealing)

    assert dealt(3) == tuple(map(tuple, parts))
    assert num_groups == 1 or len({dealt(seed) for seed in range(20)}) > 1

"""Claims about GRPO: the objective, the advantages, the step, the loop."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import grpo
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.rollouts import Rollouts

CONFIG = grpo.GRPOConfig(max_num_steps=1)


def share_of_threes(completions):
    return [completion.count("3") / 3 for completion in completions]


def make_rollouts(table, *, num_prompts=4, group_size=8, width=5, seed=0):
    """Rollouts of ragged length whose reward is the share of token 2."""
    generator = torch.Generator().manual_seed(seed)
    rows = num_prompts * group_size
    tokens = torch.randint(2, 6, (rows, width), generator=generator)
    lengths = torch.randint(2, width + 1, (rows,), generator=generator)
    response = (torch.arange(width) >= 1) & (torch.arange(width) < lengths[:, None])
    examples = grpo.Examples(
        tokens=tokens,
        lengths=lengths,
        trainable=response,
        logp_old=torch.zeros(rows, width),
        advantage=torch.zeros(rows),
    )
    return Rollouts(
        tokens=tokens,
        lengths=lengths,
        response=response,
        logp_old=table.logp(examples).float(),
        rewards=((tokens == 2) & response).float().sum(1).view(num_prompts, group_size),
        truncated=torch.zeros(rows, dtype=torch.bool),
        answers=("",) * rows,
    )


def step(table, rollouts, config=CONFIG):
    return grpo.step(table, grpo.prepare(rollouts, normalize_by_std=config.normalize_by_std), config)


@given(st.lists(st.lists(st.floats(-4, 4, width=32), min_size=4, max_size=4), min_size=1, max_size=6), st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_equal_rewards_give_exactly_zero(rewards, normalize_by_std):
    rewards = torch.tensor(rewards)
    advantage = grpo.group_advantage(rewards, normalize_by_std=normalize_by_std)
    assert advantage.sum(dim=1).abs().max() < 1e-3
    constant = rewards.amax(1) == rewards.amin(1)
    assert (advantage[constant] == 0).all()


@given(st.floats(0.5, 20), st.floats(-5, 5))
def test_normalized_advantages_do_not_depend_on_the_scale_of_rewards(scale, shift):
    rewards = torch.tensor([[1.0, 0.0, 0.0, 3.0]])
    torch.testing.assert_close(
        grpo.group_advantage(scale * rewards + shift, normalize_by_std=True),
        grpo.group_advantage(rewards, normalize_by_std=True),
        rtol=1e-3,
        atol=1e-3,
    )


def test_a_lone_winner_of_eight_gets_the_published_advantage():
    # (1 - 1/8) / Bessel std of one 1 among seven 0s = 0.875 / 0.35355
    advantage = grpo.group_advantage(torch.eye(8)[:1], normalize_by_std=True)
    assert advantage[0, 0].item() == pytest.approx(2.4742, abs=1e-3)


def test_group_advantage_checks_its_shape():
    with pytest.raises(Exception, match=r"(?i)type"):
        grpo.group_advantage(torch.zeros(3), normalize_by_std=False)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (0.0, 1.0, -1.0),
        (0.5, 1.0, 0.0),  # already pushed up beyond 1.28
        (-0.5, -1.0, 0.0),  # already pushed down below 0.8
        (0.5, -1.0, 1.6487),  # pessimistic: too likely and bad is still pushed down, by the ratio
        (-0.5, 1.0, -0.6065),
    ],
)
def test_clipped_tokens_have_no_gradient_and_others_the_policy_gradient(log_ratio, advantage, gradient):
    logp = torch.full((1, 1), log_ratio, requires_grad=True)
    per_token, bound = grpo.clipped_surrogate(
        logp, torch.zeros(1, 1), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28
    )
    per_token.sum().backward()
    assert logp.grad.item() == pytest.approx(gradient, abs=1e-4)
    assert bool(bound) == (gradient == 0.0)


def test_the_first_step_is_on_policy(make_table):
    table = make_table()
    metrics = step(table, make_rollouts(table))
    assert metrics["clip_fraction"] == 0.0
    assert metrics["kl_engine"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6)


def test_the_on_policy_gradient_is_that_of_reinforce(make_table):
    table = make_table()
    rollouts = make_rollouts(table)
    examples = grpo.prepare(rollouts, normalize_by_std=True)
    step(table, rollouts)
    other = make_table()
    weighted = other.token_logp(examples) * examples.advantage[:, None]
    (-weighted.sum() / examples.trainable.sum()).backward()
    torch.testing.assert_close(table.grad, other.logits.grad, rtol=1e-6, atol=1e-9)


@given(cut=st.integers(1, 40))
def test_gradient_and_metrics_do_not_depend_on_the_cut(make_table, cut):
    whole, pieces = make_table(), make_table(cut=cut)
    rollouts = make_rollouts(whole)
    metrics, metrics_of_pieces = step(whole, rollouts), step(pieces, rollouts)
    torch.testing.assert_close(whole.grad, pieces.grad, rtol=1e-9, atol=1e-12)
    assert metrics == pytest.approx(metrics_of_pieces, rel=1e-6)


def test_nothing_off_the_mask_matters_not_even_nan(make_table):
    clean, dirty = make_table(), make_table()
    rollouts = make_rollouts(clean)
    soiled = torch.where(rollouts.response, rollouts.logp_old, torch.nan)
    metrics, metrics_of_soiled = step(clean, rollouts), step(dirty, dataclasses.replace(rollouts, logp_old=soiled))
    torch.testing.assert_close(clean.grad, dirty.grad)
    assert metrics == metrics_of_soiled


def test_what_is_logged_off_policy_is_what_its_name_says(make_table):
    """One prompt, two answers of one token each, with a sampler that was off by known factors."""
    table = make_table()
    tokens = torch.tensor([[2, 2], [2, 3]])
    response = torch.tensor([[False, True], [False, True]])
    lengths = torch.tensor([2, 2])
    logp = table.logits.detach().log_softmax(-1)[1, [2, 3]].float()
    off = torch.tensor([0.5, -0.2])  # logp_old - logp: the ratios are e^-0.5, clipped for nobody, and e^0.2
    rollouts = Rollouts(
        tokens=tokens,
        lengths=lengths,
        response=response,
        logp_old=torch.stack([torch.zeros(2), logp + off], dim=1),
        rewards=torch.tensor([[1.0, 0.0]]),
        truncated=torch.tensor([True, False]),
        answers=("", ""),
    )
    metrics = step(table, rollouts)
    assert metrics["kl_engine"] == pytest.approx(off.mean().item(), abs=1e-6)
    assert metrics["token_mult_prob_error"] == pytest.approx(off.abs().exp().mean().item(), abs=1e-5)
    assert metrics["entropy"] == pytest.approx(-(logp + off).mean().item(), abs=1e-5)
    assert metrics["clip_fraction"] == 0.0
    advantage = 0.5 / (0.5**0.5 + 1e-4)
    ratio = torch.exp(-off)
    assert metrics["loss"] == pytest.approx((-advantage * ratio[0] + advantage * ratio[1]).item() / 2, abs=1e-5)


def test_tokens_beyond_the_clip_are_counted_and_only_those_of_answers(make_table):
    table = make_table()
    rollouts = make_rollouts(table)
    far = torch.where(
        rollouts.response, rollouts.logp_old - 1.0, -9.0
    )  # ratio e: clipped wherever the advantage is > 0
    examples = grpo.prepare(dataclasses.replace(rollouts, logp_old=far), normalize_by_std=True)
    bound = (examples.trainable & (examples.advantage > 0)[:, None]).sum() / examples.trainable.sum()
    assert grpo.step(table, examples, CONFIG)["clip_fraction"] == pytest.approx(bound.item())


def test_groups_without_a_signal_leave_the_batch_and_its_count(make_table):
    with_dead, without = make_table(), make_table()
    rollouts = make_rollouts(without, num_prompts=3)
    more = make_rollouts(without, num_prompts=1, seed=7)
    dead = dataclasses.replace(more, rewards=torch.full((1, 8), 0.1))
    both = dataclasses.replace(
        rollouts,
        **{
            name: torch.cat([getattr(rollouts, name), getattr(dead, name)])
            for name in ("tokens", "lengths", "response", "logp_old", "rewards", "truncated")
        },
    )
    step(without, rollouts)
    step(with_dead, both)
    torch.testing.assert_close(without.grad, with_dead.grad)


def train(table, engine, chat, rows, config, reward=share_of_threes):
    prompts = itertools.repeat([chat.prompt(row) for row in rows])
    return list(
        grpo.train(
            policy=table,
            engine=engine,
            weight_sync=engine,
            environment=RewardFunctionEnvironment(reward=reward),
            prompts=prompts,
            chat=chat,
            sampling=3,
            config=config,
            version=table.version,
        )
    )


@pytest.mark.parametrize("steps_per_generation", [1, 2])
def test_a_table_learns_and_the_engine_follows_it(make_table, make_engine, chat, rows, steps_per_generation):
    table = make_table()
    engine = make_engine(table)
    config = grpo.GRPOConfig(max_num_steps=60, steps_per_generation=steps_per_generation, num_prompts=4)
    log = train(table, engine, chat, rows, config)
    assert len(log) == 60 // steps_per_generation
    assert all(0.0 <= line["truncated"] <= 1.0 for line in log)
    assert log[-1]["truncated"] > 0.9  # three tokens is the limit, and threes are what is rewarded
    assert log[0]["reward"] < 0.3
    assert log[-1]["reward"] > 0.8
    assert engine.version == table.version == log[-1]["version"]
    torch.testing.assert_close(engine.logits, table.logits.detach())
    # Before each batch's first step trainer and engine agree, however many steps the batch serves.
    assert all(line.get("token_mult_prob_error", 1.0) == pytest.approx(1.0, abs=1e-6) for line in log)


def test_a_batch_without_any_signal_takes_no_step_and_transfers_nothing(make_table, make_engine, chat, rows):
    table = make_table()
    engine = make_engine(table)
    config = grpo.GRPOConfig(max_num_steps=2)
    log = train(table, engine, chat, rows, config, reward=lambda completions: [0.5] * len(completions))
    assert [line["version"] for line in log] == [0, 0]
    assert table.version == engine.version == 0
    assert log[0]["groups_with_signal"] == 0.0
    assert "loss" not in log[0]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"num_generations_per_prompt": 1}, "num_generations_per_prompt=1"),
        ({"max_num_steps": 7, "steps_per_generation": 2}, "max_num_steps=7"),
        ({"num_prompts": 0}, "num_prompts=0"),
    ],
)
def test_an_impossible_configuration_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        grpo.GRPOConfig(**{"max_num_steps": 4, **options})

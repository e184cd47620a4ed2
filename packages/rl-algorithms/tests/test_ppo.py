"""Claims about PPO: what the critic is asked, what it learns, and that a policy learns from it."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms import advantages, ppo, presets, value_function
from rl_algorithms.contracts import EnvironmentReturn
from rl_algorithms.objective import AdvantageConfig, Objective, RatioConfig, SelectionConfig
from rl_algorithms.rollouts import Rollouts
from rl_algorithms.stepping import take_rows

CONFIG = ppo.PPOConfig(max_num_steps=1, steps_per_generation=1)


class TableValues:
    """`values[t]` for the state before position t, whatever came before; garbage where nothing was asked."""

    def __init__(self, *, length=12, lr=1.0, cut=10**9, seed=3, garbage=0.0):
        generator = torch.Generator().manual_seed(seed)
        self.values = torch.randn(length, generator=generator, dtype=torch.float64).requires_grad_()
        self.lr, self.cut, self.garbage, self.asked, self.grad = lr, cut, garbage, [], None

    def output(self, examples):
        return torch.where(examples.trainable, self.values[: examples.tokens.shape[1]], self.garbage)

    @torch.no_grad()
    def value(self, examples):
        self.asked.append(examples)
        return self.output(examples)

    def forward_backward(self, examples, loss, *, output):
        assert output == "value"
        sums = {}
        for rows in torch.arange(len(examples.tokens)).split(min(self.cut, len(examples.tokens))):
            microbatch = take_rows(examples, rows)
            scalar, parts = loss(self.output(microbatch), microbatch)
            scalar.backward()
            sums = {name: sums.get(name, 0) + part for name, part in parts.items()}
        return sums

    def optim_step(self):
        self.grad, self.values.grad = self.values.grad, None
        with torch.no_grad():
            self.values -= self.lr * self.grad
        return self.grad.norm().item()


class Zero(TableValues):
    """A critic that expects nothing."""

    def __init__(self):
        super().__init__()
        self.values = torch.zeros(12, dtype=torch.float64)


def make_rollouts(table, *, rows=6, width=7, seed=0, observed=True):
    """Ragged rows of two answers with an observation between, a reward at the end of each answer."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, 6, (rows, width), generator=generator)
    lengths = torch.randint(5, width + 1, (rows,), generator=generator)
    place = torch.arange(width)
    inside = place < lengths[:, None]
    response = inside & (place >= 1) & ((place != 3) if observed else True)
    last = torch.zeros(rows, width, dtype=torch.bool)
    last[torch.arange(rows), lengths - 1] = True
    last[:, 2] = True
    token_rewards = torch.where(last, torch.randn(rows, width, generator=generator, dtype=torch.float64), 0.0)
    tokens = torch.where(inside, tokens, 0)
    logp = table.logits.detach().log_softmax(-1)[place, tokens]
    return Rollouts(
        tokens=tokens,
        lengths=lengths,
        response=response,
        logp_old=torch.where(response, logp, 0.0),
        versions=torch.where(response, 0, -1),
        turns=torch.where(response, (place > 3).long(), -1),
        token_rewards=token_rewards,
        rewards=token_rewards.sum(dim=1),
        components=torch.zeros(rows, 0, dtype=torch.float64),
        groups=torch.arange(rows),
        truncated=torch.arange(rows) % 2 == 0,
        failed=torch.zeros(rows, dtype=torch.bool),
        answers=("",) * rows,
        failures=(None,) * rows,
    )


def prepare(table, rollouts, critic, config=CONFIG, reference=None):
    return ppo.prepare(rollouts, config, value_model=critic, policy=table, reference=reference)


def valued(**options):
    return dataclasses.replace(CONFIG, value=ppo.ValueConfig(**options))


def steps(table, critic, ready, config=CONFIG):
    return ppo.take_steps(ready, config, policy=table, value_model=critic, seed=0)


# -- What is estimated ---------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(gamma=st.floats(0, 1), lam=st.floats(0, 1), seed=st.integers(0, 99))
def test_advantages_are_gae_over_the_policys_tokens_read_in_order(make_table, gamma, lam, seed):
    """By hand, row by row, with the observation cut out of the row."""
    table, critic = make_table(), TableValues(seed=seed)
    rollouts = make_rollouts(table, seed=seed)
    examples, of_values = prepare(table, rollouts, critic, valued(gamma=gamma, lam=lam, whiten=False))
    for row in range(len(rollouts)):
        chosen = rollouts.response[row].nonzero()[:, 0].tolist()
        rewards = [rollouts.token_rewards[row, place].item() for place in chosen]
        values = [*(critic.values[place].item() for place in chosen), 0.0]
        deltas = [rewards[i] + gamma * values[i + 1] - values[i] for i in range(len(chosen))]
        expected = [
            sum((gamma * lam) ** (later - i) * deltas[later] for later in range(i, len(chosen)))
            for i in range(len(chosen))
        ]
        assert examples.advantage[row, chosen].tolist() == pytest.approx(expected, abs=1e-9)
        returns = [a + v for a, v in zip(expected, values, strict=False)]
        assert of_values.returns[row, chosen].tolist() == pytest.approx(returns, abs=1e-9)
    assert (examples.advantage[~examples.trainable] == 0).all()


def test_whitening_is_over_the_whole_batch_and_leaves_returns_alone(make_table):
    table, critic = make_table(), TableValues()
    rollouts = make_rollouts(table)
    raw, plain = prepare(table, rollouts, critic, valued(whiten=False))
    white, of_values = prepare(table, rollouts, critic, valued(whiten=True))
    inside = white.advantage[rollouts.response]
    assert inside.mean().item() == pytest.approx(0.0, abs=1e-9)
    assert inside.std().item() == pytest.approx(1.0, abs=1e-6)
    torch.testing.assert_close(white.advantage, advantages.whiten(raw.advantage, rollouts.response))
    torch.testing.assert_close(of_values.returns, plain.returns)


def test_a_lambda_of_its_own_brings_the_critic_the_whole_reward(make_table):
    table, critic = make_table(), TableValues()
    rollouts = make_rollouts(table)
    both, of_both = prepare(table, rollouts, critic, valued(lam=0.5, lam_of_returns=1.0))
    one, _ = prepare(table, rollouts, critic, valued(lam=0.5))
    torch.testing.assert_close(both.advantage, one.advantage)
    to_go = torch.where(rollouts.response, advantages.returns_to_go(rollouts.token_rewards), 0.0)
    torch.testing.assert_close(of_both.returns, to_go)


def test_an_answer_that_was_cut_off_is_worth_what_would_have_followed_only_if_asked_for(make_table):
    table, critic = make_table(), TableValues()
    rollouts = make_rollouts(table)
    _, as_ended = prepare(table, rollouts, critic, valued(lam=1.0))
    assert torch.equal(critic.asked[-1].lengths, rollouts.lengths)
    _, went_on = prepare(table, rollouts, critic, valued(lam=1.0, bootstrap_truncated=True))
    after = torch.where(rollouts.truncated, critic.values.detach()[rollouts.lengths], 0.0)
    expected = torch.where(rollouts.response, as_ended.returns + after[:, None], 0.0)
    torch.testing.assert_close(went_on.returns, expected)
    question = critic.asked[-1]
    assert torch.equal(question.lengths, rollouts.lengths + rollouts.truncated)
    assert torch.equal(question.trainable.sum(1), rollouts.response.sum(1) + rollouts.truncated)


def test_the_kl_is_in_the_rewards_token_by_token(make_table):
    table, reference = make_table(), make_table(seed=9)
    rollouts = make_rollouts(table)
    config = dataclasses.replace(valued(lam=1.0), objective=presets.ppo(kl_weight=0.3))
    examples, of_values = prepare(table, rollouts, Zero(), config, reference=reference)
    k1 = torch.where(rollouts.response, rollouts.logp_old - reference.logp(examples), 0.0)
    to_go = advantages.returns_to_go(rollouts.token_rewards - 0.3 * k1)
    torch.testing.assert_close(of_values.returns, torch.where(rollouts.response, to_go, 0.0))


def test_failed_rows_leave_and_none_that_is_left_changes(make_table):
    table, critic = make_table(), TableValues()
    rollouts = make_rollouts(table)
    failed = dataclasses.replace(rollouts, failed=torch.tensor([True] + [False] * 5))
    config = valued(whiten=False)
    some, of_some = prepare(table, failed, critic, config)
    every, of_every = prepare(table, rollouts, critic, config)
    width = some.tokens.shape[1]
    torch.testing.assert_close(some.advantage, every.advantage[1:, :width])
    torch.testing.assert_close(of_some.returns, of_every.returns[1:, :width])
    nothing = prepare(table, dataclasses.replace(rollouts, failed=torch.ones(6, dtype=torch.bool)), critic)
    assert len(nothing[0].tokens) == 0
    assert value_function.describe_values(nothing[1]) == {}
    assert steps(table, critic, nothing) == []


def test_what_stands_off_the_mask_matters_to_nobody_not_even_nan(make_table):
    clean, soiled = (make_table(), TableValues()), (make_table(), TableValues(garbage=torch.nan))
    rollouts = make_rollouts(clean[0])
    nan = torch.where(rollouts.response, rollouts.logp_old, torch.nan)
    dirty = dataclasses.replace(rollouts, logp_old=nan)
    log = steps(*clean, prepare(clean[0], rollouts, clean[1]))
    log_of_dirty = steps(*soiled, prepare(soiled[0], dirty, soiled[1]))
    torch.testing.assert_close(clean[0].grad, soiled[0].grad)
    torch.testing.assert_close(clean[1].grad, soiled[1].grad)
    assert log == log_of_dirty


def test_a_value_that_is_not_finite_is_named(make_table):
    critic = TableValues()
    with torch.no_grad():
        critic.values[2] = torch.inf
    with pytest.raises(ValueError, match="the value before token 2 of row 0 is inf, and 6 values"):
        prepare(make_table(), make_rollouts(make_table()), critic)


# -- What is learnt ------------------------------------------------------------------------------------------------


def of_values(seed=0, rows=4, width=6):
    generator = torch.Generator().manual_seed(seed)

    def draw():
        return torch.randn(rows, width, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, width, generator=generator) < 0.7
    lengths = torch.full((rows,), width)
    tokens = torch.zeros(rows, width, dtype=torch.int64)
    made = ppo.ValueExamples(tokens=tokens, lengths=lengths, trainable=mask, values_old=draw(), returns=draw())
    return made, draw()


@settings(max_examples=25)
@given(seed=st.integers(0, 50), clip=st.sampled_from([None, 0.2, 1.0]))
def test_the_gradient_of_the_value_loss_is_that_of_finite_differences(seed, clip):
    examples, values = of_values(seed)
    values.requires_grad_()
    torch.autograd.gradcheck(
        lambda each: value_function.loss(each, examples, clip=clip, num_tokens=9)[0], (values,), eps=1e-7, atol=1e-6
    )


@given(seed=st.integers(0, 50), clip=st.sampled_from([None, 0.2]))
def test_the_value_loss_looks_at_nothing_off_the_mask(seed, clip):
    examples, values = of_values(seed)
    mask = examples.trainable
    soiled = {name: torch.where(mask, getattr(examples, name), torch.nan) for name in ("values_old", "returns")}
    clean, dirty = values.clone().requires_grad_(), torch.where(mask, values, torch.nan).requires_grad_()
    one, _ = value_function.loss(clean, examples, clip=clip, num_tokens=9)
    two, _ = value_function.loss(dirty, dataclasses.replace(examples, **soiled), clip=clip, num_tokens=9)
    (one + two).backward()
    assert one.item() == two.item()
    torch.testing.assert_close(clean.grad, dirty.grad)
    assert (dirty.grad[~mask] == 0).all()


@settings(max_examples=25)
@given(seed=st.integers(0, 50), clip=st.sampled_from([None, 0.2, 1.0]))
def test_the_value_loss_is_its_formula_token_by_token(seed, clip):
    examples, values = of_values(seed)
    total = bound = 0
    for row, token in examples.trainable.nonzero().tolist():
        value, old, target = (each[row, token].item() for each in (values, examples.values_old, examples.returns))
        held = value if clip is None else old + min(max(value - old, -clip), clip)
        total += max((value - target) ** 2, (held - target) ** 2) / 2
        bound += (held - target) ** 2 > (value - target) ** 2
    loss, sums = value_function.loss(values, examples, clip=clip, num_tokens=7)
    assert loss.item() == sums["loss"].item() == pytest.approx(total / 7)
    assert sums["clip_fraction"].item() == bound


@settings(max_examples=25)
@given(cut=st.integers(1, 6), order=st.permutations(range(6)), more=st.integers(0, 2))
def test_neither_the_cut_nor_the_order_of_rows_nor_padding_changes_a_step(make_table, cut, order, more):
    whole, pieces = (make_table(), TableValues()), (make_table(cut=cut), TableValues(cut=cut))
    rollouts = make_rollouts(whole[0], width=6)
    moved = rollouts.take(torch.tensor(order))
    blank = {"versions": -1, "turns": -1}
    per_token = ("tokens", "response", "logp_old", "versions", "turns", "token_rewards")
    wider = {
        name: torch.nn.functional.pad(getattr(moved, name), (0, more), value=blank.get(name, 0)) for name in per_token
    }
    moved = dataclasses.replace(moved, **wider)
    (log,) = steps(*whole, prepare(whole[0], rollouts, whole[1]))
    (log_of_pieces,) = steps(*pieces, prepare(pieces[0], moved, pieces[1]))
    torch.testing.assert_close(whole[0].grad, pieces[0].grad, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(whole[1].grad, pieces[1].grad, rtol=1e-9, atol=1e-12)
    assert log == pytest.approx(log_of_pieces, rel=1e-6, abs=1e-9)


def test_the_critic_comes_to_expect_the_mean_return_and_says_what_it_explains(make_table):
    table, critic = make_table(), TableValues(lr=3.0)
    rollouts = make_rollouts(table, rows=30)
    config = valued(lam=1.0, clip=None)
    _, before = prepare(table, rollouts, critic, config)
    losses = [value_function.step(critic, before, clip=None)["value_loss"] for _ in range(60)]
    assert losses == sorted(losses, reverse=True)
    _, after = prepare(table, rollouts, critic, config)
    chosen = rollouts.response[:, 1]
    assert critic.values[1].item() == pytest.approx(after.returns[chosen, 1].mean().item(), abs=1e-3)
    explained = [value_function.describe_values(each)["explained_variance"] for each in (before, after)]
    assert explained[0] < explained[1]
    assert explained[1] >= 0.0
    perfect = dataclasses.replace(after, values_old=after.returns)
    assert value_function.describe_values(perfect)["explained_variance"] == pytest.approx(1.0)


def test_a_value_beyond_its_clip_stays_where_it_is():
    examples, _ = of_values()
    moved = (examples.values_old + 1.0).requires_grad_()
    beyond = dataclasses.replace(examples, returns=examples.values_old + 5.0)  # it is right to move, and moved enough
    loss, sums = value_function.loss(moved, beyond, clip=0.2, num_tokens=1)
    loss.backward()
    assert (moved.grad == 0).all()
    assert sums["clip_fraction"] == examples.trainable.sum()


# -- The loop ------------------------------------------------------------------------------------------------------


class ShareOfThrees:
    """An environment that likes one digit."""

    def step(self, conversations):
        return [EnvironmentReturn(reward=each.answer.count("3") / 3, terminated=True) for each in conversations]


class Broken:
    """An environment whose sandbox is gone."""

    def step(self, conversations):
        return [EnvironmentReturn(reward=0.0, terminated=True, failed="no sandbox") for _ in conversations]


def train(table, critic, engine, chat, rows, config, environment):
    return list(
        ppo.train(
            policy=table,
            value_model=critic,
            engine=engine,
            weight_sync=engine,
            environment=environment,
            prompts=itertools.repeat([chat.prompt(row) for row in rows] * 8),
            chat=chat,
            sampling=3,
            config=config,
            version=table.version,
        )
    )


@pytest.mark.parametrize(("steps_per_generation", "num_epochs"), [(1, 1), (4, 2)])
def test_a_table_learns_with_its_critic_and_the_engine_follows(
    make_table, make_engine, chat, rows, steps_per_generation, num_epochs
):
    table, critic = make_table(lr=1.0), TableValues(lr=1.0)
    engine = make_engine(table)
    config = ppo.PPOConfig(
        max_num_steps=80, num_prompts=32, steps_per_generation=steps_per_generation, num_epochs=num_epochs
    )
    log = train(table, critic, engine, chat, rows, config, ShareOfThrees())
    assert len(log) == 80 // steps_per_generation
    assert log[0]["reward"] < 0.4
    assert log[-1]["reward"] > 0.8
    assert log[-1]["value"] == pytest.approx(log[-1]["return"], abs=0.15)
    assert log[-1]["value_loss"] < log[0]["value_loss"]
    assert engine.version == table.version == log[-1]["version"] == 80
    torch.testing.assert_close(engine.logits, table.logits.detach())
    assert all(line["token_mult_prob_error"] == pytest.approx(1.0, abs=1e-6) for line in log)


def test_the_same_seed_deals_the_same_minibatches(make_table):
    config = ppo.PPOConfig(max_num_steps=4, steps_per_generation=2, num_epochs=2)
    table, critic = make_table(), TableValues()
    ready = prepare(table, make_rollouts(table), critic, config)
    other = make_table(), TableValues()
    one = ppo.take_steps(ready, config, policy=table, value_model=critic, seed=5)
    two = ppo.take_steps(ready, config, policy=other[0], value_model=other[1], seed=5)
    assert one == two
    torch.testing.assert_close(critic.values, other[1].values, rtol=0, atol=0)


def test_a_batch_that_failed_as_a_whole_ends_the_run_and_says_why(make_table, make_engine, chat, rows):
    table, critic = make_table(), TableValues()
    engine = make_engine(table)
    config = dataclasses.replace(CONFIG, num_prompts=32)
    with pytest.raises(ValueError, match=r"all 32 rows failed, .*; the first: no sandbox"):
        train(table, critic, engine, chat, rows, config, Broken())
    assert engine.version == table.version == 0


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            ppo.ValueConfig(gamma=0.9, lam=0.5, clip=None, whiten=False),
            ["delta[t] = R[t] + 0.9 V[t+1] - V[t]", "A[t] = delta[t] + 0.45 A[t+1]\n", "V[T] = 0", "(V - G[t])^2 /"],
        ),
        (
            ppo.ValueConfig(lam_of_returns=1.0, bootstrap_truncated=True),
            ["A[t+1], then mean 0 and variance 1", "+ 1 (G[t+1] - V[t+1])", "cut off is the critic's", "max((V - G"],
        ),
    ],
)
def test_a_configuration_explains_the_critic_where_groups_were_compared(value, said):
    config = dataclasses.replace(CONFIG, value=value)
    text = ppo.explain(config)
    assert all(part in text for part in said)
    assert "A = R" not in text
    assert text.split("\n")[-1] == config.objective.explain().split("\n")[-1]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"num_epochs": 0}, "num_epochs=0"),
        ({"num_prompts": 0}, "num_prompts=0"),
        ({"max_num_steps": 7, "steps_per_generation": 2}, "max_num_steps=7 must be a multiple"),
        ({"steps_per_generation": 4, "num_epochs": 3}, "steps_per_generation=4 must be a multiple of num_epochs=3"),
        ({"objective": Objective()}, "objective.advantage=.* must be as in presets.ppo"),
        (
            {
                "steps_per_generation": 2,
                "objective": Objective(
                    advantage=AdvantageConfig(baseline="none", scale="none"),
                    ratio=RatioConfig(proximal="current"),
                    selection=SelectionConfig(groups_without_signal="keep"),
                ),
            },
            "objective.ratio.proximal='current' takes no notice",
        ),
    ],
)
def test_an_impossible_configuration_is_named(options, named):
    with pytest.raises(ValueError, match=named):
        ppo.PPOConfig(**{"max_num_steps": 4, **options})


@pytest.mark.parametrize("options", [{"gamma": 1.5}, {"lam": -0.1}, {"lam_of_returns": 2.0}, {"clip": 0.0}])
def test_an_impossible_value_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value} must be"):
        ppo.ValueConfig(**options)

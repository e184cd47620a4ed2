"""Claims about DPO, and about the pairs that it learns from."""

import dataclasses
import math

import pytest
import torch

from rl_algorithms import dpo
from rl_algorithms.data import DataError, PreferenceRow
from rl_algorithms.preferences.losses import aot, pair_loss
from rl_algorithms.preferences.pairs import Pair, pad_pairs, pairs_from_rollouts, pairs_from_rows
from rl_algorithms.rollouts import Rollouts
from rl_algorithms.stepping import take_rows

PAIRS = [
    Pair(chosen=(2, 3, 1), rejected=(2, 4, 4, 1), prompt_length=1),
    Pair(chosen=(3, 3, 3, 3, 1), rejected=(3, 5, 1), prompt_length=1),
    Pair(chosen=(2, 5, 1), rejected=(2, 1), prompt_length=1),
]
PLAIN = dpo.DPOConfig(max_num_steps=1, beta=0.3, nll_weight=0.0)
VARIANTS = [
    PLAIN,
    dataclasses.replace(PLAIN, nll_weight=1.0),
    dataclasses.replace(PLAIN, label_smoothing=0.1),
    dataclasses.replace(PLAIN, loss="robust", label_smoothing=0.1),
    dataclasses.replace(PLAIN, loss="hinge"),
    dataclasses.replace(PLAIN, loss="ipo", nll_weight=0.5),
    dataclasses.replace(PLAIN, loss="sigmoid_norm"),
    dataclasses.replace(PLAIN, loss="simpo", beta=2.0, gamma=0.5),
]
every_variant = pytest.mark.parametrize("config", VARIANTS, ids=lambda config: f"{config.loss}-{config.nll_weight}")


def referenced(table, pairs=PAIRS):
    return dpo.with_reference(table, dpo.prepare(pairs))


def test_before_training_the_loss_is_log_two_and_the_margin_zero(make_table):
    table = make_table()
    metrics = dpo.step(table, referenced(table), PLAIN)
    assert metrics["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert metrics["margin"] == pytest.approx(0.0, abs=1e-6)


def test_the_gradient_is_the_closed_form(make_table):
    """dL/d(answer logp) = -+ beta sigmoid(-beta delta) / pairs (arXiv:2305.18290, section 4)."""
    table, other = make_table(seed=0), make_table(seed=0)
    examples = referenced(make_table(seed=5))  # a reference that is not the policy
    dpo.step(table, examples, PLAIN)
    answers = other.token_logp(examples).sum(dim=1)
    logratio = (answers - examples.logp_ref).detach()
    weight = PLAIN.beta * torch.sigmoid(-PLAIN.beta * (logratio[0::2] - logratio[1::2])) / len(PAIRS)
    (answers[0::2] * -weight + answers[1::2] * weight).sum().backward()
    torch.testing.assert_close(table.grad, other.logits.grad)


@pytest.mark.parametrize("cut", [2, 4, 10**9])
@pytest.mark.parametrize("loss", ["aot", "aot_unpaired"])
def test_optimal_transport_sorts_the_whole_step_however_it_is_cut(make_table, loss, cut):
    table, other, reference = make_table(seed=0, cut=cut), make_table(seed=0), make_table(seed=5)
    reference.logits = 30 * reference.logits.detach()
    pairs = [*PAIRS, Pair(chosen=(2, 2, 2, 1), rejected=(2, 3, 3, 1), prompt_length=1)]
    config = dataclasses.replace(PLAIN, loss=loss, label_smoothing=0.1)
    metrics = dpo.step(table, referenced(reference, pairs), config)

    examples = dpo.prepare(pairs)
    logp, logp_ref = (each.token_logp(examples).sum(dim=1) for each in (other, reference))
    logp_ref = logp_ref.detach()
    if loss == "aot":
        better, worse = logp[0::2] - logp[1::2], logp_ref[0::2] - logp_ref[1::2]
        assert not better.argsort().equal(worse.argsort())  # or this would be DPO
    else:
        better, worse = (logp - logp_ref)[0::2], (logp - logp_ref)[1::2]
    expected = aot(better, worse, beta=0.3, label_smoothing=0.1).mean()
    expected.backward()
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-6)
    torch.testing.assert_close(table.grad, other.logits.grad, rtol=1e-5, atol=1e-9)
    assert metrics["margin"] == pytest.approx(0.3 * (better - worse).mean().item(), abs=1e-7)


LENGTH_DECIDES_NOTHING, NO_REFERENCE = {"sigmoid_norm", "ipo", "simpo"}, {"simpo"}


@every_variant
def test_the_loss_of_a_step_is_the_mean_of_its_pairs_in_plain_floats(make_table, config):
    table, reference = make_table(seed=0), make_table(seed=5)
    logp, logp_ref = (each.logits.detach().log_softmax(-1).tolist() for each in (table, reference))

    def liking(tokens):
        said = range(1, len(tokens))
        total = sum(logp[t][tokens[t]] - (config.loss not in NO_REFERENCE) * logp_ref[t][tokens[t]] for t in said)
        return total / len(said) if config.loss in LENGTH_DECIDES_NOTHING else total

    deltas = torch.tensor([liking(pair.chosen) - liking(pair.rejected) for pair in PAIRS], dtype=torch.float64)
    nll = [-logp[t][pair.chosen[t]] for pair in PAIRS for t in range(1, len(pair.chosen))]
    expected = pair_loss(deltas, config).mean().item() + config.nll_weight * sum(nll) / len(nll)
    metrics = dpo.step(table, referenced(reference), config)
    assert metrics["loss"] == pytest.approx(expected)
    assert metrics["margin"] == pytest.approx(config.beta * deltas.mean().item())
    assert metrics["pair_accuracy"] == pytest.approx((deltas > 0).double().mean().item())
    assert metrics["trained_tokens"] == sum(len(pair.chosen) + len(pair.rejected) - 2 for pair in PAIRS)


@every_variant
def test_the_gradient_is_the_finite_difference(make_table, config):
    examples = referenced(make_table(seed=5))
    table = make_table(seed=0, lr=0.0)
    dpo.step(table, examples, config)
    for place in [(1, 3), (1, 5), (2, 4)]:
        losses = []
        for change in (1e-5, -1e-5):
            moved = make_table(seed=0, lr=0.0)
            with torch.no_grad():
                moved.logits[place] += change
            losses.append(dpo.step(moved, examples, config)["loss"])
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(table.grad[place].item(), rel=1e-5, abs=1e-9)


@every_variant
def test_nothing_depends_on_the_cut_the_padding_or_the_order(make_table, config):
    examples = referenced(make_table(seed=5))
    wide = dataclasses.replace(
        examples, **{name: torch.nn.functional.pad(getattr(examples, name), (0, 3)) for name in ("tokens", "trainable")}
    )
    turned = take_rows(examples, torch.tensor([4, 5, 0, 1, 2, 3]))
    cases = [(6, examples), (2, examples), (4, examples), (6, wide), (2, turned)]
    tables = [make_table(cut=cut) for cut, _ in cases]
    logs = [dpo.step(table, given, config) for table, (_, given) in zip(tables, cases, strict=True)]
    for table, log in zip(tables[1:], logs[1:], strict=True):
        torch.testing.assert_close(table.grad, tables[0].grad, rtol=1e-9, atol=1e-12)
        assert log == pytest.approx(logs[0])


@every_variant
def test_what_stands_off_the_mask_is_not_looked_at(make_table, config):
    class Noisy(type(make_table())):
        def token_logp(self, examples):
            return torch.where(examples.trainable, super().token_logp(examples), torch.nan)

    examples = referenced(make_table(seed=5))
    noisy, plain = Noisy(), make_table()
    assert dpo.step(noisy, examples, config) == pytest.approx(dpo.step(plain, examples, config))
    torch.testing.assert_close(noisy.grad, plain.grad)


def test_swapping_chosen_and_rejected_flips_the_margin(make_table):
    table, reference = make_table(seed=0), make_table(seed=5)
    examples = referenced(reference)
    swapped = take_rows(examples, torch.tensor([1, 0, 3, 2, 5, 4]))
    margin = dpo.margins(table, examples, PLAIN)
    assert dpo.margins(table, swapped, PLAIN)["margin"] == pytest.approx(-margin["margin"])


def test_the_nll_term_is_the_mean_over_chosen_tokens(make_table):
    table = make_table()
    examples = referenced(table)
    chosen = table.logp(examples)[0::2].sum() / examples.trainable[0::2].sum()
    metrics = dpo.step(table, examples, dataclasses.replace(PLAIN, nll_weight=2.0))
    assert metrics["nll"] == pytest.approx(-chosen.item())
    assert metrics["loss"] == pytest.approx(math.log(2) + 2.0 * metrics["nll"])


def test_a_reference_that_is_needed_and_unknown_is_named(make_table):
    examples = dpo.prepare(PAIRS)
    for use in (dpo.step, dpo.margins):
        with pytest.raises(ValueError, match=r"logp_ref of pair 0 is nan, and loss='sigmoid' .* with_reference"):
            use(make_table(), examples, PLAIN)


def test_without_need_of_a_reference_none_is_looked_at(make_table):
    config = VARIANTS[-1]
    tables = make_table(), make_table()
    logs = [
        dpo.step(table, given, config)
        for table, given in zip(tables, (dpo.prepare(PAIRS), referenced(make_table(seed=5))), strict=True)
    ]
    assert logs[0] == logs[1]
    assert torch.equal(tables[0].grad, tables[1].grad)


def test_an_answer_without_tokens_is_named(make_table):
    examples = referenced(make_table())
    examples.trainable[3] = False
    with pytest.raises(ValueError, match="the rejected answer of pair 1 has no trainable token"):
        dpo.step(make_table(), examples, PLAIN)
    with pytest.raises(ValueError, match="there is no pair"):
        dpo.step(make_table(), take_rows(examples, torch.tensor([], dtype=torch.int64)), PLAIN)


def test_a_table_learns_to_prefer(make_table):
    table = make_table(lr=1.0)
    config = dpo.DPOConfig(max_num_steps=40, batch_size=3, beta=0.5, nll_weight=1.0)
    log = list(dpo.train(policy=table, examples=referenced(table), config=config, version=7))
    assert log[-1]["margin"] > 1.0
    assert log[-1]["pair_accuracy"] == 1.0
    assert log[-1]["chosen_logratio"] > 0.0
    assert log[-1]["version"] == 47


@every_variant
def test_a_resumed_run_is_the_same_run(make_table, config):
    config = dataclasses.replace(config, max_num_steps=6, batch_size=2)
    examples = referenced(make_table(seed=5))
    whole, halves = make_table(), make_table()
    options = {"examples": examples, "seed": 3}
    list(dpo.train(policy=whole, config=config, **options))
    list(dpo.train(policy=halves, config=dataclasses.replace(config, max_num_steps=3), **options))
    list(dpo.train(policy=halves, config=config, steps_taken=3, **options))
    assert torch.equal(whole.logits, halves.logits)


def make_rollouts(tokens, response, rewards, groups, *, failed=(), lengths=None):
    tokens, response = torch.tensor(tokens), torch.tensor(response, dtype=torch.bool)
    rows, nothing = len(tokens), torch.zeros(tokens.shape)
    failed = torch.tensor([row in failed for row in range(rows)])
    return Rollouts(
        tokens=tokens,
        lengths=(tokens > 0).sum(dim=1) if lengths is None else torch.tensor(lengths),
        response=response,
        logp_old=nothing,
        versions=torch.where(response, 0, -1),
        turns=torch.where(response, 0, -1),
        token_rewards=nothing.double(),
        rewards=torch.tensor(rewards, dtype=torch.float64),
        components=torch.zeros(rows, 0, dtype=torch.float64),
        groups=torch.tensor(groups),
        truncated=failed,
        failed=failed,
        answers=("",) * rows,
        failures=tuple("it broke" if broken else None for broken in failed.tolist()),
    )


def test_pairs_join_the_best_with_the_worst_of_each_group_that_differs():
    """Groups are told by their numbers, wherever their rows stand; a failed row is in no pair."""
    last = [10, 11, 12, 13, 14, 15, 16, 17]
    rollouts = make_rollouts(
        tokens=[[2, token, 1, 0] for token in last],
        response=[[0, 1, 1, 0]] * 8,
        rewards=[0.0, 1.0, 1.0, 1.0, 0.0, 0.5, 1.0, -9.0],
        groups=[7, 3, 7, 3, 7, 7, 3, 7],
        failed=(7,),
    )
    pairs = pairs_from_rollouts(rollouts, pairs_per_prompt=2)
    assert [(pair.chosen, pair.rejected) for pair in pairs] == [((2, 12, 1), (2, 10, 1)), ((2, 12, 1), (2, 14, 1))]
    assert {pair.prompt_length for pair in pairs} == {1}


def test_observations_between_answers_are_not_trained_on():
    rollouts = make_rollouts(
        tokens=[[2, 3, 9, 9, 1], [2, 4, 8, 1, 0]],
        response=[[0, 1, 0, 0, 1], [0, 1, 0, 1, 0]],
        rewards=[1.0, 0.0],
        groups=[0, 0],
    )
    padded = pad_pairs(pairs_from_rollouts(rollouts, pairs_per_prompt=1))
    assert torch.equal(padded.tokens, rollouts.tokens)
    assert torch.equal(padded.answer, rollouts.response)


def test_pairs_of_samples_teach_what_was_rewarded(make_table, make_engine):
    """Answers of a table, judged by whether they begin with a 3: held-out pairs come to be told apart."""
    table = make_table(lr=1.0)
    engine = make_engine(table)

    def examples(groups):
        answers = [answer.tokens for answer in engine.generate([[2]] * groups * 8, 4)]
        padding = [4 - len(answer) for answer in answers]
        rollouts = make_rollouts(
            tokens=[[2, *answer, *[0] * rest] for answer, rest in zip(answers, padding, strict=True)],
            response=[[0, *[1] * len(answer), *[0] * rest] for answer, rest in zip(answers, padding, strict=True)],
            rewards=[float(answer[0] == 5) for answer in answers],
            groups=[row // 8 for row in range(groups * 8)],
            lengths=[1 + len(answer) for answer in answers],
        )
        return dpo.with_reference(table, dpo.prepare(pairs_from_rollouts(rollouts, pairs_per_prompt=2)))

    train, held_out = examples(16), examples(8)
    config = dpo.DPOConfig(max_num_steps=30, batch_size=16, beta=0.5, nll_weight=1.0)
    before = dpo.margins(table, held_out, config)
    log = list(dpo.train(policy=table, examples=train, config=config))
    after = dpo.margins(table, held_out, config)
    assert before == {"margin": pytest.approx(0.0), "pair_accuracy": 0.0}
    assert after["margin"] > 1.0
    assert after["pair_accuracy"] > 0.9
    assert log[-1]["chosen_logratio"] > 0.0


def preference(**changes):
    made = PreferenceRow(
        messages=({"role": "user", "content": "12"},),
        chosen=({"role": "assistant", "content": "3"},),
        rejected=({"role": "assistant", "content": "45"},),
        columns={},
        where="pairs.jsonl:4",
        margin=0.5,
    )
    return dataclasses.replace(made, **changes)


def test_rows_of_data_become_pairs_through_chat(chat):
    (pair,) = pairs_from_rows([preference()], chat)
    assert pair.chosen == (3, 4, 5, 1)
    assert pair.rejected == (3, 4, 6, 7, 1)
    assert pair.prompt_length == 2
    assert pair.chosen_trainable == (False, False, True, True)
    assert pair.margin == 0.5


def test_a_row_that_is_no_pair_is_named(chat):
    with pytest.raises(DataError, match=r"pairs.jsonl:4: margin=nan must be finite"):
        pairs_from_rows([preference(margin=math.nan)], chat)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prompt_length": 0}, "prompt_length=0 must be >= 1"),
        ({"prompt_length": 2}, "different prompts"),
        ({"rejected": (2,)}, "the rejected answer has no token to train on: 1 tokens, of which prompt_length=1"),
        ({"chosen_trainable": (False, True)}, "chosen_trainable has 2 marks for 3 tokens"),
        ({"chosen_trainable": (True, False, False)}, "the chosen answer has no token to train on"),
        ({"margin": math.inf}, "margin=inf must be finite"),
    ],
)
def test_what_is_no_pair_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        Pair(**{"chosen": (2, 3, 1), "rejected": (2, 4, 4, 1), "prompt_length": 1, **options})
    with pytest.raises(ValueError, match="there are no pairs"):
        pad_pairs([])


@pytest.mark.parametrize(
    "options",
    [
        {"beta": 0.0},
        {"nll_weight": -1.0},
        {"batch_size": 0},
        {"max_num_steps": 0},
        {"num_generations_per_prompt": 1},
        {"gamma": 0.5},
    ],
)
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        dpo.DPOConfig(**{"max_num_steps": 1, **options})


def test_the_default_is_dpo_as_published():
    assert dpo.DPOConfig(max_num_steps=1).nll_weight == 0.0
    assert "NLL" not in dpo.explain(dpo.DPOConfig(max_num_steps=1))


def test_a_configuration_explains_itself():
    assert dpo.explain(PLAIN).startswith("L = mean over the step's pairs of [-log sigmoid(0.3 delta)]\n")
    assert "+ 1 * NLL(chosen) / the step's chosen tokens" in dpo.explain(VARIANTS[1])

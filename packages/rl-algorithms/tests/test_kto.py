"""Claims about KTO, and about the answers that it learns from."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import kto
from rl_algorithms.data import LabelledRow
from rl_algorithms.preferences.labelled import LabelledAnswer, answers_from_rows, mismatched, pad_answers
from rl_algorithms.stepping import take_rows


def answer(prompt, said, *, desirable):
    return LabelledAnswer(
        tokens=(*prompt, *said), trainable=(False,) * len(prompt) + (True,) * len(said), desirable=desirable
    )


ANSWERS = [
    answer((2,), (3, 1), desirable=True),
    answer((2,), (4, 4, 1), desirable=False),
    answer((3, 2), (3, 3, 1), desirable=True),
    answer((4,), (5, 1), desirable=False),
    answer((5,), (3, 5, 5, 1), desirable=True),
]
CONFIG = kto.KTOConfig(max_num_steps=1, batch_size=5, beta=0.4, desirable_weight=1.0, undesirable_weight=1.5)


def both(reference, answers=ANSWERS):
    return tuple(kto.with_reference(reference, kto.prepare(each)) for each in (answers, mismatched(answers)))


def logratio(table, examples):
    return table.logp(examples).sum(dim=1) - examples.logp_ref


def upward(make_table):
    """A policy that has come to like what a reference of its own did not: z is above 0."""
    table, reference = make_table(seed=0), make_table(seed=0)
    with torch.no_grad():
        reference.logits[1:, [1, 3, 5]] -= 0.5
    return table, reference


def test_before_training_every_answer_costs_half_its_weight(make_table):
    table = make_table()
    examples, others = both(table)
    metrics = kto.step(table, examples, CONFIG, mismatched=others)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["loss"] == pytest.approx((3 * 0.5 * 1.0 + 2 * 0.5 * 1.5) / 5)
    assert metrics["desirable_logratio"] == pytest.approx(0.0, abs=1e-6)


def test_the_loss_and_its_gradient_are_the_formula(make_table):
    table, reference = upward(make_table)
    other = make_table(seed=0)
    examples, others = both(reference)
    z = logratio(table, others).mean().item()
    assert z > 0.1
    h = other.token_logp(examples).sum(dim=1) - examples.logp_ref
    good = 1.0 * (1 - torch.sigmoid(0.4 * (h - z)))
    bad = 1.5 * (1 - torch.sigmoid(0.4 * (z - h)))
    loss = torch.stack([good[0], bad[1], good[2], bad[3], good[4]]).mean()
    loss.backward()
    metrics = kto.step(table, examples, CONFIG, mismatched=others)
    assert metrics["kl"] == pytest.approx(z)
    assert metrics["loss"] == pytest.approx(loss.item())
    torch.testing.assert_close(table.grad, other.logits.grad)
    assert metrics["desirable_logratio"] == pytest.approx(h[[0, 2, 4]].mean().item())
    assert metrics["undesirable_logratio"] == pytest.approx(h[[1, 3]].mean().item())
    right = [bool(value > z) == each.desirable for value, each in zip(h.tolist(), ANSWERS, strict=True)]
    assert metrics["accuracy"] == pytest.approx(sum(right) / 5)


def test_a_policy_below_its_reference_has_drifted_by_nothing(make_table):
    reference, table = upward(make_table)
    examples, others = both(reference)
    assert logratio(table, others).mean() < -0.1
    assert kto.step(table, examples, CONFIG, mismatched=others)["kl"] == 0.0


def test_a_policy_that_is_broken_is_not_taken_for_one_that_has_not_moved(make_table):
    table, reference = upward(make_table)
    examples, others = both(reference)
    with torch.no_grad():
        table.logits[1] = torch.nan
    with pytest.raises(ValueError, match="the loss of this step is nan"):
        kto.step(table, examples, CONFIG, mismatched=others)
    assert table.version == 0


@given(
    h=st.lists(st.floats(-20, 20), min_size=1, max_size=6),
    z=st.floats(0, 5),
    label=st.booleans(),
)
def test_each_loss_is_its_formula_bounded_and_goes_the_right_way(h, z, label):
    h = torch.tensor(h, dtype=torch.float64, requires_grad=True)
    loss = kto.kto(h, torch.full(h.shape, label), CONFIG, z=z)
    weight = 1.0 if label else 1.5
    expected = weight * (1 - torch.sigmoid(0.4 * (h - z) if label else 0.4 * (z - h)))
    torch.testing.assert_close(loss, expected)
    assert ((loss >= 0) & (loss <= weight)).all()
    loss.sum().backward()
    assert ((h.grad <= 0) if label else (h.grad >= 0)).all()


def test_gradients_are_finite_differences():
    h = torch.tensor([-3.0, 0.2, 1.0, 4.0], dtype=torch.float64, requires_grad=True)
    good = torch.tensor([True, False, True, False])
    assert torch.autograd.gradcheck(lambda each: kto.kto(each, good, CONFIG, z=0.7), h)


def test_nothing_depends_on_the_cut_the_padding_or_the_order(make_table):
    _, reference = upward(make_table)
    examples, others = both(reference)

    def wider(each):
        fields = {name: torch.nn.functional.pad(getattr(each, name), (0, 1)) for name in ("tokens", "trainable")}
        return dataclasses.replace(each, **fields)

    order = torch.tensor([3, 1, 4, 0, 2])
    cases = [
        (5, examples, others),
        (1, examples, others),
        (2, examples, others),
        (5, wider(examples), wider(others)),
        (2, take_rows(examples, order), take_rows(others, order)),
    ]
    tables = [make_table(seed=0, cut=cut) for cut, _, _ in cases]
    logs = [
        kto.step(table, given, CONFIG, mismatched=other) for table, (_, given, other) in zip(tables, cases, strict=True)
    ]
    assert logs[0]["kl"] > 0.0
    for table, log in zip(tables[1:], logs[1:], strict=True):
        torch.testing.assert_close(table.grad, tables[0].grad, rtol=1e-9, atol=1e-12)
        assert log == pytest.approx(logs[0])


def test_what_stands_off_the_mask_is_not_looked_at(make_table):
    class Noisy(type(make_table())):
        def token_logp(self, examples):
            return torch.where(examples.trainable, super().token_logp(examples), torch.nan)

    examples, others = both(upward(make_table)[1])
    noisy, plain = Noisy(), make_table()
    logs = [kto.step(table, examples, CONFIG, mismatched=others) for table in (noisy, plain)]
    assert logs[0] == pytest.approx(logs[1])
    torch.testing.assert_close(noisy.grad, plain.grad)


def test_a_step_of_one_label_has_no_figure_of_the_other(make_table):
    table = make_table()
    examples, others = both(table)
    rows = torch.tensor([0, 2])
    metrics = kto.step(table, take_rows(examples, rows), CONFIG, mismatched=take_rows(others, rows))
    assert "undesirable_logratio" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_a_table_learns_what_is_good_and_what_is_bad(make_table):
    table = make_table(lr=2.0)
    examples, others = both(table)
    config = kto.KTOConfig(max_num_steps=60, batch_size=5, beta=0.5)
    log = list(kto.train(policy=table, examples=examples, mismatched=others, config=config, version=7))
    assert log[-1]["accuracy"] == 1.0
    assert log[-1]["desirable_logratio"] > 0.5
    assert log[-1]["undesirable_logratio"] < 0.0
    assert log[-1]["version"] == 67


def test_a_resumed_run_is_the_same_run(make_table):
    whole, halves = make_table(), make_table()
    examples, others = both(make_table(seed=5))
    config = kto.KTOConfig(max_num_steps=6, batch_size=3)
    options = {"examples": examples, "mismatched": others, "seed": 3}
    list(kto.train(policy=whole, config=config, **options))
    list(kto.train(policy=halves, config=dataclasses.replace(config, max_num_steps=3), **options))
    list(kto.train(policy=halves, config=config, steps_taken=3, **options))
    assert torch.equal(whole.logits, halves.logits)


@given(prompts=st.lists(st.integers(2, 5), min_size=2, max_size=12).filter(lambda each: len({*each}) > 1))
def test_each_prompt_gets_the_next_answer_to_another_prompt(prompts):
    answers = [answer((prompt,), (100 + row, 1), desirable=True) for row, prompt in enumerate(prompts)]
    for row, made in enumerate(mismatched(answers)):
        following = [(row + 1 + k) % len(prompts) for k in range(len(prompts))]
        partner = next(other for other in following if prompts[other] != prompts[row])
        assert made.tokens == (prompts[row], 100 + partner, 1)
        assert made.trainable == (False, True, True)


def test_observations_in_an_answer_stay_masked_in_its_mismatched_row():
    mixed = LabelledAnswer(tokens=(3, 3, 9, 1), trainable=(False, True, False, True), desirable=True)
    made = mismatched([answer((2, 2), (1,), desirable=False), mixed])
    assert made[0].tokens == (2, 2, 3, 9, 1)
    assert made[0].trainable == (False, False, True, False, True)
    assert pad_answers(made).answer.tolist() == [[False, False, True, False, True], [False, True, False, False, False]]


def test_rows_of_data_become_answers_through_chat(chat):
    row = LabelledRow(
        messages=({"role": "user", "content": "12"},),
        completion=({"role": "assistant", "content": "3"},),
        label=False,
        columns={},
        where="row 0",
    )
    assert answers_from_rows([row], chat) == [answer((3, 4), (5, 1), desirable=False)]


def test_data_that_kto_cannot_learn_from_is_refused(make_table):
    same = [answer((2,), (3, 1), desirable=True), answer((2,), (4, 1), desirable=False)]
    with pytest.raises(ValueError, match="the 2 answers have 1 prompt"):
        mismatched(same)
    with pytest.raises(ValueError, match="there are no answers"):
        pad_answers([])
    table = make_table()
    good = [each for each in ANSWERS if each.desirable]
    examples, others = both(table, good)
    with pytest.raises(ValueError, match="all 3 answers have desirable=True"):
        next(kto.train(policy=table, examples=examples, mismatched=others, config=CONFIG))
    for known in (examples, kto.prepare(good)):
        with pytest.raises(ValueError, match="logp_ref is not known"):
            kto.step(table, known, CONFIG, mismatched=kto.prepare(mismatched(good)))


@pytest.mark.parametrize(
    ("tokens", "trainable"), [((2, 3), (False, False)), ((2, 3), (True, True)), ((2, 3), (True,)), ((), ())]
)
def test_what_is_no_answer_is_refused(tokens, trainable):
    with pytest.raises(ValueError, match="trainable"):
        LabelledAnswer(tokens=tokens, trainable=trainable, desirable=True)


@pytest.mark.parametrize(
    "options", [{"beta": 0.0}, {"desirable_weight": -1.0}, {"batch_size": 1}, {"max_num_steps": 0}]
)
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        kto.KTOConfig(**{"max_num_steps": 1, **options})


def test_a_configuration_explains_itself():
    assert "1 sigmoid(0.4 (z - h)) if good, 1.5 sigmoid(0.4 (h - z)) if bad" in kto.explain(CONFIG)

"""Claims about SFT."""

import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms import sft
from rl_algorithms.chat import Demonstration, TokenizedConversation
from rl_algorithms.data import ConversationRow, make_row
from rl_algorithms.stepping import take_rows

ROW = make_row({"prompt": "1", "answer": "2"}, where="row 0")
DEMONSTRATIONS = [
    Demonstration(tokens=(2, 4, 5, 1), prompt_length=1, row=ROW),
    Demonstration(tokens=(3, 3, 1), prompt_length=2, row=ROW),
    Demonstration(tokens=(2, 5, 5, 5, 5, 1), prompt_length=1, row=ROW),
]
BY_TOKEN = sft.SFTConfig(max_num_steps=1)
BY_ROW = sft.SFTConfig(max_num_steps=1, aggregation="seq-mean-token-mean")
both_ways = pytest.mark.parametrize("config", [BY_TOKEN, BY_ROW], ids=lambda config: config.aggregation)


def conversation(tokens, marks, *, weight=1.0):
    row = ConversationRow(
        messages=({"role": "assistant", "content": "1"},), columns={}, where="chats.jsonl:3", weight=weight
    )
    return TokenizedConversation(tokens=tokens, trainable=tuple(map(bool, marks)), row=row)


def test_the_loss_is_the_mean_over_answer_tokens(make_table):
    table = make_table()
    logp = table.logits.detach().log_softmax(-1)
    answers = [logp[t, d.tokens[t]] for d in DEMONSTRATIONS for t in range(d.prompt_length, len(d.tokens))]
    metrics = sft.step(table, sft.prepare(DEMONSTRATIONS), BY_TOKEN)
    assert len(answers) == 3 + 1 + 5
    assert metrics["loss"] == pytest.approx(-torch.stack(answers).mean().item())
    assert metrics["trained_tokens"] == 9


def test_or_the_mean_over_rows_of_their_means(make_table):
    table = make_table()
    logp = table.logits.detach().log_softmax(-1)
    means = [
        torch.stack([logp[t, d.tokens[t]] for t in range(d.prompt_length, len(d.tokens))]).mean()
        for d in DEMONSTRATIONS
    ]
    metrics = sft.step(table, sft.prepare(DEMONSTRATIONS), BY_ROW)
    assert metrics["loss"] == pytest.approx(-torch.stack(means).mean().item())


@both_ways
def test_the_gradient_is_the_finite_difference(make_table, config):
    examples = sft.prepare([*DEMONSTRATIONS, conversation((2, 3, 4, 1), [0, 1, 0, 1], weight=0.3)])
    table = make_table(lr=0.0)
    sft.step(table, examples, config)
    for place in [(1, 4), (2, 5), (3, 1)]:
        losses = []
        for change in (1e-5, -1e-5):
            moved = make_table(lr=0.0)
            with torch.no_grad():
                moved.logits[place] += change
            losses.append(sft.step(moved, examples, config)["loss"])
        assert (losses[0] - losses[1]) / 2e-5 == pytest.approx(table.grad[place].item(), rel=1e-5, abs=1e-9)


@both_ways
def test_nothing_depends_on_the_cut_the_padding_or_the_order(make_table, config):
    examples = sft.prepare([*DEMONSTRATIONS, conversation((2, 3, 4, 1), [0, 1, 0, 1], weight=2.5)])
    wide = dataclasses.replace(
        examples, **{name: torch.nn.functional.pad(getattr(examples, name), (0, 2)) for name in ("tokens", "trainable")}
    )
    turned = take_rows(examples, torch.tensor([2, 0, 3, 1]))
    cases = [(4, examples), (1, examples), (3, examples), (4, wide), (3, turned)]
    tables = [make_table(cut=cut) for cut, _ in cases]
    logs = [sft.step(table, given, config) for table, (_, given) in zip(tables, cases, strict=True)]
    for table, log in zip(tables[1:], logs[1:], strict=True):
        torch.testing.assert_close(table.grad, tables[0].grad, rtol=1e-9, atol=1e-12)
        assert log == pytest.approx(logs[0])


@both_ways
def test_a_weight_of_two_is_the_row_given_twice_and_of_zero_a_row_left_out(make_table, config):
    def rows(*weights):
        tokens = [(2, 4, 5, 1), (3, 3, 1), (2, 5, 5, 5, 5, 1)]
        return [
            conversation(each, [0] + [1] * (len(each) - 1), weight=weight)
            for each, weight in zip(tokens, weights, strict=True)
        ]

    first, second, third = rows(1.0, 1.0, 1.0)
    for weighted, spelt in [((1.0, 2.0, 0.0), [first, second, second]), ((3.0, 3.0, 3.0), [first, second, third])]:
        tables = make_table(), make_table()
        logs = [
            sft.step(table, sft.prepare(given), config)
            for table, given in zip(tables, (rows(*weighted), spelt), strict=True)
        ]
        assert logs[0]["loss"] == pytest.approx(logs[1]["loss"])
        torch.testing.assert_close(tables[0].grad, tables[1].grad, rtol=1e-9, atol=1e-12)


@both_ways
def test_what_stands_off_the_mask_is_not_looked_at(make_table, config):
    class Noisy(type(make_table())):
        def token_logp(self, examples):
            counted = examples.trainable & (examples.weight[:, None] > 0)
            return torch.where(counted, super().token_logp(examples), torch.nan)

    examples = sft.prepare([*DEMONSTRATIONS, conversation((2, 3, 1), [0, 1, 1], weight=0.0)])
    noisy, plain = Noisy(), make_table()
    assert sft.step(noisy, examples, config) == pytest.approx(sft.step(plain, examples, config))
    torch.testing.assert_close(noisy.grad, plain.grad)


def test_the_prompt_gets_no_gradient(make_table):
    table = make_table()
    sft.step(table, sft.prepare(DEMONSTRATIONS), BY_TOKEN)
    assert (table.grad[0] == 0).all()
    assert (table.grad[1] != 0).any()


@given(marks=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_mask_is_trained_on_as_it_is_but_for_first_tokens(marks):
    examples = sft.prepare([conversation(tuple([3] * len(each)), each) for each in marks])
    for row, each in enumerate(marks):
        padding = [False] * (examples.tokens.shape[1] - len(each))
        assert examples.trainable[row].tolist() == [False, *each[1:], *padding]


@both_ways
@given(marks=st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_mask_gives_a_finite_step_or_a_refusal(make_table, config, marks):
    examples, table = sft.prepare([conversation(tuple([3] * len(each)), each) for each in marks]), make_table()
    if not any(any(each[1:]) for each in marks):
        with pytest.raises(ValueError, match=r"none of the \d+ tokens of this step is trainable"):
            sft.step(table, examples, config)
        return
    metrics = sft.step(table, examples, config)
    assert metrics["rows_without_tokens"] == sum(not any(each[1:]) for each in marks)
    assert table.logits.isfinite().all()


def test_a_table_learns_its_demonstrations(make_table, chat):
    rows = [make_row({"prompt": "1", "answer": "22"}, where="row 0")]
    demonstrations = [chat.demonstration(row) for row in rows]
    config = sft.SFTConfig(max_num_steps=50, batch_size=1)
    log = list(sft.train(policy=make_table(), demonstrations=itertools.repeat(demonstrations), config=config))
    assert log[0]["loss"] > 1.0
    assert log[-1]["loss"] < 0.05
    assert log[-1]["version"] == 50


def test_a_conversation_is_learnt_where_the_assistant_speaks(make_table, chat):
    row = ConversationRow(
        messages=({"role": "user", "content": "12"}, {"role": "assistant", "content": "3"}), columns={}, where="row 0"
    )
    examples = sft.prepare([chat.conversation(row)])
    assert examples.tokens.tolist() == [[3, 4, 5, 1]]
    assert examples.trainable.tolist() == [[False, False, True, True]]
    assert sft.step(make_table(), examples, BY_TOKEN)["trained_tokens"] == 2


def test_a_step_with_nothing_to_train_on_is_refused(make_table):
    nothing = [Demonstration(tokens=(2, 3), prompt_length=2, row=ROW), conversation((2, 3), [0, 1], weight=0.0)]
    with pytest.raises(ValueError, match=r"none of the 4 tokens .* its 2 rows"):
        sft.step(make_table(), sft.prepare(nothing), BY_TOKEN)
    with pytest.raises(ValueError, match="there are no demonstrations"):
        sft.prepare([])


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_named_with_its_row(weight):
    with pytest.raises(ValueError, match=f"chats.jsonl:3: weight={weight} must be finite and >= 0"):
        sft.prepare([conversation((2, 3), [0, 1], weight=weight)])


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"max_num_steps": 0}])
def test_an_impossible_configuration_is_named(options):
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        sft.SFTConfig(**{"max_num_steps": 1, **options})


def test_a_configuration_explains_itself():
    assert "the step's trainable tokens" in sft.explain(BY_TOKEN)
    assert "w mean(logp)" in sft.explain(BY_ROW)

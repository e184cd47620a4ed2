"""Claims about SFT."""

import itertools

import pytest
import torch

from rl_algorithms import sft
from rl_algorithms.chat import Demonstration
from rl_algorithms.data import make_row

ROW = make_row({"prompt": "1", "answer": "2"}, where="row 0")
DEMONSTRATIONS = [
    Demonstration(tokens=(2, 4, 5, 1), prompt_length=1, row=ROW),
    Demonstration(tokens=(3, 3, 1), prompt_length=2, row=ROW),
    Demonstration(tokens=(2, 5, 5, 5, 5, 1), prompt_length=1, row=ROW),
]


def test_the_loss_is_the_mean_over_answer_tokens(make_table):
    table = make_table()
    logp = table.logits.detach().log_softmax(-1)
    answers = [logp[t, d.tokens[t]] for d in DEMONSTRATIONS for t in range(d.prompt_length, len(d.tokens))]
    metrics = sft.step(table, sft.prepare(DEMONSTRATIONS))
    assert len(answers) == 3 + 1 + 5
    assert metrics["loss"] == pytest.approx(-torch.stack(answers).mean().item())
    assert metrics["trained_tokens"] == 9


def test_the_gradient_does_not_depend_on_the_cut(make_table):
    tables = [make_table(cut=cut) for cut in (1, 2, 3)]
    for table in tables:
        sft.step(table, sft.prepare(DEMONSTRATIONS))
    for table in tables[1:]:
        torch.testing.assert_close(tables[0].grad, table.grad, rtol=1e-9, atol=1e-12)


def test_the_prompt_gets_no_gradient(make_table):
    table = make_table()
    sft.step(table, sft.prepare(DEMONSTRATIONS))
    assert (table.grad[0] == 0).all()
    assert (table.grad[1] != 0).any()


def test_a_table_learns_its_demonstrations(make_table, chat):
    rows = [make_row({"prompt": "1", "answer": "22"}, where="row 0")]
    demonstrations = [chat.demonstration(row) for row in rows]
    config = sft.SFTConfig(max_num_steps=50, batch_size=1)
    log = list(sft.train(policy=make_table(), demonstrations=itertools.repeat(demonstrations), config=config))
    assert log[0]["loss"] > 1.0
    assert log[-1]["loss"] < 0.05
    assert log[-1]["version"] == 50


def test_a_step_with_nothing_to_train_on_is_refused(make_table):
    examples = sft.prepare([Demonstration(tokens=(2, 3), prompt_length=2, row=ROW)])
    with pytest.raises(ValueError, match="none of the 2 tokens"):
        sft.step(make_table(), examples)

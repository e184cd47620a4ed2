"""Claims about the loop that SFT, DPO, KTO, ORPO and reward models share."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms import dpo, kto, offline, orpo, sft
from rl_algorithms.chat import Demonstration
from rl_algorithms.data import DataError, make_row
from rl_algorithms.preferences.labelled import LabelledAnswer, mismatched
from rl_algorithms.preferences.pairs import Pair
from rl_algorithms.stepping import take_rows

PAIRS = [
    Pair(chosen=(2, 3, 1), rejected=(2, 4, 4, 1), prompt_length=1),
    Pair(chosen=(3, 3, 3, 3, 1), rejected=(3, 5, 1), prompt_length=1),
    Pair(chosen=(2, 5, 1), rejected=(2, 1), prompt_length=1),
]
ROW = make_row({"prompt": "1", "answer": "2"}, where="row 0")
TWO = SimpleNamespace(max_num_steps=6, batch_size=2)


def sft_log(table):
    lessons = [Demonstration(tokens=pair.chosen, prompt_length=1, row=ROW) for pair in PAIRS]
    config = sft.SFTConfig(max_num_steps=6, batch_size=3)
    return sft.train(policy=table, demonstrations=itertools.repeat(lessons), config=config, version=5)


def dpo_log(table):
    examples = dpo.with_reference(table, dpo.prepare(PAIRS))
    return dpo.train(policy=table, examples=examples, config=dpo.DPOConfig(max_num_steps=6, batch_size=2), version=5)


def kto_log(table):
    answers = [
        LabelledAnswer(tokens=tokens, trainable=(False, *[True] * (len(tokens) - 1)), desirable=desirable)
        for pair in PAIRS
        for tokens, desirable in ((pair.chosen, True), (pair.rejected, False))
    ]
    sets = [kto.with_reference(table, kto.prepare(each)) for each in (answers, mismatched(answers))]
    config = kto.KTOConfig(max_num_steps=6, batch_size=2)
    return kto.train(policy=table, examples=sets[0], mismatched=sets[1], config=config, version=5)


def orpo_log(table):
    config = orpo.ORPOConfig(max_num_steps=6, batch_size=2)
    return orpo.train(policy=table, examples=orpo.prepare(PAIRS), config=config, version=5)


@pytest.mark.parametrize("log_of", [sft_log, dpo_log, kto_log, orpo_log])
def test_every_algorithm_logs_the_same_frame_whatever_the_cut(make_table, log_of):
    logs = [list(log_of(make_table(lr=0.5, cut=cut))) for cut in (10**9, 2)]
    for log in logs:
        assert [(line["version"], line["steps_taken"]) for line in log] == [(5 + n, n) for n in range(1, 7)]
        assert all({"loss", "grad_norm", "trained_tokens", "phase_s/train"} <= set(line) for line in log)
    figures = [[{k: v for k, v in line.items() if k != "phase_s/train"} for line in log] for log in logs]
    for whole, cut in zip(*figures, strict=True):
        assert cut == pytest.approx(whole, rel=1e-9)


def test_a_loss_of_ones_own_takes_twenty_lines(make_table):
    """A hinge on the margin of log-probabilities, with no page of its own."""
    table, config = make_table(lr=1.0), SimpleNamespace(max_num_steps=30, batch_size=3)

    def hinge(logp, rows, *, num_pairs):
        said = torch.where(rows.trainable, logp, 0.0).sum(dim=1)
        margin = said[0::2] - said[1::2]
        loss = torch.relu(3.0 - margin).sum() / num_pairs
        return loss, {"loss": loss.detach(), "margin": margin.detach().sum()}

    def step(rows):
        pairs = len(rows.tokens) // 2
        return offline.take_step(table, rows, functools.partial(hinge, num_pairs=pairs), mean_over=pairs)

    examples = dpo.prepare(PAIRS)
    log = list(offline.train(step, offline.draw_batches(examples, config=config), config=config))
    assert set(log[0]) == {"loss", "margin", "grad_norm", "version", "steps_taken", "phase_s/train"}
    assert log[-1]["margin"] > 2.5 > log[0]["margin"]


def drawn(examples, **options):
    return [batch.tokens.tolist() for batch in itertools.islice(offline.draw_batches(examples, **options), 6)]


def test_pairs_stay_together_and_a_resumed_run_draws_what_is_left():
    examples = dpo.prepare(PAIRS)
    whole = drawn(examples, config=TWO, seed=3)
    assert drawn(examples, config=TWO, seed=3, steps_taken=2)[:4] == whole[2:]
    assert drawn(examples, config=TWO, seed=4) != whole
    known = {
        (tuple(row for row in pair.chosen if row), tuple(row for row in pair.rejected if row)): pair for pair in PAIRS
    }
    for batch in whole:
        rows = [tuple(token for token in row if token) for row in batch]
        assert all((rows[2 * k], rows[2 * k + 1]) in known for k in range(2))


def test_a_batch_is_as_wide_as_its_own_rows_and_the_reference_is_asked_by_length(make_table):
    """One long pair among short ones costs its own batch, and no other."""
    long = Pair(chosen=(2, 3, 3, 3, 3, 3, 3, 1), rejected=(2, 1), prompt_length=1)
    examples = dpo.prepare([PAIRS[0], long, PAIRS[2], PAIRS[1]])

    class Watched(type(make_table())):
        asked = ()

        def logp(self, examples):
            self.asked = (*self.asked, tuple(examples.tokens.shape))
            return super().logp(examples)

    reference = Watched()
    compared = dpo.with_reference(reference, examples, rows_at_once=4)
    assert reference.asked == ((4, 4), (4, 8))
    expected = torch.where(examples.trainable, make_table().logp(examples), 0.0).sum(dim=1)
    torch.testing.assert_close(compared.logp_ref, expected)
    one = SimpleNamespace(max_num_steps=8, batch_size=1)
    for batch in itertools.islice(offline.draw_batches(compared, config=one), 8):
        assert batch.tokens.shape[1] == batch.trainable.shape[1] == batch.lengths.max()


def test_what_no_run_can_do_is_refused_at_once():
    with pytest.raises(ValueError, match="steps_taken=7 must be from 0 to max_num_steps=6"):
        next(offline.train(dict, iter([]), config=TWO, steps_taken=7))
    with pytest.raises(ValueError, match=r"pairs ended after 0 batches, .* want 6 or more"):
        next(offline.train(dict, iter([]), config=TWO, name="pairs"))
    none = take_rows(dpo.prepare(PAIRS), torch.tensor([], dtype=torch.int64))
    with pytest.raises(DataError, match="no rows to draw batches from"):
        next(offline.draw_batches(none, config=TWO))

"""Claims about rows that begin alike: what they share is read once, and no value and no gradient changes."""

import functools
import itertools
import random

import pytest
import torch

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_backends.batching.microbatches import make_shared_inputs

SHARED = {"sequence_packing": True, "share_prefixes": True}


def padded(rows, *, width):
    tokens = torch.full((len(rows), width), 99)
    for number, row in enumerate(rows):
        tokens[number, : len(row)] = torch.tensor(row)
    return tokens, torch.tensor([len(row) for row in rows])


def beginnings_in(inputs):
    """For each place of the pack, the tokens that lead to it, as attention unfolds them."""
    starts, found = inputs.cu_seq_lens.tolist(), {}
    for start, end in itertools.pairwise(starts):
        places = list(dict.fromkeys(inputs.places_of_rows[start:end].tolist()))  # the last may be repeated
        tokens = inputs.tokens[0, places].tolist()
        for column, place in enumerate(places):
            assert found.setdefault(place, tuple(tokens[: column + 1])) == tuple(tokens[: column + 1])
    return found


@pytest.mark.parametrize("seed", range(40))
def test_each_beginning_is_read_once_and_asked_tokens_are_predicted_from_their_own(seed):
    rng = random.Random(seed)
    words, width = rng.randint(1, 3), rng.randint(7, 9)
    rows = [[rng.randrange(words) for _ in range(rng.randint(1, 7))] for _ in range(rng.randint(1, 9))]
    tokens, lengths = padded(rows, width=width)
    asked = (torch.arange(width) < lengths[:, None]) & (torch.arange(width) > 0)
    inputs = make_shared_inputs(tokens, lengths, asked)
    found = beginnings_in(inputs)
    wanted = {tuple(row[: end + 1]) for row in rows for end in range(len(row))}
    assert sorted(found.values()) == sorted(wanted)
    assert inputs.tokens.shape == (1, len(wanted))
    assert inputs.position_ids[0].tolist() == [len(found[place]) - 1 for place in range(len(wanted))]
    assert inputs.places_of_rows[inputs.places_of_pack].tolist() == list(range(len(wanted)))
    for at, target, into in zip(inputs.at.tolist(), inputs.targets.tolist(), inputs.into.tolist(), strict=True):
        row, column = divmod(into, width)
        assert (*found[at], target) == tuple(rows[row][: column + 1])


def test_a_row_that_another_begins_with_is_not_unfolded():
    tokens, lengths = padded([[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3, 4, 5], [6]], width=5)
    inputs = make_shared_inputs(tokens, lengths, torch.zeros(4, 5, dtype=torch.bool))
    assert inputs.cu_seq_lens.diff().tolist() == [8, 4]  # multiples of 4


def test_log_probabilities_and_the_gradient_are_those_of_padded_rows(world):
    examples = world.make_examples(rows=12)
    examples.tokens[1::3, :7] = examples.tokens[::3, :7]
    examples.tokens[2::3, :4] = examples.tokens[::3, :4]
    loss = functools.partial(world.token_loss, num_tokens=int(examples.trainable.sum()))
    read, gradients = [], []
    for config in ({}, SHARED, {**SHARED, "micro_batch_size": 5}):
        backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(**config))
        backend.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
        read.append(backend.logp(examples))
        backend.forward_backward(examples, loss)
        gradients.append({name: p.grad.clone() for name, p in backend.model.named_parameters()})
        backend.close()
    for logp, found in zip(read[1:], gradients[1:], strict=True):
        torch.testing.assert_close(logp, read[0], rtol=1e-5, atol=1e-5)
        for name, gradient in gradients[0].items():
            assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-8, name


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"share_prefixes": True}, "needs sequence_packing=True"),
        ({**SHARED, "router_aux_loss_coef": 0.1}, "router_aux_loss_coef > 0"),
    ],
)
def test_what_cannot_share_is_refused(given, named):
    with pytest.raises(ValueError, match=named):
        DTensorConfig(**given)

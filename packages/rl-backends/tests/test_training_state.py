"""Claims about going on: a run in two parts is, bit for bit, the run in one."""

import functools

import pytest
import torch

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig, load_causal_lm

OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=3, final_lr_ratio=0.1)


def train(world, backend, steps):
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    norms = []
    for _ in range(steps):
        backend.forward_backward(examples, loss)
        norms.append((backend.learning_rate, backend.optim_step()))
    return norms


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_in_two_parts_is_the_run_in_one(world, tmp_path, tied):
    def start(model):
        backend = DTensorBackend(model, DTensorConfig())
        backend.start_training(OPTIMIZER, num_steps=8)
        return backend

    whole = start(world.make_model("Qwen3", tie_word_embeddings=tied))
    expected = train(world, whole, 8)
    first = start(world.make_model("Qwen3", tie_word_embeddings=tied))
    norms = train(world, first, 4)
    first.save_pretrained(tmp_path / "half")
    first.save_training_state(tmp_path / "half")
    second = start(load_causal_lm(str(tmp_path / "half")))
    second.load_training_state(tmp_path / "half")
    assert second.version == 4
    assert norms + train(world, second, 4) == expected
    for ours, theirs in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs.full_tensor(), rtol=0, atol=0)


def test_there_is_nothing_to_save_before_training_starts(world, tmp_path):
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    with pytest.raises(RuntimeError, match="start_training"):
        backend.save_training_state(tmp_path)


def test_a_state_saved_before_the_first_step_counts_none(world, tmp_path):
    def start():
        backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig())
        backend.start_training(OPTIMIZER, num_steps=8)
        return backend

    expected = train(world, start(), 2)
    saved, again = start(), start()
    saved.save_training_state(tmp_path)
    again.load_training_state(tmp_path)
    assert train(world, saved, 2) == expected
    assert train(world, again, 2) == expected

"""Claims about a disk that is full while a Megatron policy is saved: an error, and training goes on."""

import functools
import resource
import signal

import pytest
import torch

from rl_backends import CheckpointError, OptimizerConfig
from rl_backends.megatron.config import MegatronConfig


@pytest.mark.parametrize("what", ["checkpoint", "asynchronous checkpoint", "model"])
def test_a_full_disk_is_an_error_that_leaves_nothing_and_training_goes_on(world, tmp_path, on_ranks, what):
    def save(backend, folder):
        if what == "model":
            backend.save_pretrained(folder)
        else:
            backend.save_checkpoint(folder, asynchronous=what.startswith("async")).wait()

    def run(rank):
        from rl_backends.megatron.backend import MegatronBackend

        examples = world.make_examples()
        loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
        config = MegatronConfig(tensor_model_parallel_size=2)
        backend = MegatronBackend(world.make_model("Qwen3", pad_token_id=None), config)
        backend.start_training(OptimizerConfig(lr=1e-3), num_steps=3)
        backend.forward_backward(examples, loss)
        backend.optim_step()
        backend.save_checkpoint(tmp_path / "earlier")
        before = backend.logp(examples)
        folder, was = tmp_path / "new", resource.getrlimit(resource.RLIMIT_FSIZE)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, was[1]))  # of a file: no weights fit into it
        try:
            with pytest.raises((CheckpointError, OSError, RuntimeError)):
                save(backend, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, was)
        assert not folder.exists()
        assert torch.equal(backend.logp(examples), before)
        backend.load_checkpoint(tmp_path / "earlier")
        backend.save_checkpoint(tmp_path / "later")
        backend.forward_backward(examples, loss)
        backend.optim_step()
        assert backend.version == 2
        backend.close()

    on_ranks(run, ranks=2)
    assert (tmp_path / "later").is_dir()

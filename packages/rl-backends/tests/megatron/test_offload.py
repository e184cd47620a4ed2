"""Claims about giving the memory of a Megatron policy to an engine: it is gone, and comes back bit for bit.

Into files, because on a CPU host memory is the device's: the same storages are emptied and filled as on a GPU.
"""

import copy
import functools

import pytest
import torch

from rl_backends import OptimizerConfig
from rl_backends.megatron.config import MegatronConfig
from rl_backends.offload import PARTS

ADAMW = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)
KINDS = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "distributed optimizer": {"use_distributed_optimizer": True},
    "bfloat16, distributed optimizer": {"precision": "bfloat16", "use_distributed_optimizer": True},
    "experts": {"family": "Qwen3Moe", "use_distributed_optimizer": True},
}


def trained(world, *, family="Qwen3", **config):
    """After a step, with a gradient."""
    from rl_backends.megatron.backend import MegatronBackend

    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend = MegatronBackend(world.make_model(family, pad_token_id=None), MegatronConfig(**config))
    backend.start_training(ADAMW, num_steps=5)
    backend.forward_backward(examples, loss)
    backend.optim_step()
    backend.forward_backward(examples, loss)
    return backend, examples, loss


def contents(backend):
    """Weights, gradients, masters and moments."""
    from rl_backends.megatron.optimizer import masters_of

    tensors = {name: parameter.detach() for name, parameter in backend.model.named_parameters()}
    tensors |= {f"{name}.main_grad": each.main_grad for name, each in backend.model.named_parameters()}
    for number, master in enumerate(masters_of(backend._optimizers)):
        tensors[f"{number}.master"] = master.tensor.detach()
        tensors |= {f"{number}.{name}": value for name, value in master.state().items()}
    return copy.deepcopy(tensors)


@pytest.mark.parametrize("kind", KINDS)
def test_all_of_it_is_gone_and_comes_back_bit_for_bit(world, tmp_path, on_ranks, kind):
    def run(rank):
        backend, examples, loss = trained(world, **KINDS[kind])
        before = contents(backend)
        report = backend.offload(directory=tmp_path)
        ddp = backend._distributed.ddp[0]
        buffers = [*ddp.buffers, *ddp.expert_parallel_buffers]
        assert all(buffer.grad_data.untyped_storage().nbytes() == 0 for buffer in buffers)
        assert all(held.parameter.untyped_storage().nbytes() == 0 for held in backend._distributed.held)
        for part in PARTS:
            assert report.bytes_moved[part] > 0, part
        for what in (
            lambda: backend.logp(examples),
            lambda: backend.forward_backward(examples, loss),
            backend.optim_step,
            backend.shards,
            lambda: backend.save_pretrained(tmp_path / "model"),
            lambda: backend.save_checkpoint(tmp_path / "checkpoint"),
            backend.freeze_reference,
        ):
            with pytest.raises(RuntimeError, match=r"offloaded to the disk; call onload\(\) first"):
                what()
        backend.onload()
        after = contents(backend)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert torch.equal(tensor, after[name]), name
        backend.close()

    on_ranks(run, ranks=1)


@pytest.mark.parametrize("kind", ["float32", "bfloat16, distributed optimizer"])
def test_training_goes_on_as_if_nothing_had_happened(world, tmp_path, on_ranks, kind):
    def run(rank):
        finals = []
        for offloads in (False, True):
            backend, examples, loss = trained(world, **KINDS[kind])
            if offloads:  # as colocated phases do
                backend.offload(directory=tmp_path)
                backend.onload()
                backend.offload(parts=("gradients", "optimizer"), directory=tmp_path)
                assert torch.isfinite(backend.logp(examples)).all()
                backend.offload(directory=tmp_path)
                backend.onload(parts=("weights",))
                backend.shards()
                backend.offload(parts=("weights",), directory=tmp_path)
                backend.onload()
            backend.optim_step()
            backend.forward_backward(examples, loss)
            backend.optim_step()
            finals.append(contents(backend))
            backend.close()
        for name, tensor in finals[0].items():
            assert torch.equal(tensor, finals[1][name]), name

    on_ranks(run, ranks=2)


def test_a_reference_that_is_offloaded_answers_as_one_that_is_not(world, on_ranks):
    def run(rank):
        backend, examples, _ = trained(world)
        here, away = backend.freeze_reference(), backend.freeze_reference(offload=True)
        assert torch.equal(here.logp(examples), away.logp(examples))
        assert torch.equal(here.logp(examples), backend.logp(examples))
        backend.close()

    on_ranks(run, ranks=1)

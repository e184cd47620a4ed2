"""Claims about errors in the middle of a pass: every rank is told at once, whichever of them it happened on.

The deadline of a collective is far longer than the tests: a rank that was left waiting would fail them.
"""

import functools

import pytest
import torch
import torch.distributed as dist

from rl_backends import OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

LAYOUTS = {
    "DP2": {},
    "TP2": {"tensor_model_parallel_size": 2},
    "PP2": {"pipeline_model_parallel_size": 2},
    "CP2": {"context_parallel_size": 2},
}


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logp):
        return logp.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError("in backward")


def loss_that_fails_in_backward(loss, logp, examples):
    on_the_last = dist.get_rank() == dist.get_world_size() - 1
    return loss(FailsInBackward.apply(logp) if on_the_last else logp, examples)


def loss_of_other_names(loss, logp, examples):
    total, sums = loss(logp, examples)
    return total, {**sums, f"of rank {dist.get_rank()}": total.detach()}


def told(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what it was is the claim
        return f"{type(error).__name__}: {error}"
    return "nothing"


def one_rank(world, layout, rank):
    from rl_backends.megatron.backend import MegatronBackend

    model = world.make_model("Qwen3", pad_token_id=None)
    backend = MegatronBackend(model, MegatronConfig(micro_batch_size=2, timeout_s=90.0, **layout))
    backend.start_training(OptimizerConfig(lr=1e-2, eps=1e-4), num_steps=4)
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    seen = {
        "backward": told(
            lambda: backend.forward_backward(examples, functools.partial(loss_that_fails_in_backward, loss))
        ),
        "no gradient is left": told(backend.optim_step),
    }
    if dist.get_world_size() == 4:
        seen["names"] = told(lambda: backend.forward_backward(examples, functools.partial(loss_of_other_names, loss)))
    backend.forward_backward(examples, loss)
    seen["norm"] = backend.optim_step()
    backend.close()
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_error_in_the_backward_of_a_loss_is_told_to_all_and_the_next_step_is_right(world, on_ranks, layout):
    seen = on_ranks(functools.partial(one_rank, world, LAYOUTS[layout]), ranks=2)
    assert all("ZeroDivisionError: in backward" in each["backward"] for each in seen)
    assert all("there is no gradient" in each["no gradient is left"] for each in seen)
    model = world.make_model("Qwen3", pad_token_id=None)
    examples = world.make_examples()
    loss = world.token_loss(world.plain_logp(model, examples), examples, num_tokens=examples.trainable.sum())[0]
    loss.backward()
    expected = float(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
    assert [each["norm"] for each in seen] == [pytest.approx(expected, rel=1e-5)] * 2


def test_sums_of_other_names_are_told_to_the_stages_that_have_none(world, on_ranks):
    layout = {"pipeline_model_parallel_size": 2}
    seen = on_ranks(functools.partial(one_rank, world, layout), ranks=4)
    assert all("ranks returned sums of different names" in each["names"] for each in seen)

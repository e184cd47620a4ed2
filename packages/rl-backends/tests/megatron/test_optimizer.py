"""Claims about Megatron's optimizer: the numbers of the other backend, whole steps or none, the same on every rank."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from rl_backends import optimizers as neutral
from rl_backends.errors import CheckpointError, ModelError, NonFiniteGradientError
from rl_backends.megatron.config import MegatronConfig, MegatronOptimizerConfig, MegatronSchedulerConfig
from rl_backends.optimizers import MuonConfig, OptimizerConfig

# megatron-core 0.16 names collectives as torch did before 2.13.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning")

ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Layered(nn.Module):
    """A table, a matrix with a bias, a norm, and a matrix of another shape, none trivially right."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 8)
        self.up = nn.Linear(8, 12)
        self.norm = nn.RMSNorm(12)
        self.down = nn.Linear(12, 5, bias=False)
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(100 + seed))


@pytest.fixture
def alone(imported):
    """Megatron's groups of this one process."""
    from rl_backends.megatron.groups import ParallelGroups

    groups = ParallelGroups.join(MegatronConfig())
    yield groups
    groups.leave()


def wrap(model, config):
    """The model in Megatron's DDP, as the backend does it, and Megatron's configuration of it."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig
    from rl_backends.megatron.cpu_compat import cpu_compat

    dtype = getattr(torch, config.precision)
    theirs = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True, cuda_graph_scope=[],
    )  # fmt: skip
    model.config = theirs
    model.to(dtype)
    gradients = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=config.use_distributed_optimizer
    )
    with cpu_compat():
        return DistributedDataParallel(theirs, gradients, model), theirs


def make(model, config, optimizer, *, num_steps=3):
    from rl_backends.megatron.optimizer import make_optimizers

    ddp, theirs = wrap(model, config)
    return ddp, make_optimizers(ddp, theirs, config, optimizer, num_steps=num_steps)


def random_like(parameters, *, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(parameter.shape, generator=generator) for parameter in parameters]


def give_gradients(ddp, **how):
    parameters = list(ddp.parameters())
    for parameter, gradient in zip(parameters, random_like(parameters, **how), strict=True):
        parameter.main_grad.add_(gradient)


def step(ddp, optimizers, *, seed, **how):
    from rl_backends.megatron.gradient_step import clip_and_step

    give_gradients(ddp, seed=seed, **how)
    return clip_and_step(ddp, optimizers, version=optimizers.num_steps_taken)


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def plain_steps(model, config, *, num_steps):
    """The same gradients through rl_backends.optimizers, as every other backend steps."""
    optimizers = neutral.make_optimizers(model, config, num_steps=num_steps)
    steps = []
    for number in range(num_steps):
        parameters = list(model.parameters())
        for parameter, gradient in zip(parameters, random_like(parameters, seed=number), strict=True):
            parameter.grad = gradient
        steps.append(neutral.clip_and_step(model, optimizers, config, version=number))
    return steps


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [
        {"warmup_steps": 2, "final_lr_ratio": 0.5},
        {"schedule": "cosine", "final_lr_ratio": 0.1, "decay_vectors": True},
        {"schedule": "wsd", "decay_steps": 2, "final_lr_ratio": 0.0, "max_grad_norm": None},
    ],
)
def test_the_same_recipe_gives_the_numbers_of_the_other_backend(alone, recipe, distributed):
    model = Layered()
    plain, config = copy.deepcopy(model), OptimizerConfig(**ADAMW, **recipe)
    expected = plain_steps(plain, config, num_steps=4)
    megatron = MegatronConfig(use_distributed_optimizer=distributed)
    ddp, optimizers = make(model, megatron, config, num_steps=4)
    found = [step(ddp, optimizers, seed=number) for number in range(4)]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.norm == pytest.approx(theirs.norm, rel=1e-6)
        assert (ours.clipped, ours.skipped) == (theirs.clipped, theirs.skipped)
    torch.testing.assert_close(weights_of(model), weights_of(plain), rtol=0, atol=1e-6)

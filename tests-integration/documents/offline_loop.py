"""A tiny policy, pairs of rows, and a loss of one's own over them."""

import torch
from tiny_setup import TinySetup

from rl_algorithms import offline
from rl_algorithms.dpo import DPOConfig, Examples
from rl_backends import OptimizerConfig

policy = TinySetup.make().policy
config = DPOConfig(max_num_steps=3, batch_size=2)
policy.start_training(OptimizerConfig(lr=1e-3), num_steps=3)
examples = Examples(
    tokens=torch.arange(80).view(8, 10) % 10 + 3,
    lengths=torch.full((8,), 10),
    trainable=(torch.arange(10) >= 4).expand(8, 10),
    logp_ref=torch.zeros(8, 10),
)


def my_loss(logp, pairs):
    margin = (logp * pairs.trainable).sum(1).view(-1, 2)
    total = -torch.nn.functional.logsigmoid(margin[:, 0] - margin[:, 1]).sum() / 2
    return total, {"loss": total.detach()}

"""rl-algorithms' GRPO loss in a plain loop of your own: your model, your sampler, your optimizer. Needs torch alone.

The policy is a small recurrent network; the task is to answer each digit by the same digit three times.
"""

import torch
from torch import nn

from rl_algorithms import grpo
from rl_algorithms.advantages import group_advantage
from rl_algorithms.losses import Counts
from rl_algorithms.policy_gradient import loss as grpo_loss

PROMPTS, GROUP, VOCABULARY, LENGTH = 16, 8, 10, 4  # a prompt of one token, and three that are sampled


class Policy(nn.Module):
    """Logits of the next token, [B, T, V]."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 64)
        self.body = nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.body(self.embedding(tokens))[0])


def logp_of(policy, tokens):
    """Log-probability of each token given those before it, [B, T]; 0 for the first."""
    logp = policy(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]
    return nn.functional.pad(logp, (1, 0))


@torch.no_grad()
def sample(policy, prompts):
    """Rollouts: prompts and three sampled tokens each, [B, T]."""
    tokens = prompts[:, None]
    while tokens.shape[1] < LENGTH:
        distribution = policy(tokens)[:, -1].softmax(-1)
        tokens = torch.cat([tokens, torch.multinomial(distribution, 1)], dim=1)
    return tokens


torch.manual_seed(0)
policy = Policy()
optimizer = torch.optim.AdamW(policy.parameters(), lr=3e-3)
objective = grpo.dapo()  # or grpo.deepseek_grpo(), grpo.gspo(), grpo.rloo(), ... or an Objective of your own
print(objective.explain())
trainable = torch.tensor([False, True, True, True]).expand(PROMPTS * GROUP, LENGTH)
unknown = torch.full((PROMPTS * GROUP, LENGTH), torch.nan)  # this objective reads neither reference nor proximal policy

for step in range(120):
    prompts = torch.randint(VOCABULARY, (PROMPTS,)).repeat_interleave(GROUP)
    tokens = sample(policy, prompts)
    rewards = (tokens[:, 1:] == tokens[:, :1]).double().mean(1)
    advantage = group_advantage(rewards, groups=torch.arange(PROMPTS).repeat_interleave(GROUP), scale="group_std")
    examples = grpo.Examples(
        tokens=tokens,
        lengths=torch.full((PROMPTS * GROUP,), LENGTH),
        trainable=trainable,
        advantage=advantage[:, None].expand(-1, LENGTH).float(),
        logp_old=logp_of(policy, tokens).detach(),
        logp_proximal=unknown,
        logp_ref=unknown,
    )
    counts = Counts.of(trainable)  # of the whole step: microbatches and ranks would share it, and sum their gradients
    value, sums = grpo_loss(logp_of(policy, tokens), examples, objective=objective, counts=counts)
    optimizer.zero_grad()
    value.backward()
    optimizer.step()
    # One step on each batch is on-policy: the value of the loss is 0, and its gradient is not.
    if step % 20 == 0 or step == 119:
        entropy = sums["entropy"].item() / counts.tokens
        print(f"step {step:3}: reward {rewards.mean():.3f}, entropy {entropy:.3f}")

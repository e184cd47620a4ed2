"""A small problem in fp64 on one rank, its truth by log_softmax, and gradients that tell every entry apart."""

import torch
from torch import nn
from torch.nn.functional import log_softmax

ROWS, FEATURES, WORDS = 7, 6, 11


def problem(*, num_rows=ROWS, features=FEATURES, words=WORDS, dtype=torch.float64, bias=False):
    generator = torch.Generator().manual_seed(num_rows + 100 * words)
    hidden = torch.randn(num_rows, features, generator=generator, dtype=torch.float64).to(dtype)
    head = nn.Linear(features, words, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return hidden, head, torch.randint(words, (num_rows,), generator=generator)


def distribution(hidden, head, *, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = head(hidden) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return log_softmax(logits / temperature, -1)


def gradients(outputs, inputs):
    total = sum(
        (output * torch.linspace(-1, 2, len(output)).to(output) * (i + 1)).sum() for i, output in enumerate(outputs)
    )
    return torch.autograd.grad(total, inputs)

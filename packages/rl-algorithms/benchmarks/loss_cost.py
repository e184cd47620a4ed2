"""What GRPO's own arithmetic costs: its loss and gradient on logp, against a bare sum of the same tensor.

The last line is JSON with every figure.
"""

import functools
import json
import statistics
import time

import torch

from rl_algorithms import grpo

SHAPES = [(64, 21), (512, 1024)]
ROUNDS = 15


def make_examples(rows: int, width: int) -> grpo.Examples:
    """Random tokens, the last three quarters of each row trainable."""
    return grpo.Examples(
        tokens=torch.randint(0, 50, (rows, width)),
        lengths=torch.full((rows,), width),
        trainable=(torch.arange(width) >= width // 4).expand(rows, width),
        logp_old=-torch.rand(rows, width),
        advantage=torch.randn(rows),
    )


def milliseconds(function: functools.partial) -> float:
    """Of one forward and backward."""
    started = time.perf_counter()
    function().backward()
    return 1e3 * (time.perf_counter() - started)


def bare_sum(logp: torch.Tensor, examples: grpo.Examples) -> torch.Tensor:
    """The least that any loss does: mask and add up."""
    return (logp * examples.trainable).sum()


def grpo_loss(logp: torch.Tensor, examples: grpo.Examples) -> torch.Tensor:
    """The loss that the policy calls, metrics included."""
    config = grpo.GRPOConfig(max_num_steps=1)
    return grpo._loss(logp, examples, config=config, num_tokens=examples.trainable.sum())[0]


def main() -> None:
    """Time both side by side, alternating, and print medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures = {}
    print(f"{'rows x tokens':>16} {'bare sum':>12} {'GRPO loss':>12} {'ratio':>8}")
    for rows, width in SHAPES:
        examples = make_examples(rows, width)
        logp = (examples.logp_old + 0.1 * torch.randn(rows, width)).requires_grad_()
        times = [
            [milliseconds(functools.partial(function, logp, examples)) for function in (bare_sum, grpo_loss)]
            for _ in range(ROUNDS)
        ]
        bare, loss = (statistics.median(column) for column in zip(*times, strict=True))
        print(f"{f'{rows} x {width}':>16} {bare:>9.3f} ms {loss:>9.3f} ms {loss / bare:>7.1f}x")
        figures[f"{rows}x{width}"] = {"bare_sum_ms": bare, "grpo_loss_ms": loss, "ratio": loss / bare}
    print(json.dumps({"torch": torch.__version__, **figures}))


if __name__ == "__main__":
    main()

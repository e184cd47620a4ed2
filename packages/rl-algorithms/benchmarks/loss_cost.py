"""What a policy-gradient loss costs of its own: loss, gradient and metrics on logp, against a bare sum.

`fused_dapo` is DAPO's loss with the same metrics written out in one function, without pieces: what choosing the parts
by name costs is `dapo` over `fused_dapo`. The last line is JSON with every figure.
"""

import functools
import json
import statistics
import time

import torch

from rl_algorithms import grpo
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.losses import Counts
from rl_algorithms.objective import KLConfig, Objective, RatioConfig
from rl_algorithms.policy_gradient import loss

SHAPES = [(64, 21), (512, 1024)]
ROUNDS = 25
OBJECTIVES = {
    "dapo": grpo.dapo(),
    "gspo": grpo.gspo(),
    "gmpo": grpo.gmpo(),
    "vespo": grpo.vespo(),
    "everything": Objective(
        ratio=RatioConfig(proximal="recomputed", dual_clip=3.0),
        correction=CorrectionConfig(weight="token", geometric_low=0.99, geometric_high=1.01),
        kl=KLConfig(weight=0.01),
    ),
}


def make_examples(rows: int, width: int) -> grpo.Examples:
    """Random tokens, the last three quarters of each row trainable."""
    logp_old = -torch.rand(rows, width)
    return grpo.Examples(
        tokens=torch.randint(0, 50, (rows, width)),
        lengths=torch.full((rows,), width),
        trainable=(torch.arange(width) >= width // 4).expand(rows, width),
        advantage=torch.randn(rows, 1).expand(rows, width).contiguous(),
        logp_old=logp_old,
        logp_proximal=logp_old + 0.01 * torch.randn(rows, width),
        logp_ref=logp_old + 0.1 * torch.randn(rows, width),
    )


def milliseconds(function: functools.partial) -> float:
    """Of one forward and backward."""
    started = time.perf_counter()
    function().backward()
    return 1e3 * (time.perf_counter() - started)


def bare_sum(logp: torch.Tensor, examples: grpo.Examples) -> torch.Tensor:
    """The minimum work of any loss: mask and sum."""
    return (logp * examples.trainable).sum()


def fused_dapo(logp: torch.Tensor, examples: grpo.Examples) -> torch.Tensor:
    """The same arithmetic as `dapo` through `loss`, with nothing chosen."""
    mask = examples.trainable
    logp = torch.where(mask, logp, 0.0)
    logp_old = torch.where(mask, examples.logp_old, 0.0)
    advantage = torch.where(mask, examples.advantage, 0.0)
    ratio = torch.where(mask, logp - logp_old, 0.0).clamp(-20.0, 20.0).exp()
    free, held = ratio * advantage, ratio.clamp(0.8, 1.28) * advantage
    per_token = -torch.minimum(free, held)
    with torch.no_grad():
        gap = torch.where(mask, logp_old - logp, 0.0)
        sums = [
            ((held < free) & mask).sum(),
            torch.where(mask, ratio, 0.0).sum(),
            gap.sum(),
            torch.where(mask, gap.abs().clamp(max=20.0).exp(), 0.0).sum(),
            -torch.where(mask, logp_old, 0.0).sum(),
        ]
    weights = (mask.double() / max(Counts.of(mask).tokens, 1)).to(logp.dtype)
    total = (weights * torch.where(mask, per_token, 0.0)).sum()
    assert sums[0].ndim == 0
    return total


def with_objective(logp: torch.Tensor, examples: grpo.Examples, objective: Objective) -> torch.Tensor:
    """The loss that the policy calls, metrics included."""
    return loss(logp, examples, objective=objective, counts=Counts.of(examples.trainable))[0]


def main() -> None:
    """Time all side by side, alternating, and print medians."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    figures: dict[str, object] = {}
    for rows, width in SHAPES:
        examples = make_examples(rows, width)
        logp = (examples.logp_old + 0.1 * torch.randn(rows, width)).requires_grad_()
        assert torch.equal(
            fused_dapo(logp, examples).detach(), with_objective(logp, examples, OBJECTIVES["dapo"]).detach()
        )
        functions = {
            "bare_sum": functools.partial(bare_sum, logp, examples),
            "fused_dapo": functools.partial(fused_dapo, logp, examples),
        } | {
            name: functools.partial(with_objective, logp, examples, objective) for name, objective in OBJECTIVES.items()
        }
        times: dict[str, list[float]] = {name: [] for name in functions}
        for _ in range(ROUNDS):
            for name, function in functions.items():
                times[name].append(milliseconds(function))
        medians = {name: statistics.median(each) for name, each in times.items()}
        for name, median in medians.items():
            ratio = median / medians["bare_sum"]
            token = 1e6 * median / examples.tokens.numel()
            print(f"{rows} x {width}  {name:<12} {median:>9.3f} ms {ratio:>7.1f}x  {token:.1f} ns a token")
        medians["dapo_over_fused"] = medians["dapo"] / medians["fused_dapo"]
        print(f"{rows} x {width}  pieces over the fused formula: {medians['dapo_over_fused']:.3f}")
        figures[f"{rows}x{width}"] = medians
    print(json.dumps({"torch": torch.__version__, **figures}))


if __name__ == "__main__":
    main()

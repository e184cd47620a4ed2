"""CUDA kernels of others behind linear_logp: the same numbers where they run, refused with the reason elsewhere."""

import importlib.util

import pytest
import torch
from torch import nn

from rl_parallel_plans import PlanError, linear_logp

KERNELS = ["liger", "verl"]
DISTRIBUTIONS = {"liger": "liger_kernel", "verl": "verl"}


def problem(device, *, num_rows=40, features=256, words=1000, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, features, generator=generator).to(device, dtype).requires_grad_()
    head = nn.Linear(features, words, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.randn(words, features, generator=generator) / features**0.5)
    return hidden, head.to(device, dtype), torch.randint(words, (num_rows,), generator=generator).to(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel runs on CUDA, and there is no GPU here")
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ignored", [0, 7])
def test_kernel_gives_the_numbers_of_torch(kernel, ignored):
    if importlib.util.find_spec(DISTRIBUTIONS[kernel]) is None:
        pytest.skip(f"{DISTRIBUTIONS[kernel]} is not installed")
    hidden, head, targets = problem("cuda")
    targets[:ignored] = -100
    outcomes = []
    for name in ("torch", kernel):
        logp, entropy = linear_logp(hidden, head, targets, temperature=0.7, entropy=True, kernel=name)
        gradients = torch.autograd.grad((logp.sum() + 0.5 * entropy.sum()), [hidden, head.weight])
        outcomes.append([tensor.float() for tensor in (logp, entropy, *gradients)])
    for found, expected in zip(*outcomes, strict=True):
        assert ((found - expected).norm() / expected.norm()).item() < 0.02


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_is_refused_without_a_gpu(kernel):
    hidden, head, targets = problem("cpu", num_rows=3)
    with pytest.raises(
        PlanError, match=rf"kernel='{kernel}' does not take this: hidden is on cpu, and it runs on CUDA"
    ):
        linear_logp(hidden, head, targets, kernel=kernel)


def test_every_reason_to_refuse_a_kernel_is_named():
    hidden, _, targets = problem("meta", features=200, dtype=torch.float64)
    head = nn.Linear(200, 1000, device="meta", dtype=torch.float64)
    with pytest.raises(PlanError) as refusal:
        linear_logp(
            hidden,
            head,
            targets[:, None].expand(-1, 2),
            softcap=30.0,
            logit_scale=-1.0,
            kernel="verl",
            ignore_index=None,
        )
    for reason in (
        "it runs on CUDA",
        "hidden is torch.float64",
        "the lm_head has a bias",
        "softcap is 30.0",
        "logit_scale is -1.0",
        "targets ask for 2 words",
        "hidden size 200 is no multiple of 128",
        "kernel='torch' takes all of it",
    ):
        assert reason in str(refusal.value)


@pytest.mark.parametrize("kernel", KERNELS)
def test_missing_kernel_says_how_to_install_it(kernel, monkeypatch):
    from rl_parallel_plans.logp import kernels

    home, install = kernels._HOMES[kernel]
    monkeypatch.setitem(__import__("sys").modules, home, None)  # as if it were not installed
    with pytest.raises(PlanError, match=rf"kernel='{kernel}' needs {home}, which cannot be imported") as refusal:
        kernels._imported(kernel)
    assert install in str(refusal.value)


def test_uneven_vocabulary_is_refused(ranks):
    for message in ranks("logp:uneven_kernel", 2):
        assert "the vocabulary is cut unevenly, into [65, 64] words" in message


@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("hidden_placement", ["plain", "shard 0"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_contract_is_kept(ranks, kernel, hidden_placement, cut):
    """Signs, scales, contiguous gradients, and the gradient of hidden summed over ranks exactly once."""
    for errors in ranks("kernels:wiring", 2, kernel=kernel, hidden_placement=hidden_placement, cut=cut):
        assert max(errors) < 1e-5

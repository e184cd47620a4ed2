"""Norms and clipping over any mixture of placements, and of plain tensors."""

import math

import pytest
import torch
from torch import nn

from rl_parallel_plans import clip_grad_by_total_norm_, get_grad_norm, to_local_if_dtensor


def parameter_with(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient
    return parameter


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_each_entry_counts_once_on_every_mixture_of_meshes(ranks, norm_type):
    results = ranks("mixed_gradient_norm", 4, norm_type=norm_type)
    for norm, clipped, truth in results:
        assert norm == pytest.approx(truth, rel=1e-6)
        assert clipped == pytest.approx(1.0, rel=1e-5)
    assert len({norm for norm, _, _ in results}) == 1


def test_sharded_bf16_gradient_is_scaled_in_place(ranks):
    assert ranks("clip_in_bf16", 2) == [[16.0, "torch.bfloat16", [2.0] * 4]] * 2


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_plain_norm_is_torchs(norm_type):
    parameters = [parameter_with(torch.randn(shape)) for shape in [(3, 4), (5,), ()]]
    truth = torch.nn.utils.get_total_norm([p.grad for p in parameters], norm_type)
    torch.testing.assert_close(get_grad_norm(parameters, norm_type), truth)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_clipped_in_place(dtype):
    gradient = torch.full((4,), 8.0, dtype=dtype)
    parameter = parameter_with(gradient)
    clip_grad_by_total_norm_([parameter], 4.0, get_grad_norm([parameter]))
    assert parameter.grad is gradient
    assert gradient.tolist() == pytest.approx([2.0] * 4)


def test_norm_of_bf16_gradients_is_fp32():
    norm = get_grad_norm([parameter_with(torch.full((1 << 14,), 0.1, dtype=torch.bfloat16))])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(torch.tensor(0.1, dtype=torch.bfloat16).item() * 128, rel=1e-4)


def test_small_gradients_are_left_alone_to_the_bit():
    gradient = torch.randn(7)
    parameter = parameter_with(gradient.clone())
    clip_grad_by_total_norm_([parameter], 1e6, get_grad_norm([parameter]))
    assert torch.equal(parameter.grad, gradient)


def test_no_gradients_have_norm_zero():
    assert get_grad_norm([nn.Parameter(torch.ones(2))]).item() == 0
    assert get_grad_norm([]).item() == 0
    assert get_grad_norm([parameter_with(torch.zeros(0)), parameter_with(torch.ones(1))], math.inf).item() == 1


def test_total_norm_may_be_a_number():
    parameter = parameter_with(torch.ones(4))
    clip_grad_by_total_norm_(iter([parameter]), 1.0, 2.0)
    torch.testing.assert_close(parameter.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("norm_type", [0.0, -1.0, math.nan])
def test_norm_type_that_is_no_norm_is_refused(norm_type):
    with pytest.raises(ValueError, match="it must be above 0, or inf"):
        get_grad_norm([], norm_type)


def test_plain_tensor_is_its_own_local_piece():
    tensor = torch.ones(2)
    assert to_local_if_dtensor(tensor) is tensor

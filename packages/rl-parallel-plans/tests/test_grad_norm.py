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


@pytest.mark.parametrize("half", [False, True], ids=["fp32", "half of it bf16"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_each_entry_counts_once_on_every_mixture_of_meshes(ranks, norm_type, half):
    results = ranks("grad_norm:mixture", 4, norm_type=norm_type, half=half)
    for result in results:
        assert result["norm"] == pytest.approx(result["truth"], rel=1e-6)
        assert result["clipped"] == pytest.approx(1.0, rel=1e-3 if half else 1e-5)
        assert result["still_partial"].startswith("(Partial")
        # dp, tp and both flattened, and one for the two gradients that are still Partial.
        assert result["collectives"] == {"allreduce_": 4}
    assert len({result["norm"] for result in results}) == 1


def test_one_all_reduce_for_each_sharded_axis_however_many_parameters_and_meshes(ranks):
    assert ranks("grad_norm:collectives_of_many", 4, partial=False) == [2] * 4


def test_partial_gradients_of_an_axis_are_summed_together(ranks):
    assert ranks("grad_norm:collectives_of_many", 4, partial=True) == [3] * 4


def test_strided_shards_of_fsdp_over_tensor_parallelism_all_count(ranks):
    for result in ranks("grad_norm:fsdp_over_tp", 4):
        assert "_StridedShard" in result["placements"]
        assert result["norm"] == pytest.approx(result["truth"], rel=1e-6)
        assert result["published"] > 1.001 * result["truth"]  # counts replicated gradients of every tp rank


def test_replicated_gradients_are_not_counted_once_for_each_rank(ranks):
    """Summing squares over every axis of the mesh made norms up to 1.56 times too large, and steps as much smaller."""
    for result in ranks("grad_norm:replicated_over_dp", 4):
        assert result["norm"] == pytest.approx(result["truth"], rel=1e-6)
        assert result["published"] > 1.4 * result["truth"]


def test_rank_without_a_gradient_takes_part(ranks):
    for norm, truth in ranks("grad_norm:missing_on_one_rank", 2):
        assert norm == pytest.approx(truth, rel=1e-6)


def test_sharded_bf16_gradient_is_scaled_in_place(ranks):
    assert ranks("grad_norm:clip_in_bf16", 2) == [[16.0, "torch.bfloat16", [2.0] * 4]] * 2


def test_clipping_a_cast_copy_does_nothing_to_bf16_and_ours_does():
    """What clipping by `gradient.to(fp32).mul_(...)` is: right for fp32, nothing at all for bf16."""
    published, ours = (torch.full((4,), 8.0, dtype=torch.bfloat16) for _ in range(2))
    published.to(torch.float32).mul_(0.25)
    assert published.tolist() == [8.0] * 4
    clip_grad_by_total_norm_([parameter_with(ours)], 4.0, 16.0)
    assert ours.tolist() == [2.0] * 4


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


def test_norm_with_fp64_gradients_is_fp64():
    gradients = [torch.randn(5, dtype=torch.float64), torch.randn(3)]
    norm = get_grad_norm([parameter_with(gradient) for gradient in gradients])
    truth = torch.linalg.vector_norm(torch.cat([gradient.double() for gradient in gradients]))
    torch.testing.assert_close(norm, truth, rtol=1e-7, atol=0)


@pytest.mark.parametrize(("norm_type", "size"), [(2.0, 8e18), (8.0, 1e10), (8.0, 1e-10)])
def test_powers_beyond_fp32_do_not_overflow_or_vanish(norm_type, size):
    gradients = [torch.full((4,), size), torch.full((4,), size)]
    norm = get_grad_norm([parameter_with(gradient) for gradient in gradients], norm_type)
    assert norm.item() == pytest.approx(size * 8 ** (1 / norm_type), rel=1e-5)


def test_small_gradients_are_left_alone_to_the_bit():
    gradient = torch.randn(7)
    parameter = parameter_with(gradient.clone())
    clip_grad_by_total_norm_([parameter], 1e6, get_grad_norm([parameter]))
    assert torch.equal(parameter.grad, gradient)


def test_no_gradients_have_norm_zero():
    assert get_grad_norm([nn.Parameter(torch.ones(2))]).item() == 0
    assert get_grad_norm([]).item() == 0
    assert get_grad_norm([nn.Parameter(torch.ones(2), requires_grad=False)]).item() == 0
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

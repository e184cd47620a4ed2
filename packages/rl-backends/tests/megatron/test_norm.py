"""Claims about the norm: bit for bit Hugging Face's, whatever the dtypes."""

from types import SimpleNamespace

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from rl_backends.megatron.gpt_model import RMSNorm

EPS = 1e-6


def norms(features, dtype):
    torch.manual_seed(0)
    ours = RMSNorm(SimpleNamespace(params_dtype=dtype, sequence_parallel=False), features, EPS)
    theirs = LlamaRMSNorm(features, EPS).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.copy_(torch.randn(features)))
    return ours, theirs


def answers(norm, x, gradient):
    x = x.clone().requires_grad_()
    out = norm(x)
    out.backward(gradient.to(out.dtype))
    return out, x.grad, norm.weight.grad


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["weights-fp32", "weights-bf16"])
@pytest.mark.parametrize("features", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", [(7, 3, 32), (5, 2, 4, 8), (3, 1, 100)])
def test_values_and_gradients_equal_hugging_face_bit_for_bit(shape, features, weights):
    ours, theirs = norms(shape[-1], weights)
    x, gradient = torch.randn(shape).to(features), torch.randn(shape)
    for own, expected in zip(answers(ours, x, gradient), answers(theirs, x, gradient), strict=True):
        assert own.dtype == expected.dtype
        assert torch.equal(own, expected)


def test_eps_counts_where_features_are_small():
    ours, theirs = norms(8, torch.float32)
    tiny = torch.full((1, 8), 1e-4)
    assert torch.equal(ours(tiny), theirs(tiny))
    ours.eps = 1e-12
    assert not torch.allclose(ours(tiny), theirs(tiny))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_weights_say_whether_ranks_hold_other_tokens(sequence_parallel):
    norm = RMSNorm(SimpleNamespace(params_dtype=torch.bfloat16, sequence_parallel=sequence_parallel), 8)
    assert norm.weight.sequence_parallel is sequence_parallel
    assert norm.weight.dtype == torch.bfloat16

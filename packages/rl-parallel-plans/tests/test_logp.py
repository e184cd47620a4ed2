"""linear_logp against log_softmax: values, gradients, memory, refusals."""

import copy
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from parallel_plans_cases.logp_problem import FEATURES, ROWS, WORDS, distribution, gradients, problem
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import cross_entropy, log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_parallel_plans import PlanError, linear_logp
from rl_parallel_plans.logp import linear as fused
from rl_parallel_plans.logp import logp_of_token_ids, top_k_logp
from rl_parallel_plans.logp.chunks import Options


def truth(hidden, head, targets, **transform):
    log_p = distribution(hidden, head, **transform)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


@pytest.fixture(params=[0, fused.KEPT_BYTES], ids=["logits made twice", "logits kept"])
def _both_ways(request, monkeypatch):
    monkeypatch.setattr(fused, "KEPT_BYTES", request.param)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # no clock
@given(
    num_rows=st.integers(0, 20),
    words=st.integers(1, 30),
    chunk_size=st.integers(1, 25),
    temperature=st.floats(0.3, 3),
    softcap=st.none() | st.floats(0.5, 20),
    logit_scale=st.sampled_from([1.0, 0.25]),
    kept=st.booleans(),
    bias=st.booleans(),
)
def test_values_and_gradients_do_not_depend_on_the_cut(
    num_rows, words, chunk_size, temperature, softcap, logit_scale, kept, bias
):
    hidden, head, targets = problem(num_rows=num_rows, words=words, bias=bias)
    hidden.requires_grad_()
    transform = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "KEPT_BYTES", fused.KEPT_BYTES if kept else 0)
        found = linear_logp(hidden, head, targets, chunk_size=chunk_size, entropy=True, **transform)
        found_gradients = gradients(found, [hidden, *head.parameters()])
    expected = truth(hidden, head, targets, **transform)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients(expected, [hidden, *head.parameters()]))


@pytest.mark.usefixtures("_both_ways")
def test_logp_without_entropy_has_the_same_gradient():
    hidden, head, targets = problem()
    hidden.requires_grad_()
    found = linear_logp(hidden, head, targets, chunk_size=3)
    expected, _ = truth(hidden, head, targets)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, head.weight]
    torch.testing.assert_close(gradients([found], inputs), gradients([expected], inputs))


@pytest.mark.usefixtures("_both_ways")
def test_a_weight_alone_is_a_layer_without_bias():
    hidden, head, targets = problem()
    weight = head.weight.detach().clone().requires_grad_()
    found, expected = linear_logp(hidden, weight, targets), linear_logp(hidden, head, targets)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients([found], [weight]), gradients([expected], [head.weight]), rtol=0, atol=0)
    of_three, of_layer = (top_k_logp(hidden, each, 3) for each in (weight, head))
    assert torch.equal(of_three.token_ids, of_layer.token_ids)


@pytest.mark.usefixtures("_both_ways")
def test_entropy_alone_may_be_differentiated():
    hidden, head, targets = problem()
    hidden.requires_grad_()
    _, found = linear_logp(hidden, head, targets, entropy=True)
    _, expected = truth(hidden, head, targets)
    torch.testing.assert_close(gradients([found], [hidden]), gradients([expected], [hidden]))


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("wants", ["hidden", "weight", "neither"])
def test_only_the_asked_gradients_are_made(wants):
    hidden, head, targets = problem()
    hidden.requires_grad_(wants == "hidden")
    head.weight.requires_grad_(wants == "weight")
    found = linear_logp(hidden, head, targets)
    assert found.requires_grad == (wants != "neither")
    if wants != "neither":
        found.sum().backward()
        assert (hidden.grad is not None, head.weight.grad is not None) == (wants == "hidden", wants == "weight")


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_rows_that_ask_for_nothing_are_zero_as_in_cross_entropy(ignore_index):
    hidden, head, targets = problem(num_rows=20, bias=True)
    targets[::3] = ignore_index
    hidden.requires_grad_()
    inputs = [hidden, *head.parameters()]
    found, entropy = linear_logp(hidden, head, targets, entropy=True, chunk_size=4, ignore_index=ignore_index)
    expected = -cross_entropy(head(hidden), targets, reduction="none", ignore_index=ignore_index)
    torch.testing.assert_close(found, expected)
    assert torch.equal(entropy == 0, targets == ignore_index)
    torch.testing.assert_close(gradients([found], inputs), gradients([expected], inputs))


def test_rows_that_ask_for_nothing_cost_nothing(monkeypatch):
    monkeypatch.setattr(fused, "KEPT_BYTES", 0)
    hidden, head, targets = problem(num_rows=4096, words=512, dtype=torch.float32)
    targets[300:] = -100
    hidden.requires_grad_()
    with _Multiplied() as rows:
        linear_logp(hidden, head, targets, chunk_size=64)[:200].sum().backward()
    # Logits forward, logits again, and the gradients of hidden and of the weight (whose rows are words).
    assert rows.made == {"forward and hidden": 3 * 300, "weight": 5 * 512}


def test_no_row_may_ask_for_anything():
    hidden, head, targets = problem()
    hidden.requires_grad_()
    found, entropy = linear_logp(hidden, head, torch.full_like(targets, -100), entropy=True)
    (found.sum() + entropy.sum()).backward()
    assert not any(tensor.any() for tensor in (found, entropy, hidden.grad, head.weight.grad))


def test_leading_dims_are_kept():
    hidden, head, targets = problem(num_rows=12)
    flat, flat_entropy = linear_logp(hidden, head, targets, entropy=True)
    found, entropy = linear_logp(hidden.view(3, 4, -1), head, targets.view(3, 4), entropy=True)
    assert torch.equal(found, flat.view(3, 4))
    assert torch.equal(entropy, flat_entropy.view(3, 4))


@pytest.mark.usefixtures("_both_ways")
@pytest.mark.parametrize("leading", [(ROWS,), (2, 3)])
def test_many_words_in_each_row(leading):
    hidden, head, targets = problem(num_rows=math.prod(leading) * 4)
    hidden = hidden[: math.prod(leading)].view(*leading, -1).requires_grad_()
    targets = targets.view(*leading, 4)
    targets[..., 1] = targets[..., 0]  # the same word twice adds its gradients
    targets[0, ..., 2] = -100
    targets[-1] = -100
    found, entropy = linear_logp(hidden, head, targets, entropy=True, chunk_size=2, temperature=0.9)
    log_p = distribution(hidden, head, temperature=0.9)
    expected = log_p.gather(-1, targets.clamp(min=0)).where(targets != -100, 0)
    expected_entropy = -(log_p.exp() * log_p).sum(-1).where((targets != -100).any(-1), 0)
    torch.testing.assert_close([found, entropy], [expected, expected_entropy])
    inputs = [hidden, head.weight]
    torch.testing.assert_close(
        gradients([found.flatten(), entropy.flatten()], inputs),
        gradients([expected.flatten(), expected_entropy.flatten()], inputs),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_are_fp32(dtype):
    hidden, head, targets = problem(features=64, words=200, dtype=dtype)
    hidden.requires_grad_()
    found = linear_logp(hidden, head, targets)
    assert found.dtype == torch.float32
    # The same rounding of the logits, then fp32: what upcasting the logits of a model gives.
    expected = log_softmax((hidden @ head.weight.T).float(), -1).gather(-1, targets[:, None])[:, 0]
    assert torch.equal(found, expected)
    found.sum().backward()
    assert hidden.grad.dtype == head.weight.grad.dtype == dtype


def test_half_precision_gradients_are_near_those_of_fp32():
    hidden, head, targets = problem(num_rows=40, features=64, words=50, dtype=torch.bfloat16)
    hidden.requires_grad_()
    linear_logp(hidden, head, targets, chunk_size=7).sum().backward()
    exact_hidden, exact_head = hidden.detach().double().requires_grad_(), copy.deepcopy(head).double()
    exact_head.zero_grad()
    truth(exact_hidden, exact_head, targets)[0].sum().backward()
    for found, exact in ((hidden.grad, exact_hidden.grad), (head.weight.grad, exact_head.weight.grad)):
        assert ((found - exact).norm() / exact.norm()).item() < 0.02


@pytest.mark.usefixtures("_both_ways")
def test_autocast_gives_forward_and_backward_the_same_logits():
    hidden, head, targets = problem(num_rows=40, features=64, words=50, dtype=torch.float32)
    hidden.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = linear_logp(hidden, head, targets)
    rounded_hidden, rounded_head = hidden.detach().bfloat16().requires_grad_(), copy.deepcopy(head).bfloat16()
    expected = linear_logp(rounded_hidden, rounded_head, targets)
    assert torch.equal(found, expected)
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(hidden.grad, rounded_hidden.grad.float())
    assert torch.equal(head.weight.grad, rounded_head.weight.grad.float())


class _LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation returned."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


class _Multiplied(TorchDispatchMode):
    """Rows of all matrix products."""

    def __init__(self):
        super().__init__()
        self.made = {"forward and hidden": 0, "weight": 0}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.mm.default, torch.ops.aten.mm.out):
            self.made["forward and hidden"] += len(args[0])
        elif function is torch.ops.aten.addmm_.default:
            self.made["weight"] += len(args[1])
        return result


@pytest.mark.parametrize(("k", "given_words"), [(None, False), (5, False), (5, True)])
@pytest.mark.parametrize(("chunk_size", "chunk_rows"), [(64, 64), (None, 512)])
def test_all_logits_never_exist(chunk_size, chunk_rows, k, given_words):
    num_rows, features, words = 4096, 8, 512
    hidden, head, targets = problem(num_rows=num_rows, features=features, words=words, dtype=torch.float32)
    hidden.requires_grad_()
    with _LargestTensor() as largest:
        if k is None:
            logp, _ = linear_logp(hidden, head, targets, chunk_size=chunk_size, entropy=True)
        elif given_words:
            logp = logp_of_token_ids(hidden, head, targets[:, None].expand(-1, k), chunk_size=chunk_size)
        else:
            logp = top_k_logp(hidden, head, k, chunk_size=chunk_size).logp
        logp.sum().backward()
    assert num_rows * words * 4 > fused.KEPT_BYTES
    assert largest.elements == max(chunk_rows * words, num_rows * features, num_rows * (k or 1))


@pytest.mark.parametrize(
    ("num_rows", "words", "expected"),
    [
        (100, 1000, 100),
        (1000, 1000, 256),
        (4096, 16032, 512),
        (65536, 16032, 1024),
        (65536, 256_000, 262),
        (10, 10**9, 1),
    ],
)
def test_default_chunk_is_an_eighth_of_the_rows_within_bounds(num_rows, words, expected):
    chunks = Options().chunks(num_rows, words, torch.float32)
    assert chunks[0] == slice(0, expected)
    assert [row for chunk in chunks for row in range(num_rows)[chunk]] == list(range(num_rows))


@pytest.mark.parametrize("ignore_index", [-100, None])
def test_fake_tensors_have_the_shapes_of_real_ones(ignore_index):
    with FakeTensorMode():
        hidden, head = torch.empty(4096, 64, requires_grad=True), nn.Linear(64, 3200)
        targets = torch.zeros(4096, dtype=torch.long)
        found, entropy = linear_logp(hidden, head, targets, entropy=True, ignore_index=ignore_index)
        (found.sum() + entropy.sum() + top_k_logp(hidden, head, 5).logp.sum()).backward()
    assert found.shape == entropy.shape == (4096,)
    assert hidden.grad.shape == hidden.shape
    assert head.weight.grad.shape == head.weight.shape


def test_a_row_that_is_no_number_stays_none_and_alone():
    hidden, head, targets = problem()
    hidden[2] = torch.nan
    assert linear_logp(hidden, head, targets).isnan().tolist() == [row == 2 for row in range(ROWS)]


@pytest.mark.parametrize("bad", [-1, WORDS])
def test_target_outside_the_vocabulary_is_refused(bad):
    hidden, head, targets = problem()
    targets[2] = bad
    with pytest.raises(ValueError, match=rf"targets span .* and the vocabulary 0 to {WORDS - 1}: give rows that ask"):
        linear_logp(hidden, head, targets)


def test_without_an_ignore_index_every_target_must_be_a_word():
    hidden, head, targets = problem()
    targets[2] = -100
    with pytest.raises(ValueError, match="targets span -100 to"):
        linear_logp(hidden, head, targets, ignore_index=None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(ROWS, 3)}, r"hidden is \[7, 3\], lm_head.weight \[11, 6\] and targets \[7\]"),
        ({"hidden": torch.zeros(1, ROWS, FEATURES)}, r"they must be \[..., H\], \[V, H\] and \[...\]"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets \[3\]"),
        ({"targets": torch.zeros(ROWS)}, r"targets are torch.float32: they must be token ids"),
        ({"hidden": torch.zeros(ROWS, FEATURES)}, r"hidden is torch.float32 and lm_head.weight is torch.float64"),
        ({"temperature": 0.0}, r"temperature is 0.0"),
        ({"chunk_size": 0}, r"chunk_size is 0"),
        ({"softcap": -1.0}, r"softcap is -1.0"),
        ({"kernel": "cuda"}, r"kernel is 'cuda': it may be one of \['torch', 'liger', 'verl'\]"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_values(change, message):
    hidden, head, targets = problem()
    arguments = {"hidden": hidden, "targets": targets, **change}
    with pytest.raises(ValueError, match=message):
        linear_logp(arguments.pop("hidden"), head, arguments.pop("targets"), **arguments)


class _Adapted(nn.Module):
    """A layer as adapters make it: its `weight` is not all that it computes."""

    def __init__(self, layer):
        super().__init__()
        self.base_layer, self.lora_A = layer, nn.Linear(layer.in_features, 2)

    @property
    def weight(self):
        return self.base_layer.weight


def test_weight_that_is_no_matrix_is_refused():
    hidden, _, targets = problem()
    with pytest.raises(ValueError, match=r"\[V, H\]"):
        linear_logp(hidden, torch.zeros(WORDS), targets)
    with pytest.raises(ValueError, match=r"\[V, H\]"):
        top_k_logp(hidden, torch.zeros(WORDS), 2)


def test_layer_that_computes_more_than_its_weight_is_refused():
    hidden, head, targets = problem()
    with pytest.raises(
        PlanError, match=r"the lm_head is a _Adapted with the parameters \['base_layer.weight', 'lora_A"
    ):
        linear_logp(hidden, _Adapted(head), targets)

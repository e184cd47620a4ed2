"""linear_logp and its sibling for logits against log_softmax: values, gradients, memory, refusals."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import log_softmax
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_parallel_plans import PlanError, get_logprobs_from_vocab_parallel_logits, linear_logp, logp

ROWS, FEATURES, WORDS = 7, 6, 11


def problem(*, num_rows=ROWS, features=FEATURES, words=WORDS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(num_rows + 100 * words)
    hidden = torch.randn(num_rows, features, generator=generator, dtype=torch.float64).to(dtype)
    head = nn.Linear(features, words, bias=False, dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.randn(words, features, generator=generator, dtype=torch.float64))
    return hidden, head, torch.randint(words, (num_rows,), generator=generator)


def truth(hidden, weight, targets, *, temperature=1.0, softcap=None, logit_scale=1.0):
    logits = hidden @ weight.T * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = log_softmax(logits / temperature, -1)
    return log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def gradients(outputs, inputs):
    total = sum(
        (output * torch.linspace(-1, 2, len(output)).to(output) * (i + 1)).sum() for i, output in enumerate(outputs)
    )
    return torch.autograd.grad(total, inputs)


@pytest.fixture(params=[0, logp.KEPT_BYTES], ids=["logits made twice", "logits kept"])
def _both_ways(request, monkeypatch):
    monkeypatch.setattr(logp, "KEPT_BYTES", request.param)


@settings(max_examples=60, deadline=None)
@given(
    num_rows=st.integers(0, 20),
    words=st.integers(1, 30),
    chunk_size=st.integers(1, 25),
    temperature=st.floats(0.3, 3),
    softcap=st.none() | st.floats(0.5, 20),
    logit_scale=st.sampled_from([1.0, 0.25]),
    kept=st.booleans(),
)
def test_values_and_gradients_do_not_depend_on_the_cut(
    num_rows, words, chunk_size, temperature, softcap, logit_scale, kept
):
    hidden, head, targets = problem(num_rows=num_rows, words=words)
    hidden.requires_grad_()
    transform = {"temperature": temperature, "softcap": softcap, "logit_scale": logit_scale}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logp, "KEPT_BYTES", logp.KEPT_BYTES if kept else 0)
        found = linear_logp(hidden, head, targets, chunk_size=chunk_size, entropy=True, **transform)
        found_gradients = gradients(found, [hidden, head.weight])
    expected = truth(hidden, head.weight, targets, **transform)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found_gradients, gradients(expected, [hidden, head.weight]))


@pytest.mark.usefixtures("_both_ways")
def test_logp_without_entropy_has_the_same_gradient():
    hidden, head, targets = problem()
    hidden.requires_grad_()
    found = linear_logp(hidden, head, targets, chunk_size=3)
    expected, _ = truth(hidden, head.weight, targets)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, head.weight]
    torch.testing.assert_close(gradients([found], inputs), gradients([expected], inputs))


@pytest.mark.usefixtures("_both_ways")
def test_entropy_alone_may_be_differentiated():
    hidden, head, targets = problem()
    hidden.requires_grad_()
    _, found = linear_logp(hidden, head, targets, entropy=True)
    _, expected = truth(hidden, head.weight, targets)
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
    exact_hidden, exact_weight = (t.detach().double().requires_grad_() for t in (hidden, head.weight))
    truth(exact_hidden, exact_weight, targets)[0].sum().backward()
    for found, exact in ((hidden.grad, exact_hidden.grad), (head.weight.grad, exact_weight.grad)):
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


def test_all_logits_never_exist():
    num_rows, features, words, chunk_size = 4096, 8, 512, 64
    hidden, head, targets = problem(num_rows=num_rows, features=features, words=words, dtype=torch.float32)
    hidden.requires_grad_()
    with _LargestTensor() as largest:
        linear_logp(hidden, head, targets, chunk_size=chunk_size, entropy=True)[0].sum().backward()
    assert num_rows * words * 4 > logp.KEPT_BYTES
    assert largest.elements == max(chunk_size * words, num_rows * features)


CUT = {
    "chunks": {
        "num_rows": 17,
        "vocabulary": 128,
        "chunk_size": 5,
        "temperature": 1.0,
        "softcap": None,
        "entropy": False,
    },
    "uneven": {
        "num_rows": 17,
        "vocabulary": 129,
        "chunk_size": 50,
        "temperature": 0.7,
        "softcap": None,
        "entropy": True,
    },
    "capped": {"num_rows": 9, "vocabulary": 129, "chunk_size": 4, "temperature": 1.3, "softcap": 5.0, "entropy": True},
    "no rows": {"num_rows": 1, "vocabulary": 3, "chunk_size": 1, "temperature": 1.0, "softcap": None, "entropy": True},
}


@pytest.mark.parametrize("name", CUT)
def test_cut_vocabulary_equals_the_whole_one(ranks, name):
    for result in ranks("linear_logp_parity", 2, **CUT[name]):
        assert max(result["values"]) < 2e-6
        assert result["hidden"] < 5e-6
        assert result["weight"] < 5e-6
        assert result["weight_placement"] == "(Shard(dim=0),)"


def test_rank_without_a_word_takes_part(ranks):
    case = {"num_rows": 6, "vocabulary": 5, "chunk_size": 4, "temperature": 1.0, "softcap": None, "entropy": True}
    for result in ranks("linear_logp_parity", 4, **case):  # ceil(5 / 4) = 2 words a rank: 2, 2, 1, 0
        assert max(result["values"]) < 2e-6
        assert max(result["hidden"], result["weight"]) < 5e-6


def test_forward_takes_two_collectives_whatever_the_number_of_chunks(ranks):
    for chunk_size in (1, 100):
        case = {**CUT["uneven"], "chunk_size": chunk_size}
        assert [result["collectives"] for result in ranks("linear_logp_parity", 2, **case)] == [2, 2]


def test_cut_vocabulary_in_bf16_has_fp32_statistics(ranks):
    for result in ranks("linear_logp_parity", 2, **{**CUT["uneven"], "dtype": "bfloat16"}):
        assert set(result["dtypes"]) == {"torch.float32"}
        assert max(result["values"]) < 0.02
        assert max(result["hidden"], result["weight"]) < 0.02


@pytest.mark.parametrize("vocabulary", [8, 9])
def test_cut_logits_equal_whole_ones_and_stay_as_they_are(ranks, vocabulary):
    for result in ranks("logits_parity", 2, vocabulary=vocabulary):
        assert max(result["values"]) < 2e-6
        assert result["gradient"] < 5e-6
        assert result["unchanged"]


def test_mesh_of_one_rank_is_the_plain_result(ranks):
    assert ranks("one_rank_meshes", 1) == [[True, True, True]]


def test_weight_that_fsdp_has_not_gathered_is_refused(ranks):
    for message in ranks("weight_on_another_axis", 2):
        assert "a mesh with the axes ('dp',), and its only axis may be 'tp'" in message
        assert "register_fsdp_forward_method" in message


def test_plain_logits_equal_log_softmax():
    logits = torch.randn(3, 4, WORDS, dtype=torch.float64, requires_grad=True)
    target = torch.randint(WORDS, (3, 4))
    found = get_logprobs_from_vocab_parallel_logits(logits, target, temperature=0.8, chunk_size=5)
    expected = log_softmax(logits / 0.8, -1).gather(-1, target[..., None])[..., 0]
    torch.testing.assert_close(found, expected)
    weight = torch.randn_like(found)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), logits),
        torch.autograd.grad((expected * weight).sum(), logits),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_masked_words_have_no_entropy_and_no_gradient():
    logits = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    target = torch.tensor([1])
    found, entropy = get_logprobs_from_vocab_parallel_logits(logits, target, entropy=True)
    torch.testing.assert_close([found, entropy], [torch.tensor([0.5]).log(), torch.tensor([2.0]).log()])
    (found + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]))


def test_numbers_of_the_caller_are_never_changed():
    logits = torch.randn(4, WORDS, requires_grad=True)
    before = logits.detach().clone()
    get_logprobs_from_vocab_parallel_logits(logits, torch.zeros(4, dtype=torch.long), temperature=2.0).sum().backward()
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [-100, WORDS])
def test_target_outside_the_vocabulary_is_refused(bad):
    hidden, head, targets = problem()
    targets[2] = bad
    with pytest.raises(ValueError, match=rf"targets span .* and the vocabulary 0 to {WORDS - 1}: replace padding"):
        linear_logp(hidden, head, targets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(ROWS, 3)}, r"hidden is \[7, 3\], lm_head.weight \[11, 6\] and targets \[7\]"),
        ({"hidden": torch.zeros(1, ROWS, FEATURES)}, r"they must be \[N, H\], \[V, H\] and \[N\]"),
        ({"targets": torch.zeros(3, dtype=torch.long)}, r"targets \[3\]"),
        ({"targets": torch.zeros(ROWS)}, r"targets are torch.float32: they must be token ids"),
        ({"hidden": torch.zeros(ROWS, FEATURES)}, r"hidden is torch.float32 and lm_head.weight is torch.float64"),
        ({"temperature": 0.0}, r"temperature is 0.0"),
        ({"chunk_size": 0}, r"chunk_size is 0"),
        ({"softcap": -1.0}, r"softcap is -1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_with_their_values(change, message):
    hidden, head, targets = problem()
    arguments = {"hidden": hidden, "targets": targets, **change}
    with pytest.raises(ValueError, match=message):
        linear_logp(arguments.pop("hidden"), head, arguments.pop("targets"), **arguments)


def test_bias_is_refused():
    with pytest.raises(PlanError, match="the lm_head has a bias, which linear_logp does not add"):
        linear_logp(torch.zeros(1, 2), nn.Linear(2, 3), torch.zeros(1, dtype=torch.long))

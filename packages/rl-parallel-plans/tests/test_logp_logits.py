"""Log-probabilities from logits that exist, and of the k most probable words, against log_softmax and topk."""

import pytest
import torch
from parallel_plans_cases.logp_problem import ROWS, WORDS, distribution, gradients, problem
from torch.nn.functional import cross_entropy, log_softmax

from rl_parallel_plans import get_logprobs_from_vocab_parallel_logits
from rl_parallel_plans.logp import linear as fused
from rl_parallel_plans.logp import logp_of_token_ids, top_k_logp, top_k_logp_from_logits


@pytest.mark.parametrize("kept_bytes", [0, fused.KEPT_BYTES], ids=["logits made twice", "logits kept"])
@pytest.mark.parametrize("k", [1, 4, WORDS])
def test_top_k_is_topk_of_log_softmax(k, kept_bytes, monkeypatch):
    monkeypatch.setattr(fused, "KEPT_BYTES", kept_bytes)
    hidden, head, _ = problem(bias=True)
    hidden.requires_grad_()
    found = top_k_logp(hidden, head, k, temperature=0.7, softcap=5.0, logit_scale=1.3, chunk_size=3)
    expected = distribution(hidden, head, temperature=0.7, softcap=5.0, logit_scale=1.3).topk(k)
    torch.testing.assert_close(found.logp, expected.values)
    assert torch.equal(found.token_ids, expected.indices)
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(
        gradients([found.logp.flatten()], inputs), gradients([expected.values.flatten()], inputs)
    )


def test_top_k_of_logits_keeps_leading_dims_and_is_differentiable():
    logits = torch.randn(2, 3, WORDS, dtype=torch.float64, requires_grad=True)
    found = top_k_logp_from_logits(logits, 3, temperature=0.7)
    expected = log_softmax(logits / 0.7, -1).topk(3)
    torch.testing.assert_close(found.logp, expected.values)
    assert torch.equal(found.token_ids, expected.indices)
    assert not found.token_ids.requires_grad
    torch.testing.assert_close(
        gradients([found.logp.flatten()], [logits]), gradients([expected.values.flatten()], [logits])
    )


@pytest.mark.parametrize("kept_bytes", [0, fused.KEPT_BYTES], ids=["logits made twice", "logits kept"])
def test_given_words_have_the_log_softmax_of_all(kept_bytes, monkeypatch):
    monkeypatch.setattr(fused, "KEPT_BYTES", kept_bytes)
    hidden, head, _ = problem(bias=True)
    hidden.requires_grad_()
    words = torch.randint(WORDS, (ROWS, 4), generator=torch.Generator().manual_seed(0))
    words[:, 3] = words[:, 0]  # a word asked for twice
    transform = {"temperature": 0.7, "softcap": 5.0, "logit_scale": 1.3}
    found = logp_of_token_ids(hidden, head, words, chunk_size=3, **transform)
    expected = distribution(hidden, head, **transform).gather(-1, words)
    torch.testing.assert_close(found, expected)
    inputs = [hidden, *head.parameters()]
    torch.testing.assert_close(gradients([found.flatten()], inputs), gradients([expected.flatten()], inputs))


@pytest.mark.parametrize(("shape", "words"), [((ROWS,), r"\[7\]"), ((ROWS, 0), r"\[7, 0\]")])
def test_given_words_without_an_axis_of_words_are_refused(shape, words):
    hidden, head, _ = problem()
    with pytest.raises(ValueError, match=rf"token_ids {words}.*K at least 1"):
        logp_of_token_ids(hidden, head, torch.zeros(shape, dtype=torch.int64))


def test_distillation_of_a_teachers_top_k():
    """What the two functions are for: the student's probabilities of the words that the teacher finds likely."""
    hidden, teacher, _ = problem()
    _, student, _ = problem(words=WORDS, num_rows=ROWS + 1)
    with torch.no_grad():
        logp, words = top_k_logp(hidden, teacher, 3)
    found = (logp.exp() * (logp - logp_of_token_ids(hidden, student, words))).sum()
    log_p, log_q = distribution(hidden, teacher), distribution(hidden, student)
    top = log_p.topk(3)
    expected = (top.values.exp() * (top.values - log_q.gather(-1, top.indices))).sum()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*(torch.autograd.grad(loss, student.weight)[0] for loss in (found, expected)))


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


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_of_the_caller_are_never_changed(dtype, temperature):
    """`logits.float()` of fp32 logits is the same memory: a softmax in its place destroys the caller's logits."""
    logits = torch.randn(4, WORDS, dtype=dtype, requires_grad=True)
    before = logits.detach().clone()
    target = torch.zeros(4, dtype=torch.long)
    logp, entropy = get_logprobs_from_vocab_parallel_logits(logits, target, temperature=temperature, entropy=True)
    (logp + entropy).sum().backward()
    top_k_logp_from_logits(logits, 2, temperature=temperature).logp.sum().backward()
    assert torch.equal(logits, before)


def test_logits_of_rows_that_ask_for_nothing_have_no_gradient():
    logits = torch.randn(3, 4, WORDS, dtype=torch.float64, requires_grad=True)
    target = torch.randint(WORDS, (3, 4))
    target[1] = -100
    found = get_logprobs_from_vocab_parallel_logits(logits, target, temperature=0.8)
    expected = -cross_entropy(logits.flatten(0, 1) / 0.8, target.flatten(), reduction="none").view(3, 4)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradients([found.flatten()], [logits]), gradients([expected.flatten()], [logits]))


@pytest.mark.parametrize("chunk_size", [3, 100])
def test_bf16_logits_are_never_rounded_again(chunk_size):
    logits = (torch.randn(20, 300) * 8).bfloat16().requires_grad_()
    target = torch.randint(300, (20,))
    found = get_logprobs_from_vocab_parallel_logits(logits, target, chunk_size=chunk_size)
    assert found.dtype == torch.float32
    assert torch.equal(found, log_softmax(logits.float(), -1).gather(-1, target[:, None])[:, 0])


@pytest.mark.parametrize("k", [0, WORDS + 1])
def test_k_outside_the_vocabulary_is_refused(k):
    hidden, head, _ = problem()
    with pytest.raises(ValueError, match=rf"k is {k} and the vocabulary has {WORDS} words"):
        top_k_logp(hidden, head, k)

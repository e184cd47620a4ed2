"""Claims about divergences of K words: what they are at K = V, what the tail does, where they are least; gradients.

Compared with the definitions over a whole vocabulary, in fp64.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.distill import advantage, divergence
from rl_algorithms.distillation.losses import LOG_ZERO

VOCABULARY = 7
WAYS = [(0.0, "jsd"), (1.0, "jsd"), (0.3, "jsd"), (0.3, "mixed")]
TAILS = ["bucket", "ignore", "renormalize"]


def logits(seed, *, rows=5, vocabulary=VOCABULARY, scale=1.5):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64)


def of_k_words(student, teacher, *, k, **way):
    """The divergence of logits from the teacher's k most probable words."""
    top = teacher.log_softmax(-1).topk(k)
    return divergence(student.log_softmax(-1).gather(-1, top.indices), top.values, **way)


def kl(log_a, log_b):
    return (log_a.exp() * (log_a - log_b)).sum(-1)


def whole(student, teacher, *, beta, interpolation):
    """The definition, over the whole vocabulary."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)
    if beta == 0.0:
        return kl(log_p, log_q)
    if beta == 1.0:
        return kl(log_q, log_p)
    if interpolation == "mixed":
        return (1 - beta) * kl(log_p, log_q) + beta * kl(log_q, log_p)
    log_m = (beta * log_p.exp() + (1 - beta) * log_q.exp()).log()
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def gradient(value, student):
    return torch.autograd.grad(value.sum(), student)[0]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
def test_all_words_give_the_divergence_of_the_whole_vocabulary_and_its_gradient(beta, interpolation, tail):
    student, teacher = logits(0).requires_grad_(), logits(1)
    way = {"beta": beta, "interpolation": interpolation}
    found = of_k_words(student, teacher, k=VOCABULARY, tail=tail, **way)
    expected = whole(student, teacher, **way)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(gradient(found, student), gradient(expected, student), rtol=0, atol=1e-13)


@pytest.mark.parametrize("k", [1, 3, VOCABULARY])
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
def test_gradients_are_those_of_finite_differences(beta, interpolation, tail, k):
    teacher, student = logits(1), logits(0).requires_grad_()
    way = {"beta": beta, "interpolation": interpolation, "tail": tail}
    torch.autograd.gradcheck(lambda student: of_k_words(student, teacher, k=k, **way), student)


def lightest_tail(student, teacher):
    """Of each row: the probability of the teacher's least probable word, under either of them."""
    last = teacher.argmin(-1, keepdim=True)
    return torch.minimum(student.softmax(-1).gather(-1, last), teacher.softmax(-1).gather(-1, last))[:, 0]


@given(
    seed=st.integers(0, 10**6),
    scale=st.floats(0.1, 4),
    way=st.sampled_from(WAYS),
    k=st.integers(1, VOCABULARY - 1),
)
def test_with_the_tail_as_one_more_word_it_is_between_0_and_that_of_more_words(seed, scale, way, k):
    """Putting words together never makes two distributions easier to tell apart.

    A tail is what is left of 1, known to a rounding of 1: the lighter it is, the less its logarithm is known.
    """
    student, teacher = logits(seed, scale=scale), logits(seed + 1, scale=scale)
    way = {"beta": way[0], "interpolation": way[1]}
    found, more = (of_k_words(student, teacher, k=words, **way) for words in (k, k + 1))
    known = 1e-12 + 16 * torch.finfo(torch.float64).eps / lightest_tail(student, teacher)
    assert (found >= -known).all()
    assert (found <= more + known).all()
    assert (more <= whole(student, teacher, **way) + known).all()


@given(seed=st.integers(0, 10**6), way=st.sampled_from(WAYS), k=st.integers(2, VOCABULARY))
def test_scaled_to_the_words_it_is_not_negative_either(seed, way, k):
    way = {"beta": way[0], "interpolation": way[1], "tail": "renormalize"}
    assert (of_k_words(logits(seed), logits(seed + 1), k=k, **way) >= -1e-12).all()


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
def test_a_student_that_is_its_teacher_has_nothing_to_learn_unless_the_tail_is_ignored(beta, interpolation, tail):
    student = logits(0).requires_grad_()
    found = of_k_words(student, student.detach(), k=3, beta=beta, interpolation=interpolation, tail=tail)
    torch.testing.assert_close(found, torch.zeros_like(found), rtol=0, atol=1e-13)
    of_kl = beta in {0.0, 1.0} or interpolation == "mixed"
    assert (gradient(found, student).abs().max() > 1e-6) == (tail == "ignore" and of_kl)


def test_without_its_tail_the_reverse_kl_rewards_a_student_that_leaves_the_teachers_words():
    log_p = torch.tensor([0.6, 0.3], dtype=torch.float64).log()
    left = (log_p - 1).requires_grad_()  # each word at 1 / e of what the teacher gives it
    found = divergence(left, log_p, beta=1.0, tail="ignore")
    assert found.item() == pytest.approx(-0.9 / torch.e)
    assert found < divergence(log_p, log_p, beta=1.0, tail="ignore") == 0.0
    assert gradient(found, left).abs().max() < 1e-15
    assert divergence(left, log_p, beta=1.0) > 0.7  # with it, it is far from the teacher


@pytest.mark.parametrize(("end", "reverse"), [(1e-6, False), (1 - 1e-6, True)])
def test_close_to_an_end_jsd_is_the_kl_times_the_distance_to_it(end, reverse):
    student, teacher = logits(0), logits(1)
    distance = min(end, 1 - end)
    found = of_k_words(student, teacher, k=4, beta=end) / distance
    torch.testing.assert_close(found, of_k_words(student, teacher, k=4, beta=float(reverse)), rtol=1e-3, atol=0)


def test_half_way_jsd_is_symmetric():
    teacher, student = logits(1).log_softmax(-1), logits(0).log_softmax(-1)
    there, back = divergence(student, teacher, beta=0.5), divergence(teacher, student, beta=0.5)
    torch.testing.assert_close(there, back)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
@pytest.mark.parametrize("of", ["teacher", "student"])
def test_a_word_that_is_ruled_out_makes_no_nan_and_no_infinity(beta, interpolation, tail, of):
    student, teacher = logits(0), logits(1)
    {"teacher": teacher, "student": student}[of][:, :3] = -torch.inf
    student.requires_grad_()
    top = teacher.log_softmax(-1).topk(VOCABULARY - 1)
    logp = student.log_softmax(-1).gather(-1, top.indices)
    found = divergence(logp, top.values, beta=beta, interpolation=interpolation, tail=tail)
    assert found.isfinite().all()
    of_words = torch.autograd.grad(found.sum(), logp)[0]
    assert of_words.isfinite().all()


def test_the_reverse_kl_counts_a_word_that_the_teacher_rules_out_at_the_named_bound():
    teacher = torch.tensor([0.0, -torch.inf], dtype=torch.float64)
    student = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    expected = 0.5 * student[0] + 0.5 * (student[1] - LOG_ZERO)
    assert divergence(student, teacher, beta=1.0).item() == pytest.approx(expected.item())


@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
@pytest.mark.parametrize(("k", "scale"), [(2, 0.5), (2, 4.0), (VOCABULARY, 0.5), (VOCABULARY, 4.0), (VOCABULARY, 12.0)])
def test_float32_has_the_gradient_of_float64(beta, interpolation, k, scale):
    student, teacher = logits(0, rows=40, scale=scale), logits(1, rows=40, scale=scale)
    way = {"beta": beta, "interpolation": interpolation}
    gradients = []
    for dtype in (torch.float32, torch.float64):
        given = student.to(dtype).requires_grad_()
        gradients.append(gradient(of_k_words(given, teacher.to(dtype), k=k, **way), given).double())
    torch.testing.assert_close(*gradients, rtol=0.01, atol=2e-3)


def test_a_tail_that_is_lighter_than_rounding_counts_as_one_that_is_not():
    """What is left of 1 in float32 is no measure of it: the student's tail of a half costs log 130 000, not more."""
    teacher = torch.tensor([1 - 1e-9]).log()
    student = torch.tensor([0.5]).log().requires_grad_()
    found = divergence(student, teacher, beta=1.0)
    lightest = torch.tensor(64 * torch.finfo(torch.float32).eps)
    assert found.item() == pytest.approx(float(0.5 * student.detach() + 0.5 * (student.detach() - lightest.log())))
    assert gradient(found, student) < 0  # more of the teacher's word


@pytest.mark.parametrize(("beta", "interpolation"), WAYS)
def test_a_student_that_lost_its_tail_in_float32_is_still_told_to_find_it(beta, interpolation):
    """The teacher has a tail of 0.4: the loss falls with the word that the student is sure of."""
    teacher, student = torch.tensor([[0.6]]).log(), torch.tensor([[-1e-7]], requires_grad=True)
    found = divergence(student, teacher, beta=beta, interpolation=interpolation)
    assert found.isfinite().all()
    assert gradient(found, student).item() > 1.0 if beta in {0.0, 1.0} else gradient(found, student).item() > 0.1


def test_the_policy_gradient_of_the_advantage_is_that_of_the_reverse_kl():
    """In expectation, by going through all words: sum_v Q(v) A(v) grad log Q(v) = -grad KL(Q || P)."""
    student, teacher = logits(0).requires_grad_(), logits(1).log_softmax(-1)
    logp = student.log_softmax(-1)
    found = -(logp.detach().exp() * advantage(teacher, logp) * logp).sum(-1)
    expected = whole(student, teacher, beta=1.0, interpolation="jsd")
    torch.testing.assert_close(gradient(found, student), gradient(expected, student))


def test_the_advantage_has_no_gradient_and_is_finite_where_the_teacher_would_never_say_the_word():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    found = advantage(torch.tensor([-0.5, -torch.inf]), logp)
    assert found.tolist() == [0.5, LOG_ZERO + 2.0]
    assert not found.requires_grad

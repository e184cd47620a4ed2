"""How far a student is from its teacher at each token, from K words of the vocabulary.

P is the teacher's distribution over the words that it finds most probable, Q the student's over the same words.

    beta = 0              KL(P || Q)             forward: Q covers all that P may say
    beta = 1              KL(Q || P)             reverse: Q says nothing that P would not
    between, "jsd"        beta KL(P || M) + (1 - beta) KL(Q || M),    M = beta P + (1 - beta) Q
    between, "mixed"      (1 - beta) KL(P || Q) + beta KL(Q || P)

"jsd" is GKD's and TRL's. It goes to 0 at both ends, as beta KL(P || Q) and (1 - beta) KL(Q || P), where its definition
jumps to the KL itself: close to an end it is a small loss. "mixed" is NeMo-RL's, whose `mixed_kl_weight` is 1 - beta.

What becomes of the probability outside of the K words, the tail:

    "bucket"         it is one more word, of P and of Q. Both sum to 1, so the divergence is >= 0, it is 0 only where
                     Q = P on all K, it grows with K, and with K = V it is the divergence of the whole vocabulary.
                     TRL's `loss_add_tail`, which is on there too.
    "ignore"         the K terms alone. Forward: Q learns to have no tail. Reverse: each term is least at Q = P / e,
                     so that a student is rewarded for leaving the teacher's words. No divergence, maybe negative.
    "renormalize"    P and Q are made to sum to 1 over the K words, as in NeMo-RL by default. >= 0, blind to the tail.

NeMo-RL's `zero_outside_topk` has P alone made to sum to 1, log P = -100 outside, and adds to the reverse KL the tail's
sum of Q (log Q + 100), which needs the entropy of the whole vocabulary.

Axes: K words; any before it.
References: GKD (arXiv:2306.13649, eq. 1 and 2), On-Policy Distillation (Thinking Machines, 2025), MOPD
(arXiv:2601.02780).
"""

from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

__all__ = ["LOG_ZERO", "Interpolation", "Tail", "advantage", "divergence"]

Interpolation: TypeAlias = Literal["jsd", "mixed"]
Tail: TypeAlias = Literal["bucket", "ignore", "renormalize"]

LOG_ZERO = -100.0
"""What counts as the log-probability of a word that is ruled out: -inf would make of one such word an infinite loss."""

ROUNDING = 64
"""A tail lighter than so many units in the last place of 1 is what rounding has left of K log-probabilities. It weighs
nothing, and a tail of the other model is compared with one of just that weight: 1 / 130 000 in float32. Its gradient is
that of a logarithm which goes on straight from there: a student that has lost its tail finds it again, if slowly."""


def divergence(
    logp: Float[Tensor, "*axes K"],
    logp_teacher: Float[Tensor, "*axes K"],
    *,
    beta: float,
    interpolation: Interpolation = "jsd",
    tail: Tail = "bucket",
) -> Float[Tensor, "*axes"]:
    """Of each token, in nats; differentiable in `logp`, finite whatever is ruled out.

    Args:
        logp: the student's, of the teacher's K words, normalised over the whole vocabulary.
        logp_teacher: the teacher's, of the same.
        beta: from 0, forward KL, to 1, reverse KL.
        interpolation: what lies between.
        tail: see above.
    """
    student, teacher = _categories(logp, tail), _categories(logp_teacher.detach().to(logp.dtype), tail)
    if beta == 0.0:
        return _kl(teacher, student[0])
    if beta == 1.0:
        return _kl(student, teacher[0])
    if interpolation == "mixed":
        return (1 - beta) * _kl(teacher, student[0]) + beta * _kl(student, teacher[0])
    weights = logp.new_tensor([beta, 1 - beta]).log()
    log_mixture = torch.logaddexp(teacher[0] + weights[0], student[0] + weights[1])
    return beta * _kl(teacher, log_mixture) + (1 - beta) * _kl(student, log_mixture)


def advantage(logp_teacher: Float[Tensor, "*axes"], logp: Float[Tensor, "*axes"]) -> Float[Tensor, "*axes"]:
    """sg(logp_teacher - logp) of the sampled tokens: the advantages with which a policy gradient distils.

    In expectation over the student's own samples the score-function gradient is then that of KL(Q || P) at each state,
    with one word of the teacher's a token instead of K. It is each token's own: nothing is returned to go, nothing is
    compared with a group: `replace(examples, advantage=...)` puts it in the place of GRPO's, of an objective whose
    `advantage.baseline` is "none" and which keeps groups without a signal. It may be added to the advantage of a task.

    Args:
        logp_teacher: of each sampled token, as `teacher.logp(examples)` gives it.
        logp: the policy's, by which it was sampled: `logp_old`, or its own `logp` now.
    """
    return (logp_teacher.clamp(min=LOG_ZERO) - logp.clamp(min=LOG_ZERO)).detach()


def _categories(logp: Tensor, tail: Tail) -> tuple[Tensor, Tensor]:
    """Log-probabilities and probabilities of the words, and of the tail where it counts as one."""
    logp = logp.clamp(min=LOG_ZERO)
    if tail == "renormalize":
        logp = logp.log_softmax(-1)
    mass = logp.exp()
    if tail != "bucket":
        return logp, mass
    rest = 1 - mass.sum(-1, keepdim=True)
    least = ROUNDING * torch.finfo(logp.dtype).eps  # below it the gradient of the logarithm would be one of rounding
    held, change = rest.detach().clamp(min=least), rest - rest.detach()
    log_rest = held.log() + change / held
    counted = torch.where(rest.detach() > least, rest.detach(), 0.0) + change
    return torch.cat([logp, log_rest], -1), torch.cat([mass, counted], -1)


def _kl(categories: tuple[Tensor, Tensor], log_other: Tensor) -> Tensor:
    log_mass, mass = categories
    return (mass * (log_mass - log_other)).sum(-1)

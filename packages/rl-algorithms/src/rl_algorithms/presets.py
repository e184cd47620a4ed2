"""The published policy-gradient algorithms as compositions. Each returns an `Objective`; `grpo` offers them by name.

Learning rates, batch sizes and numbers of steps are a run's own; what papers say of them stands with each.
"""

from rl_algorithms.objective import (
    AdvantageConfig,
    KLConfig,
    Objective,
    OverlongConfig,
    RatioConfig,
    SelectionConfig,
)

__all__ = [
    "cispo",
    "dapo",
    "deepseek_grpo",
    "dr_grpo",
    "gdpo",
    "gspo",
    "leave_one_out_grpo",
    "ppo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "rloo",
]

KEEP = SelectionConfig(groups_without_signal="keep")
SYMMETRIC = RatioConfig(clip_low=0.2, clip_high=0.2)


def deepseek_grpo(*, kl_weight: float = 0.04) -> Objective:
    """GRPO as first published (DeepSeekMath, arXiv:2402.03300 eq. 3-4): group std, k3 in the loss, mean of means.

    The paper takes 64 rollouts of each prompt and one step on each batch.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="group_std"),
        ratio=SYMMETRIC,
        kl=KLConfig(weight=kl_weight, estimator="k3"),
        selection=KEEP,
        aggregation="seq-mean-token-mean",
    )


def leave_one_out_grpo(*, kl_weight: float = 0.0) -> Objective:
    """GRPO whose baseline leaves the row out, and whose std does not; NeMo-RL's default leaves it out of both."""
    return Objective(
        advantage=AdvantageConfig(baseline="leave_one_out", scale="group_std"),
        ratio=SYMMETRIC,
        kl=KLConfig(weight=kl_weight),
        selection=KEEP,
        aggregation="token-mean",
    )


def dr_grpo(*, max_length: int) -> Objective:
    """GRPO done right (arXiv:2503.20783): no std, and every token divided by the same constant; no KL.

    Beside a mean over each answer its gradient is smaller by `max_length` over the length of a typical answer:
    learning rate and gradient clip are others.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="none"),
        ratio=SYMMETRIC,
        selection=KEEP,
        aggregation="seq-mean-token-sum-norm",
        max_length=max_length,
    )


def dapo(
    *,
    max_length: int | None = None,
    overlong_buffer: int = 0,
    max_generation_batches: int = 10,
    mask_truncated: bool = False,
) -> Objective:
    """DAPO (arXiv:2503.14476): clip-higher, token mean, dynamic sampling, soft punishment of length; no KL.

    Args:
        max_length: response tokens at which the whole penalty of 1 is due (20,480 in the paper); None leaves it out.
        overlong_buffer: over so many tokens before it the penalty grows (4,096 in the paper).
        max_generation_batches: of prompts that may be asked until every group has a signal.
        mask_truncated: overlong filtering, which the paper compares with the punishment.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="group_std"),
        ratio=RatioConfig(clip_low=0.2, clip_high=0.28),
        selection=SelectionConfig(
            groups_without_signal="drop",
            max_generation_batches=max_generation_batches,
            mask_truncated=mask_truncated,
        ),
        overlong=OverlongConfig(max_length=max_length, buffer=overlong_buffer),
        aggregation="token-mean",
    )


def gspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Objective:
    """GSPO (arXiv:2507.18071): one ratio for an answer, clipped at a few parts in ten thousand; 4 steps a batch."""
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="group_std"),
        ratio=RatioConfig(level="sequence", clip_low=clip_low, clip_high=clip_high),
        selection=KEEP,
        aggregation="seq-mean-token-mean",
    )


def cispo(*, clip_high: float = 4.0) -> Objective:
    """CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE at a ratio bounded from above, token mean, no KL.

    The paper tunes the bound and does not print it; 4 to 5 is what ScaleRL (arXiv:2510.13786) found robust.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="group_std"),
        ratio=RatioConfig(surrogate="cispo", clip_low=1.0, clip_high=clip_high),
        selection=KEEP,
        aggregation="token-mean",
    )


def rloo(*, kl_weight: float = 0.05) -> Objective:
    """RLOO (arXiv:2402.14740): REINFORCE on the whole answer, the others as baseline, k1 KL in the reward.

    The paper takes one step on each batch, and so needs no ratio. TRL and verl add PPO's clip to it.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="leave_one_out", scale="none"),
        ratio=RatioConfig(surrogate="reinforce"),
        kl=KLConfig(weight=kl_weight, estimator="k1", place="reward"),
        selection=KEEP,
        aggregation="seq-mean-token-sum",
    )


def reinforce_plus_plus(*, kl_weight: float = 1e-3) -> Objective:
    """REINFORCE++ (arXiv:2501.03262): k1 KL in each token's return, whitened over the batch's tokens; needs no groups.

    A[t] = whiten(r - beta sum_{s >= t} k1[s]). NeMo-RL subtracts each token's own KL alone.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="none", scale="none", whiten="tokens"),
        ratio=SYMMETRIC,
        kl=KLConfig(weight=kl_weight, estimator="k1", place="reward"),
        selection=KEEP,
        aggregation="token-mean",
    )


def reinforce_plus_plus_baseline(*, kl_weight: float = 1e-3) -> Objective:
    """REINFORCE++ with the group's mean as baseline, then whitened over the batch's tokens; k2 KL in the loss."""
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="none", whiten="tokens"),
        ratio=SYMMETRIC,
        kl=KLConfig(weight=kl_weight, estimator="k2", place="loss"),
        selection=KEEP,
        aggregation="token-mean",
    )


def gdpo(*, reward_weights: dict[str, float] | None = None) -> Objective:
    """GDPO (arXiv:2601.05242): each named reward compared by itself, added up, whitened over the batch's answers."""
    return Objective(
        advantage=AdvantageConfig(normalize_each_reward=True, reward_weights=reward_weights or {}, whiten="sequences"),
        ratio=SYMMETRIC,
        selection=KEEP,
        aggregation="seq-mean-token-mean",
    )


def ppo(*, kl_weight: float = 0.0) -> Objective:
    """What PPO (arXiv:1707.06347) clips; its advantages are those of a value function: see `rl_algorithms.ppo`."""
    return Objective(
        advantage=AdvantageConfig(baseline="none", scale="none"),
        ratio=SYMMETRIC,
        kl=KLConfig(weight=kl_weight, estimator="k1", place="reward"),
        selection=KEEP,
        aggregation="token-mean",
    )

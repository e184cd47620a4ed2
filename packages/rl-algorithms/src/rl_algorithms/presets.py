"""The published policy-gradient algorithms as compositions. Each returns an `Objective`; `grpo` offers them by name.

Learning rates, batch sizes and numbers of steps are a run's own; what papers say of them stands with each. `preset`
takes one by its name, with its arguments and with other fields of the objective in place of its own; in a recipe that
is `objective: {preset: gspo, clip_high: 5.0e-4, kl: {weight: 0.001}}`.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.objective import (
    AdvantageConfig,
    KLConfig,
    Objective,
    OverlongConfig,
    RatioConfig,
    SelectionConfig,
)
from rl_algorithms.pieces import PieceName, find

__all__ = [
    "best_minus_second",
    "cispo",
    "clip_cov",
    "dapo",
    "deepseek_grpo",
    "deepseek_v32",
    "dppo_tv",
    "dr_grpo",
    "gdpo",
    "gmpo",
    "gpg",
    "gspo",
    "high_entropy",
    "kl_cov",
    "leave_one_out_grpo",
    "luspo",
    "opo",
    "optimal_baseline",
    "pass_at_k",
    "ppo",
    "preset",
    "preset_arguments",
    "preset_names",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "rloo",
    "sapo",
    "vespo",
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


def sapo(*, tau_positive: float = 1.0, tau_negative: float = 1.05) -> Objective:
    """SAPO (arXiv:2511.20347): a soft gate around the ratio instead of a clip, mean over responses of token means."""
    return Objective(
        ratio=RatioConfig(surrogate="sapo", options={"tau_positive": tau_positive, "tau_negative": tau_negative}),
        selection=KEEP,
        aggregation="seq-mean-token-mean",
    )


def gmpo(*, clip_low: float = 0.4, clip_high: float = 0.4) -> Objective:
    """GMPO (arXiv:2507.20673): the geometric mean of a response's clipped ratios; the clip is of their logarithm."""
    return Objective(
        ratio=RatioConfig(surrogate="gmpo", clip_low=clip_low, clip_high=clip_high),
        selection=KEEP,
        aggregation="seq-mean-token-mean",
    )


def vespo(
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Objective:
    """VESPO (arXiv:2602.10693): REINFORCE at a gamma-shaped weight of the response's ratio; TRL's numbers."""
    options = {
        "k_positive": k_positive,
        "lambda_positive": lambda_positive,
        "k_negative": k_negative,
        "lambda_negative": lambda_negative,
    }
    return Objective(ratio=RatioConfig(surrogate="vespo", options=options), selection=KEEP)


def luspo(*, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Objective:
    """LUSPO (arXiv:2602.05261): GSPO whose responses weigh as many times as they have tokens.

    TRL divides by all rows, empty ones included.
    """
    return Objective(
        ratio=RatioConfig(level="sequence", clip_low=clip_low, clip_high=clip_high),
        selection=KEEP,
        aggregation="seq-mean-token-sum",
    )


def gpg() -> Objective:
    """GPG (arXiv:2504.02546): REINFORCE on the group's mean, no std, groups without a signal out of the count.

    The paper scales the loss by alpha, all responses over those of groups with a signal; to leave the others out of the
    batch and its counts is the same. verl's alpha counts responses of reward other than 0 instead.
    """
    return Objective(
        advantage=AdvantageConfig(baseline="group_mean", scale="none"), ratio=RatioConfig(surrogate="reinforce")
    )


def dppo_tv(*, clip_low: float = 0.2, clip_high: float = 0.2, ratio_limit: float = 20.0) -> Objective:
    """DPPO (arXiv:2602.04879): a trust region of probabilities, by binary total variation, instead of ratios."""
    return Objective(
        ratio=RatioConfig(
            surrogate="dppo_tv", clip_low=clip_low, clip_high=clip_high, options={"ratio_limit": ratio_limit}
        ),
        selection=KEEP,
    )


def clip_cov(*, share: float = 2e-4, low: float = 1.0, high: float = 5.0) -> Objective:
    """Clip-Cov (arXiv:2505.22617): a few tokens whose log-probability and advantage covary lose their gradient."""
    selection = SelectionConfig(
        groups_without_signal="keep", tokens="clip_cov", token_options={"share": share, "low": low, "high": high}
    )
    return Objective(ratio=SYMMETRIC, selection=selection)


def kl_cov(*, share: float = 2e-4, kl_weight: float = 1.0) -> Objective:
    """KL-Cov (arXiv:2505.22617): such tokens are held to the sampler instead, and nothing is clipped."""
    return Objective(
        ratio=RatioConfig(surrogate="kl_cov", options={"kl_weight": kl_weight}),
        selection=SelectionConfig(groups_without_signal="keep", tokens="top_cov", token_options={"share": share}),
    )


def high_entropy(*, share: float = 0.2) -> Objective:
    """DAPO on the tokens of highest entropy alone (arXiv:2506.01939); the policy must give entropies."""
    return Objective(
        ratio=RatioConfig(clip_low=0.2, clip_high=0.28),
        selection=SelectionConfig(tokens="high_entropy", token_options={"share": share}),
    )


def opo() -> Objective:
    """OPO (arXiv:2505.23585): exactly on-policy REINFORCE with a length-weighted baseline, token mean, no KL."""
    return Objective(
        advantage=AdvantageConfig(estimator="opo"), ratio=RatioConfig(surrogate="reinforce"), selection=KEEP
    )


def optimal_baseline() -> Objective:
    """REINFORCE with the baseline of least variance at each token; see `advantages.optimal_baseline`."""
    return Objective(
        advantage=AdvantageConfig(estimator="optimal_baseline"),
        ratio=RatioConfig(surrogate="reinforce"),
        selection=KEEP,
        aggregation="seq-mean-token-sum",
    )


def pass_at_k(*, k: int = 4) -> Objective:
    """Pass@k training (arXiv:2508.10751): a response is worth what it adds to subsets of k; rewards are 0 or 1."""
    return Objective(
        advantage=AdvantageConfig(estimator="pass_at_k", options={"k": float(k)}),
        ratio=RatioConfig(clip_low=0.2, clip_high=0.28),
        selection=KEEP,
    )


def best_minus_second() -> Objective:
    """Pass@k by the best response alone (arXiv:2503.19595; verl's `grpo_passk`), divided by the group's std."""
    return Objective(advantage=AdvantageConfig(estimator="best_minus_second"), ratio=SYMMETRIC, selection=KEEP)


def remax(*, kl_weight: float = 0.0) -> Objective:
    """ReMax (arXiv:2310.10505): REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    It is sampled beside the others, so that `num_generations_per_prompt: 1`, as in the paper, costs two of them.
    """
    return Objective(
        advantage=AdvantageConfig(estimator="remax"),
        ratio=RatioConfig(surrogate="reinforce"),
        kl=KLConfig(weight=kl_weight, estimator="k1", place="reward"),
        selection=KEEP,
        aggregation="seq-mean-token-sum",
    )


def deepseek_v32(*, off_policy_threshold: float = 0.1, kl_weight: float = 1e-3) -> Objective:
    """GRPO as in DeepSeek-V3.2 (arXiv:2512.02556 sec. 3.1): unbiased k3, and bad responses far off-policy left out.

    The report prints neither number; thresholds from 1e-4 (slime) up are used, and the KL differs by domain.
    """
    return Objective(
        ratio=SYMMETRIC,
        correction=CorrectionConfig(off_policy_threshold=off_policy_threshold),
        kl=KLConfig(weight=kl_weight, estimator="k3_unbiased"),
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


def preset(name: str, /, **settings: Any) -> Objective:
    """The preset of this name with some of its arguments, and fields of the objective in place of its own.

    Args:
        name: of a function above.
        settings: arguments of that function, else fields of `Objective`; a mapping replaces some fields of a section.
            Another surrogate leaves those numbers of the preset's behind that it does not have.

    Raises:
        ValueError: there is no such preset, argument or field, or the fields do not go together.

    >>> objective = preset("gspo", clip_high=5e-4, kl={"weight": 0.01})
    >>> objective.ratio.clip_high, objective.kl.weight, objective.aggregation
    (0.0005, 0.01, 'seq-mean-token-mean')
    """
    arguments = preset_arguments(name)
    known = [*arguments, *(each.name for each in fields(Objective))]
    for key in settings:
        if key not in known:
            raise ValueError(
                f"preset {name!r}: there is no {key!r}{_nearest(key, known)}; there are {', '.join(known)}"
            )
    given = {key: value for key, value in settings.items() if key in arguments}
    if missing := [
        key for key, default in arguments.items() if default is inspect.Parameter.empty and key not in given
    ]:
        raise ValueError(f"preset {name!r} needs {', '.join(missing)}")
    rest = {key: value for key, value in settings.items() if key not in arguments}
    ratio = rest.get("ratio")
    surrogate = ratio.get("surrogate") if isinstance(ratio, Mapping) else None
    changed: Objective = _with(with_surrogate(_PRESETS[name](**given), surrogate), rest)
    return changed


def with_surrogate(made: Objective, surrogate: PieceName | None) -> Objective:
    """`made` with another surrogate, if there is one; numbers that this one does not have go back to their defaults."""
    if surrogate is None:
        return made
    piece = find("surrogate", surrogate)
    kept = {name: getattr(made.ratio, name) for name in ("clip_low", "clip_high", "dual_clip") if name in piece.numbers}
    options = {name: value for name, value in made.ratio.options.items() if name in piece.options}
    level = made.ratio.level if "ratio" in piece.inputs else "token"
    ratio = RatioConfig(surrogate=surrogate, options=options, level=level, proximal=made.ratio.proximal, **kept)
    return replace(made, ratio=ratio)


def preset_arguments(name: str) -> dict[str, Any]:
    """The arguments of a preset with their defaults; `inspect.Parameter.empty` for one that must be given.

    Raises:
        ValueError: there is no such preset.
    """
    if name not in _PRESETS:
        raise ValueError(f"there is no preset {name!r}{_nearest(name, _PRESETS)}; there are {', '.join(_PRESETS)}")
    return {key: each.default for key, each in inspect.signature(_PRESETS[name]).parameters.items()}


def preset_names() -> list[str]:
    """All of them, sorted."""
    return [*_PRESETS]


_PRESETS: dict[str, Callable[..., Objective]] = {
    name: globals()[name] for name in __all__ if not name.startswith("preset")
}


def _with(config: Any, settings: Mapping[str, Any]) -> Any:
    """`config` with all these fields replaced at once: one alone might not go together with the others."""
    known = [each.name for each in fields(config)]
    values = {}
    for key, value in settings.items():
        if key not in known:
            raise ValueError(f"there is no {key!r}{_nearest(key, known)}; there are {', '.join(known)}")
        inner = getattr(config, key)
        values[key] = _with(inner, value) if is_dataclass(inner) and isinstance(value, Mapping) else value
    return replace(config, **values) if values else config


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""

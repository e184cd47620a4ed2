"""What a policy-gradient loss is composed of, as configuration. Computes nothing: `policy_gradient` does.

    advantage x ratio and surrogate x correction  +  KL  -  entropy,     aggregated

Each part is a dataclass that refuses what means nothing; `Objective` refuses what does not go together, and
`explain()` prints the formula that is left. `presets` has the published compositions by name.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from rl_algorithms.advantages import Baseline, Scale
from rl_algorithms.choices import check_fields
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.kl import KLEstimator

__all__ = [
    "AdvantageConfig",
    "Aggregation",
    "KLConfig",
    "Objective",
    "OverlongConfig",
    "RatioConfig",
    "RatioLevel",
    "SelectionConfig",
]

Aggregation: TypeAlias = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

RatioLevel: TypeAlias = Literal["token", "sequence"]

STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig:
    """What a reward is compared with."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    baseline: Baseline = "group_mean"
    """What is subtracted: the mean of the group, the mean of the others of the group, or nothing."""

    scale: Scale = "group_std"
    """`group_std` divides by the std of the group's rewards: groups almost all right or wrong then count more."""

    whiten: Literal["none", "tokens", "sequences"] = "none"
    """Bring the whole batch to mean 0 and variance 1, every token or every answer counting the same."""

    normalize_each_reward: bool = False
    """Compare each named reward by itself and add up what comes out (GDPO), instead of adding up the rewards. What is
    no named reward, the penalty of length and a KL in the reward, is compared with its group's mean, and not scaled."""

    reward_weights: dict[str, float] = field(default_factory=dict)
    """Weights of the named rewards where each is normalised by itself; 1 for those not named."""

    epsilon: float = 1e-6
    """Added to the std of a group. It matters where rewards differ by as little; 0 is allowed."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"epsilon": 0})
        if self.baseline == "none" and self.scale != "none":
            raise ValueError(
                f"scale={self.scale!r} divides what a reward is more than its group's mean, and baseline='none' takes "
                f"no mean: equal rewards would be divided by a std of 0; set scale='none', or a baseline"
            )
        if self.baseline == "none" and self.whiten == "sequences":
            raise ValueError(
                "whiten='sequences' is of one number for each answer, and baseline='none' gives each of its tokens "
                "what is rewarded from it on; set whiten='tokens', or a baseline"
            )
        if self.reward_weights and not self.normalize_each_reward:
            raise ValueError(
                f"reward_weights={self.reward_weights} are of rewards that are normalised one by one, and "
                f"normalize_each_reward is false; set it to true, or weigh the rewards in the environment"
            )
        if self.normalize_each_reward and (self.baseline, self.scale) != ("group_mean", "group_std"):
            raise ValueError(
                f"normalize_each_reward=true is GDPO, which takes baseline='group_mean' and scale='group_std'; got "
                f"baseline={self.baseline!r}, scale={self.scale!r}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioConfig:
    """The importance ratio, around which policy, and what the loss makes of it."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    """`clip`: PPO's. `cispo`: REINFORCE at the clipped ratio, so that no token loses its gradient. `reinforce`: without
    a ratio, right only while the policy is the one that sampled."""

    level: RatioLevel = "token"
    """`sequence`: one ratio for an answer, the geometric mean over its tokens (GSPO); its clip is far narrower, and the
    `k3_unbiased` KL is weighed by it too."""

    proximal: Literal["sampler", "recomputed", "current"] = "sampler"
    """The policy that the ratio is taken to. `sampler`: as the engine reported it, no further forward.
    `recomputed`: by the trainer, when a batch of rollouts is begun; needed where the engine computes differently and
    that is corrected. `current`: the policy itself, so that the ratio is 1 and only its gradient counts (NeMo-RL's
    `force_on_policy_ratio`); for one step on each batch."""

    clip_low: float = 0.2
    """A token whose ratio is below `1 - clip_low` is no longer pushed down; 1 leaves out the lower bound."""

    clip_high: float = 0.28
    """A token whose ratio is above `1 + clip_high` is no longer pushed up."""

    dual_clip: float | None = None
    """The ratio beyond which a token of negative advantage is not pushed down harder; 3 is usual; null is no bound."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0.0 < self.clip_low <= 1.0:
            raise ValueError(
                f"clip_low={self.clip_low} must be between 0 and 1 (included): the ratio is held above 1 - clip_low"
            )
        if not self.clip_high > 0.0:
            raise ValueError(f"clip_high={self.clip_high} must be > 0: the ratio is held below 1 + clip_high")
        if self.dual_clip is not None and self.surrogate != "clip":
            raise ValueError(f"dual_clip={self.dual_clip} bounds surrogate='clip', and surrogate={self.surrogate!r}")
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip={self.dual_clip} must be > 1, the ratio of a policy that has not moved")
        if self.surrogate == "reinforce" and self.level == "sequence":
            raise ValueError("level='sequence' is of a ratio, and surrogate='reinforce' has none")


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """How the policy is held to the reference."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    weight: float = 0.0
    """beta; 0 needs no reference."""

    estimator: KLEstimator = "k3"
    """See `rl_algorithms.kl`; in the loss `k2` and `k3_unbiased` have the gradient of the KL, in the reward `k1`."""

    place: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from the reward before anything is compared, without a gradient of its own."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"weight": 0})
        if self.place == "reward" and self.estimator == "k3_unbiased":
            raise ValueError("estimator='k3_unbiased' differs from 'k3' in its gradient alone, and a reward has none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionConfig:
    """Which rollouts are trained on."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    groups_without_signal: Literal["drop", "keep"] = "drop"
    """Groups whose rewards are all equal have no advantage. `drop` leaves them out of the batch and its counts (DAPO);
    `keep` lets them count, so that the step is smaller where they are many."""

    max_generation_batches: int = 1
    """At most so many batches of prompts are asked until `num_prompts` groups have a signal (DAPO's dynamic sampling);
    what is found by then is trained on. 1 never asks again."""

    mask_truncated: bool = False
    """Do not train on answers that the token limit cut off (DAPO's overlong filtering); baselines still count them."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"max_generation_batches": 1})
        if self.max_generation_batches > 1 and self.groups_without_signal == "keep":
            raise ValueError(
                f"max_generation_batches={self.max_generation_batches} replaces groups without a signal, and "
                f"groups_without_signal='keep' wants them; set it to 'drop', or ask once"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongConfig:
    """DAPO's soft punishment of answers that come near the limit; it does not say which groups have a signal."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    max_length: int | None = None
    """Response tokens at which the whole penalty is due; null is no penalty."""

    buffer: int = 0
    """Response tokens before `max_length` over which it grows."""

    penalty: float = 1.0
    """What is taken from the reward at `max_length`."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"penalty": 0})
        if self.max_length is not None and not 0 < self.buffer <= self.max_length:
            raise ValueError(f"buffer={self.buffer} must be from 1 to max_length={self.max_length}")
        if self.max_length is None and self.buffer:
            raise ValueError(f"buffer={self.buffer} ends at max_length, which is null; set it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A policy-gradient loss, whole. The defaults are GRPO with DAPO's clip-higher, token mean and dropped groups."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """What a reward is compared with."""

    ratio: RatioConfig = field(default_factory=RatioConfig)
    """How far a step may go on the same rollouts."""

    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """What makes up for a sampler that is not the proximal policy."""

    kl: KLConfig = field(default_factory=KLConfig)
    """How the policy is held to the reference."""

    selection: SelectionConfig = field(default_factory=SelectionConfig)
    """Which rollouts are trained on."""

    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    """What long answers lose."""

    aggregation: Aggregation = "token-mean"
    """How tokens and answers are weighed against one another; see `rl_algorithms.losses`."""

    max_length: int | None = None
    """The constant of `seq-mean-token-sum-norm`: the longest answer that the run allows, in tokens."""

    entropy_weight: float = 0.0
    """Bonus on the entropy of the policy's distributions, in nats, as a mean over the step's trainable tokens whatever
    `aggregation` is, so that it means the same with all of them; needs a policy that gives it."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"entropy_weight": 0})
        if (self.max_length is not None) != (self.aggregation == "seq-mean-token-sum-norm"):
            raise ValueError(
                f"max_length={self.max_length} and aggregation={self.aggregation!r}: the constant length belongs to "
                f"'seq-mean-token-sum-norm', which needs it, and to no other"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be >= 1")
        if self.correction.active and self.ratio.proximal == "sampler":
            raise ValueError(
                "correction compares the proximal policy with the sampler, and ratio.proximal='sampler' says that they "
                "are one, so every weight would be 1; set ratio.proximal to 'recomputed', or to 'current' with one "
                "step on each batch"
            )
        if self.advantage.baseline == "none" and self.selection.groups_without_signal == "drop":
            raise ValueError(
                "advantage.baseline='none' learns from every reward, and selection.groups_without_signal='drop' would "
                "throw away those of equal ones; set it to 'keep'"
            )

    def refuse_off_policy(self, steps_per_generation: int) -> None:
        """Refuse several optimizer steps on the same rollouts where nothing looks at how far they lead.

        Raises:
            ValueError: there is no ratio, or one that is always 1.
        """
        blind = {"ratio.proximal": "current"} if self.ratio.proximal == "current" else {}
        blind |= {"ratio.surrogate": "reinforce"} if self.ratio.surrogate == "reinforce" else {}
        if steps_per_generation > 1 and blind:
            named = " and ".join(f"objective.{field}={value!r}" for field, value in blind.items())
            raise ValueError(
                f"steps_per_generation={steps_per_generation} moves the policy away from its rollouts, of which "
                f"{named} takes no notice; take one step, or a clipped ratio to the sampler"
            )

    def explain(self) -> str:
        """The formula that this configuration amounts to, and what is normalised by what. For people."""
        from rl_algorithms.explaining import explain

        return explain(self)

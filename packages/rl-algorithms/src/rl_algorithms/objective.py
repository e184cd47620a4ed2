"""What a policy-gradient loss is composed of, as configuration. Computes nothing: `policy_gradient` does.

    advantage x ratio and surrogate x correction  +  KL  -  entropy,     aggregated

Each part is named: a piece of the registry, a function in a file of yours, or a function (`pieces`). Each section is a
dataclass that refuses what means nothing; `Objective` refuses what does not go together, and `explain()` joins the
formulas of the pieces that run. `presets` has the published compositions by name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_algorithms import advantages, losses  # noqa: F401 - they register their pieces
from rl_algorithms.advantages import Baseline, Scale
from rl_algorithms.choices import check_fields
from rl_algorithms.corrections import CorrectionConfig
from rl_algorithms.pieces import Piece, PieceName, find, named_files

__all__ = [
    "AdvantageConfig",
    "KLConfig",
    "Objective",
    "OverlongConfig",
    "RatioConfig",
    "SelectionConfig",
]

STRICT: dict[str, object] = {"extra": "forbid"}


def _named(key: str, kind: str, named: PieceName) -> Piece:
    """`find`, whose refusal begins with the key that names the piece."""
    try:
        return find(kind, named)
    except ValueError as error:
        raise ValueError(f"{key}={_text(named)}: {error}") from None


def _text(named: PieceName | None) -> str:
    return repr(named) if named is None or isinstance(named, str) else getattr(named, "__name__", repr(named))


def _refuse_without_effect(config: Any, names: tuple[str, ...], *, taken: tuple[str, ...], because: str) -> None:
    """Refuse fields that were set, and that nothing looks at."""
    defaults = {each.name: each.default for each in fields(config)}
    for name in names:
        if name not in taken and (value := getattr(config, name)) != defaults[name]:
            raise ValueError(f"{name}={value} has no effect: {because}; leave it out")


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

    estimator: PieceName | None = None
    """Another advantage, in place of `baseline` and `scale`: `opo`, `optimal_baseline`, `pass_at_k`,
    `best_minus_second`, `remax`, or `file.py:function` of your own; null is what `baseline` and `scale` say."""

    options: dict[str, float] = field(default_factory=dict)
    """Numbers of the `estimator`, such as `k` of `pass_at_k`."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"epsilon": 0})
        if self.estimator is not None:
            _refuse_without_effect(
                self,
                ("baseline", "scale", "normalize_each_reward"),
                taken=(),
                because=f"estimator={_text(self.estimator)} is the whole advantage",
            )
        _ = self.numbers
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

    @property
    def piece(self) -> Piece:
        """What makes advantages of rewards."""
        if self.estimator is not None:
            return _named("estimator", "advantage", self.estimator)
        if self.baseline == "none":
            return find("advantage", "returns")
        return find("advantage", "gdpo" if self.normalize_each_reward else "group")

    @property
    def numbers(self) -> dict[str, Any]:
        """What it is called with beside the rollouts."""
        return self.piece.bound(options=self.options, baseline=self.baseline, scale=self.scale, epsilon=self.epsilon)

    @property
    def compares_group(self) -> bool:
        """Whether a response is compared with others of its group, which then must have some."""
        return "groups" in self.piece.inputs

    @property
    def compares_greedy(self) -> bool:
        """Whether a response is compared with the greedy one to the same prompt, which then must be sampled too."""
        return "greedy_rewards" in self.piece.inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioConfig:
    """The importance ratio, around which policy, and what the loss makes of it."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    surrogate: PieceName = "clip"
    """What each token loses: a name of `rl_algorithms.losses`, or `file.py:function` of your own. `clip` is PPO's.
    `cispo`: REINFORCE at the clipped ratio, so that no token loses its gradient. `reinforce`: without a ratio, right
    only while the policy is the one that sampled. `sapo`, `gmpo`, `vespo`, `dppo_tv`, `kl_cov` are the others."""

    options: dict[str, float] = field(default_factory=dict)
    """Numbers of the `surrogate` beside `clip_low`, `clip_high` and `dual_clip`, such as `tau_negative` of `sapo`."""

    level: PieceName = "token"
    """Of what the ratio is: `token`, `sequence`, or what `file.py:function` of your own says. `sequence`: one ratio for
    an answer, the geometric mean over its tokens (GSPO); its clip is far narrower, and the `k3_unbiased` KL is weighed
    by it too."""

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
        piece = self.piece
        if self.dual_clip is not None and "dual_clip" not in piece.numbers:
            raise ValueError(
                f"dual_clip={self.dual_clip} bounds surrogate='clip', and surrogate={_text(self.surrogate)} has no "
                f"such bound; leave it out"
            )
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip={self.dual_clip} must be > 1, the ratio of a policy that has not moved")
        _refuse_without_effect(
            self,
            ("clip_low", "clip_high"),
            taken=piece.numbers,
            because=f"surrogate={_text(self.surrogate)} has no such bound",
        )
        _ = self.level_piece
        if self.level != "token" and "ratio" not in piece.inputs:
            raise ValueError(
                f"level={_text(self.level)} is of a ratio, and surrogate={_text(self.surrogate)} has none, or makes "
                f"its own of the log-probabilities; set level='token'"
            )
        _ = self.numbers

    @property
    def piece(self) -> Piece:
        """The surrogate."""
        return _named("surrogate", "surrogate", self.surrogate)

    @property
    def numbers(self) -> dict[str, Any]:
        """What the surrogate is called with beside tensors."""
        own = {"clip_low": self.clip_low, "clip_high": self.clip_high, "dual_clip": self.dual_clip}
        return self.piece.bound(options=self.options, **own)

    @property
    def level_piece(self) -> Piece:
        """What makes the ratio."""
        return _named("level", "ratio", self.level)

    @property
    def looks_at_ratio(self) -> bool:
        """Whether the surrogate sees how far the policy is from the one that the ratio is taken to."""
        return bool({"ratio", "log_ratio", "logp_proximal", "logp_old"} & {*self.piece.inputs})


@dataclass(frozen=True, slots=True, kw_only=True)
class KLConfig:
    """How the policy is held to the reference."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    weight: float = 0.0
    """beta; 0 needs no reference."""

    estimator: PieceName = "k3"
    """How the KL of a token is estimated: `k1`, `k2`, `k3`, `k3_unbiased`, see `rl_algorithms.kl`, or by
    `file.py:function` of your own. In the loss `k2` and `k3_unbiased` have the gradient of the KL, in the
    reward `k1`."""

    place: Literal["loss", "reward"] = "loss"
    """`reward`: subtracted from the reward before anything is compared, without a gradient of its own."""

    log_ratio_limit: float | None = None
    """`logp_ref - logp` of a token is held within +- this before it is estimated from, and a token beyond has no
    gradient. NeMo-RL and verl hold it within 20; see `rl_algorithms.kl` for what is bounded without it."""

    limit: float | None = None
    """The estimate of a token is held within +- this, in nats, and a token beyond has no gradient. NeMo-RL and verl
    hold it within 10: a token that the reference rules out then costs no more, and is not learned from."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"weight": 0}, above={"log_ratio_limit": 0, "limit": 0})
        piece = self.piece
        if self.place == "reward" and "ratio" in piece.inputs:
            raise ValueError(
                f"estimator={_text(self.estimator)} differs from 'k3' in its gradient alone, which its ratio makes, "
                f"and a reward has none; set place='loss', or estimator='k3'"
            )

    @property
    def piece(self) -> Piece:
        """What estimates the KL."""
        return _named("estimator", "kl", self.estimator)

    @property
    def formula(self) -> str:
        """The estimate of a token, as text."""
        text = self.piece.explain({})
        return text if self.limit is None else f"clip({text}, {-self.limit:g}, {self.limit:g})"

    def estimate(self, available: Mapping[str, Any]) -> Float[Tensor, "B T"]:
        """The estimate of each token in nats, within the limits.

        Args:
            available: the tensors that a piece of kind "kl" may ask for, `rl_algorithms.pieces.KINDS`.
        """
        if self.log_ratio_limit is not None:
            logp, logp_ref, ratio = available["logp"], available["logp_ref"].detach(), available.get("ratio")
            difference = (logp_ref - logp).detach()
            inside = difference.abs() <= self.log_ratio_limit
            # Within the limit `logp` itself, and not what is left after two subtractions.
            held = logp_ref - difference.clamp(-self.log_ratio_limit, self.log_ratio_limit)
            available = {**available, "logp": torch.where(inside, logp, held)}
            if ratio is not None:
                available["ratio"] = torch.where(inside, ratio, ratio.detach())
        found: Tensor = self.piece(available, {})
        return found if self.limit is None else found.clamp(-self.limit, self.limit)


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

    tokens: PieceName | None = None
    """Which trainable tokens keep their policy gradient; the others keep their place in the counts, and their KL.
    `high_entropy`, `clip_cov`, `top_cov` (with the surrogate `kl_cov`), or `file.py:function`; null is all."""

    token_options: dict[str, float] = field(default_factory=dict)
    """Numbers of `tokens`, such as `share`."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"max_generation_batches": 1})
        if self.token_options and self.tokens is None:
            raise ValueError(f"token_options={self.token_options} are of tokens, which is null; set it")
        _ = self.numbers
        if self.max_generation_batches > 1 and self.groups_without_signal == "keep":
            raise ValueError(
                f"max_generation_batches={self.max_generation_batches} replaces groups without a signal, and "
                f"groups_without_signal='keep' wants them; set it to 'drop', or ask once"
            )

    @property
    def piece(self) -> Piece | None:
        """What selects tokens; None where all are."""
        return None if self.tokens is None else _named("tokens", "tokens", self.tokens)

    @property
    def numbers(self) -> dict[str, Any]:
        """What it is called with beside tensors."""
        return {} if self.piece is None else self.piece.bound(options=self.token_options)


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

    aggregation: PieceName = "token-mean"
    """How tokens and answers are weighed against one another: `token-mean`, `seq-mean-token-mean`,
    `seq-mean-token-sum`, `seq-mean-token-sum-norm`, see `rl_algorithms.losses`, or `file.py:function`."""

    max_length: int | None = None
    """The constant of `seq-mean-token-sum-norm`: the longest answer that the run allows, in tokens."""

    preset: str | None = None
    """In a recipe: the published objective that the other keys change, such as `gspo`; its arguments stand beside it,
    as in `{preset: gspo, clip_high: 5.0e-4}`. In Python it is `presets.preset("gspo", clip_high=5e-4)`."""

    entropy_weight: float = 0.0
    """Bonus on the entropy of the policy's distributions, in nats, as a mean over the step's trainable tokens whatever
    `aggregation` is, so that it means the same with all of them; needs a policy that gives it."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"entropy_weight": 0})
        if self.preset is not None:
            raise ValueError(
                f"preset={self.preset!r} would change no other field here; in Python call "
                f"rl_algorithms.presets.preset({self.preset!r}, ...), which makes the objective"
            )
        if (self.max_length is not None) != ("max_length" in self.aggregation_piece.numbers):
            raise ValueError(
                f"max_length={self.max_length} and aggregation={_text(self.aggregation)}: the constant length belongs "
                f"to 'seq-mean-token-sum-norm', which needs it, and to no other"
            )
        if self.max_length is not None and self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be >= 1")
        if self.correction.active and self.ratio.proximal == "sampler":
            raise ValueError(
                "correction compares the proximal policy with the sampler, and ratio.proximal='sampler' says that they "
                "are one, so every weight would be 1; set ratio.proximal to 'recomputed', or to 'current' with one "
                "step on each batch"
            )
        if self.max_length is not None:
            _ = self.aggregation_piece.bound(options={}, max_length=self.max_length)
        selects = "selected" in self.ratio.piece.inputs
        if selects and (self.selection.piece is None or not self.selection.piece.whole_step):
            raise ValueError(
                f"ratio.surrogate={_text(self.ratio.surrogate)} treats some tokens apart, and selection.tokens="
                f"{_text(self.selection.tokens)} does not say which; set it to 'top_cov'"
            )
        alone = self.advantage.estimator is not None and not self.advantage.compares_group
        if alone and self.selection.groups_without_signal == "drop":
            raise ValueError(
                f"advantage.estimator={_text(self.advantage.estimator)} compares with no group, and "
                f"selection.groups_without_signal='drop' would throw groups away; set it to 'keep'"
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
        blind: dict[str, PieceName] = {"ratio.proximal": "current"} if self.ratio.proximal == "current" else {}
        blind |= {} if self.ratio.looks_at_ratio else {"ratio.surrogate": self.ratio.surrogate}
        if steps_per_generation > 1 and blind:
            named = " and ".join(f"objective.{name}={_text(value)}" for name, value in blind.items())
            raise ValueError(
                f"steps_per_generation={steps_per_generation} moves the policy away from its rollouts, of which "
                f"{named} takes no notice; take one step, or a clipped ratio to the sampler"
            )

    @property
    def aggregation_piece(self) -> Piece:
        """What weighs tokens against one another."""
        return _named("aggregation", "aggregation", self.aggregation)

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss looks at the entropy of the policy's distributions."""
        pieces = [self.ratio.piece, self.selection.piece]
        return self.entropy_weight > 0 or any("entropy" in piece.inputs for piece in pieces if piece is not None)

    def named_code(self) -> dict[str, str]:
        """Functions of the user's own that this objective names as text, by the key that names them."""
        keys: dict[str, PieceName | None] = {
            "advantage.estimator": self.advantage.estimator,
            "ratio.surrogate": self.ratio.surrogate,
            "ratio.level": self.ratio.level,
            "correction.weight": self.correction.weight,
            "kl.estimator": self.kl.estimator,
            "selection.tokens": self.selection.tokens,
            "aggregation": self.aggregation,
        }
        return {key: text for key, named in keys.items() for text in named_files(named)}

    def explain(self) -> str:
        """The formula that this configuration amounts to, and what is normalised by what. For people.

        One line for each part of the loss, in the order in which it is computed; the formulas are those of the pieces.
        """
        parts = {
            "rollouts": _explain_rollouts(self.selection),
            "reward": _explain_reward(self),
            "advantage": _explain_advantage(self),
            "ratio": f"rho = {self.ratio.level_piece.explain({})}" if self._has_ratio else "",
            "per token": f"l = {self.ratio.piece.explain(self.ratio.numbers)}",
            "tokens": _explain_tokens(self.selection, treated_apart="selected" in self.ratio.piece.inputs),
            "correction": _explain_correction(self.correction),
            "loss": _explain_loss(self),
            "counts": _explain_counts(self),
            "note": "; ".join(_notes(self)),
        }
        proximal = {"sampler": "logp_old", "recomputed": "logp_proximal", "current": "sg(logp)"}[self.ratio.proximal]
        width = max(map(len, parts)) + 2
        lines = "\n".join(f"{name:<{width}}{line}" for name, line in parts.items() if line)
        return lines.replace("logp_proximal", proximal)

    @property
    def _has_ratio(self) -> bool:
        return bool({"ratio", "log_ratio"} & {*self.ratio.piece.inputs}) or "ratio" in self.kl.piece.inputs


# -- The lines of `explain` --------------------------------------------------------------------------


def _explain_rollouts(selection: SelectionConfig) -> str:
    kept = (
        "groups with rewards that differ; the others leave the batch and its counts"
        if selection.groups_without_signal == "drop"
        else "all that did not fail, those of groups with equal rewards too"
    )
    times = selection.max_generation_batches
    again = f"; up to {times} batches of prompts are asked to find enough" if times > 1 else ""
    cut = "; answers that were cut off are compared but not trained on" if selection.mask_truncated else ""
    return kept + again + cut


def _explain_reward(objective: Objective) -> str:
    terms = ["R = r"]
    if objective.overlong.max_length is not None:
        end, buffer = objective.overlong.max_length, objective.overlong.buffer
        terms.append(f"{objective.overlong.penalty:g} * clip((tokens - {end - buffer}) / {buffer}, 0, 1)")
    if objective.kl.weight > 0 and objective.kl.place == "reward":
        terms.append(f"{objective.kl.weight:g} * {objective.kl.formula}")
    return " - ".join(terms)


def _explain_advantage(objective: Objective) -> str:
    config = objective.advantage
    line = f"A = {config.piece.explain(config.numbers)}"
    if config.normalize_each_reward:
        if objective.overlong.max_length is not None or (objective.kl.weight > 0 and objective.kl.place == "reward"):
            line += " + (R - r) - mean(R - r of the group)"
        weights = ", ".join(f"{name} {weight:g}" for name, weight in config.reward_weights.items())
        line += f", w = {weights}, else 1" if weights else ", w = 1"
    return line if config.whiten == "none" else f"{line}, then mean 0 and variance 1 over the batch's {config.whiten}"


def _explain_tokens(selection: SelectionConfig, *, treated_apart: bool) -> str:
    if selection.piece is None:
        return ""
    told = f"selected are {selection.piece.explain(selection.numbers)}"
    return told if treated_apart else f"l = 0 unless selected; {told}"


def _explain_correction(config: CorrectionConfig) -> str:
    lines = []
    if config.weight != "none":
        how = "held within" if config.outside == "truncate" else "0 outside"
        lines.append(f"l *= {config.piece.explain({})}, {how} [{config.low:g}, {config.high:g}]")
    if config.geometric_low is not None or config.geometric_high is not None:
        low = 0.0 if config.geometric_low is None else config.geometric_low
        high = float("inf") if config.geometric_high is None else config.geometric_high
        lines.append(f"l = 0 for answers with exp(mean_t logp_proximal - logp_old) outside [{low:g}, {high:g}]")
    if config.sequence_error_threshold is not None:
        threshold = f"{config.sequence_error_threshold:g}"
        lines.append(f"l = 0 for answers with mean_t exp|logp_proximal - logp_old| > {threshold}")
    if config.veto is not None:
        lines.append(f"l = 0 for answers with a token of exp(logp_proximal - logp_old) < {config.veto:g}")
    if config.off_policy_threshold is not None:
        lines.append(f"l = 0 where A < 0 in answers with mean_t(logp_old - logp) > {config.off_policy_threshold:g}")
    return "; ".join(lines)


def _explain_loss(objective: Objective) -> str:
    kl = objective.kl
    inside = "l"
    if kl.weight > 0 and kl.place == "loss":
        inside = f"(l + {kl.weight:g} * {kl.formula})"
    piece = objective.aggregation_piece
    # The formula of an aggregation is of a bare l, which is one word of it.
    text = piece.explain(piece.bound(options={}, max_length=objective.max_length))
    line = "L = " + " ".join(inside if word == "l" else word for word in text.replace(" l)", " l )").split(" "))
    line = line.replace(f"{inside} )", f"{inside})")
    entropy = objective.entropy_weight
    return f"{line} - {entropy:g} * sum_i sum_t H / N_tok" if entropy > 0 else line


def _explain_counts(objective: Objective) -> str:
    counted = [] if objective.aggregation == "token-mean" else ["N_seq answers with a trainable token"]
    if not counted or objective.entropy_weight > 0:
        counted.append("N_tok trainable tokens")
    return f"{' and '.join(counted)} of the whole optimizer step, over all ranks and microbatches"


def _notes(objective: Objective) -> Iterator[str]:
    kl = objective.kl
    if kl.weight > 0 and kl.place == "loss" and kl.estimator == "k1":
        yield ("the expected gradient of k1 in the loss is 0 on-policy: it holds the policy to nothing; take k2 or k3")
    if kl.weight > 0 and kl.log_ratio_limit is not None:
        yield f"in the KL logp_ref - logp is within +-{kl.log_ratio_limit:g}; a token beyond has no gradient"
    if objective.aggregation == "seq-mean-token-sum-norm":
        yield (
            "verl's mode of this name does not divide by N_seq: its loss and gradient are N_seq times larger than here"
        )

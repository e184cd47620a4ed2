"""Held-out accuracy: how often answers to prompts that nothing was trained on are right, and how sure that is.

`estimates` has the mathematics of pass@k, cons@k and of the intervals.

A row that failed (a tool that timed out) says nothing of the policy: it is counted and left out, and its prompt has the
fewer samples. An answer passes when its reward reaches `pass_reward`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, ClassVar, Literal, TypeVar

import torch

from rl_algorithms import sft
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.choices import check_fields
from rl_algorithms.contracts import Engine, Environment, Policy
from rl_algorithms.data.sources import Source
from rl_algorithms.estimates import Estimate, majority_at_k, pass_at_k
from rl_algorithms.rollouts import Rollouts, collect, require_some_judged
from rl_algorithms.stepping import PhaseTimer

__all__ = [
    "Accuracy",
    "EvaluationConfig",
    "Figures",
    "HeldOut",
    "Measured",
    "Outcome",
    "ValidationSet",
    "demonstration_nll",
    "evaluate",
    "judge",
]

SamplingT = TypeVar("SamplingT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Which figures are made of the answers."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    pass_at: tuple[int, ...] = (1,)
    """The k of pass@k: does one of k answers pass? None may be beyond the samples of a prompt."""

    cons_at: tuple[int, ...] = ()
    """The k of cons@k: does the most frequent of k answers pass? Needs a function that says what is voted on."""

    pass_reward: float = 1.0
    """The reward from which on an answer passes. Lower counts the half-right too."""

    confidence: float = 0.95
    """How often, over evaluations, an interval should hold the truth. Higher makes intervals wider."""

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("pass_at", "cons_at"):
            if any(k < 1 for k in getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be of numbers >= 1: k answers are looked at")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence={self.confidence} must be between 0 and 1, and is 0.95 by custom")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """How the answers to held-out prompts did. Everything is a mean over prompts."""

    reward: Estimate
    """The mean reward of an answer: the share of right answers where the reward is 0 or 1."""

    pass_at: Mapping[int, Estimate]
    """By k: how often at least one of k answers passes. At 1: the share of answers that pass."""

    cons_at: Mapping[int, Estimate]
    """By k: how often the most frequent of k answers passes, ties shared; also called maj@k."""

    num_failed: int
    """Rows that are in none of these figures, because judging them failed."""

    rollouts: Rollouts
    """All answers, the failed included; those to one prompt have one number in `groups`."""

    @property
    def mean(self) -> float:
        """Of the reward."""
        return self.reward.mean

    @property
    def standard_error(self) -> float:
        """Of the mean reward, over prompts; NaN for one prompt."""
        return self.reward.standard_error

    def metrics(self) -> dict[str, float]:
        """For the log: `reward`, `pass@k`, `cons@k`, each with its interval as `/low` and `/high`, `failed`."""
        named = {
            "reward": self.reward,
            **{f"pass@{k}": estimate for k, estimate in self.pass_at.items()},
            **{f"cons@{k}": estimate for k, estimate in self.cons_at.items()},
        }
        figures = {name: estimate.mean for name, estimate in named.items()}
        figures |= {f"{name}/low": estimate.low for name, estimate in named.items()}
        figures |= {f"{name}/high": estimate.high for name, estimate in named.items()}
        return {**figures, "failed": self.num_failed / len(self.rollouts.failed)}


DEFAULT = Figures()


def evaluate(
    prompts: Sequence[Prompt],
    *,
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
    samples_per_prompt: int = 1,
    max_turns: int = 1,
    max_length: int | None = None,
    seed: int = 0,
    extract: Callable[[str], str | None] | None = None,
    figures: Figures = DEFAULT,
) -> Accuracy:
    """Sample `samples_per_prompt` answers to each prompt and judge them.

    Args:
        prompts: the held-out ones.
        engine: what samples.
        sampling: its options; greedy answers are all the same, so one a prompt is enough of those.
        environment: what judges.
        chat: between text and tokens.
        samples_per_prompt: more make every prompt's figure surer, and pass@k and cons@k of k up to it possible.
        max_turns: answers that the policy may give in one conversation.
        max_length: tokens that a conversation may have, as for `collect`.
        seed: of the environment's episodes.
        extract: the part of an answer that is voted on, or None for no vote; it sees the last answer of each row.
        figures: which ones.

    Raises:
        ValueError: no prompts, a k beyond `samples_per_prompt`, `cons_at` without `extract`, or every row failed.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on; hold some out of the data, or leave evaluation out")
    if beyond := [k for k in (*figures.pass_at, *figures.cons_at) if k > samples_per_prompt]:
        raise ValueError(
            f"pass_at={figures.pass_at}, cons_at={figures.cons_at} look at up to {max(beyond)} answers to a prompt, "
            f"and samples_per_prompt={samples_per_prompt}; sample more, or ask for less"
        )
    _check_votes(figures, extract)
    rollouts = collect(
        prompts,
        group_size=samples_per_prompt,
        engine=engine,
        sampling=sampling,
        environment=environment,
        chat=chat,
        timer=PhaseTimer(),
        max_turns=max_turns,
        max_length=max_length,
        seed=seed,
    )
    return judge(rollouts, extract=extract, figures=figures)


def judge(
    rollouts: Rollouts, *, extract: Callable[[str], str | None] | None = None, figures: Figures = DEFAULT
) -> Accuracy:
    """The figures of rollouts that are there already.

    A prompt that failures left with fewer than k answers is not in the figures at k; `num_prompts` says how many are.

    Raises:
        ValueError: every row failed, or `cons_at` without `extract`.
    """
    _check_votes(figures, extract)
    prompts = _rows_by_prompt(rollouts)
    rewards = rollouts.rewards.tolist()
    passed = [reward >= figures.pass_reward for reward in rewards]
    votes = [extract(answer) for answer in rollouts.answers] if extract is not None and figures.cons_at else []

    def over_prompts(one: Callable[[list[int], int], float], k: int = 1) -> Estimate:
        enough = [rows for rows in prompts if len(rows) >= k]
        return Estimate.over_prompts(
            [one(rows, k) for rows in enough], num_samples=sum(map(len, enough)), confidence=figures.confidence
        )

    def reward(rows: list[int], _: int) -> float:
        return fmean(rewards[row] for row in rows)

    def passes(rows: list[int], k: int) -> float:
        return pass_at_k(len(rows), num_passed=sum(passed[row] for row in rows), k=k)

    def agrees(rows: list[int], k: int) -> float:
        return majority_at_k([votes[row] for row in rows], passed=[passed[row] for row in rows], k=k)

    return Accuracy(
        reward=over_prompts(reward),
        pass_at={k: over_prompts(passes, k) for k in figures.pass_at},
        cons_at={k: over_prompts(agrees, k) for k in figures.cons_at},
        num_failed=int(rollouts.failed.sum()),
        rollouts=rollouts,
    )


def demonstration_nll(policy: Policy, demonstrations: sft.Lessons) -> float:
    """-logp of a trained token in nats, a mean over tokens times the weights of their rows; nothing is trained."""
    examples = sft.prepare(demonstrations)
    weights = examples.trainable.double() * examples.weight[:, None]
    nll = -torch.where(weights > 0, policy.logp(examples).double(), 0.0)
    return ((nll * weights).sum() / weights.sum()).item()


def _check_votes(figures: Figures, extract: Callable[[str], str | None] | None) -> None:
    if figures.cons_at and extract is None:
        raise ValueError(
            f"cons_at={figures.cons_at} counts votes for answers, and extract is None: give a function from the text "
            f"of an answer to what is voted on, or leave cons_at empty"
        )


def _rows_by_prompt(rollouts: Rollouts) -> list[list[int]]:
    """The rows of each prompt that did not fail; prompts of which all failed are left out."""
    require_some_judged(rollouts)
    rows: dict[int, list[int]] = {}
    for row, (group, failed) in enumerate(zip(rollouts.groups.tolist(), rollouts.failed.tolist(), strict=True)):
        if not failed:
            rows.setdefault(group, []).append(row)
    return list(rows.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationSet:
    """A further set of prompts that the policy is measured on."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    source: str
    """As `data.source`; no function."""

    split: str | None = None
    """As `data.split`."""

    name: str | None = None
    """As `data.name`."""

    revision: str | None = None
    """As `data.revision`."""

    columns: dict[str, str] = field(default_factory=dict)
    """As `data.columns`."""

    samples_per_prompt: int | None = None
    """Sampled responses to each of its prompts; null takes `evaluation.samples_per_prompt`. Small sets, such as AIME
    with 30 prompts, need many."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"samples_per_prompt": 1})

    @property
    def rows(self) -> Source:
        """Where its rows are."""
        return Source(path=self.source, split=self.split, name=self.name, revision=self.revision)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the policy is measured on held-out prompts."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    every: int = 0
    """Optimizer steps between evaluations during training; 0 evaluates before and after training only."""

    max_prompts: int = 1000
    """Number of held-out prompts before and after training, at most."""

    max_prompts_while_training: int = 256
    """Number of held-out prompts during training, at most. `held_out_loss` uses as many demonstrations, the same ones
    before, during and after."""

    samples_per_prompt: int = 1
    """Sampled responses to each held-out prompt. More narrow the interval and allow pass@k."""

    pass_at: tuple[int, ...] = (1,)
    """The values of k for pass@k, the chance that one of k sampled responses passes; at most `samples_per_prompt`."""

    pass_reward: float = 1.0
    """Reward at or above which a response passes."""

    temperature: float | None = None
    """Temperature of sampled responses to held-out prompts; null takes that of training."""

    top_p: float | None = None
    """Their `top_p`; null takes that of training."""

    top_k: int | None = None
    """Their `top_k`; null takes that of training, 0 samples from all tokens."""

    min_p: float | None = None
    """Their `min_p`; null takes that of training."""

    max_new_tokens: int | None = None
    """Length limit of a held-out response in tokens; null takes that of training."""

    greedy: bool = True
    """Whether held-out prompts are decoded greedily too, before and after training."""

    while_training: Literal["greedy", "sampled"] = "greedy"
    """What is measured during training: one greedy response to each prompt, or `samples_per_prompt` sampled ones with
    their pass@k, as is usual for small sets such as AIME."""

    sets: dict[str, ValidationSet] = field(default_factory=dict)
    """Further sets to measure on, by a name of yours: each is read with the templates of `data`, scored as held-out
    prompts are, at the same times, and logged as `validation/NAME/...`."""

    samples: int | None = None
    """Held-out responses, before and after, that are kept for the report. Null keeps 12 where responses are generated
    anyway, and none where nothing else needs an engine."""

    def __post_init__(self) -> None:
        at_least = {"every": 0, "samples": 0, "max_prompts": 1, "max_prompts_while_training": 1}
        check_fields(
            self,
            at_least={**at_least, "samples_per_prompt": 1, "max_new_tokens": 1, "top_k": 0},
            above={"temperature": 0},
        )
        if beyond := [k for k in self.pass_at if not 1 <= k <= self.samples_per_prompt]:
            raise ValueError(
                f"pass_at={list(self.pass_at)} has {beyond[0]}, and each k must be from 1 to samples_per_prompt="
                f"{self.samples_per_prompt}"
            )
        if wrong := [name for name in self.sets if not name.isidentifier()]:
            raise ValueError(f"sets has {wrong[0]!r}: a name is of letters, digits and _, as aime24")

    def due(self, previous_step: int, step: int) -> bool:
        """Whether an evaluation falls between two optimizer steps."""
        return self.every > 0 and previous_step // self.every < step // self.every


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """Sampled and greedy responses to the same held-out prompts, and how they are shown."""

    sampled: Accuracy | None
    """None where responses were decoded greedily only."""

    greedy: Accuracy | None
    """None where responses were sampled only."""

    @property
    def num_failed(self) -> int:
        """Responses that could not be judged."""
        return sum(each.num_failed for each in (self.sampled, self.greedy) if each is not None)

    @property
    def pass_at(self) -> Mapping[int, Estimate]:
        """Of the sampled responses."""
        return {} if self.sampled is None else self.sampled.pass_at

    def metrics(self) -> dict[str, float]:
        """Both figures and the pass@k, for the log; intervals as `/low` and `/high`, where there are any."""
        named = {
            **({} if self.sampled is None else {"held_out_sampled": self.sampled.reward}),
            **({} if self.greedy is None else {"held_out_greedy": self.greedy.reward}),
            **{f"held_out_pass@{k}": estimate for k, estimate in self.pass_at.items() if k > 1},
        }
        figures = {name: estimate.mean for name, estimate in named.items()}
        for name, estimate in named.items():
            if math.isfinite(estimate.low):
                figures |= {f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        return figures

    def metrics_of(self, name: str) -> dict[str, float]:
        """The same figures of a set of that name: `validation/NAME/sampled`, `validation/NAME/pass@4`."""
        return {f"validation/{name}/{key.removeprefix('held_out_')}": value for key, value in self.metrics().items()}

    def describe(self) -> str:
        """Both figures with their standard errors, where there are any, and the pass@k."""
        parts = [] if self.sampled is None else [f"sampled {_with_error(self.sampled.reward)}"]
        parts += [] if self.greedy is None else [f"greedy {_with_error(self.greedy.reward)}"]
        parts += [f"pass@{k} {_with_error(estimate)}" for k, estimate in self.pass_at.items() if k > 1]
        return ", ".join(parts)

    def table(self) -> str:
        """One line for each figure, with its interval."""
        lines = [
            *([] if self.sampled is None else [f"{'sampled reward':<16}{_with_interval(self.sampled.reward)}"]),
            *([] if self.greedy is None else [f"{'greedy reward':<16}{_with_interval(self.greedy.reward)}"]),
            *(f"{f'pass@{k}':<16}{_with_interval(estimate)}" for k, estimate in self.pass_at.items()),
        ]
        if failed := self.num_failed:
            lines.append(f"{failed} responses could not be judged, and are left out of these figures")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was measured on held-out data at one time: rewards of responses, and other figures."""

    answers: HeldOut | None
    """None where nothing scores responses."""

    figures: dict[str, float]
    """What else was measured, as `held_out_loss`."""

    def metrics(self) -> dict[str, float]:
        """Everything, for the log."""
        return {**({} if self.answers is None else self.answers.metrics()), **self.figures}

    def describe(self) -> str:
        """In a line."""
        parts = [] if self.answers is None else [self.answers.describe()]
        parts += [
            f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}" for name, value in self.figures.items()
        ]
        return ", ".join(parts) or "nothing was measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """How a model does on held-out prompts."""

    model: str
    held_out: HeldOut
    num_prompts: int
    samples_per_prompt: int
    num_failed: int

    sets: Mapping[str, HeldOut] = field(default_factory=dict)
    """The same of further sets, by name."""

    def text(self) -> str:
        """For people."""
        greedy = "" if self.held_out.greedy is None else " and 1 greedy"
        each = f"{self.samples_per_prompt} sampled{greedy} response each"
        sizes = f"{self.num_prompts} held-out prompts, {each}; 95 % confidence intervals"
        others = "".join(f"\n{name}\n{each.table()}" for name, each in self.sets.items())
        return f"{self.model}: {sizes}\n{self.held_out.table()}{others}"

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model,
            "prompts": self.num_prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "failed": self.num_failed,
            **self.held_out.metrics(),
            **{key: value for name, each in self.sets.items() for key, value in each.metrics_of(name).items()},
        }


def _with_error(estimate: Estimate) -> str:
    error = estimate.standard_error
    return f"{estimate.mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{estimate.mean:.3f} (one prompt)"


def _with_interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.mean:.3f}  (one prompt: no interval)"
    return f"{estimate.mean:.3f}  [{estimate.low:.3f}, {estimate.high:.3f}]"

"""ROLLOUTS

A row is everything that one episode said: the prompt, then the policy's answers with the environment's observations
between them. Only what the policy chose is `response`; the rest is context.

Axes: B rows, T tokens, K named parts of the reward.

An answer that lost a log-probability or a reward that is NaN would train as if nothing were wrong.

Axes: B rows, T tokens, K named parts of the reward.

Sums and products of a seed and a place collide (seed 0 at step 1 is seed 1 at step 0), and runs with neighbouring seeds
would then see each other's episodes. A hash of all numbers does not.

Tokens in, tokens out: what the engine sampled is what will be trained on, in every turn; text is made only for the
environment, and what it answers is appended as tokens that no loss looks at. A single turn is the case in which the
environment has nothing more to say.

Nothing is kept between calls, so several threads may collect at once, a group or a batch each, where their engine and
environment may be called at once.

Axes: P prompts, G rollouts a prompt, B = P * G rows, T tokens.

A group whose rewards are all equal teaches nothing, and a batch of many such groups is a small one. Judged by the
rewards of the task; penalties of length, which would make every group differ, come later.

A prompt is known by its ticket, its place in the order of the run, and its episodes begin from a seed of that: another
batch has other episodes, steps taken or not, and a run that goes on has those that it would have had.

driver              one or several turns between engine and environment
batches             one batch of a loop that samples and trains in turn, and the seeds of its episodes
dynamic_sampling    more prompts until enough groups have a signal
episode, checks     one conversation as it grows; what engine and environment may not return
"""

import hashlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, SupportsFloat, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rl_algorithms.advantages import has_signal
from rl_algorithms.chat import Chat, Prompt, TextError
from rl_algorithms.contracts import (
    Conversation,
    Engine,
    Environment,
    EnvironmentReturn,
    EpisodeStart,
    Message,
    ResettingEnvironment,
    Rollout,
)
from rl_algorithms.stepping import PhaseTimer

__all__ = [
    "BatchConfig",
    "Episode",
    "Rollouts",
    "Tally",
    "check_return",
    "check_rollout",
    "collect",
    "collect_batch",
    "collect_with_signal",
    "concatenate",
    "describe",
    "episode_seed",
    "lay_out",
    "require_some_judged",
    "ticket_seeds",
]

PADDING = {"versions": -1, "turns": -1}
PER_TOKEN = ("tokens", "response", "logp_old", "versions", "turns", "token_rewards")
PER_ROW = ("lengths", "rewards", "components", "truncated", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollouts:
    """What the engine made and the environment said of it, one row per episode; the rows of a group need no order."""

    tokens: Int[Tensor, "B T"]
    """The prompt, then answers and observations in turn; right-padded with 0."""

    lengths: Int[Tensor, " B"]
    """Tokens of each row that are not padding."""

    response: Bool[Tensor, "B T"]
    """True where the policy chose the token: not in the prompt, nor in observations, nor in padding."""

    logp_old: Float[Tensor, "B T"]
    """The sampler's log-probability of each response token; 0 elsewhere."""

    versions: Int[Tensor, "B T"]
    """The version of the weights that sampled each response token; -1 elsewhere."""

    turns: Int[Tensor, "B T"]
    """Which answer of its row each response token belongs to, from 0; -1 elsewhere."""

    token_rewards: Float64[Tensor, "B T"]
    """The reward of each answer, at its last token; 0 elsewhere."""

    rewards: Float64[Tensor, " B"]
    """The sum over a row's answers; float64, so that large rewards that differ a little still differ."""

    components: Float64[Tensor, "B K"]
    """The named parts of the reward, each summed over a row's answers. K may be 0."""

    component_names: tuple[str, ...] = ()
    """What the K parts are called."""

    groups: Int[Tensor, " B"]
    """Which rows answer the same prompt: those with equal numbers."""

    truncated: Bool[Tensor, " B"]
    """Rows that ended at a limit (of tokens, of turns, of the environment), and might have gone on."""

    failed: Bool[Tensor, " B"]
    """Rows that say nothing of the policy: not trained on, in no baseline. Their reward is 0."""

    answers: tuple[str, ...]
    """The last answer of each row as text, for people to read."""

    failures: tuple[str | None, ...]
    """Why a row failed; None for those that did not."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers for the log, averaged over the conversations that it judged."""

    def __len__(self) -> int:
        """How many rows there are: B."""
        return len(self.lengths)

    def take(self, rows: Tensor) -> "Rollouts":
        """Only `rows`, indices or a mask along B; what is padding in all of them goes. `metrics` stay the whole's."""
        kept = torch.arange(len(self))[rows].tolist()
        width = int(self.lengths[rows].max()) if kept else 0
        tensors = {name: getattr(self, name)[rows] for name in (*PER_ROW, "groups")}
        return Rollouts(
            **tensors,
            **{name: getattr(self, name)[rows][:, :width] for name in PER_TOKEN},
            component_names=self.component_names,
            answers=tuple(self.answers[row] for row in kept),
            failures=tuple(self.failures[row] for row in kept),
            metrics=self.metrics,
        )


def describe(rollouts: Rollouts, *, version: int) -> dict[str, float]:
    """What a batch of rollouts looks like. Failed rows are in `failed` and `sampled_tokens` only.

    Args:
        rollouts: of one batch, on all ranks together.
        version: of the weights that are about to be trained on it; `staleness` counts from there.

    Returns:
        `reward`, `reward_std` (Bessel's; over rows) and `reward/<component>`, in the units of the reward;
        `groups_with_signal`, the share of groups whose rewards differ, found exactly; `response_tokens` and
        `response_tokens_max`, of a row; `turns`, answers a row; `truncated`, a share of rows; `staleness` and
        `staleness_max`, optimizer steps, over response tokens; `failed`, a share of rows; `sampled_tokens` of all rows;
        and the environment's own metrics as `environment/<name>`. Where no row is left, only the last three.
    """
    figures = {
        "failed": rollouts.failed.double().mean().item(),
        "sampled_tokens": float(rollouts.response.sum()),
        **{f"environment/{name}": value for name, value in rollouts.metrics.items()},
    }
    kept = ~rollouts.failed
    if not kept.any():
        return figures
    rewards, groups, truncated = (each[kept] for each in (rollouts.rewards, rollouts.groups, rollouts.truncated))
    response, turns = rollouts.response[kept], rollouts.turns[kept]
    tokens = response.sum(dim=1).double()
    age = (version - rollouts.versions[kept])[response].double()
    with_signal = set(groups[has_signal(rewards, groups)].tolist())
    parts = rollouts.components[kept].mean(dim=0).tolist()
    figures |= {
        "reward": rewards.mean().item(),
        "reward_std": rewards.std(correction=min(1, len(rewards) - 1)).item(),
        **{f"reward/{name}": part for name, part in zip(rollouts.component_names, parts, strict=True)},
        "groups_with_signal": len(with_signal) / len(set(groups.tolist())),
        "response_tokens": tokens.mean().item(),
        "response_tokens_max": tokens.max().item(),
        "turns": (turns.amax(dim=1) + 1).double().mean().item(),
        "truncated": truncated.double().mean().item(),
    }
    if len(age):
        figures |= {"staleness": age.mean().item(), "staleness_max": age.max().item()}
    return figures


def concatenate(parts: Sequence[Rollouts]) -> Rollouts:
    """All rows of all parts, in order; groups of different parts stay different, numbered from 0 by first occurrence.

    `metrics` are weighted by the parts' rows; one that only some parts have is averaged over those.

    Raises:
        ValueError: there are no parts, or they name different components.
    """
    if not parts:
        raise ValueError("there are no rollouts to concatenate")
    names = parts[0].component_names
    for index, part in enumerate(parts):
        if part.component_names != names:
            raise ValueError(
                f"part {index} has the reward components {part.component_names}, and part 0 has {names}; "
                f"rollouts that are trained on together come from environments that name the same ones"
            )
    width = max(part.tokens.shape[1] for part in parts)
    tensors: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in PER_ROW}
    for name in PER_TOKEN:
        tensors[name] = torch.cat([_widen(getattr(part, name), width, PADDING.get(name, 0)) for part in parts])
    return Rollouts(
        **tensors,
        component_names=names,
        groups=_renumber(parts),
        answers=tuple(itertools.chain.from_iterable(part.answers for part in parts)),
        failures=tuple(itertools.chain.from_iterable(part.failures for part in parts)),
        metrics=_average(parts),
    )


def _widen(tensor: Tensor, width: int, padding: int) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, width - tensor.shape[1]), value=padding)


def _renumber(parts: Sequence[Rollouts]) -> Tensor:
    numbers: dict[tuple[int, int], int] = {}
    groups = [
        numbers.setdefault((index, group), len(numbers))
        for index, part in enumerate(parts)
        for group in part.groups.tolist()
    ]
    return torch.tensor(groups, dtype=torch.int64)


def _average(parts: Sequence[Rollouts]) -> dict[str, float]:
    totals: dict[str, tuple[float, int]] = {}
    for part in parts:
        for name, value in part.metrics.items():
            total, rows = totals.get(name, (0.0, 0))
            totals[name] = (total + value * len(part), rows + len(part))
    return {name: total / rows for name, (total, rows) in totals.items() if rows}


ROUNDING = 1e-3
"""How far above 0 a log-probability may be: a log-softmax in low precision gives a little."""


@runtime_checkable
class Asked(Protocol):
    """Whose answer it is. Its names are made for a message alone: a batch has hundreds."""

    @property
    def where(self) -> str: ...

    def __str__(self) -> str: ...


def check_rollout(rollout: Rollout, *, of: Asked) -> None:
    """Refuse an answer without tokens, or whose log-probabilities or versions do not fit its tokens.

    Raises:
        ValueError: it names the rollout, and the token where it is one.
    """
    if not rollout.tokens or len(rollout.logp) != len(rollout.tokens):
        raise ValueError(
            f"{of} has {len(rollout.tokens)} tokens and {len(rollout.logp)} log-probabilities ({of.where}); "
            f"each sampled token needs one, and an answer has at least its stop token"
        )
    wrong = [index for index, logp in enumerate(rollout.logp) if not _is_logp(logp)]
    if wrong:
        logp, token = rollout.logp[wrong[0]], rollout.tokens[wrong[0]]
        raise ValueError(
            f"{of} has a log-probability that {'is above 0' if _finite(logp) else 'is not finite'} ({of.where}): "
            f"{logp!r} of token {wrong[0]} of {len(rollout.tokens)}, which has the id {token}; the engine must give "
            f"the logarithm of the probability with which it sampled each token"
        )
    place = 0
    for span in rollout.versions:
        if span.start != place or span.end <= span.start or span.version < 0:
            break
        place = span.end
    if place != len(rollout.tokens):
        spans = [(span.start, span.end, span.version) for span in rollout.versions]
        raise ValueError(
            f"{of} has the versions (start, end, version) {spans} for its {len(rollout.tokens)} tokens ({of.where}); "
            f"the spans must cover them in order and without gaps, and a version is 0 or more"
        )


def check_return(judged: EnvironmentReturn, *, of: Asked) -> None:
    """Refuse a judgement with a number that is none, or with observations that are no messages.

    One that failed says nothing, and is not looked at further.

    Raises:
        ValueError: it names the rollout.
    """
    if judged.failed is not None:
        if not isinstance(judged.failed, str):
            raise ValueError(f"the environment must say why {of} failed, as text ({of.where}); found {judged.failed!r}")
        return
    for what, value in {
        "reward": judged.reward,
        **{f"rewards[{part!r}]": number for part, number in judged.rewards.items()},
        **{f"metrics[{part!r}]": number for part, number in judged.metrics.items()},
    }.items():
        if not _finite(value):
            raise ValueError(
                f"the environment gave {of} the {what} {value!r}, which is not a finite number ({of.where}); "
                f"where an answer cannot be judged, say why in `failed`"
            )
    said: object = judged.observations
    if not isinstance(said, Sequence) or isinstance(said, str) or not all(map(_is_message, said)):
        raise ValueError(
            f"the environment gave {of} the observations {said!r:.80} ({of.where}); they are a sequence of messages, "
            f"as ({{'role': 'user', 'content': '...'}},)"
        )


class Tally:
    """The environment's numbers over a batch: that all judgements name the same parts, and the means for the log."""

    def __init__(self) -> None:
        self.component_names: tuple[str, ...] | None = None
        self._sums: dict[str, tuple[float, int]] = {}

    def count(self, judged: EnvironmentReturn, *, of: Asked) -> None:
        """Take one judgement in.

        Raises:
            ValueError: it names other parts of the reward than those before it.
        """
        if judged.failed is not None:
            return
        if self.component_names is None:
            self.component_names = tuple(judged.rewards)
        if {*judged.rewards} != {*self.component_names}:
            raise ValueError(
                f"the environment gave {of} ({of.where}) rewards called {sorted(judged.rewards)}, and those before it "
                f"{sorted(self.component_names)}; every judgement names the same parts, with 0 for what does not apply"
            )
        for metric, value in judged.metrics.items():
            total, number = self._sums.get(metric, (0.0, 0))
            self._sums[metric] = (total + float(value), number + 1)

    def means(self) -> Mapping[str, float]:
        """Each metric, averaged over the judgements that gave it."""
        return {metric: total / number for metric, (total, number) in self._sums.items()}


def _is_logp(value: Any) -> bool:
    try:
        return bool(-math.inf < value <= ROUNDING)
    except TypeError:  # None, say
        return False


def _is_message(said: object) -> bool:
    return isinstance(said, Mapping) and isinstance(said.get("role"), str)


def _finite(value: object) -> bool:
    if type(value) is float:  # nearly always; asking for a protocol takes ten times as long
        return math.isfinite(value)
    try:
        return isinstance(value, SupportsFloat) and math.isfinite(float(value))
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a tensor of several elements, 10**400
        return False


@dataclass(slots=True, kw_only=True)
class Episode:
    """A prompt, the answers to it and the observations between them, as they come."""

    prompt: Prompt
    row: int
    """Its place in the batch, for messages and for the order of rows."""
    group: int
    tokens: list[int] = field(init=False)
    logp: list[float] = field(init=False)
    versions: list[int] = field(init=False)
    turns: list[int] = field(init=False)
    """Of each token, which answer it belongs to; -1 for what the policy did not choose."""
    messages: tuple[Message, ...] = field(init=False)
    state: object = field(init=False)
    answer: str = ""
    num_answers: int = 0
    rewards: dict[int, float] = field(default_factory=dict)
    """By the place of the token that earned it."""
    components: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    failed: str | None = None
    unsayable: TextError | None = None
    """The tokenizer's complaint of an observation that has no tokens."""

    def __post_init__(self) -> None:
        self.tokens, self.logp, self.versions, self.turns = [], [], [], []
        self._add(self.prompt.tokens)
        self.messages, self.state = self.prompt.messages, self.prompt.state

    def __str__(self) -> str:
        """Which one it is, for error messages."""
        return f"rollout {self.row}"

    @property
    def where(self) -> str:
        """The data row and the turn, for error messages."""
        return f"{self.prompt.row.where}, answer {self.num_answers + 1}"

    def conversation(self, rollout: Rollout, answer: str) -> Conversation:
        """What the environment is to judge. The columns are its own, so that it cannot change them for others."""
        return Conversation(
            messages=self.messages,
            answer=answer,
            row=dict(self.prompt.row.columns),
            state=self.state,
            turn=self.num_answers,
            truncated=rollout.truncated,
        )

    def answered(self, rollout: Rollout, answer: str) -> None:
        """Take in what the policy said, token by token as it was sampled."""
        self.tokens += rollout.tokens
        self.logp += rollout.logp
        for span in rollout.versions:
            self.versions += [span.version] * (span.end - span.start)
        self.turns += [self.num_answers] * len(rollout.tokens)
        self.messages = (*self.messages, {"role": "assistant", "content": answer})
        self.answer, self.num_answers = answer, self.num_answers + 1
        self.truncated = rollout.truncated

    def rewarded(self, reward: float, components: Mapping[str, float]) -> None:
        """The newest answer earned this, at its last token."""
        self.rewards[len(self.tokens) - 1] = reward
        for name, value in components.items():
            self.components[name] = self.components.get(name, 0.0) + value

    def observed(self, tokens: Sequence[int], observations: Sequence[Message]) -> None:
        """Take in what the environment said."""
        self._add(tokens)
        self.messages = (*self.messages, *observations)

    def end(self, *, truncated: bool = False, failed: str | None = None) -> None:
        """Nothing follows. A failed one earned nothing, whatever its earlier answers did."""
        self.truncated, self.failed = self.truncated or truncated, failed
        if failed is not None:
            self.rewards, self.components = {}, {}

    def _add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        self.logp += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)
        self.turns += [-1] * len(tokens)


def lay_out(
    episodes: Sequence[Episode], *, component_names: Sequence[str] = (), metrics: Mapping[str, float] | None = None
) -> Rollouts:
    """Episodes as rows of tensors, in their order."""
    lengths = torch.tensor([len(episode.tokens) for episode in episodes])
    filled = torch.arange(int(lengths.max())) < lengths[:, None]
    tokens, logp_old = torch.zeros(filled.shape, dtype=torch.int64), torch.zeros(filled.shape)
    versions, turns = torch.full(filled.shape, -1), torch.full(filled.shape, -1)
    # Tokens one after another as arrays become tensors in a seventh of the time that lists take.
    flat = itertools.chain.from_iterable
    tokens[filled] = torch.frombuffer(array("q", flat(each.tokens for each in episodes)), dtype=torch.int64)
    logp_old[filled] = torch.frombuffer(array("f", flat(each.logp for each in episodes)), dtype=torch.float32)
    versions[filled] = torch.frombuffer(array("q", flat(each.versions for each in episodes)), dtype=torch.int64)
    turns[filled] = torch.frombuffer(array("q", flat(each.turns for each in episodes)), dtype=torch.int64)
    token_rewards = torch.zeros(shape, dtype=torch.float64)
    places = [(row, place) for row, episode in enumerate(episodes) for place in episode.rewards]
    earned = [reward for episode in episodes for reward in episode.rewards.values()]
    rows, columns = torch.tensor(places, dtype=torch.int64).reshape(-1, 2).unbind(1)
    token_rewards[rows, columns] = torch.tensor(earned, dtype=torch.float64)
    components = [[episode.components.get(name, 0.0) for name in component_names] for episode in episodes]
    return Rollouts(
        tokens=tokens,
        lengths=lengths,
        response=turns >= 0,
        logp_old=logp_old,
        versions=versions,
        turns=turns,
        token_rewards=token_rewards,
        rewards=torch.tensor([sum(episode.rewards.values()) for episode in episodes], dtype=torch.float64),
        components=torch.tensor(components, dtype=torch.float64).reshape(len(episodes), len(component_names)),
        component_names=tuple(component_names),
        groups=torch.tensor([episode.group for episode in episodes]),
        truncated=torch.tensor([episode.truncated for episode in episodes]),
        failed=torch.tensor([episode.failed is not None for episode in episodes]),
        answers=tuple(episode.answer for episode in episodes),
        failures=tuple(episode.failed for episode in episodes),
        metrics=dict(metrics or {}),
    )


def episode_seed(seed: int, *place: int) -> int:
    """A seed in [0, 2^31) made of the run's `seed` and a place in it, as (batch,) or (batch, prompt).

    The same numbers always give the same seed, in any process; other numbers, or as many in another order, another one
    but for a chance of 2^-31.
    """
    numbers = ",".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(numbers.encode()).digest()[:4], "big") >> 1


SamplingT = TypeVar("SamplingT")


def collect(
    prompts: Sequence[Prompt],
    *,
    group_size: int,
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
    timer: PhaseTimer | None = None,
    max_turns: int = 1,
    max_length: int | None = None,
    seed: int = 0,
    seeds: Sequence[int] | None = None,
) -> Rollouts:
    """Sample `group_size` episodes of each prompt. Row `p * group_size + g` is one of prompt `p`, which is its group.

    In each turn all episodes that are not over are sampled as one batch, and judged as one. An episode ends when the
    environment says so; truncated, when an answer met its token limit (it is judged, and nothing follows), after
    `max_turns` answers, and when its next answer would begin at `max_length` tokens or later; and when it failed, as it
    does where the tokenizer has no tokens for what the environment says to it. Observations that come with an end are
    not appended: no answer follows them.

    A `ResettingEnvironment` says itself how episodes begin; those of one group are given equal seeds: that of their
    prompt in `seeds`, or one made of `seed` and the place of the prompt.

    Each conversation has a dict of the row's columns to itself; the values in it are the row's own, and are only read.

    Raises:
        ValueError: the engine or the environment returned something that cannot be trained on (the message names the
            rollout, the data row and the answer); the environment goes on after one answer and `max_turns` is 1; or
            it began the episodes of a group differently; or there are not as many `seeds` as prompts.
        DataError: the chat template cannot continue a conversation, or no episode's observations have tokens.
    """
    _check_options(prompts, group_size=group_size, max_turns=max_turns)
    seeds = [episode_seed(seed, place) for place in range(len(prompts))] if seeds is None else seeds
    timer = PhaseTimer() if timer is None else timer
    with timer.phase("reward"):
        begun = _begin(prompts, environment, chat, group_size=group_size, seeds=seeds)
    episodes = [Episode(prompt=prompt, row=row, group=row // group_size) for row, prompt in enumerate(begun)]
    _check_room(episodes, max_length)
    tally = Tally()
    live = episodes
    while live:
        with timer.phase("generate"):
            rollouts = engine.generate([tuple(episode.tokens) for episode in live], sampling)
        _check_answers(live, rollouts)
        with timer.phase("reward"):
            going_on = _judge(live, rollouts, environment=environment, chat=chat, tally=tally)
            live = [
                episode
                for episode, observations in going_on
                if _continue(episode, observations, chat, max_turns=max_turns, max_length=max_length)
            ]
    errors = [episode.unsayable for episode in episodes if episode.unsayable is not None]
    if len(errors) == len(episodes):
        raise errors[0]
    return lay_out(episodes, component_names=tally.component_names or (), metrics=tally.means())


def _check_options(prompts: Sequence[Prompt], *, group_size: int, max_turns: int) -> None:
    if not prompts:
        raise ValueError("there are no prompts to collect rollouts for")
    for name, value in {"group_size": group_size, "max_turns": max_turns}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1")


def _begin(
    prompts: Sequence[Prompt], environment: Environment, chat: Chat, *, group_size: int, seeds: Sequence[int]
) -> list[Prompt]:
    """The prompt of each row: as given, or as the environment begins it."""
    if len(seeds) != len(prompts):
        raise ValueError(f"there are {len(seeds)} seeds for {len(prompts)} prompts; each prompt needs one")
    if not isinstance(environment, ResettingEnvironment):
        return [prompt for prompt in prompts for _ in range(group_size)]
    rows = [dict(prompt.row.columns) for prompt in prompts for _ in range(group_size)]
    starts = environment.reset(rows, seeds=[seed for seed in seeds for _ in range(group_size)])
    if len(starts) != len(rows):
        raise ValueError(f"the environment began {len(starts)} episodes for {len(rows)} rows")
    begun: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        group = starts[index * group_size : (index + 1) * group_size]
        _check_start(group, prompt)
        first = chat.start(group[0], row=prompt.row)  # rendered once: the others say the same
        begun += [replace(first, state=start.state) for start in group]
    return begun


def _check_start(group: Sequence[EpisodeStart], prompt: Prompt) -> None:
    for start in group:
        if not start.messages:
            raise ValueError(f"the environment began an episode of {prompt.row.where} without a message")
        if (start.messages, start.tools) != (group[0].messages, group[0].tools):
            raise ValueError(
                f"the environment began two episodes of {prompt.row.where} differently, with equal rows and seeds "
                f"({start.messages!r:.60} and {group[0].messages!r:.60}); a group is compared with itself, so its "
                f"episodes must begin alike: let the start depend on row and seed only"
            )


def _check_room(episodes: Sequence[Episode], max_length: int | None) -> None:
    for episode in episodes:
        if max_length is not None and len(episode.tokens) >= max_length:
            raise ValueError(
                f"the prompt of {episode} has {len(episode.tokens)} tokens ({episode.prompt.row.where}), and "
                f"max_length={max_length} leaves no room for an answer; leave the row out, or raise max_length"
            )


def _check_answers(live: Sequence[Episode], rollouts: Sequence[Rollout]) -> None:
    if len(rollouts) != len(live):
        raise ValueError(f"the engine returned {len(rollouts)} rollouts for {len(live)} prompts")
    for episode, rollout in zip(live, rollouts, strict=True):
        check_rollout(rollout, of=episode)


def _judge(
    live: Sequence[Episode], rollouts: Sequence[Rollout], *, environment: Environment, chat: Chat, tally: Tally
) -> list[tuple[Episode, tuple[Message, ...]]]:
    """Take in what each answer was worth; return those that the environment goes on with, and what it says to them."""
    answers = [chat.text(rollout.tokens) for rollout in rollouts]
    said = list(zip(live, rollouts, answers, strict=True))
    returns = environment.step([episode.conversation(rollout, answer) for episode, rollout, answer in said])
    if len(returns) != len(live):
        raise ValueError(f"the environment judged {len(returns)} conversations of {len(live)}")
    going_on = []
    for (episode, rollout, answer), judged in zip(said, returns, strict=True):
        check_return(judged, of=episode)
        tally.count(judged, of=episode)
        episode.answered(rollout, answer)
        episode.state = judged.state
        if judged.failed is not None:
            episode.end(failed=judged.failed)
            continue
        episode.rewarded(float(judged.reward), judged.rewards)
        if judged.terminated or judged.truncated or rollout.truncated:
            episode.end(truncated=judged.truncated)
        else:
            going_on.append((episode, tuple(judged.observations)))
    return going_on


def _continue(
    episode: Episode, observations: tuple[Message, ...], chat: Chat, *, max_turns: int, max_length: int | None
) -> bool:
    """Append the observations, or end the episode at a limit; whether it goes on."""
    if max_turns == 1:
        raise ValueError(
            f"the environment goes on after the first answer of {episode} ({episode.prompt.row.where}), and "
            f"max_turns=1 allows one; raise max_turns, or let the environment terminate"
        )
    if not observations:
        raise ValueError(
            f"the environment goes on after answer {episode.num_answers} of {episode} ({episode.prompt.row.where}) "
            f"without an observation to answer; let it terminate, or say something"
        )
    if episode.num_answers == max_turns:
        episode.end(truncated=True)
        return False
    before = episode.messages[:-1]
    try:
        tokens = chat.observation(
            before, episode.tokens, observations, tools=episode.prompt.tools, where=episode.prompt.row.where
        )
    except TextError as error:  # of this text alone; what the template cannot do ends the run
        episode.unsayable = error
        episode.end(failed=f"the observations have no tokens: {error}")
        return False
    if max_length is not None and len(episode.tokens) + len(tokens) >= max_length:
        episode.end(truncated=True)
        return False
    episode.observed(tokens, observations)
    return True


def collect_with_signal(ask: Callable[[int], Rollouts], *, num_groups: int, max_batches: int) -> Rollouts:
    """Rollouts of one batch of prompts, and of up to `max_batches` until `num_groups` groups have a signal.

    Args:
        ask: gives the rollouts of the next batch of prompts; it is told how many were asked before.
        num_groups: how many are wanted.
        max_batches: 1 asks once, whatever comes.

    Returns:
        All rollouts but those of groups with a signal beyond `num_groups`. `metrics` say how many batches were asked as
        `generation_batches`, and as `groups_too_many` how many groups were left out.
    """
    parts: list[Rollouts] = []
    for again in range(max_batches):
        parts.append(ask(again))
        rollouts = concatenate(parts) if len(parts) > 1 else parts[0]
        found = _groups_with_signal(rollouts)
        if len(found) >= num_groups:
            break
    if max_batches == 1:
        return rollouts
    surplus = found[num_groups:]
    kept = rollouts.take(~torch.isin(rollouts.groups, torch.tensor(surplus, dtype=torch.int64)))
    counted = {"generation_batches": float(len(parts)), "groups_too_many": float(len(surplus))}
    return replace(kept, metrics={**kept.metrics, **counted})


def _groups_with_signal(rollouts: Rollouts) -> list[int]:
    """Their numbers, in the order in which they were asked."""
    valid = ~rollouts.failed
    groups = rollouts.groups[valid]
    return list(dict.fromkeys(groups[has_signal(rollouts.rewards[valid], groups)].tolist()))


@runtime_checkable
class BatchConfig(Protocol):
    """How rollouts are asked for: what the configurations of all loops that sample have."""

    @property
    def num_prompts(self) -> int:
        """In each batch."""

    @property
    def num_generations_per_prompt(self) -> int:
        """Rollouts of each."""

    @property
    def max_turns(self) -> int:
        """Answers in one conversation at most."""

    @property
    def max_length(self) -> int | None:
        """Tokens that a conversation may have."""


def collect_batch(
    prompts: Iterator[list[Prompt]],
    config: BatchConfig,
    *,
    number: int,
    version: int,
    seed: int,
    max_batches: int = 1,
    **asked: Any,
) -> Rollouts:
    """The rollouts of one batch, all sampled by the weights that are about to be trained on it.

    Args:
        prompts: batches of `num_prompts`.
        config: how they are asked for.
        number: of the batch in the run, from 0.
        version: of the policy's weights, which the engine must hold.
        seed: of the run.
        max_batches: batches of prompts to ask at most, until enough groups have a signal.
        **asked: what else `collect` is given.

    Raises:
        ValueError: all rollouts failed, or other weights sampled a token.
    """
    first = number * config.num_prompts

    def ask(again: int) -> Rollouts:
        batch = next(prompts)
        return collect(
            batch,
            group_size=config.num_generations_per_prompt,
            max_turns=config.max_turns,
            max_length=config.max_length,
            seeds=ticket_seeds(seed, range(first, first + len(batch)), again=again),
            **asked,
        )

    rollouts = collect_with_signal(ask, num_groups=config.num_prompts, max_batches=max_batches)
    require_some_judged(rollouts)
    _require_version(rollouts, version)
    return rollouts


def ticket_seeds(seed: int, tickets: Sequence[int], *, again: int = 0) -> list[int]:
    """The seed of each prompt's episodes, from the run's; `again` counts the batches asked before in its place."""
    return [episode_seed(seed, ticket, again) for ticket in tickets]


def require_some_judged(rollouts: Rollouts) -> Rollouts:
    """The rollouts; refused where none of them says anything of the policy.

    Raises:
        ValueError: all failed, or there are none; it gives the first reason.
    """
    if (~rollouts.failed).any():
        return rollouts
    first = next((reason for reason in rollouts.failures if reason), "no row was sampled")
    raise ValueError(
        f"all {len(rollouts.failed)} rows failed, so that nothing can be said of the policy; the first: {first}. "
        f"Mend the environment (a tool, a sandbox, a deadline)"
    )


def _require_version(rollouts: Rollouts, version: int) -> None:
    versions = rollouts.versions[rollouts.response]
    others = versions[versions != version]
    if len(others):
        raise ValueError(
            f"{len(others)} of {len(versions)} tokens were sampled by version {int(others[0])} of the weights, and "
            f"this loop trains version {version} on them, as if it had sampled them; the engine must hold the policy's "
            f"weights when a batch is begun, and count the same optimizer steps. For older weights there is async_grpo"
        )

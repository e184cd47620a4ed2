"""Rollouts: collect sampled and judged episodes, keep groups with a training signal, lay them out as tensors.

`collect_batch` collects the rollouts of one batch of a loop that samples and trains in turn; `collect` plays the
episodes of some prompts, over one or several turns between engine and environment; `Rollouts` is what both return. A
row of it is everything in one episode: the prompt, then the policy's responses with the environment's observations
between them. Only what the policy chose is `response`; the rest is context.

Tokens in, tokens out: what the engine sampled is what will be trained on, in every turn. Text is made only for the
environment, and its observations are appended as tokens that no loss looks at. Whatever engine and environment return
is checked: a response that lost a log-probability, or a reward that is NaN, would train as if nothing were wrong.

Nothing is kept between calls, so several threads may collect at once, a group or a batch each, if their engine and
environment may be called at once.

Axes: P prompts, G rollouts a prompt, B = P * G rows, T tokens, K named parts of the reward.
"""

import hashlib
import itertools
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, Generic, Protocol, SupportsFloat, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from rl_algorithms.advantages import has_signal
from rl_algorithms.chat import Chat, Prompt, TextError
from rl_algorithms.contracts import (
    Conversation,
    ConversationEnvironment,
    Engine,
    Environment,
    EnvironmentReturn,
    Message,
    RequestEngine,
    ResettingEnvironment,
    Rollout,
    SeededBatchEngine,
    matches,
)
from rl_algorithms.stepping import PhaseTimer

__all__ = [
    "BatchConfig",
    "Rollouts",
    "collect",
    "collect_batch",
    "concatenate",
    "describe",
    "episode_seed",
    "require_some_judged",
    "with_greedy_rewards",
]

SamplingT = TypeVar("SamplingT")

PADDING = {"versions": -1, "turns": -1}
PER_TOKEN = ("tokens", "response", "logp_old", "versions", "turns", "token_rewards")
PER_ROW = ("lengths", "rewards", "components", "truncated", "failed")

ROUNDING = 1e-3
"""How far above 0 a log-probability may be: a log-softmax in low precision gives a little."""


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

    sources: tuple[str, ...] = ()
    """The data row behind each row, such as `rows.jsonl line 7`; empty where it is not known."""

    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's numbers for the log, averaged over the conversations that it judged."""

    greedy_rewards: Float64[Tensor, " B"] | None = None
    """The reward of the greedy response to each row's prompt; None where none was sampled."""

    def __len__(self) -> int:
        """How many rows there are: B."""
        return len(self.lengths)

    def take(self, rows: Tensor) -> "Rollouts":
        """Only `rows`, indices or a mask along B; what is padding in all of them goes. `metrics` stay the whole's."""
        kept = torch.arange(len(self.lengths))[rows].tolist()
        width = int(self.lengths[rows].max()) if kept else 0
        tensors = {name: getattr(self, name)[rows] for name in (*PER_ROW, "groups")}
        return Rollouts(
            **tensors,
            **{name: getattr(self, name)[rows][:, :width] for name in PER_TOKEN},
            component_names=self.component_names,
            answers=tuple(self.answers[row] for row in kept),
            failures=tuple(self.failures[row] for row in kept),
            sources=tuple(self.sources[row] for row in kept) if self.sources else (),
            metrics=self.metrics,
            greedy_rewards=None if self.greedy_rewards is None else self.greedy_rewards[rows],
        )


@runtime_checkable
class BatchConfig(Protocol):
    """How rollouts are sampled: the fields that the configurations of all loops that sample share."""

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
    greedy: Any = None,
    **asked: Any,
) -> Rollouts:
    """Collect the rollouts of one batch, all sampled by the weights that are about to be trained on it.

    A group whose rewards are all equal has no signal, and a batch of many such groups is a small one. Up to
    `max_batches` batches of prompts are sampled until `config.num_prompts` groups have a signal, judged by the rewards
    of the task; penalties of length, which would make every group differ, come later.

    A prompt is known by its ticket, its place in the order of the run, and its episodes begin from a seed of that:
    another batch has other episodes, steps taken or not, and a resumed run has those that it would have had.

    Args:
        prompts: batches of `num_prompts`.
        config: how they are sampled.
        number: of the batch in the run, from 0.
        version: of the policy's weights, which the engine must hold.
        seed: of the run.
        max_batches: batches of prompts to sample at most; 1 samples once, whatever comes.
        greedy: the engine's sampling options at temperature 0; with them one more response to each prompt is sampled,
            whose reward is `greedy_rewards` of the rows of its group. Where it failed, they have no baseline and fail.
        **asked: the other arguments of `collect`.

    Returns:
        All rollouts, without those of groups with a signal beyond `config.num_prompts`. Where `max_batches` is above 1,
        `metrics` has how many batches were sampled as `generation_batches`, and as `groups_too_many` how many groups
        were left out.

    Raises:
        ValueError: all rollouts failed, or other weights sampled a token.
    """
    parts: list[Rollouts] = []
    for again in range(max_batches):
        batch = next(prompts)
        tickets = range(number * config.num_prompts, number * config.num_prompts + len(batch))
        episodes: dict[str, Any] = {
            **asked,
            "max_turns": config.max_turns,
            "max_length": config.max_length,
            "seeds": [episode_seed(seed, ticket, again) for ticket in tickets],
        }
        part = collect(batch, group_size=config.num_generations_per_prompt, **episodes)
        if greedy is not None:
            part = with_greedy_rewards(part, collect(batch, group_size=1, **{**episodes, "sampling": greedy}))
        parts.append(part)
        rollouts = concatenate(parts) if len(parts) > 1 else part
        if max_batches > 1:
            valid = ~rollouts.failed
            groups = rollouts.groups[valid]
            with_signal = groups[has_signal(rollouts.rewards[valid], groups)]
            found = list(dict.fromkeys(with_signal.tolist()))  # in the order in which they were sampled
            if len(found) >= config.num_prompts:
                break
    if max_batches > 1:
        surplus = found[config.num_prompts :]
        kept = rollouts.take(~torch.isin(rollouts.groups, torch.tensor(surplus, dtype=torch.int64)))
        counted = {"generation_batches": float(len(parts)), "groups_too_many": float(len(surplus))}
        rollouts = replace(kept, metrics={**kept.metrics, **counted})

    require_some_judged(rollouts)
    versions = rollouts.versions[rollouts.response]
    others = versions[versions != version]
    if len(others):
        raise ValueError(
            f"{len(others)} of {len(versions)} tokens were sampled by version {int(others[0])} of the weights, and "
            f"this loop trains version {version} on them, as if it had sampled them; the engine must hold the policy's "
            f"weights when a batch is begun, and count the same optimizer steps. For older weights there is async_grpo"
        )
    return rollouts


def with_greedy_rewards(rollouts: Rollouts, greedy: Rollouts) -> Rollouts:
    """`rollouts` with the reward of the greedy response to each row's prompt; row p of `greedy` is that of group p."""
    failures = [
        own if own is not None or reason is None else f"the greedy response to its prompt failed: {reason}"
        for own, reason in zip(rollouts.failures, (greedy.failures[group] for group in rollouts.groups), strict=True)
    ]
    return replace(
        rollouts,
        greedy_rewards=greedy.rewards[rollouts.groups],
        failed=rollouts.failed | greedy.failed[rollouts.groups],
        failures=tuple(failures),
    )


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

    Every episode goes on by itself where it can: with a `RequestEngine` and a `ConversationEnvironment` its next turn
    begins as soon as its own answer has been judged, so that tools and rewards run while others are generated, and a
    slow tool delays one rollout. An engine that only takes batches is asked for all episodes that wait for it, once
    none is being judged; an environment that only takes batches, once none is being generated: all march in step, and
    a `SeededBatchEngine` is then asked for batches too. The rollouts are the same either way.

    An episode ends when the environment terminates it; truncated, when an answer met its token limit (it is judged, and
    nothing follows), after `max_turns` answers, and when its next answer would begin at `max_length` tokens or later;
    and when it failed, as it does where the tokenizer has no tokens for what the environment says to it. Observations
    that come with an end are not appended: no answer follows them.

    A `ResettingEnvironment` says itself how episodes begin; those of one group are given equal seeds: that of their
    prompt in `seeds`, or one made of `seed` and the place of the prompt.

    Each conversation has a dict of the row's columns to itself; the values in it are the row's own, and are only read.

    Raises:
        ValueError: the engine or the environment returned something that cannot be trained on (the message names the
            rollout, the data row and the answer); the environment goes on after one answer and `max_turns` is 1; or
            it began the episodes of a group differently; or there are not as many `seeds` as prompts.
        DataError: the chat template cannot continue a conversation, or no episode's observations have tokens.
    """
    if not prompts:
        raise ValueError("there are no prompts to collect rollouts for")
    for name, value in {"group_size": group_size, "max_turns": max_turns}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    seeds = [episode_seed(seed, place) for place in range(len(prompts))] if seeds is None else seeds
    if len(seeds) != len(prompts):
        raise ValueError(f"there are {len(seeds)} seeds for {len(prompts)} prompts; each prompt needs one")
    timer = PhaseTimer() if timer is None else timer

    # Each row begins with its prompt, or as the environment says.
    begun = [prompt for prompt in prompts for _ in range(group_size)]
    if matches(environment, ResettingEnvironment):
        with timer.phase("reward"):
            begun = _reset(environment, prompts, chat, group_size=group_size, seeds=seeds)
    episodes = [
        Episode(
            prompt=prompt,
            row=row,
            group=row // group_size,
            tokens=[*prompt.tokens],
            logp=[0.0] * len(prompt.tokens),
            versions=[-1] * len(prompt.tokens),
            turns=[-1] * len(prompt.tokens),
            messages=prompt.messages,
            state=prompt.state,
        )
        for row, prompt in enumerate(begun)
    ]
    for episode in episodes:
        if max_length is not None and len(episode.tokens) >= max_length:
            raise ValueError(
                f"the prompt of {episode} has {len(episode.tokens)} tokens ({episode.prompt.row.where}), and "
                f"max_length={max_length} leaves no room for an answer; leave the row out, or raise max_length"
            )

    driver = _Driver(engine, sampling, environment, chat=chat, timer=timer, max_turns=max_turns, max_length=max_length)
    for episode, seed_of_group in zip(episodes, (each for each in seeds for _ in range(group_size)), strict=True):
        episode.seed = episode_seed(seed_of_group, episode.row % group_size)
    driver.play(episodes)
    first = next((episode.judged[0] for episode in episodes if episode.judged), None)
    for episode in episodes:
        if first is not None:
            episode.check_components(first)

    errors = [episode.unsayable for episode in episodes if episode.unsayable is not None]
    if len(errors) == len(episodes):
        raise errors[0]
    judged = [each for episode in episodes for each in episode.judged]
    figures: dict[str, list[float]] = {}
    for each in judged:
        for metric, figure in each.metrics.items():
            figures.setdefault(metric, []).append(float(figure))
    metrics = {metric: math.fsum(values) / len(values) for metric, values in figures.items()}
    return _lay_out(episodes, component_names=tuple(judged[0].rewards) if judged else (), metrics=metrics)


def _reset(
    environment: ResettingEnvironment, prompts: Sequence[Prompt], chat: Chat, *, group_size: int, seeds: Sequence[int]
) -> list[Prompt]:
    """The prompt of each row, as the environment begins it. Rows of one group have equal seeds."""
    rows = [dict(prompt.row.columns) for prompt in prompts for _ in range(group_size)]
    starts = environment.reset(rows, seeds=[seed for seed in seeds for _ in range(group_size)])
    if len(starts) != len(rows):
        raise ValueError(f"the environment began {len(starts)} episodes for {len(rows)} rows")
    begun: list[Prompt] = []
    for index, prompt in enumerate(prompts):
        group = starts[index * group_size : (index + 1) * group_size]
        for start in group:
            if not start.messages:
                raise ValueError(f"the environment began an episode of {prompt.row.where} without a message")
            if (start.messages, start.tools) != (group[0].messages, group[0].tools):
                raise ValueError(
                    f"the environment began two episodes of {prompt.row.where} differently, with equal rows and seeds "
                    f"({start.messages!r:.60} and {group[0].messages!r:.60}); a group is compared with itself, so its "
                    f"episodes must begin alike: let the start depend on row and seed only"
                )
        first = chat.start(group[0], row=prompt.row)  # rendered once: the others say the same
        begun += [replace(first, state=start.state) for start in group]
    return begun


@dataclass(slots=True, kw_only=True)
class Episode:
    """A prompt, the answers to it and the observations between them, as they come."""

    prompt: Prompt
    row: int
    """Its place in the batch, for messages and for the order of rows."""
    group: int
    tokens: list[int]
    logp: list[float]
    versions: list[int]
    turns: list[int]
    """Of each token, which answer it belongs to; -1 for what the policy did not choose."""
    messages: tuple[Message, ...]
    state: object
    seed: int = 0
    """What the seeds of its requests are made of."""
    answer: str = ""
    num_answers: int = 0
    judged: list[EnvironmentReturn] = field(default_factory=list)
    """What the environment said of its answers, those that failed excepted."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By the place of the token that earned it."""
    components: dict[str, float] = field(default_factory=dict)
    truncated: bool = False
    failed: str | None = None
    unsayable: TextError | None = None
    """The tokenizer's complaint of an observation that has no tokens."""

    def __str__(self) -> str:
        """Which one it is, for error messages."""
        return f"rollout {self.row}"

    @property
    def where(self) -> str:
        """The data row and the turn, for error messages."""
        return f"{self.prompt.row.where}, answer {self.num_answers + 1}"

    def answered(self, rollout: Rollout, answer: str, judged: EnvironmentReturn) -> bool:
        """Append what the policy sampled, and what it was worth; return whether the environment goes on."""
        self.tokens += rollout.tokens
        self.logp += rollout.logp
        for span in rollout.versions:
            self.versions += [span.version] * (span.end - span.start)
        self.turns += [self.num_answers] * len(rollout.tokens)
        self.messages = (*self.messages, {"role": "assistant", "content": answer})
        self.answer, self.num_answers = answer, self.num_answers + 1
        self.truncated, self.state = rollout.truncated, judged.state
        if judged.failed is not None:
            self.fail(judged.failed)
            return False
        self.judged.append(judged)
        self.rewards[len(self.tokens) - 1] = float(judged.reward)
        for name, value in judged.rewards.items():
            self.components[name] = self.components.get(name, 0.0) + value
        if judged.terminated or judged.truncated or rollout.truncated:
            self.truncated = rollout.truncated or judged.truncated
            return False
        return True

    def check_components(self, first: EnvironmentReturn) -> None:
        """Refuse parts of the reward that differ from those of `first`, the first judged answer of all."""
        for number, judged in enumerate(self.judged, start=1):
            if judged.rewards.keys() != first.rewards.keys():
                raise ValueError(
                    f"the environment gave {self} ({self.prompt.row.where}, answer {number}) rewards called "
                    f"{sorted(judged.rewards)}, and those before it {sorted(first.rewards)}; every judgement names the "
                    f"same parts, with 0 for what does not apply"
                )

    def fail(self, reason: str) -> None:
        """End the episode without a reward, whatever its earlier answers earned."""
        self.failed, self.rewards, self.components = reason, {}, {}


class _Driver(Generic[SamplingT]):
    """Plays episodes: whatever happens to one is handled in the caller's thread, one event at a time.

    Engine and environment complete futures in threads of their own; these only put the event into a queue.
    """

    def __init__(
        self,
        engine: Engine[SamplingT],
        sampling: SamplingT,
        environment: Environment,
        *,
        chat: Chat,
        timer: PhaseTimer,
        max_turns: int,
        max_length: int | None,
    ) -> None:
        self._engine, self._sampling, self._environment, self._chat = engine, sampling, environment, chat
        self._timer, self._max_turns, self._max_length = timer, max_turns, max_length
        self._takes_conversations = matches(environment, ConversationEnvironment)
        # Answers that are judged as a batch are all waited for anyway: a future for each would only cost time.
        waits_for_all = not self._takes_conversations and matches(engine, SeededBatchEngine)
        self._takes_requests = matches(engine, RequestEngine) and not waits_for_all
        self._events: SimpleQueue[tuple[Future[Any], Callable[[Any], None]]] = SimpleQueue()
        """Futures that are done, each with what handles its result."""
        self._under_way: set[Future[Any]] = set()
        self._num_generating = 0
        self._unasked: list[Episode] = []
        """Episodes that wait until the engine can be asked for a batch."""
        self._unjudged: list[tuple[Episode, Rollout, Conversation]] = []
        """Answers that wait until the environment can be asked for a batch."""

    def play(self, episodes: Sequence[Episode]) -> None:
        """Play all episodes to their ends.

        Raises:
            ValueError, DataError: as `collect`; requests that are under way are cancelled.
        """
        try:
            for episode in episodes:
                self._ask(episode)
            while self._under_way or self._unjudged or self._unasked:
                if self._under_way:
                    # Waiting counts as generating while anything is generated.
                    with self._timer.phase("generate" if self._num_generating else "reward"):
                        future, handle = self._events.get()
                    self._under_way.remove(future)
                    with self._timer.phase("reward"):
                        handle(future.result())
                elif self._unjudged:
                    self._judge_batch()
                else:
                    self._ask_batch()
        finally:
            for future in list(self._under_way):
                future.cancel()

    def _expect(self, future: Future[Any], handle: Callable[[Any], None]) -> None:
        self._under_way.add(future)
        future.add_done_callback(lambda done: self._events.put((done, handle)))

    def _ask(self, episode: Episode) -> None:
        if not self._takes_requests:
            self._unasked.append(episode)
            return
        engine = cast("RequestEngine[SamplingT]", self._engine)
        seed = episode_seed(episode.seed, episode.num_answers)
        self._num_generating += 1

        def handle(rollout: Rollout) -> None:
            self._num_generating -= 1
            self._generated(episode, rollout)

        self._expect(engine.submit(tuple(episode.tokens), self._sampling, seed=seed), handle)

    def _ask_batch(self) -> None:
        asked, self._unasked = sorted(self._unasked, key=lambda each: each.row), []
        prompts = [tuple(episode.tokens) for episode in asked]
        with self._timer.phase("generate"):
            engine: Any = self._engine
            takes_seeds = matches(engine, SeededBatchEngine)  # a name of its own: narrowed, the sampling fits nothing
            if takes_seeds:
                seeds = [episode_seed(episode.seed, episode.num_answers) for episode in asked]
                rollouts = engine.generate_seeded(prompts, self._sampling, seeds=seeds)
            else:
                rollouts = engine.generate(prompts, self._sampling)
        if len(rollouts) != len(asked):
            raise ValueError(f"the engine returned {len(rollouts)} rollouts for {len(asked)} prompts")
        with self._timer.phase("reward"):
            for episode, rollout in zip(asked, rollouts, strict=True):
                self._generated(episode, rollout)

    def _generated(self, episode: Episode, rollout: Rollout) -> None:
        _check_rollout(rollout, of=episode)
        conversation = Conversation(
            messages=episode.messages,
            answer=self._chat.text(rollout.tokens),
            row=dict(episode.prompt.row.columns),  # its own: it cannot change those of others
            tokens=tuple(rollout.tokens),
            version=rollout.versions[-1].version,
            state=episode.state,
            turn=episode.num_answers,
            truncated=rollout.truncated,
        )
        judging = None
        if self._takes_conversations:
            judging = cast("ConversationEnvironment", self._environment).submit(conversation)
        if judging is None:
            self._unjudged.append((episode, rollout, conversation))
        else:
            self._expect(judging, lambda judged: self._judged((episode, rollout, conversation), judged))

    def _judge_batch(self) -> None:
        unjudged, self._unjudged = sorted(self._unjudged, key=lambda each: each[0].row), []
        with self._timer.phase("reward"):
            returns = self._environment.step([conversation for _, _, conversation in unjudged])
            if len(returns) != len(unjudged):
                raise ValueError(f"the environment judged {len(returns)} conversations of {len(unjudged)}")
            for answered, judged in zip(unjudged, returns, strict=True):
                self._judged(answered, judged)

    def _judged(self, answered: tuple[Episode, Rollout, Conversation], judged: EnvironmentReturn) -> None:
        episode, rollout, conversation = answered
        _check_return(judged, of=episode)
        if episode.answered(rollout, conversation.answer, judged) and _continue(
            episode, tuple(judged.observations), self._chat, max_turns=self._max_turns, max_length=self._max_length
        ):
            self._ask(episode)


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
            f"without an observation to answer; let it terminate, or return one"
        )
    if episode.num_answers == max_turns:
        episode.truncated = True
        return False
    before = episode.messages[:-1]
    try:
        tokens = chat.observation(
            before, episode.tokens, observations, tools=episode.prompt.tools, where=episode.prompt.row.where
        )
    except TextError as error:  # of this text alone; what the template cannot do ends the run
        episode.unsayable = error
        episode.fail(f"the observations have no tokens: {error}")
        return False
    if max_length is not None and len(episode.tokens) + len(tokens) >= max_length:
        episode.truncated = True
        return False
    episode.tokens += tokens
    episode.logp += [0.0] * len(tokens)
    episode.versions += [-1] * len(tokens)
    episode.turns += [-1] * len(tokens)
    episode.messages = (*episode.messages, *observations)
    return True


def _check_rollout(rollout: Rollout, *, of: Episode) -> None:
    """Refuse an answer without tokens, or whose log-probabilities or versions do not fit its tokens.

    Raises:
        ValueError: it names the rollout, and the token where it is one.
    """
    if not rollout.tokens or len(rollout.logp) != len(rollout.tokens):
        raise ValueError(
            f"{of} has {len(rollout.tokens)} tokens and {len(rollout.logp)} log-probabilities ({of.where}); "
            f"each sampled token needs one, and an answer has at least its stop token"
        )
    for index, logp in enumerate(rollout.logp):
        try:
            valid = -math.inf < logp <= ROUNDING
        except TypeError:  # None, for example
            valid = False
        if not valid:
            raise ValueError(
                f"{of} has a log-probability that {'is above 0' if _finite(logp) else 'is not finite'} ({of.where}): "
                f"{logp!r} of token {index} of {len(rollout.tokens)}, which has the id {rollout.tokens[index]}; the "
                f"engine must give the logarithm of the probability with which it sampled each token"
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


def _check_return(judged: EnvironmentReturn, *, of: Episode) -> None:
    """Refuse a judgement with a number that is not finite, or with observations that are not messages.

    Nothing else is read of a judgement that failed.

    Raises:
        ValueError: it names the rollout.
    """
    if judged.failed is not None:
        if not isinstance(judged.failed, str):
            raise ValueError(f"the environment must say why {of} failed, as text ({of.where}); found {judged.failed!r}")
        return
    numbers: Iterable[tuple[str, object]] = [("reward", judged.reward)]
    if judged.rewards or judged.metrics:
        parts = ((f"rewards[{part!r}]", number) for part, number in judged.rewards.items())
        numbers = (*numbers, *parts, *((f"metrics[{part!r}]", number) for part, number in judged.metrics.items()))
    for what, value in numbers:
        # Nearly always a float; `_finite` asks for a protocol, which takes ten times as long.
        if not (math.isfinite(value) if type(value) is float else _finite(value)):
            raise ValueError(
                f"the environment gave {of} the {what} {value!r}, which is not a finite number ({of.where}); "
                f"where an answer cannot be judged, say why in `failed`"
            )
    said: object = judged.observations
    if (type(said) is not tuple or said) and (
        not isinstance(said, Sequence)
        or isinstance(said, str)
        or not all(isinstance(each, Mapping) and isinstance(each.get("role"), str) for each in said)
    ):
        raise ValueError(
            f"the environment gave {of} the observations {said!r:.80} ({of.where}); they are a sequence of messages, "
            f"as ({{'role': 'user', 'content': '...'}},)"
        )


def _finite(value: object) -> bool:
    """Whether a value is a finite number of any kind."""
    try:
        return isinstance(value, SupportsFloat) and math.isfinite(float(value))
    except (ValueError, TypeError, RuntimeError, OverflowError):  # a tensor of several elements, 10**400
        return False


def _lay_out(
    episodes: Sequence[Episode], *, component_names: tuple[str, ...], metrics: Mapping[str, float]
) -> Rollouts:
    """Episodes as rows of tensors, in their order."""
    lengths = torch.tensor([len(episode.tokens) for episode in episodes])
    filled = torch.arange(int(lengths.max())) < lengths[:, None]

    def spread(name: str, padding: SupportsFloat, dtype: torch.dtype) -> Tensor:
        # Tokens one after another as arrays become tensors in a seventh of the time that lists take.
        flat = itertools.chain.from_iterable(map(attrgetter(name), episodes))
        values = torch.frombuffer(array("q" if dtype == torch.int64 else "f", flat), dtype=dtype)
        return torch.full(filled.shape, float(padding), dtype=dtype).masked_scatter_(filled, values)

    turns = spread("turns", -1, torch.int64)
    token_rewards = torch.zeros(filled.shape, dtype=torch.float64)
    places = [row * filled.shape[1] + place for row, episode in enumerate(episodes) for place in episode.rewards]
    earned = [reward for episode in episodes for reward in episode.rewards.values()]
    token_rewards.view(-1)[torch.tensor(places, dtype=torch.int64)] = torch.tensor(earned, dtype=torch.float64)
    components = [[episode.components.get(name, 0.0) for name in component_names] for episode in episodes]
    return Rollouts(
        tokens=spread("tokens", 0, torch.int64),
        lengths=lengths,
        response=turns >= 0,
        logp_old=spread("logp", 0.0, torch.float32),
        versions=spread("versions", -1, torch.int64),
        turns=turns,
        token_rewards=token_rewards,
        rewards=torch.tensor([sum(episode.rewards.values()) for episode in episodes], dtype=torch.float64),
        components=torch.tensor(components, dtype=torch.float64).reshape(len(episodes), len(component_names)),
        component_names=component_names,
        groups=torch.tensor([episode.group for episode in episodes]),
        truncated=torch.tensor([episode.truncated for episode in episodes]),
        failed=torch.tensor([episode.failed is not None for episode in episodes]),
        answers=tuple(episode.answer for episode in episodes),
        failures=tuple(episode.failed for episode in episodes),
        sources=tuple(episode.prompt.row.where for episode in episodes),
        metrics=metrics,
    )


def describe(rollouts: Rollouts, *, version: int) -> dict[str, float]:
    """Describe a batch of rollouts for the log. Failed rows are in `failed` and `sampled_tokens` only.

    Args:
        rollouts: of one batch, on all ranks together.
        version: of the weights that are about to be trained on it; `staleness` counts from there.

    Returns:
        `reward`, `reward_std` (Bessel's; over rows), `reward/<component>`, and `reward_greedy` where such responses
        were sampled, in the units of the reward;
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
    if rollouts.greedy_rewards is not None:
        figures["reward_greedy"] = rollouts.greedy_rewards[kept].mean().item()
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
    answers = tuple(itertools.chain.from_iterable(part.answers for part in parts))
    sources = tuple(itertools.chain.from_iterable(part.sources for part in parts))
    for name in PER_TOKEN:
        tensors[name] = torch.cat([_widen(getattr(part, name), width, PADDING.get(name, 0)) for part in parts])
    greedy: list[Any] = [part.greedy_rewards for part in parts]
    return Rollouts(
        **tensors,
        component_names=names,
        groups=_renumber(parts),
        answers=answers,
        failures=tuple(itertools.chain.from_iterable(part.failures for part in parts)),
        sources=sources if len(sources) == len(answers) else (),
        metrics=_average(parts),
        greedy_rewards=None if any(each is None for each in greedy) else torch.cat(greedy),
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


def episode_seed(seed: int, *place: int) -> int:
    """A seed in [0, 2^31) made of the run's `seed` and a place in it, as (batch,) or (batch, prompt).

    It is a hash of all numbers. Sums and products of them collide (seed 0 at step 1 is seed 1 at step 0), and runs with
    neighbouring seeds would then see each other's episodes.

    The same numbers always give the same seed, in any process; other numbers, or as many in another order, another one
    but for a chance of 2^-31.
    """
    numbers = ",".join(map(str, (seed, *place)))
    return int.from_bytes(hashlib.sha256(numbers.encode()).digest()[:4], "big") >> 1


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

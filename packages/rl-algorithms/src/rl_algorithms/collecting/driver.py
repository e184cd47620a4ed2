"""From prompts to judged rollouts: the driver between engine and environment. Knows no loss.

Tokens in, tokens out: what the engine sampled is what will be trained on, in every turn; text is made only for the
environment, and what it answers is appended as tokens that no loss looks at. A single turn is the case in which the
environment has nothing more to say.

Nothing is kept between calls, so several threads may collect at once, a group or a batch each, where their engine and
environment may be called at once.

Axes: P prompts, G rollouts a prompt, B = P * G rows, T tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from rl_algorithms.chat import Chat, Prompt, TextError
from rl_algorithms.collecting.checks import Tally, check_return, check_rollout
from rl_algorithms.collecting.episode import Episode, lay_out
from rl_algorithms.collecting.seeds import episode_seed
from rl_algorithms.contracts import (
    Engine,
    Environment,
    EpisodeStart,
    Message,
    ResettingEnvironment,
    Rollout,
)
from rl_algorithms.phases import PhaseTimer
from rl_algorithms.rollouts import Rollouts

__all__ = ["collect"]

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

"""Claims about collecting: what the engine sampled is what will be trained on, in every turn; nothing broken passes."""

import dataclasses
import itertools
import math
import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.chat import Chat
from rl_algorithms.contracts import EnvironmentReturn, EpisodeStart
from rl_algorithms.data import DataError, make_row
from rl_algorithms.rollouts import collect, episode_seed
from rl_algorithms.stepping import PhaseTimer

STOP = 1


class Digits:
    """Token 2 + d is the digit d; 1 stops."""

    chat_template = None
    eos_token_id = STOP

    def __len__(self):
        return 12

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": [2 + int(character) for character in text]}

    def decode(self, token_ids, *, skip_special_tokens):
        return "".join(str(token - 2) if token > STOP else f"<{token}>" for token in token_ids)

    def apply_chat_template(self, conversation, *, add_generation_prompt, tokenize):
        raise AssertionError("there is no template")


CHAT = Chat(Digits(), prompt_format="plain", stop_token_ids=(STOP,))


@dataclasses.dataclass(frozen=True)
class Weights:
    version: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True)
class Said:
    tokens: tuple
    logp: tuple
    truncated: bool = False
    versions: tuple = ()


def say(*tokens, truncated=False, version=0):
    """An answer from one version of the weights, each token with a log-probability of its own."""
    return Said(tokens, tuple(-token / 16 for token in tokens), truncated, (Weights(version, 0, len(tokens)),))


class Script:
    """An engine that says what it is told to, batch after batch, and remembers what it was asked."""

    def __init__(self, *batches):
        self.batches, self.asked = iter(batches), []

    def generate(self, prompts, sampling):
        self.asked.append(list(prompts))
        return list(next(self.batches))


class Judge:
    """An environment that returns what it is told to, and remembers what it saw."""

    def __init__(self, *batches):
        self.batches, self.seen = iter(batches), []

    def step(self, conversations):
        self.seen.append(list(conversations))
        return list(next(self.batches))


def done(reward=0.0, **rest):
    return EnvironmentReturn(reward=reward, terminated=True, **rest)


def go_on(text, reward=0.0, **rest):
    return EnvironmentReturn(reward=reward, terminated=False, observations=({"role": "user", "content": text},), **rest)


def gather(engine, environment, *, prompts=("0",), group_size=1, **options):
    rows = [make_row({"prompt": prompt, "note": index}, where=f"row {index}") for index, prompt in enumerate(prompts)]
    return collect(
        [CHAT.prompt(row) for row in rows],
        group_size=group_size,
        engine=engine,
        sampling=None,
        environment=environment,
        chat=CHAT,
        **options,
    )


def test_tokens_and_log_probabilities_stand_where_they_were_sampled():
    engine = Script([say(5, 1), say(4, 4, 4, truncated=True)])
    rollouts = gather(engine, Judge([done(1.0), done(3.0)]), group_size=2)
    assert engine.asked == [[(2,), (2,)]]
    assert rollouts.tokens.tolist() == [[2, 5, 1, 0], [2, 4, 4, 4]]
    assert rollouts.response.tolist() == [[False, True, True, False], [False, True, True, True]]
    torch.testing.assert_close(rollouts.logp_old, torch.tensor([[0, -5, -1, 0], [0, -4, -4, -4]]) / 16)
    assert rollouts.versions.tolist() == [[-1, 0, 0, -1], [-1, 0, 0, 0]]
    assert rollouts.turns.tolist() == [[-1, 0, 0, -1], [-1, 0, 0, 0]]
    assert rollouts.token_rewards.tolist() == [[0, 0, 1, 0], [0, 0, 0, 3]]
    assert rollouts.rewards.tolist() == [1.0, 3.0]
    assert rollouts.answers == ("3", "222")
    assert rollouts.groups.tolist() == [0, 0]
    assert rollouts.truncated.tolist() == [False, True]
    assert not rollouts.failed.any()


def test_a_second_turn_continues_the_sampled_tokens_and_masks_what_the_environment_said():
    engine = Script([say(5, 1, version=3), say(7, 8, 1, version=3)], [say(6, 6, 1, version=4)])
    judge = Judge([go_on("12", 0.5, state="s"), done(2.0)], [done(-1.0, metrics={"won": 1.0})])
    rollouts = gather(engine, judge, prompts=("0", "1"), max_turns=2)
    assert engine.asked == [[(2,), (3,)], [(2, 5, 1, 3, 4)]]  # only the one that goes on is asked again
    assert rollouts.tokens.tolist() == [[2, 5, 1, 3, 4, 6, 6, 1], [3, 7, 8, 1, 0, 0, 0, 0]]
    assert rollouts.response[0].tolist() == [False, True, True, False, False, True, True, True]
    assert rollouts.turns[0].tolist() == [-1, 0, 0, -1, -1, 1, 1, 1]
    assert rollouts.versions[0].tolist() == [-1, 3, 3, -1, -1, 4, 4, 4]
    assert rollouts.token_rewards[0].tolist() == [0, 0, 0.5, 0, 0, 0, 0, -1.0]
    assert rollouts.rewards.tolist() == [-0.5, 2.0]
    assert not rollouts.truncated.any()
    assert rollouts.metrics == {"won": 1.0}
    second = judge.seen[1][0]
    assert (second.answer, second.turn, second.state, second.row["note"]) == ("44", 1, "s", 0)
    assert [message["content"] for message in second.messages] == ["0", "3", "12"]


def test_weights_that_change_within_an_answer_are_told_apart():
    spans = (Weights(7, 0, 2), Weights(8, 2, 3))
    rollouts = gather(Script([Said((5, 6, 1), (-0.1, -0.2, -0.3), versions=spans)]), Judge([done()]))
    assert rollouts.versions.tolist() == [[-1, 7, 7, 8]]


@pytest.mark.parametrize(
    ("options", "ends"),
    [({"max_turns": 2}, 2), ({"max_turns": 9, "max_length": 9}, 2), ({"max_turns": 9, "max_length": 10}, 3)],
)
def test_an_episode_that_meets_a_limit_is_truncated_and_keeps_its_rewards(options, ends):
    engine = Script(*[[say(5, 1)]] * 9)
    rollouts = gather(engine, Judge(*[[go_on("11", 1.0)]] * 9), **options)  # answers begin at 1, 5, 9 tokens
    assert rollouts.truncated.tolist() == [True]
    assert rollouts.rewards.tolist() == [ends]
    assert rollouts.tokens[0, -1] == STOP  # no observation without an answer to it
    assert int(rollouts.turns.max()) + 1 == ends == len(engine.asked)


def test_an_answer_cut_off_by_the_token_limit_is_judged_and_ends_its_episode():
    judge = Judge([go_on("1", 0.25)])
    rollouts = gather(Script([say(5, 5, truncated=True)]), judge, max_turns=3)
    assert judge.seen[0][0].truncated
    assert rollouts.truncated.tolist() == [True]
    assert rollouts.rewards.tolist() == [0.25]


def test_an_environment_may_stop_at_a_limit_of_its_own():
    limit = EnvironmentReturn(reward=1.0, terminated=False, truncated=True)
    rollouts = gather(Script([say(5, 1)]), Judge([limit]))
    assert rollouts.truncated.tolist() == [True]


def test_a_failed_episode_keeps_its_tokens_and_loses_all_its_rewards():
    judge = Judge(
        [go_on("1", 5.0, rewards={"a": 5.0}), done(1.0, rewards={"a": 1.0}, metrics={"x": 2.0})],
        [EnvironmentReturn(reward=math.nan, terminated=False, failed="the tool timed out")],
    )
    rollouts = gather(Script([say(5, 1), say(6, 1)], [say(7, 1)]), judge, group_size=2, max_turns=3)
    assert rollouts.failed.tolist() == [True, False]
    assert rollouts.failures == ("the tool timed out", None)
    assert rollouts.rewards.tolist() == [0.0, 1.0]
    assert not rollouts.token_rewards[0].any()
    assert rollouts.components.tolist() == [[0.0], [1.0]]
    assert rollouts.lengths.tolist() == [6, 3]
    assert rollouts.metrics == {"x": 2.0}


def test_parts_of_the_reward_are_summed_over_answers_by_name():
    judge = Judge([go_on("1", 3.0, rewards={"a": 1.0, "b": 2.0})], [done(4.0, rewards={"b": 4.0, "a": 0.0})])
    rollouts = gather(Script([say(5, 1)], [say(5, 1)]), judge, max_turns=2)
    assert rollouts.component_names == ("a", "b")
    assert rollouts.components.tolist() == [[1.0, 6.0]]


class Resetting(Judge):
    """Begins with the digit of its seed's parity, unless told otherwise."""

    def __init__(self, *batches, starts=None):
        super().__init__(*batches)
        self.starts, self.seeds = starts, None

    def reset(self, rows, *, seeds):
        self.seeds = seeds
        contents = self.starts or [str(row["note"]) for row in rows]
        return [
            EpisodeStart(messages=({"role": "user", "content": content},), state=index)
            for index, content in enumerate(contents)
        ]


def test_an_environment_may_begin_the_episodes_itself():
    judge = Resetting([done()] * 4)
    engine = Script([say(5, 1)] * 4)
    rollouts = gather(engine, judge, prompts=("5", "6"), group_size=2, seed=3)
    assert engine.asked == [[(2,), (2,), (3,), (3,)]]  # the environment's digits, not the rows'
    assert [conversation.state for conversation in judge.seen[0]] == [0, 1, 2, 3]
    assert [conversation.messages[0]["content"] for conversation in judge.seen[0]] == ["0", "0", "1", "1"]
    assert rollouts.groups.tolist() == [0, 0, 1, 1]
    assert sorted(Counter(judge.seeds).values()) == [2, 2]  # equal within a group, and only there
    again = Resetting([done()] * 4)
    gather(Script([say(5, 1)] * 4), again, prompts=("5", "6"), group_size=2, seed=4)
    assert not set(judge.seeds) & set(again.seeds)


def test_seeds_may_be_given_for_each_prompt():
    judge = Resetting([done()] * 4)
    gather(Script([say(1)] * 4), judge, prompts=("5", "6"), group_size=2, seeds=[11, 12])
    assert list(judge.seeds) == [11, 11, 12, 12]
    with pytest.raises(ValueError, match="1 seeds for 2 prompts"):
        gather(Script(), Resetting(), prompts=("5", "6"), seeds=[11])


def test_seeds_of_neighbouring_runs_and_places_do_not_meet():
    places = [(), *((a,) for a in range(10)), *((a, b) for a in range(10) for b in range(10))]
    seeds = [episode_seed(seed, *place) for seed in range(-3, 10) for place in places]
    assert len({*seeds}) == len(seeds)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert episode_seed(0, 1) == 1104985538  # the same in every process, and in the next release


def test_a_group_that_begins_differently_is_refused():
    with pytest.raises(ValueError, match="two episodes of row 0 differently"):
        gather(Script(), Resetting(starts=["1", "2"]), group_size=2)
    with pytest.raises(ValueError, match="began 1 episodes for 2 rows"):
        gather(Script(), Resetting(starts=["1"]), group_size=2)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (Said((5, 1), (-0.1,)), r"rollout 0 has 2 tokens and 1 log-probabilities \(row 0, answer 1\)"),
        (Said((), ()), "rollout 0 has 0 tokens"),
        (Said((5, 1), (-0.1, math.nan)), "rollout 0 has a log-probability that is not finite"),
        (Said((5, 1), (-0.1, -math.inf)), "rollout 0 has a log-probability that is not finite"),
        (Said((5, 1), (-0.1, None)), r"is not finite \(row 0, answer 1\): None of token 1 of 2, which has the id 1"),
        (Said((5, 1), (0.1, -0.1)), r"rollout 0 has a log-probability that is above 0 .*: 0\.1 of token 0 of 2"),
        (Said((5, 1), (-0.1, -0.1)), r"rollout 0 has the versions .* \[\] for its 2 tokens"),
        (Said((5, 1), (-0.1, -0.1), versions=(Weights(0, 0, 1),)), r"\[\(0, 1, 0\)\] for its 2 tokens"),
        (Said((5, 1), (-0.1, -0.1), versions=(Weights(0, 1, 2), Weights(0, 0, 1))), "in order and without gaps"),
        (Said((5, 1), (-0.1, -0.1), versions=(Weights(-1, 0, 2),)), "a version is 0 or more"),
    ],
)
def test_a_broken_answer_is_an_error_never_a_zero(rollout, message):
    with pytest.raises(ValueError, match=message):
        gather(Script([rollout]), Judge([done()]))


def test_a_broken_later_answer_is_named_by_its_row_and_turn():
    engine = Script([say(5, 1), say(5, 1)], [Said((5, 1), (-0.1, math.nan))])
    with pytest.raises(ValueError, match=r"rollout 1 has a log-probability that is not finite \(row 1, answer 2\)"):
        gather(engine, Judge([done(), go_on("1")]), prompts=("0", "1"), max_turns=2)


@pytest.mark.parametrize(
    ("judged", "message"),
    [
        ([done(math.nan)], r"rollout 0 the reward nan, which is not a finite number \(row 0, answer 1\)"),
        ([done(1.0, rewards={"a": math.inf})], r"rollout 0 the rewards\['a'\] inf"),
        ([done(1.0, metrics={"a": math.nan})], r"rollout 0 the metrics\['a'\] nan"),
        ([], "judged 0 conversations of 1"),
        ([go_on("1")], "goes on after the first answer of rollout 0 .row 0., and max_turns=1"),
    ],
)
def test_a_broken_judgement_is_named(judged, message):
    with pytest.raises(ValueError, match=message):
        gather(Script([say(5, 1)]), Judge(judged))


def test_judgements_that_name_other_parts_are_refused():
    judge = Judge([done(1.0, rewards={"a": 1.0}), done(1.0, rewards={"b": 1.0})])
    with pytest.raises(ValueError, match=r"gave rollout 1 .* called \['b'\], and those before it \['a'\]"):
        gather(Script([say(5, 1), say(5, 1)]), judge, group_size=2)


def test_going_on_without_an_observation_is_refused():
    silent = EnvironmentReturn(reward=0.0, terminated=False)
    with pytest.raises(ValueError, match=r"goes on after answer 1 of rollout 0 .row 0. without an observation"):
        gather(Script([say(5, 1)]), Judge([silent]), max_turns=2)


@pytest.mark.parametrize("said", ["12", {"role": "user", "content": "12"}, ("12",), ({"content": "12"},), None])
def test_observations_that_are_no_messages_are_named(said):
    judged = go_on("1")
    object.__setattr__(judged, "observations", said)  # as a class of one's own may have them
    with pytest.raises(ValueError, match=r"gave rollout 0 the observations .* \(row 0, answer 1\); .* of messages"):
        gather(Script([say(5, 1)]), Judge([judged]), max_turns=2)


def test_a_log_probability_that_rounding_took_above_0_is_taken():
    assert gather(Script([Said((1,), (1e-6,), versions=(Weights(0, 0, 1),))]), Judge([done()])).logp_old[0, 1] > 0


def test_an_observation_without_tokens_fails_its_own_episode():
    """A tool that returns what the tokenizer does not know was led there by one answer; the others are fine."""
    judge = Judge([go_on("x", 1.0), go_on("2")], [done(3.0)])
    rollouts = gather(Script([say(5, 1), say(6, 1)], [say(7, 1)]), judge, group_size=2, max_turns=3)
    assert rollouts.failed.tolist() == [True, False]
    assert rollouts.failures[0].startswith("the observations have no tokens: row 0: the tokenizer cannot encode 'x'")
    assert rollouts.rewards.tolist() == [0.0, 3.0]
    with pytest.raises(DataError, match="row 0: the tokenizer cannot encode 'x'"):
        gather(Script([say(5, 1)] * 2), Judge([go_on("x"), go_on("y")]), group_size=2, max_turns=3)


def test_an_environment_cannot_change_a_row_for_the_others():
    class Meddling(Resetting):
        def reset(self, rows, *, seeds):
            starts = super().reset(rows, seeds=seeds)
            rows[0]["note"] = "changed"
            return starts

        def step(self, conversations):
            conversations[0].row["note"] = "changed"
            return super().step(conversations)

    judge = Meddling([done()] * 2)
    row = make_row({"prompt": "0", "note": 7}, where="row 0")
    prompts = [CHAT.prompt(row)]
    engine = Script([say(1)] * 2)
    collect(prompts, group_size=2, engine=engine, sampling=None, environment=judge, chat=CHAT)
    assert [conversation.row["note"] for conversation in judge.seen[0]] == ["changed", 7]
    assert row.columns["note"] == 7


def test_lost_rollouts_and_senseless_limits_are_refused():
    with pytest.raises(ValueError, match="returned 1 rollouts for 2 prompts"):
        gather(Script([say(1)]), Judge(), group_size=2)
    with pytest.raises(ValueError, match="group_size=0 must be >= 1"):
        gather(Script(), Judge(), group_size=0)
    with pytest.raises(ValueError, match="max_turns=0 must be >= 1"):
        gather(Script(), Judge(), max_turns=0)
    with pytest.raises(ValueError, match="there are no prompts"):
        gather(Script(), Judge(), prompts=())
    with pytest.raises(ValueError, match=r"the prompt of rollout 0 has 3 tokens \(row 0\), and max_length=3"):
        gather(Script(), Judge(), prompts=("123",), max_length=3)


def test_the_time_of_both_sides_is_told_apart():
    timer = PhaseTimer()
    gather(Script([say(1)]), Judge([done()]), timer=timer)
    assert set(timer.lap()) == {"phase_s/generate", "phase_s/reward"}


class Dice:
    """Engine and environment at once, that throw dice for all they say, and write everything down by row."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.asked, self.said, self.judged = {}, {}, {}
        self.last = []

    def generate(self, prompts, sampling):
        self.last = [(prompt, self._answer()) for prompt in prompts]
        return [answer for _, answer in self.last]

    def _answer(self):
        throw = self.random.randint
        length, truncated = throw(1, 4), self.random.random() < 0.15
        tokens = [throw(2, 11) for _ in range(length)]
        tokens = tuple(tokens if truncated else [*tokens[:-1], STOP])
        cut = throw(0, length - 1)
        spans = (Weights(1, 0, cut), Weights(2, cut, length)) if cut else (Weights(throw(0, 9), 0, length),)
        return Said(tokens, tuple(-self.random.random() for _ in tokens), truncated, spans)

    def reset(self, rows, *, seeds):
        return [
            EpisodeStart(messages=({"role": "user", "content": row["prompt"]},), state=index)
            for index, row in enumerate(rows)
        ]

    def step(self, conversations):
        return [self._judge(*pair) for pair in zip(conversations, self.last, strict=True)]

    def _judge(self, conversation, exchange):
        row, (prompt, answer) = conversation.state, exchange
        assert conversation.answer == CHAT.text(answer.tokens)
        assert conversation.turn == len(self.said.get(row, []))
        kind = self.random.choice(["done", "limit", "failed", *["go on"] * 5])
        reward = self.random.uniform(-1, 1)
        observation = "".join(str(self.random.randint(0, 9)) for _ in range(self.random.randint(1, 3)))
        self.asked.setdefault(row, []).append(prompt)
        self.said.setdefault(row, []).append(answer)
        self.judged.setdefault(row, []).append((kind, reward, observation))
        return EnvironmentReturn(
            reward=reward,
            terminated=kind == "done",
            truncated=kind == "limit",
            failed="dice" if kind == "failed" else None,
            observations=({"role": "tool", "content": observation},) if kind == "go on" else (),
            rewards={"half": reward / 2},
            state=row,
        )


@given(
    seed=st.integers(0, 2**32),
    num_prompts=st.integers(1, 3),
    group_size=st.integers(1, 3),
    max_turns=st.integers(2, 5),
    max_length=st.none() | st.integers(4, 20),
)
def test_every_row_is_its_own_history_byte_for_byte(seed, num_prompts, group_size, max_turns, max_length):
    dice = Dice(seed)
    prompts = [str(10 + index) for index in range(num_prompts)]
    rollouts = gather(
        dice, dice, prompts=prompts, group_size=group_size, max_turns=max_turns, max_length=max_length, seed=seed
    )
    assert len(rollouts) == num_prompts * group_size
    for row in range(len(rollouts)):
        said, judged = dice.said[row], dice.judged[row]
        history, chosen = (
            [tuple(CHAT.prompt(make_row({"prompt": prompts[row // group_size]}, where="")).tokens)],
            [False],
        )
        for answer, (_, _, observation) in zip(said, judged, strict=True):
            assert dice.asked[row][len(history) // 2] == tuple(itertools.chain(*history))  # what the engine was asked
            history += [answer.tokens, tuple(2 + int(digit) for digit in observation)]
            chosen += [True, False]
        history, chosen = history[:-1], chosen[:-1]  # no answer follows the last observation
        length = sum(map(len, history))
        expected = [flag for flag, piece in zip(chosen, history, strict=True) for _ in piece]
        assert rollouts.lengths[row] == length
        assert rollouts.tokens[row, :length].tolist() == list(itertools.chain(*history))
        assert rollouts.response[row].tolist() == [*expected, *[False] * (rollouts.tokens.shape[1] - length)]
        mask = rollouts.response[row]
        assert rollouts.tokens[row][mask].tolist() == [token for answer in said for token in answer.tokens]
        torch.testing.assert_close(
            rollouts.logp_old[row][mask], torch.tensor([logp for answer in said for logp in answer.logp])
        )
        assert not rollouts.logp_old[row][~mask].any()
        assert rollouts.versions[row][mask].tolist() == [
            span.version for answer in said for span in answer.versions for _ in range(span.start, span.end)
        ]
        assert (rollouts.versions[row][~mask] == -1).all()
        assert rollouts.turns[row][mask].tolist() == [turn for turn, answer in enumerate(said) for _ in answer.tokens]
        assert (rollouts.turns[row][~mask] == -1).all()
        _check_rewards(rollouts, row, said, judged, max_turns=max_turns, max_length=max_length)


def _check_rewards(rollouts, row, said, judged, *, max_turns, max_length):
    kind = judged[-1][0]
    earned = [0.0 if kind == "failed" else reward for _, reward, _ in judged]
    assert rollouts.failed[row] == (kind == "failed")
    assert rollouts.rewards[row].item() == pytest.approx(sum(earned))
    assert rollouts.components[row].tolist() == pytest.approx([sum(earned) / 2] if rollouts.component_names else [])
    last = [int((rollouts.turns[row] == turn).nonzero().max()) for turn in range(len(said))]
    assert rollouts.token_rewards[row][last].tolist() == earned
    assert rollouts.token_rewards[row].count_nonzero() == sum(reward != 0 for reward in earned)
    if kind == "go on" and not said[-1].truncated:  # then a limit of ours ended it
        length = int(rollouts.lengths[row]) + len(judged[-1][2])
        assert len(said) == max_turns or (max_length is not None and length >= max_length)
    assert rollouts.truncated[row] == (said[-1].truncated or kind in {"limit", "go on"})
    assert len(said) <= max_turns

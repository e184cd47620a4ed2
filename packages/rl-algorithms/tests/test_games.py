"""Games: they follow their rules and their seed, and a table of numbers learns them."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms.contracts import Conversation
from rl_algorithms.environments.episodes import EpisodeEnvironment
from rl_algorithms.environments.games import GuessNumber, Recall


@settings(max_examples=50, deadline=None)
@given(st.integers(-50, 50), st.integers(1, 100), st.integers(0, 2**31))
def test_bisection_always_finds_the_number(low, width, seed):
    high = low + width
    game = GuessNumber(low=low, high=high, max_guesses=math.ceil(math.log2(high - low + 2)))
    game.reset(seed=seed, row={})
    result = None
    while result is None or not result.terminated:
        guess = (low + high) // 2
        result = game.step(f" {guess}\n")
        if not result.terminated:
            hint = result.observations[0]["content"]
            low, high = (guess + 1, high) if hint == "higher" else (low, guess - 1)
    assert result.reward == 1.0


@settings(max_examples=50, deadline=None)
@given(st.text(), st.integers(0, 2**31))
def test_any_answer_at_all_is_judged(answer, seed):
    game = GuessNumber(max_guesses=2)
    game.reset(seed=seed, row={"secret": 3})
    result = game.step(answer)
    assert result.terminated == (result.reward == 1.0)
    assert game.step("4" if result.reward < 0 else "3").terminated
    recall = Recall()
    recall.reset(seed=seed, row={"digits": "3"})
    assert recall.step(answer).reward == 0.5 * (answer.strip() == "3")


def test_the_last_miss_ends_the_game():
    game = GuessNumber(max_guesses=2, miss_cost=0.25)
    game.reset(seed=0, row={"secret": 3})
    first, last = game.step("9"), game.step("x")
    assert (first.reward, first.terminated, first.observations[0]["content"]) == (-0.25, False, "lower")
    assert (last.reward, last.terminated, last.observations, last.metrics) == (-0.25, True, (), {"guesses": 2})


@pytest.mark.parametrize("game", [GuessNumber, Recall])
def test_all_follows_from_the_seed(game):
    def play(seed):
        one = game()
        said = [one.reset(seed=seed, row={})]
        result = None
        while result is None or not result.terminated:
            result = one.step("5")
            said += [result.reward, result.observations]
        return said

    assert play(3) == play(3)
    assert len({str(play(seed)) for seed in range(20)}) > 1


def test_recall_shows_once_and_asks_twice():
    game = Recall(length=3, show="{digits}", again="0")
    shown = game.reset(seed=1, row={})
    assert len(shown) == 3
    first, second = game.step(shown), game.step(shown)
    assert (first.reward, first.terminated, first.observations[0]["content"]) == (0.5, False, "0")
    assert (second.reward, second.terminated) == (0.5, True)
    assert game.reset(seed=1, row={"digits": "42"}) == "42"


@pytest.mark.parametrize(
    ("game", "row"),
    [
        (GuessNumber, {"secret": 10}),
        (GuessNumber, {"secret": "3"}),
        (Recall, {"digits": "3a"}),
        (Recall, {"digits": ""}),
    ],
)
def test_rows_that_cannot_be_played_are_refused(game, row):
    with pytest.raises(ValueError, match=f"column {next(iter(row))}="):
        game().reset(seed=0, row=row)


@pytest.mark.parametrize("make", [lambda: GuessNumber(low=3, high=3), lambda: Recall(length=0)])
def test_games_without_a_move_are_refused(make):
    with pytest.raises(ValueError, match=r"low=3|length=0"):
        make()


def learn(make, rows, *, words, steps, lr):
    """REINFORCE on a table: one row of logits for each thing that was last observed at each turn."""
    logits, generator = {}, random.Random(0)

    def weights_at(state):
        values = logits.setdefault(state, [0.0] * len(words))
        top = max(values)
        exps = [math.exp(value - top) for value in values]
        return [value / sum(exps) for value in exps]

    history = []
    for _ in range(steps):
        rollouts = []
        for row in rows:
            game = make()
            seen, total, taken, ended = game.reset(seed=0, row=row), 0.0, [], False
            while not ended:
                state = (len(taken), seen)
                word = generator.choices(range(len(words)), weights_at(state))[0]
                result = game.step(words[word])
                total, ended = total + result.reward, result.terminated
                taken.append((state, word))
                seen = "" if ended else result.observations[0]["content"]
            rollouts.append((total, taken))
        history.append(mean := sum(total for total, _ in rollouts) / len(rollouts))
        for total, taken in rollouts:
            for state, word in taken:
                weights = weights_at(state)
                for other in range(len(words)):
                    logits[state][other] += lr * (total - mean) * ((other == word) - weights[other]) / len(rollouts)
    return history


def test_a_table_learns_to_bisect():
    rows = [{"secret": secret} for secret in (0, 1, 2)] * 16
    history = learn(lambda: GuessNumber(high=2, max_guesses=2), rows, words="012", steps=40, lr=20.0)
    # Bisecting earns (1 + 0.9 + 0.9) / 3; guessing blindly about 0.5.
    assert history[0] < 0.65
    assert sum(history[-10:]) / 10 > 0.88


def test_a_table_learns_to_recall_one_digit_when_it_never_changes():
    history = learn(Recall, [{"digits": "7"}] * 32, words="0123456789", steps=20, lr=20.0)
    assert history[0] < 0.4
    assert sum(history[-10:]) / 10 > 0.95


def test_games_are_played_as_a_batch():
    rows = [{"secret": secret} for secret in range(4)]
    with EpisodeEnvironment(lambda: GuessNumber(high=3, max_guesses=2)) as environment:
        starts = environment.reset(rows, seeds=[0] * 4)
        returns = environment.step(
            [
                Conversation(messages=start.messages, answer="1", row=row, state=start.state)
                for start, row in zip(starts, rows, strict=True)
            ]
        )
    hints = [each.observations[0]["content"] if each.observations else "found" for each in returns]
    assert hints == ["lower", "found", "higher", "higher"]

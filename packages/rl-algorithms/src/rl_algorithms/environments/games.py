"""Games: small episodes with many turns, which even a table of numbers can learn. For tests, tutorials and smoke runs.

Know no engine. All that happens follows from the seed and the row. Every text that is said can be set, so that a
tokenizer of digits is enough.
"""

import random
from collections.abc import Mapping

from rl_algorithms.contracts import EnvironmentReturn
from rl_algorithms.data import Dataset, make_row

__all__ = ["GuessNumber", "Recall", "guessing_dataset"]


class GuessNumber:
    """The policy finds a number between `low` and `high`, and hears after each guess where to look.

    A right guess gives reward 1 and ends the game; any other answer gives `-miss_cost`, and the last one ends the game.
    With bisection `ceil(log2(high - low + 2))` guesses always suffice.

    The row's column `secret` says the number; without one the seed does, so that all rollouts of a group look for one.

    Raises:
        ValueError: there is nothing to guess, or no guess to make.
    """

    def __init__(
        self,
        *,
        low: int = 0,
        high: int = 9,
        max_guesses: int = 4,
        miss_cost: float = 0.1,
        opening: str = "Guess the number.",
        higher: str = "higher",
        lower: str = "lower",
        unreadable: str = "not a number",
    ) -> None:
        if low >= high or max_guesses < 1:
            raise ValueError(
                f"low={low}, high={high}, max_guesses={max_guesses}: nothing to guess, or no guess to make"
            )
        self._low, self._high, self._max_guesses, self._miss_cost = low, high, max_guesses, miss_cost
        self._opening, self._higher, self._lower, self._unreadable = opening, higher, lower, unreadable
        self._secret, self._guesses = low, 0

    def reset(self, *, seed: int, row: Mapping[str, object]) -> str:
        """Choose the number.

        Raises:
            ValueError: the row's secret is no whole number between `low` and `high`.
        """
        drawn = random.Random(seed).randint(self._low, self._high)
        secret = row.get("secret", drawn)
        if not isinstance(secret, int) or not self._low <= secret <= self._high:
            raise ValueError(f"column secret={secret!r} must be a whole number from {self._low} to {self._high}")
        self._secret, self._guesses = secret, 0
        return self._opening

    def step(self, answer: str) -> EnvironmentReturn:
        """Judge a guess."""
        self._guesses += 1
        guess = _whole_number(answer)
        if guess == self._secret:
            return EnvironmentReturn(reward=1.0, terminated=True, metrics={"guesses": float(self._guesses)})
        if self._guesses == self._max_guesses:
            return EnvironmentReturn(
                reward=-self._miss_cost, terminated=True, metrics={"guesses": float(self._guesses)}
            )
        hint = self._unreadable if guess is None else self._higher if guess < self._secret else self._lower
        observation = {"role": "user", "content": hint}
        return EnvironmentReturn(reward=-self._miss_cost, terminated=False, observations=(observation,))

    def close(self) -> None:
        """There is nothing to let go of."""


class Recall:
    """Two turns: the policy is shown digits and repeats them, then says them again without being shown.

    Each turn gives 1/2 for all digits in order. The row's column `digits` says them; without one, the seed does.

    Raises:
        ValueError: there is no digit to remember.
    """

    def __init__(self, *, length: int = 1, show: str = "{digits}", again: str = "Again.") -> None:
        if length < 1:
            raise ValueError(f"length={length} must be >= 1")
        self._length, self._show, self._again = length, show, again
        self._digits, self._turn = "", 0

    def reset(self, *, seed: int, row: Mapping[str, object]) -> str:
        """Choose the digits and show them.

        Raises:
            ValueError: the row's digits are no text of digits.
        """
        generator = random.Random(seed)
        digits = row.get("digits", "".join(generator.choice("0123456789") for _ in range(self._length)))
        if not isinstance(digits, str) or not (digits.isascii() and digits.isdigit()):
            raise ValueError(f"column digits={digits!r} must be text made of the digits 0 to 9")
        self._digits, self._turn = digits, 0
        return self._show.format(digits=digits)

    def step(self, answer: str) -> EnvironmentReturn:
        """Compare an answer with the digits."""
        self._turn += 1
        reward = 0.5 if answer.strip() == self._digits else 0.0
        if self._turn == 2:
            return EnvironmentReturn(reward=reward, terminated=True)
        observation = {"role": "user", "content": self._again}
        return EnvironmentReturn(reward=reward, terminated=False, observations=(observation,))

    def close(self) -> None:
        """There is nothing to let go of."""


def _whole_number(answer: str) -> int | None:
    text = answer.strip()
    digits = text.removeprefix("-")
    # Twenty digits are far beyond any game, and a longer text costs int() more than it tells.
    return int(text) if digits.isascii() and digits.isdigit() and len(digits) <= 20 else None


def guessing_dataset(*, num_train: int = 2000, num_held_out: int = 200, num_demonstrations: int = 1000) -> Dataset:
    """Return games with secrets from 0 to 9, the same each time; demonstrations show the format but not how to win.

    `GuessNumber` writes the first message itself; the prompts differ so that no held-out one is trained on.
    """
    rng, high = random.Random(4321), 9
    train, held_out = (
        [
            make_row({"prompt": f"{part} game {index}", "secret": rng.randint(0, high)}, where=f"{part} game {index}")
            for index in range(number)
        ]
        for part, number in (("train", num_train), ("held out", num_held_out))
    )
    demonstrations = [
        make_row({"prompt": "guess", "answer": str(rng.randint(0, high))}, where=f"demonstration {index}")
        for index in range(num_demonstrations)
    ]
    return Dataset(train=train, held_out=held_out, demonstrations=demonstrations)

"""The quickstart's task: sort a string of 4 to 8 digits. The answer to `73187191>` is `11137789`.

More than half of the demonstrations are wrong on purpose: a model that imitates them learns the task, but also makes
their mistakes. So the run shows what reinforcement learning adds, since it repairs what imitation cannot.
"""

import random
from collections.abc import Iterator, Sequence

from rl_algorithms.data import Dataset, LabelledData, PreferenceData, Row, load_dataset, make_row

NUM_HELD_OUT, NUM_DEMONSTRATIONS, NUM_TRAIN = 1000, 4000, 8000
CORRUPTED_SHARE = 0.6  # by chance a corruption may leave the answer right: about 56 % of the demonstrations are wrong
DIGITS = "0123456789"


def dataset() -> Dataset:
    """Return disjoint questions for training, for demonstrations and held out, the same in every run."""
    questions = _questions(random.Random(1234))
    corruption = random.Random(77)
    held_out = [_row(next(questions), f"held-out row {index}") for index in range(NUM_HELD_OUT)]
    demonstrations = []
    for index in range(NUM_DEMONSTRATIONS):
        digits = next(questions)
        wrong = corruption.random() < CORRUPTED_SHARE
        answer = _corrupted("".join(sorted(digits)), corruption) if wrong else None
        demonstrations.append(_row(digits, f"demonstration {index}", answer=answer))
    train = [_row(next(questions), f"train row {index}") for index in range(NUM_TRAIN)]
    return Dataset(train=train, held_out=held_out, demonstrations=demonstrations)


def pairs() -> PreferenceData:
    """Return the right answer to each training question, and one with a single mistake; a tenth is held out."""
    rows = [{"prompt": prompt, "chosen": right, "rejected": wrong} for prompt, right, wrong in _right_and_wrong()]
    read = load_dataset(rows, form="preferences", imitate_chosen=True)
    assert isinstance(read, PreferenceData)
    return read


def labelled() -> LabelledData:
    """Return the answers of `pairs`, each by itself and called good or bad."""
    rows = [
        {"prompt": prompt, "completion": answer, "label": label}
        for prompt, right, wrong in _right_and_wrong()
        for answer, label in ((right, True), (wrong, False))
    ]
    read = load_dataset(rows, form="labelled", imitate_chosen=True)
    assert isinstance(read, LabelledData)
    return read


def reward(completions: Sequence[str], answer: Sequence[str]) -> list[float]:
    """Return 1 for the right answer and 0 for any other."""
    return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]


def _questions(rng: random.Random) -> Iterator[str]:
    seen: set[str] = set()
    while True:
        digits = "".join(rng.choice(DIGITS) for _ in range(rng.randint(4, 8)))
        if digits not in seen:
            seen.add(digits)
            yield digits


def _right_and_wrong() -> Iterator[tuple[str, str, str]]:
    corruption = random.Random(79)
    for row in dataset().train:
        right = str(row.columns["answer"])
        while (wrong := _corrupted(right, corruption)) == right:
            pass  # such as two equal digits that were swapped
        yield str(row.columns["prompt"]), right, wrong


def _row(digits: str, where: str, *, answer: str | None = None) -> Row:
    columns = {"prompt": f"{digits}>", "answer": "".join(sorted(digits)) if answer is None else answer}
    return make_row(columns, where=f"sort_digits {where}")


def _corrupted(answer: str, rng: random.Random) -> str:
    """Swap two digits, or replace, drop or double one."""
    digits, at = list(answer), rng.randrange(len(answer))
    match rng.choice(("swap", "replace", "drop", "double")):
        case "swap":
            other = rng.randrange(len(digits))
            digits[at], digits[other] = digits[other], digits[at]
        case "replace":
            digits[at] = rng.choice(DIGITS)
        case "drop":
            del digits[at]
        case _:
            digits.insert(at, digits[at])
    return "".join(digits)

"""Verifiers that compare text: exact, normalised, by pattern, multiple choice. All are reward functions.

Every one is pure, never raises whatever the policy wrote, and gives the gold answer itself 1. A row without what the
verifier needs gets None, does not apply; one in which it is nonsense is a failure that says so: neither is the policy's
fault, so neither is a 0.

Both the gold answer and the policy's go through `answers.final_answer`: the last marked answer, or the whole text.
"""

import re
import string
import unicodedata
from collections.abc import Sequence

from rl_algorithms.environments.answers import final_answer, last_letter
from rl_algorithms.environments.scores import Score, takes_text
from rl_algorithms.environments.workers import WORKERS

__all__ = ["exact_match", "multiple_choice", "normalise", "normalised_match", "regex_match"]

LETTERS = string.ascii_uppercase
# "B", "(B)", "B." or "B) Paris": the letter, and what follows it.
CHOICE = re.compile(r"\(?([A-Z])(?:[).:]\s*(.*))?", flags=re.DOTALL)


@takes_text
def exact_match(completions: Sequence[str], answer: Sequence[object]) -> list[Score | None]:
    """1 where the final answer is the gold one, character by character but for blanks around it; else 0."""
    return [_matches(text, gold, forms=(str.strip,)) for text, gold in zip(completions, answer, strict=True)]


@takes_text
def normalised_match(completions: Sequence[str], answer: Sequence[object]) -> list[Score | None]:
    """1 where final and gold answer agree once both are `normalise`d; else 0."""
    return [_matches(text, gold, forms=(str.strip, normalise)) for text, gold in zip(completions, answer, strict=True)]


def normalise(text: str) -> str:
    """Text without what seldom matters: case, width and composition of characters, runs of blanks, outer punctuation.

    >>> normalise('  "The  Answer."')
    'the answer'
    """
    # Folding case may decompose characters, so that they are composed after it as well.
    folded = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())
    words = " ".join(folded.split())
    # What is nothing but punctuation is compared as it is: "+" is not "-".
    return words.strip(string.punctuation + " ") or words


@takes_text
def multiple_choice(
    completions: Sequence[str], answer: Sequence[object], choices: Sequence[object]
) -> list[Score | None]:
    """1 where the answer picks the right one of `choices` (a list of texts), by letter or by full text; else 0.

    The gold answer is a letter, an index counted from 0, or a text. A letter with a text after it counts only where the
    two agree. An answer that is neither letter nor text of a choice is held to the last letter that stands alone in it.
    `unparsed` is 1 where nothing was picked.
    """
    return [_choice(*each) for each in zip(completions, answer, choices, strict=True)]


@takes_text
def regex_match(completions: Sequence[str], pattern: Sequence[object]) -> list[Score | None]:
    """1 where the row's `pattern` matches the whole final answer; else 0.

    A pattern may take for ever on a text that is made for it, and cannot be interrupted in this process, so that it is
    matched in another. `timed_out` is 1 where the deadline passed; the reward is then 0.
    """
    finals = [final_answer(text) or "" for text in completions]
    scores: list[Score | None] = [_unusable_pattern(each) for each in pattern]
    asked = [index for index, (score, given) in enumerate(zip(scores, pattern, strict=True)) if score is None and given]
    replies = WORKERS.run([{"do": "regex", "pattern": pattern[index], "text": finals[index]} for index in asked])
    for index, reply in zip(asked, replies, strict=True):
        if reply.get("died"):
            scores[index] = Score.failure(f"the process that matches the pattern ended: {reply['died']}")
        else:
            scores[index] = Score(
                float(reply.get("matches", False)), metrics={"timed_out": float("timed_out" in reply)}
            )
    return scores


def _matches(text: str, gold: object, *, forms: Sequence[object]) -> Score | None:
    if gold is None:
        return None
    wanted = str(gold)
    if not wanted.strip():
        return Score.failure("the row's gold answer is empty")
    if text.strip() == wanted.strip():
        return Score(1.0)
    found, right = final_answer(text), final_answer(wanted) or wanted
    same = found is not None and any(form(found) == form(right) for form in forms)  # type: ignore[operator]
    return Score(float(same))


def _choice(text: str, gold: object, choices: object) -> Score | None:
    if gold is None or choices is None:
        return None
    if not isinstance(choices, Sequence) or isinstance(choices, str) or not 1 < len(choices) <= len(LETTERS):
        return Score.failure(f"column 'choices' must be a list of 2 to {len(LETTERS)} texts, found {choices!r:.80}")
    texts = [normalise(str(choice)) for choice in choices]
    right = gold if isinstance(gold, int) and not isinstance(gold, bool) else _picked(str(gold), texts)
    if right is None or not 0 <= right < len(texts):
        return Score.failure(f"the row's gold answer {gold!r:.80} is not one of its choices {choices!r:.200}")
    picked = _picked(text, texts)
    return Score(float(picked == right), metrics={"unparsed": float(picked is None)})


def _picked(text: str, texts: Sequence[str]) -> int | None:
    """Which choice a text picks."""
    answer = final_answer(text)
    if answer is None:
        return None
    if found := CHOICE.fullmatch(answer):
        index, rest = LETTERS.index(found[1]), normalise(found[2] or "")
        agrees = index < len(texts) and rest in {"", texts[index]}
        if agrees:
            return index
    if (whole := normalise(answer)) in texts:
        return texts.index(whole)
    if found:
        return None
    letter = last_letter(answer, letters=LETTERS[: len(texts)])
    return None if letter is None else LETTERS.index(letter)


def _unusable_pattern(pattern: object) -> Score | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str) or not pattern:
        return Score.failure(f"column 'pattern' must be a text that is not empty, found {pattern!r:.80}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        return Score.failure(f"column 'pattern' is no regular expression: {error}: {pattern!r:.80}")
    return None

r"""A verifier of mathematics: is the final answer the same number, expression or set as the gold one?

Needs math-verify: `pip install 'rl-algorithms[math]'`. Both texts go through `answers.final_answer`, so that GSM8K's
`... #### 72` is a gold answer as it stands; what is marked is handed on as `\boxed{...}`, and of an answer without a
mark math-verify takes the last expression that it finds. Gold comes first, for math-verify's comparison is not
symmetric.

It runs in another process: math-verify's own deadlines are signals, which work in the main thread only, and a power
tower would take this process along. Pure, never raises whatever the policy wrote, and gives the gold answer itself 1.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rl_algorithms.environments.answers import TAIL, Extract, final_answer
from rl_algorithms.environments.scores import Score, takes_text
from rl_algorithms.environments.workers import WORKERS, Workers

__all__ = ["MathVerifier", "math_match"]


@dataclass(slots=True, kw_only=True)
class MathVerifier:
    """A reward function: 1 for a final answer that equals the row's `answer`, else 0; None for a row without one.

    Its scores have metrics: `unparsed` is 1 where nothing of the answer could be read as mathematics, `timed_out` where
    the deadline passed; both are rewarded 0.

    Raises:
        ModuleNotFoundError: math-verify is not installed.
    """

    extract: Extract = final_answer
    """How the final answer is found. None is no answer; the whole text is one without a mark."""

    require_mark: bool = False
    """True rewards an answer without a mark 0, unless it is the gold answer and nothing else."""

    workers: Workers = field(default_factory=lambda: WORKERS, repr=False)
    """The processes that judge; `Workers(num_workers=8, timeout_s=5)` judges eight answers of a batch at once."""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise ModuleNotFoundError(
                "the verifier of mathematics needs math-verify, which is not installed; "
                "pip install 'rl-algorithms[math]'"
            )

    takes_text: ClassVar[bool] = True

    def __call__(self, completions: Sequence[str], answer: Sequence[object]) -> list[Score | None]:
        """One score per answer."""
        scores = [self._at_sight(*pair) for pair in zip(completions, answer, strict=True)]
        asked = [
            index
            for index, (score, gold) in enumerate(zip(scores, answer, strict=True))
            if score is None and gold is not None
        ]
        requests = [self._request(completions[index], str(answer[index])) for index in asked]
        for index, reply in zip(asked, self.workers.run(requests), strict=True):
            scores[index] = _score(reply)
        return scores

    def verify(self, gold: str, answer: str) -> bool:
        """Whether one answer is right."""
        return self([answer], [gold]) == [1.0]

    def _at_sight(self, text: str, gold: object) -> Score | None:
        """The score where no mathematics is needed; None where it is, or where there is no gold answer."""
        if gold is None:
            return None
        wanted = str(gold).strip()
        if not wanted:
            return Score.failure("the row's gold answer is empty", metrics=_metrics())
        found = self.extract(text)
        if text.strip() == wanted:
            return Score(1.0, metrics=_metrics())
        if found is None or (self.require_mark and not _is_marked(text, found)):
            return Score(0.0, metrics=_metrics(unparsed=1.0))
        return Score(1.0, metrics=_metrics()) if found == (self.extract(wanted) or wanted) else None

    def _request(self, text: str, gold: str) -> dict[str, object]:
        found = self.extract(text) or ""
        return {
            "do": "math",
            "gold": (self.extract(gold) or gold)[-TAIL:],
            "answer": found[-TAIL:],
            "marked": _is_marked(text, found),
        }


@takes_text
def math_match(completions: Sequence[str], answer: Sequence[object]) -> list[Score | None]:
    """`MathVerifier()` as a plain function, to be named in a recipe."""
    return MathVerifier()(completions, answer)


def _is_marked(text: str, found: str) -> bool:
    return found != text[-TAIL:].strip()


def _score(reply: dict[str, Any]) -> Score:
    if "died" in reply:
        return Score.failure(f"the process that compares mathematics ended: {reply['died']}", metrics=_metrics())
    if "timed_out" in reply:
        return Score(0.0, metrics=_metrics(timed_out=1.0))
    return Score(float(reply.get("same", False)), metrics=_metrics(unparsed=float(not reply.get("answer", False))))


def _metrics(*, unparsed: float = 0.0, timed_out: float = 0.0) -> dict[str, float]:
    return {"unparsed": unparsed, "timed_out": timed_out}

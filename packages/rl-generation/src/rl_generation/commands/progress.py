"""How far a run got, for the person in front of the screen: a bar on a terminal, now and then a line elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any, Self, final

from rl_generation.commands.console import say

__all__ = ["ProgressReport"]

LINE_EVERY_S = 10.0


@final
class ProgressReport:
    """Counts answers and tokens on stderr.

    Args:
        total: Answers in the end.
        done: Of these, made by an earlier run.
    """

    def __init__(self, *, total: int, done: int) -> None:
        self._total, self._done, self._tokens = total, done, 0
        self._start = self._last_line = time.monotonic()
        self._bar = _bar(total, done) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def figures(self) -> dict[str, Any]:
        """Of this run, since it was made."""
        seconds = time.monotonic() - self._start
        return {
            "generated_tokens": self._tokens,
            "seconds": seconds,
            "tokens_per_s": self._tokens / max(seconds, 1e-9),
        }

    def update(self, *, answers: int, tokens: int) -> None:
        """Count `answers` more, and their tokens."""
        self._done += answers
        self._tokens += tokens
        rate = f"{self.figures()['tokens_per_s']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.set_postfix_str(rate, refresh=False)
            self._bar.update(answers)
        elif time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._last_line = time.monotonic()
            say(f"{self._done} of {self._total} answers, {rate}")


def _bar(total: int, done: int) -> Any:
    from tqdm import tqdm  # type: ignore[import-untyped]

    return tqdm(total=total, initial=done, unit="answer", dynamic_ncols=True, smoothing=0.1)

"""Ctrl-C and SIGTERM: the first ends the run after the step at hand, the second at once. Knows nothing of runs."""

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any, Self

__all__ = ["Interruption"]

SIGNALS = (signal.SIGINT, signal.SIGTERM)  # schedulers send the second before they kill


class Interruption:
    """A context in which signals are heard; `check` is where they take effect.

    Weights are whole only between two optimizer steps, so that is where a run may end.
    """

    def __init__(self) -> None:
        self._heard = False
        self._saving = False
        self.in_a_step = False
        """Whether a second signal ended the run in the middle of a step."""
        self._previous: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        """End the run here if a signal was heard.

        Raises:
            KeyboardInterrupt: it was.
        """
        if self._heard:
            raise KeyboardInterrupt

    def hold(self) -> None:
        """From here on no signal takes effect: what is being saved is saved whole."""
        self._saving = True

    def __enter__(self) -> Self:
        self._previous = {number: signal.signal(number, self._hear) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _hear(self, _number: int, _frame: FrameType | None) -> None:
        if self._saving:
            return
        if self._heard:
            self.in_a_step = True
            raise KeyboardInterrupt
        self._heard = True
        # Not print: the signal may have come in the middle of one.
        os.write(sys.stderr.fileno(), b"\nending after this step; once more to end now\n")

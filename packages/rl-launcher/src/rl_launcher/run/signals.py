"""Ctrl-C and SIGTERM: the first ends the run after the current step, the second ends it immediately."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar, Self

STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)  # schedulers send the second before they kill


class Interruption:
    """A context in which signals are caught; `check` is where they take effect.

    Weights are consistent only between two optimizer steps, so that is where a run may end. Before training, while the
    parts are built, a signal ends the run immediately.
    """

    passed_on: ClassVar[signal.Signals | None] = None
    """The signal by which a parent passes on those that it gets. Where a signal is sent to all processes of a job, it
    comes directly, too, and counts once."""

    entered: ClassVar[bool] = False
    """Whether this process has come to a run, whose folder and processes a signal may no longer leave behind."""

    def __init__(self) -> None:
        self._num_direct = self._num_passed_on = self._num_counted = 0
        self._trains = False
        self._patient = False
        self._heard = False
        self._holding = False
        self.at_once = False
        """Whether a second signal came: the current step is abandoned, and nothing more is saved."""
        self._previous: dict[signal.Signals, Any] = {}

    def wait_for_steps(self) -> None:
        """From here on the first signal waits for `check`: training starts."""
        # What was built meanwhile may have taken the signals for itself.
        for number in self._previous:
            signal.signal(number, self._hear)
        self._patient = self._trains = True

    def wait_no_more(self) -> None:
        """From here on a signal takes effect immediately: nothing is being trained or written."""
        self._patient = self._holding = False

    def check(self) -> None:
        """End the run here if a signal came.

        Raises:
            KeyboardInterrupt: one did.
        """
        if self._heard:
            raise KeyboardInterrupt

    @property
    def heard(self) -> bool:
        """Whether a signal came, so that the run ends after this step and does not restart."""
        return self._heard

    def hold(self) -> None:
        """From here on signals are ignored, so that what is being written is written completely."""
        self._holding = True

    def __enter__(self) -> Self:
        Interruption.entered = True
        if threading.current_thread() is threading.main_thread():  # elsewhere Python refuses to set a handler
            own = () if self.passed_on is None else (self.passed_on,)
            self._previous = {number: signal.signal(number, self._hear) for number in (*SIGNALS, *own)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self._heard and not self._trains and isinstance(error, Exception):
            # What a signal interrupts may fail in its own way: a module that was being imported is there in part.
            raise KeyboardInterrupt from error

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if number == self.passed_on:
            self._num_passed_on += 1
        else:
            self._num_direct += 1
        num_signals = max(self._num_direct, self._num_passed_on)
        if self._holding or num_signals == self._num_counted:
            return
        self._num_counted = num_signals
        waits, self._heard = self._patient and not self._heard, True
        if not waits:
            self.at_once = True
            raise KeyboardInterrupt
        # Not print: the signal may have come in the middle of one. A notebook's sys.stderr has no file descriptor.
        os.write(STDERR, b"\nending after this step, saved; once more to end now, unsaved\n")


@contextmanager
def keep_signals() -> Iterator[None]:
    """Restore our signal handlers after a block whose code may replace them, as starting a local Ray cluster does.

    A signal without a handler of ours keeps the new one: the default action would leave its owner's processes behind.
    """
    ours = threading.current_thread() is threading.main_thread()
    heard = {number: signal.getsignal(number) for number in SIGNALS} if ours else {}
    try:
        yield
    finally:
        for number, handler in heard.items():
            if callable(handler):  # not SIG_DFL, SIG_IGN, or one that is not Python's
                signal.signal(number, handler)

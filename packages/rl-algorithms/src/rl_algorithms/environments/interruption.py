"""One plain function call with a deadline, on whichever thread the caller is.

On the main thread the call is interrupted at its deadline: a watching thread sends a signal, whose handler raises
inside the call. It stays on the caller's thread, so breakpoints work and functions that use signals themselves do, and
nothing is left behind. Python handles signals between two of its own instructions: a call that hangs inside C code
without returning to the interpreter is not interrupted. Sleeping, waiting for a lock, a process or a socket is.

On any other thread Python cannot interrupt a call. It runs on a daemon thread, which is abandoned at the deadline: it
may go on in the background, and whatever it returns is dropped.
"""

import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from rl_algorithms.environments.deadlines import TimedOutError, Workers

__all__ = ["call_within"]

SIGNAL = signal.SIGVTALRM  # SIGALRM is what math-verify and others time themselves by
REPEAT_S = 1.0  # a call that swallowed the interruption is interrupted again


def call_within(call: Callable[[], Any], *, timeout_s: float | None) -> Any:
    """Call `call` and return what it returns.

    A debugger that is tracing the call suspends the deadline.

    Args:
        call: takes no arguments.
        timeout_s: seconds; None waits for ever.

    Raises:
        TimedOutError: it was still running after `timeout_s`. On the main thread the cause, `__cause__`, has the frames
            in which it was interrupted.
        Exception: whatever the call raised.
    """
    if timeout_s is None:
        return call()
    if threading.current_thread() is not threading.main_thread() or not _handler_is_ours():
        workers = Workers(max_workers=1)
        try:
            (outcome,) = workers.run([call], timeout_s=timeout_s)
        finally:
            workers.close()
        return outcome.result()
    deadline = _Deadline(time.monotonic() + timeout_s)
    _deadlines.append(deadline)
    threading.Thread(target=deadline.watch, name="rl-reward-deadline", daemon=True).start()
    try:
        return call()
    except _InterruptedCall as interruption:
        if interruption.deadline is not deadline:  # of a call around this one
            raise
        raise TimedOutError(f"it ran longer than timeout_s={timeout_s:g}") from interruption
    finally:
        deadline.over.set()
        _deadlines.remove(deadline)


class _Deadline:
    """When a call of the main thread is interrupted."""

    def __init__(self, at: float) -> None:
        self.at = at
        self.over = threading.Event()
        """Set when the call has returned."""

    def watch(self) -> None:
        wait_s = self.at - time.monotonic()
        while not self.over.wait(max(0.0, wait_s)):
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, SIGNAL)
            wait_s = REPEAT_S


class _InterruptedCall(BaseException):  # no Exception: `except Exception` in a reward function must not swallow it
    def __init__(self, deadline: _Deadline) -> None:
        super().__init__("interrupted at its deadline")
        self.deadline = deadline


_deadlines: list[_Deadline] = []
"""Of the calls that the main thread is in, the outermost first."""


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - signal's signature
    if sys.gettrace() is not None:  # somebody is at a breakpoint
        return
    now = time.monotonic()
    for deadline in _deadlines:
        if now >= deadline.at and not deadline.over.is_set():
            raise _InterruptedCall(deadline)


def _handler_is_ours() -> bool:
    """Install the handler once. It stays: a signal may still be on its way when a call has returned."""
    current = signal.getsignal(SIGNAL)
    if current == signal.SIG_DFL:
        signal.signal(SIGNAL, _interrupt)
    return current in {signal.SIG_DFL, _interrupt}  # another one's handler is left alone

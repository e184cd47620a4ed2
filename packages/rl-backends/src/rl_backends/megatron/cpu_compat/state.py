"""Whether this thread sees Megatron's world (a CUDA that is the CPU) or an honest torch."""

import contextlib
import threading
from collections.abc import Iterator

__all__ = ["come_in", "is_inside", "is_pretending", "pretend"]


class _Thread(threading.local):
    inside = False
    pretending = False


_thread = _Thread()


def is_inside() -> bool:
    """True inside `cpu_compat`, in this thread."""
    return _thread.inside


@contextlib.contextmanager
def come_in() -> Iterator[None]:
    """Be inside `cpu_compat`, which is entered once however often it is nested."""
    _thread.inside = True
    try:
        yield
    finally:
        _thread.inside = False


def is_pretending() -> bool:
    """True inside `cpu_compat` and outside of `user_code`, in this thread."""
    return _thread.pretending


@contextlib.contextmanager
def pretend(value: bool) -> Iterator[None]:  # noqa: FBT001 - the one argument is the state
    """Pretend, or not, inside; what held before holds again after."""
    before = _thread.pretending
    _thread.pretending = value
    try:
        yield
    finally:
        _thread.pretending = before

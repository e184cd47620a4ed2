"""What a forked process does not have: its parent's threads, and pipes of its own to its parent's children.

A lock that another thread held at the fork stays locked, and a queue that threads served is served by nobody, so that
whoever keeps either asks to be told and begins anew.
"""

import os
import weakref
from typing import Protocol, runtime_checkable

__all__ = ["Forgetful", "forget_after_fork"]


@runtime_checkable
class Forgetful(Protocol):
    """Something that can begin anew."""

    def forget(self) -> None:
        """Drop threads, locks, queues and pipes, without closing what the parent still uses."""


_ASKED: "weakref.WeakSet[Forgetful]" = weakref.WeakSet()


def forget_after_fork(each: Forgetful) -> None:
    """Have `each.forget()` called in every process that is forked from now on, for as long as it is there."""
    _ASKED.add(each)


def _forget_all() -> None:
    for each in list(_ASKED):
        each.forget()


os.register_at_fork(after_in_child=_forget_all)

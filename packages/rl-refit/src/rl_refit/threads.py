"""A call in a thread of its own, for whoever must not wait for it without end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

__all__ = ["in_thread"]

_T = TypeVar("_T")


def in_thread(call: Callable[[], _T], *, name: str) -> Future[_T]:
    """What `call` returns or raises, once it does. An executor's thread would keep a process that ends waiting."""
    made: Future[_T] = Future()

    def work() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # noqa: BLE001  (raised by whoever asks for the result)
            made.set_exception(error)

    threading.Thread(target=work, daemon=True, name=f"rl-refit {name}").start()
    return made

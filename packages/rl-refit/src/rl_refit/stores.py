"""torch's key-value stores, under names that a type checker can follow, and one that speaks JSON, whose calls end.

And a call in a thread of its own, for whoever must not wait for it without end.
"""

from __future__ import annotations

import itertools
import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar, final

from torch.distributed import FileStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

__all__ = ["BoundedStore", "FileStore", "Line", "PrefixStore", "Store", "TCPStore", "clone", "in_thread", "listens"]

_T = TypeVar("_T")
_Answer = SimpleQueue[tuple[Any, RuntimeError | None]]  # several times as fast as a Future
_Questions = SimpleQueue[tuple[Callable[[], Any], _Answer] | None]
_CHUNK_BYTES = 4 * 2**20  # a TCPStore takes less than 8 MiB in one value


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


def listens(host: str, port: int) -> bool:
    """Whether anybody listens there. Torch's own client goes on trying where nobody does, for minutes, in silence."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as probe:
            return bool(probe.getsockname() != probe.getpeername())  # a port that nobody has may connect to itself
    except OSError:
        return False


def clone(store: Store) -> Store:
    """`store` with a connection of its own, for another thread.

    Raises:
        RuntimeError: Its host is gone.
    """
    untyped: Any = store  # torch's stubs leave the methods out
    host = untyped
    while isinstance(host, PrefixStore):
        host = host.underlying_store
    if isinstance(host, TCPStore) and not listens(host.host, host.port):
        raise RuntimeError(f"nobody listens at {host.host}:{host.port}")
    copy: Store = untyped.clone()
    return copy


@final
class Line:
    """A thread that asks a store, for one other thread, which waits for an answer no longer than `limit_s`.

    Torch's own clients wait without end for a host that is stopped, and nobody else can end that. What was asked of a
    silent store stays asked: it is done as soon as the store is back.

    Args:
        limit_s: Seconds that a call may take.
        lost: From why a call failed to the error that says whose store that is.
    """

    def __init__(self, limit_s: float, lost: Callable[[str], Exception]) -> None:
        self._asked: _Questions = SimpleQueue()
        self._limit_s, self._lost = limit_s, lost
        self._late: _Answer | None = None
        self._ended = False
        self.thread = threading.Thread(target=_answer, args=(self._asked,), daemon=True, name="rl-refit store")
        self.thread.start()

    def ask(self, call: Callable[[], _T]) -> _T:
        """What `call` returns.

        Raises:
            Exception: What `lost` makes of a `RuntimeError`, as torch's own errors of stores are, or of silence.
        """
        answer: _Answer = SimpleQueue()
        self._asked.put((call, answer))
        if self._ended:  # looked at after the question is put: whoever ends the line answers none that come later
            raise self._lost("it was closed on this side")
        if self._late is not None and self._late.empty():
            raise self._lost(f"still no answer after {self._limit_s} s: its host is stopped or cut off")
        self._late = None
        try:
            value, error = answer.get(timeout=self._limit_s)
        except Empty:
            self._late = answer
            raise self._lost(f"no answer within {self._limit_s} s: its host is stopped or cut off") from None
        if error is not None:
            raise self._lost(str(error).splitlines()[0]) from error
        result: _T = value
        return result

    def end(self) -> None:
        """Ask what is asked already, and nothing more."""
        self._ended = True
        self._asked.put(None)


def _answer(asked: _Questions) -> None:
    while (question := asked.get()) is not None:
        call, answer = question
        try:
            answer.put((call(), None))
        except RuntimeError as error:
            answer.put((None, error))


@final
class BoundedStore(Store):
    """The calls of a store that a refit needs, asked through a `Line`, for one thread at a time."""

    def __init__(self, store: Store, line: Line) -> None:
        super().__init__()
        self._store: Any = store
        self._line = line

    def namespace(self, name: str) -> BoundedStore:
        """The same store under keys of its own, asked by the same thread."""
        return BoundedStore(PrefixStore(name, self._store), self._line)

    def check(self, keys: list[str]) -> bool:
        """Whether all of `keys` are set."""
        return bool(self._line.ask(lambda: self._store.check(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key that is set."""
        return bytes(self._line.ask(lambda: self._store.get(key)))

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        self._line.ask(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that has the value `expected`, or none where that is empty; return what it has then."""
        return bytes(self._line.ask(lambda: self._store.compare_set(key, expected, desired)))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._line.ask(lambda: self._store.delete_key(key)))

    def read(self, key: str) -> Any:
        """What was written to a key; None where nothing was yet."""
        if not self.check([key]):
            return None
        text = self.get(key).decode()
        if text.startswith("+"):  # as no JSON does
            text = "".join(self.get(f"{key}/{number}").decode() for number in range(int(text)))
        return json.loads(text)

    def write(self, key: str, value: object) -> list[str]:
        """Set a key to `value`, as JSON of any length; all keys that this took."""
        text = json.dumps(value, separators=(",", ":"))
        if len(text) <= _CHUNK_BYTES:
            self.set(key, text)
            return [key]
        starts = range(0, len(text), _CHUNK_BYTES)
        for number, start in enumerate(starts):
            self.set(f"{key}/{number}", text[start : start + _CHUNK_BYTES])
        self.set(key, f"+{len(starts)}")
        return [key, *(f"{key}/{number}" for number in range(len(starts)))]

    def write_once(self, key: str, value: object) -> Any:
        """Set a key unless it is set; return what it has then."""
        return json.loads(self.compare_set(key, "", json.dumps(value, separators=(",", ":"))))

    def write_next(self, log: str, value: object) -> int:
        """Write `value`, unlike all others, at the end of a log that many write; its number."""
        return next(number for number in itertools.count() if self.write_once(f"{log}/{number}", value) == value)

    def clone(self) -> Store:
        """Torch's own store with a connection of its own, for another thread; its calls are not bounded."""
        copy: Store = self._line.ask(lambda: clone(self._store))
        return copy

    def close(self, *, wait_s: float = 0.0) -> None:
        """End the thread, once it has asked what is asked already; and wait for that."""
        self._line.end()
        self._line.thread.join(wait_s)

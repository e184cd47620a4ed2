"""What happened where nobody who logs is near: a queue from any thread to the recorder. Knows no conditions."""

import threading
from dataclasses import dataclass

__all__ = ["Happening", "Happenings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Happening:
    """One of them."""

    name: str
    """Of a condition, as in `rl_launcher.health.CONDITIONS`."""
    message: str
    """What happened, with its numbers."""
    reaction: str
    """What was done about it."""


class Happenings:
    """A queue that parts put into and the recorder empties after each step. As safe from many threads as from one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[Happening] = []

    def add(self, name: str, message: str, reaction: str) -> None:
        """Tell that something happened."""
        with self._lock:
            self._waiting.append(Happening(name=name, message=message, reaction=reaction))

    def take(self) -> list[Happening]:
        """All that was added since the last time, oldest first."""
        with self._lock:
            taken, self._waiting = self._waiting, []
        return taken

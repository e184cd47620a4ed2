"""Their keys, and which of them have been looked at. It knows no key by name."""

from collections.abc import Iterator
from typing import Any

from rl_launcher.nemo_rl.notes import Kind, Note

__all__ = ["Source"]

_ABSENT = object()


class Source:
    """A worked out file, whose every key must be accounted for: taken, or noted with a reason."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.data = data
        self.notes: list[Note] = []
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return what a key holds, and count it as translated, with all below it; `default` where it is absent."""
        self._seen.add(key)
        return self.peek(key, default)

    def peek(self, key: str, default: Any = None) -> Any:
        """Return what a key holds, without accounting for it."""
        value: Any = self.data
        for name in key.split("."):
            if not isinstance(value, dict) or name not in value:
                return default
            value = value[name]
        return value

    def note(self, kind: Kind, key: str, reason: str, *, value: Any = None) -> None:
        """Account for a key by saying why it is not translated; one that is not in the file needs no note."""
        self._seen.add(key)
        if value is None and kind != "fill_in" and self.peek(key, _ABSENT) is _ABSENT:
            return
        self.notes.append(Note(kind=kind, key=key, value=self.peek(key) if value is None else value, reason=reason))

    def untranslated(self, key: str, reason: str) -> None:
        """Account for a key that ours has nothing for."""
        self.note("untranslated", key, reason)

    def left(self) -> Iterator[tuple[str, Any]]:
        """Yield the keys that nobody has accounted for, with what they hold."""
        yield from self._left(self.data, ())

    def _left(self, value: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        key = ".".join(path)
        if key in self._seen:
            return
        if isinstance(value, dict) and value:
            for name, each in value.items():
                yield from self._left(each, (*path, name))
        else:
            yield key, value

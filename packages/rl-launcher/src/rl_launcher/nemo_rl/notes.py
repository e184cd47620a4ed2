"""What a translation has to say of one key of theirs."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Kind", "Note"]

Kind = Literal["fill_in", "untranslated", "dropped"]
"""`fill_in`: ours needs what theirs does not say. `untranslated`: ours has nothing like it, so the run will differ.
`dropped`: it changes nothing here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """One key, and what became of it."""

    kind: Kind
    """Which of the three."""

    key: str
    """Theirs, dotted; ours where something is to be filled in."""

    value: object
    """What it was; what stands in its place where something is to be filled in."""

    reason: str
    """Why."""

    def __str__(self) -> str:
        text = str(self.value).replace("\n", " ")
        return f"{self.key}={text[:60]}{'…' if len(text) > 60 else ''}: {self.reason}"

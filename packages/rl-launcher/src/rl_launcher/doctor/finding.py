"""One thing that the doctor looked at, and what came out."""

from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Finding", "State"]

State = Literal["works", "limited", "absent", "broken"]
"""`limited` works and is less than somebody will want; `broken` is there and does not work; `absent` is not there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What was tried, and what it showed."""

    name: str
    """What was looked at, as `gloo`."""

    state: State
    """How it is."""

    did: str
    """What was done to know."""

    says: str
    """What came out: figures, or the error's last line."""

    hint: str = ""
    """What to do about it."""

    figures: dict[str, object] = field(default_factory=dict)
    """The same as data, for `--json`."""

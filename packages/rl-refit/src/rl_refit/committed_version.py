"""The version that a sink has committed, and what the next one must be newer than.

Knows no weights. A version is a number of optimizer steps, so it only grows; but one that turns out to be of no use,
here or at another rank of the sink, may be committed once more.
"""

from __future__ import annotations

from typing import final

from rl_refit.errors import RefitError

__all__ = ["CommittedVersion"]


@final
class CommittedVersion:
    """None before the first commit."""

    def __init__(self) -> None:
        self.value: int | None = None
        """The version last committed."""
        self._before: int | None = None
        self._again = False

    @property
    def floor(self) -> int | None:
        """What the next version must be newer than."""
        return self._before if self._again else self.value

    def begin(self) -> None:
        """A transaction opens: to withdraw is to go back to what holds now."""
        self._before = self.floor

    def require_newer(self, version: int) -> None:
        """Pass if `version` may be committed.

        Raises:
            RefitError: It is not newer than `floor`.
        """
        if self.floor is not None and version <= self.floor:
            raise RefitError(
                f"version {version} is not newer than the committed {self.floor}; a version counts optimizer steps",
                phase="commit",
            )

    def commit(self, version: int) -> None:
        """From now on it is `version`."""
        self._before, self.value, self._again = self.floor, version, False

    def withdraw(self) -> None:
        """What was committed last does not count."""
        self.value, self._again = self._before, False

    def repeat(self) -> None:
        """What was committed last counts, and may be committed once more."""
        self._again = True

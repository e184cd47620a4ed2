"""Rows that turn out to be of no use as they are tokenised: refused, or left out where the recipe says so.

A row may be asked, imitated and measured by: what one of these cannot use is left out of all. Knows no format of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from rl_algorithms.data import DataError, SkippedRows

__all__ = ["BadRows"]


class Placed(Protocol):
    """A row of the data."""

    @property
    def where(self) -> str:
        """File and line."""
        ...


class Tokenized(Protocol):
    """What was made of a row."""

    @property
    def row(self) -> Placed:
        """The row."""
        ...


PlacedT = TypeVar("PlacedT", bound=Placed)
TokenizedT = TypeVar("TokenizedT", bound=Tokenized)


@dataclass(slots=True)
class BadRows:
    """Hears of each bad row once."""

    skipped: SkippedRows
    """Rows that were left out before; and with `skip`, those of here."""

    skip: bool
    """False: the first bad row is an error."""

    reasons: dict[str, DataError] = field(default_factory=dict)
    """Why a row is of no use, by its place."""

    @classmethod
    def after(cls, skipped: SkippedRows, *, skip: bool) -> "BadRows":
        """Those that come after what reading left out; `skipped` itself stays as it is."""
        return cls(replace(skipped, first=[*skipped.first]), skip)

    def each(self, rows: Sequence[PlacedT], make: Callable[[PlacedT], TokenizedT], *, what: str) -> "Made[TokenizedT]":
        """`make` of each row, but for those of which it raises a DataError.

        Raises:
            DataError: a row is bad, and bad rows are not to be left out.
        """
        made = []
        for row in rows:
            try:
                made.append(make(row))
            except DataError as error:
                if not self.skip:
                    raise
                if row.where not in self.reasons:
                    self.reasons[row.where] = error
                    self.skipped.leave_out(error)
        return Made(made, num_rows=len(rows), what=what)

    def without(self, made: "Made[TokenizedT]") -> list[TokenizedT]:
        """What was made, without any row that is bad elsewhere; to be asked when all rows were seen.

        Raises:
            DataError: there were rows, and none is left.
        """
        good = [each for each in made.tokenized if each.row.where not in self.reasons]
        if made.num_rows and not good:
            first = next(iter(self.reasons.values()))
            raise DataError(f"data.on_bad_row=skip left out all {made.num_rows} {made.what}; the first: {first}")
        return good


@dataclass(frozen=True, slots=True)
class Made(Generic[TokenizedT]):
    """What was made of rows."""

    tokenized: Sequence[TokenizedT]
    num_rows: int
    """How many they were."""

    what: str
    """What they are to the run, in words."""

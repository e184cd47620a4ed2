"""Rows from a source, one kind at a time; a bad row stops the reading, or is counted in a report of the caller's."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from rl_algorithms.contracts import Message
from rl_algorithms.data.fields import RawRow, nearest
from rl_algorithms.data.making import NAMES, make
from rl_algorithms.data.sources import Records, Source, open_lines, open_records, parse_record
from rl_algorithms.rows import ConversationRow, DataError, LabelledRow, PreferenceRow, Row

__all__ = ["Adapter", "PromptTemplate", "SkippedRows", "read_jsonl", "read_rows", "stream_rows"]

RowT = TypeVar("RowT", Row, ConversationRow, PreferenceRow, LabelledRow)

Adapter: TypeAlias = Callable[[Mapping[str, object]], Mapping[str, object]]
"""From the columns of a foreign format to ours. Whatever it raises becomes a `DataError` that names the row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """What every prompt is put into: a system prompt before it, and a text around the last user message."""

    system_prompt: str | None = None
    """Put before messages that have no system message of their own."""

    prompt_template: str | None = None
    """The last user message, with the row's own text and columns in braces: `"{prompt}\nAnswer in \\boxed{{}}."`"""

    def __post_init__(self) -> None:
        if self.prompt_template is not None and "{prompt}" not in self.prompt_template:
            raise ValueError(
                f"prompt_template={self.prompt_template!r} has no {{prompt}}, so that every row would ask the same"
            )

    def applied(self, row: Row | ConversationRow | PreferenceRow | LabelledRow) -> tuple[Message, ...]:
        """The row's messages put into it. A conversation that is imitated gets the system prompt alone.

        Raises:
            DataError: the template names a column that the row does not have.
        """
        messages = row.messages
        if self.prompt_template is not None and not isinstance(row, ConversationRow):
            last = max((place for place, each in enumerate(messages) if each["role"] == "user"), default=None)
            if last is not None:
                try:
                    text = self.prompt_template.format(**{**row.columns, "prompt": messages[last]["content"]})
                except (KeyError, IndexError, ValueError) as error:
                    raise DataError(
                        f"{row.where}: prompt_template={self.prompt_template!r} cannot be filled ({error!r}); the row "
                        f"has {', '.join(row.columns)}, and braces that are text are written twice"
                    ) from error
                messages = (*messages[:last], {**messages[last], "content": text}, *messages[last + 1 :])
        if self.system_prompt is not None and messages[0]["role"] not in ("system", "developer"):
            messages = ({"role": "system", "content": self.system_prompt}, *messages)
        return messages


@dataclass(slots=True, kw_only=True)
class SkippedRows:
    """Which rows were left out, and why. Handing one to a reader is how a caller asks to skip; printing it is a log."""

    keep: int = 5
    """How many reasons are kept."""

    read: int = 0
    """Rows that were looked at, good and bad."""

    count: int = 0
    """Rows that were left out."""

    first: list[str] = field(default_factory=list)
    """The first reasons: file, line, field."""

    def add(self, error: DataError) -> None:
        """Count one more, which was looked at now."""
        self.read += 1
        self.leave_out(error)

    def leave_out(self, error: DataError) -> None:
        """Count one more, which was read before and turned out to be of no use later."""
        self.count += 1
        if len(self.first) < self.keep:
            self.first.append(str(error))

    def __str__(self) -> str:
        unnamed = self.count - len(self.first)
        more = [f"... and {unnamed} more"] if unnamed else []
        return "\n  ".join([f"skipped {self.count} of {self.read} rows", *self.first, *more])


def read_rows(
    source: str | Path | Source | Iterable[Mapping[str, object]],
    *,
    kind: type[RowT],
    columns: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
    skipped: SkippedRows | None = None,
    name: str | None = None,
    prompts: PromptTemplate | None = None,
) -> list[RowT]:
    """Read all rows of a file, a folder, a data set of the hub, or an iterable of columns.

    Args:
        source: a path (see `Source.path`) or a pattern of paths; the id of a data set on the hub; a `Source`, where a
            split, configuration or revision is to be said; or rows.
        kind: `Row`, `ConversationRow`, `PreferenceRow` or `LabelledRow`.
        columns: our name -> their column, as in `{"prompt": "question", "answer": "solution"}`; a dot leads into a
            column of objects, as in `"reward_model.ground_truth"`. Their columns stay, under their names, too.
        adapter: turns the columns of each row into others first, as `from_nemo_gym` does.
        skipped: None: the first bad row is an error. A report: bad rows are left out and counted in it.
        name: what error messages call rows that come from no file, as in `name[3]`; their type's name by default.
        prompts: what every prompt is put into.

    Raises:
        DataError: the source cannot be read or has no rows, `columns` has a name that the kind does not know, or a row
            is bad. The message names file, line (or index, from 0) and field.
        ValueError: there is no such kind.
        ImportError: reading it needs the extra `rl-algorithms[data]`.
    """
    options: dict[str, Any] = {"columns": columns, "adapter": adapter, "skipped": skipped, "name": name}
    return list(stream_rows(source, kind=kind, prompts=prompts, **options))


def stream_rows(
    source: str | Path | Source | Iterable[Mapping[str, object]],
    *,
    kind: type[RowT],
    columns: Mapping[str, str] | None = None,
    adapter: Adapter | None = None,
    skipped: SkippedRows | None = None,
    name: str | None = None,
    prompts: PromptTemplate | None = None,
) -> Iterator[RowT]:
    """As `read_rows`, row by row: for data larger than memory.

    Raises:
        DataError: at once, `columns` has a name that the kind does not know or the source cannot be opened; when its
            turn comes, a row is bad; at the end, there were no rows, or none that is good.
        ValueError: at once, there is no such kind.
        ImportError: at once or at the first row, reading it needs the extra `rl-algorithms[data]`.
    """
    if kind not in NAMES:
        raise ValueError(f"kind={kind!r} is not one of {', '.join(each.__name__ for each in NAMES)}")
    names = dict(columns or {})
    for ours in names:
        if ours not in NAMES[kind]:
            raise DataError(
                f"columns={names}: a {kind.__name__} has no {ours!r}; it has {', '.join(NAMES[kind])}"
                f"{nearest(ours, list(NAMES[kind]))}"
            )
    records = open_records(source, name=name)
    return _stream(records, kind=kind, names=names, adapter=adapter, skipped=skipped, prompts=prompts)


def read_jsonl(path: str | Path) -> list[Row]:
    """Read one prompt per line of a file, whatever it is called; blank lines are skipped.

    Raises:
        DataError: the file is missing or empty, or a line is not a JSON object with a usable `prompt` (and a text
            `answer`, if there is one). The message names file, line and field.
    """
    return list(_stream(open_lines(Path(path)), kind=Row, names={}, adapter=None, skipped=None))


def _stream(
    source: Records,
    *,
    kind: type[RowT],
    names: Mapping[str, str],
    adapter: Adapter | None,
    skipped: SkippedRows | None,
    prompts: PromptTemplate | None = None,
) -> Iterator[RowT]:
    num_read, num_made, last = 0, 0, ""
    for where, record in source.records:
        num_read += 1
        try:
            columns = _mapped(where, _adapted(where, parse_record(where, record), adapter), names)
            row = _made(kind, RawRow(columns=columns, where=where, names=names, fills_none=source.fills_none))
            row = row if prompts is None else replace(row, messages=prompts.applied(row))
        except DataError as error:
            if skipped is None:
                raise
            last = str(error)
            skipped.add(error)
        else:
            num_made += 1
            if skipped is not None:
                skipped.read += 1
            yield row
    if not num_read:
        raise DataError(f'{source.name}: has no rows; each is an object such as {{"prompt": "2+2=", "answer": "4"}}')
    if not num_made:
        raise DataError(f"{source.name}: none of its {num_read} rows can be used; of the last: {last}")


def _adapted(where: str, columns: Mapping[str, object], adapter: Adapter | None) -> Mapping[str, object]:
    if adapter is None:
        return columns
    try:
        return adapter(columns)
    except Exception as error:
        name = getattr(adapter, "__name__", "the adapter")
        raise DataError(f"{where}: {name} cannot read the row: {type(error).__name__}: {error}") from error


def _mapped(where: str, columns: Mapping[str, object], names: Mapping[str, str]) -> Mapping[str, object]:
    mapped = {name: _column(where, columns, theirs) for name, theirs in names.items()}
    for name, theirs in names.items():
        if theirs != name and name in columns:
            raise DataError(
                f"{where}: {theirs!r} is to be read as {name!r}, and the row has a field {name!r} of its own, which "
                f"would be lost; rename that one first (an adapter can)"
            )
    return {**columns, **mapped}


def _column(where: str, columns: Mapping[str, object], name: str) -> object:
    if name in columns:
        return columns[name]
    value: object = columns
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            known = [*map(str, value)] if isinstance(value, Mapping) else []
            listed = ", ".join(map(repr, known)) or "no fields"
            place = "the row" if value is columns else "what is there"
            raise DataError(f"{where}: field {name!r} is missing; {place} has {listed}{nearest(part, known)}")
        value = value[part]
    return value


def _made(kind: type[RowT], raw: RawRow) -> RowT:
    try:
        return cast("RowT", make(kind, raw))
    except RecursionError as error:
        raise DataError(f"{raw.where}: cannot be read ({error}): it is nested too deeply") from error

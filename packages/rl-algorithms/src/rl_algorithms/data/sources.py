"""Where rows come from: JSON Lines, JSON, Parquet, what `datasets` saved or can load, or any iterable of columns.

It gives each row's columns, and where they stand. Files are read row by row; a JSON Lines file never has more than one
line in memory, a Parquet file one batch. `pyarrow` and `datasets` are imported only by what needs them.
"""

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from rl_algorithms.data.fields import nearest, parse_json
from rl_algorithms.data.rows import DataError

__all__ = ["Records", "Source", "open_records", "parse_record"]

Record: TypeAlias = tuple[str, object]
"""Where a row stands, and its columns: a mapping, or `bytes` that are a line of JSON still to be parsed."""

LINES = (".jsonl", ".ndjson")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How many rows of a Parquet file are in memory at once; a row may hold a conversation of a megabyte.
PARQUET_BATCH_ROWS = 256
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Data to read, where a path alone does not say which."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    path: str
    """A file (`.jsonl`, `.json`, `.parquet`), a folder that `datasets` wrote or can load, or the id of a data set on
    the Hugging Face hub. What exists here is taken before what is on the hub."""

    split: str | None = None
    """Which split of a data set, such as `train` or `train[:1000]`; needed where there are several."""

    name: str | None = None
    """Which configuration of a data set on the hub, where there are several."""

    revision: str | None = None
    """Which commit, tag or branch of a data set on the hub. Without one, a run tomorrow may read other data."""

    def __post_init__(self) -> None:
        for name in ("path", "split", "name", "revision"):
            if getattr(self, name) == "":
                raise ValueError(f"{name}='' must not be empty; leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Rows that nothing is known of yet."""

    name: str
    """What error messages call the data."""

    records: Iterator[Record]
    """Each row, once, in order."""

    fills_none: bool = False
    """Whether keys that some messages lack are there as None: so does Arrow."""


def open_records(source: str | Path | Source | Iterable[Mapping[str, object]], *, name: str | None = None) -> Records:
    """Open `source` and read no more than its beginning; error messages call rows of an iterable `name[index]`.

    Raises:
        DataError: it cannot be read, is of no known kind, or has no such split.
        ImportError: reading it needs the extra `rl-algorithms[data]`.
    """
    if isinstance(source, Path):
        source = Source(path=str(source))
        return _open_file(source) if not Path(source.path).is_dir() else _open_folder(source)
    if isinstance(source, str):
        source = Source(path=source)
    if not isinstance(source, Source):
        name = type(source).__name__ if name is None else name
        records = ((f"{name}[{index}]", columns) for index, columns in enumerate(source))
        return Records(name=name, records=records, fills_none=hasattr(source, "features"))
    path = Path(source.path)
    if path.is_dir():
        return _open_folder(source)
    if path.exists() or path.suffix in (*LINES, ".json", ".parquet") or not HUB_ID.fullmatch(source.path):
        return _open_file(source)
    return _open_hub(source)


def parse_record(where: str, record: object) -> Mapping[str, object]:
    """The columns of a record.

    Raises:
        DataError: it is no JSON, or not an object.
    """
    columns = _parse(where, record) if isinstance(record, bytes) else record
    if not isinstance(columns, Mapping):
        what = "line must be a JSON object" if isinstance(record, bytes) else "row must be a mapping of columns"
        raise DataError(f"{where}: each {what}, found {type(columns).__name__}")
    return columns


def _parse(where: str, content: bytes) -> object:
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: is not UTF-8 text (byte {error.start}); JSON is UTF-8") from error
    try:
        columns: object = parse_json(text)
        json.dumps(columns, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} " * ("\n" in text) + f"column {error.colno}"
        raise DataError(f"{where}: is not valid JSON ({error.msg} at {place}): {text[:60]!r}") from error
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, half a character, a thousand brackets
        raise DataError(f"{where}: cannot be read ({error}): {text[:60]!r}") from error
    return columns


# -- Files ---------------------------------------------------------------------------------------------------------


def _open_file(source: Source) -> Records:
    for name in ("split", "name", "revision"):
        if value := getattr(source, name):
            raise DataError(f"{source.path}: {name}={value!r} is for data sets, and this is a file; leave it out")
    path = Path(source.path)
    try:
        with path.open("rb") as file:
            start = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); give a .jsonl, .json or .parquet file, a folder of "
            f"`datasets`, or the id of a data set on the hub"
        ) from error
    if path.suffix == ".parquet":
        return Records(name=str(path), records=_parquet(path), fills_none=True)
    if path.suffix == ".json" and not start.startswith(b"{"):
        return Records(name=str(path), records=_json_list(path))
    if path.suffix in (*LINES, ".json"):
        return open_lines(path)
    raise DataError(f"{path}: is of no known kind; known are .jsonl, .ndjson, .json and .parquet")


def open_lines(path: Path) -> Records:
    """A file of one JSON object a line, whatever its name; blank lines are skipped."""
    return Records(name=str(path), records=_lines(path))


def _lines(path: Path) -> Iterator[Record]:
    try:
        with path.open("rb") as file:  # split at \n alone: strings of JSON may hold what else ends a line of text
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if content.strip():
                    yield f"{path}:{number}", content.rstrip(b"\r\n")
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); give a JSONL file with one row per line"
        ) from error


def _json_list(path: Path) -> Iterator[Record]:
    rows = _parse(str(path), path.read_bytes().removeprefix(BYTE_ORDER_MARK))
    if not isinstance(rows, list):
        raise DataError(f"{path}: must be a list of objects, or one object per line; found {type(rows).__name__}")
    yield from ((f"{path}[{index}]", columns) for index, columns in enumerate(rows))


def _parquet(path: Path) -> Iterator[Record]:
    parquet, errors = (_import(module, needed_by=str(path)) for module in ("pyarrow.parquet", "pyarrow.lib"))
    index = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                for columns in batch.to_pylist():
                    yield f"{path}[{index}]", columns
                    index += 1
    except (OSError, errors.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Parquet, after {index} rows ({error})") from error


# -- Data sets of Hugging Face -------------------------------------------------------------------------------------


def _open_folder(source: Source) -> Records:
    datasets = _import("datasets", needed_by=source.path)
    folder = Path(source.path)
    if source.revision:
        raise DataError(f"{folder}: revision={source.revision!r} is for the hub, and this is a folder; leave it out")
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        return _load(datasets, source)
    if source.name:
        raise DataError(f"{folder}: name={source.name!r} is for data sets with configurations; leave it out")
    try:
        saved = datasets.load_from_disk(str(folder))
    except Exception as error:
        raise DataError(f"{folder}: `datasets` cannot load it ({type(error).__name__}: {error})") from error
    if isinstance(saved, datasets.DatasetDict):
        saved = _pick_split(source, saved)
    elif source.split:
        raise DataError(f"{folder}: split={source.split!r}, and this is a data set without splits; leave it out")
    return _of_dataset(source.path, saved)


def _open_hub(source: Source) -> Records:
    return _load(_import("datasets", needed_by=source.path), source)


def _load(datasets: Any, source: Source) -> Records:
    try:
        loaded = datasets.load_dataset(source.path, source.name, split=source.split, revision=source.revision)
    except Exception as error:  # the hub, the network, a script, a split: each has errors of its own
        here = (
            "" if Path(source.path).exists() else " (there is no such file or folder here, so it is taken for its id)"
        )
        options = ", ".join(
            f"{name}={value!r}" for name in ("name", "split", "revision") if (value := getattr(source, name))
        )
        raise DataError(
            f"{source.path}: `datasets` cannot load it{here}{' with ' * bool(options)}{options}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return _of_dataset(source.path, _pick_split(source, loaded) if isinstance(loaded, Mapping) else loaded)


def _pick_split(source: Source, splits: Mapping[str, Any]) -> Any:
    names = [str(name) for name in splits]
    if source.split is None and len(names) == 1:
        return splits[names[0]]
    if source.split is None:
        raise DataError(f"{source.path}: has the splits {', '.join(names)}; say which, as in split={names[0]!r}")
    if source.split not in names:
        raise DataError(
            f"{source.path}: has no split {source.split!r}; it has {', '.join(names)}{nearest(source.split, names)}"
        )
    return splits[source.split]


def _of_dataset(path: str, dataset: Any) -> Records:
    name = f"{path}:{dataset.split}" if dataset.split else path
    records = ((f"{name}[{index}]", columns) for index, columns in enumerate(dataset))
    return Records(name=name, records=records, fills_none=True)


def _import(module: str, *, needed_by: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ImportError(
            f"{needed_by}: reading it needs {package}, which cannot be imported ({error}): "
            f"pip install 'rl-algorithms[data]'"
        ) from error

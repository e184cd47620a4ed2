"""Where rows come from: JSON Lines, JSON, CSV, Parquet, Arrow, `datasets`, or any iterable of columns.

It gives each row's columns, and where they stand. Files are read row by row; a JSON Lines file never has more than one
line in memory, a Parquet file one batch. `pyarrow` and `datasets` are imported only by what needs them.
"""

import csv
import glob
import gzip
import importlib
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from rl_algorithms.data.fields import nearest, parse_json
from rl_algorithms.rows import DataError

__all__ = ["Records", "Source", "open_records", "parse_record"]

Record: TypeAlias = tuple[str, object]
"""Where a row stands, and its columns: a mapping, or `bytes` that are a line of JSON still to be parsed."""

LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
GLOB = re.compile(r"[*?\[]")
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How many rows of a Parquet file are in memory at once; a row may hold a conversation of a megabyte.
PARQUET_BATCH_ROWS = 256
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Data to read, where a path alone does not say which."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    path: str
    """A file (`.jsonl`, `.json`, `.csv`, `.tsv`, each also with `.gz`, `.parquet`, `.arrow`), a pattern of such files
    (`shards/*.parquet`, read in the order of their names), a folder that `datasets` wrote or can load, or the id of a
    data set on the Hugging Face hub. What exists here is taken before what is on the hub."""

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
    if GLOB.search(source.path) and not path.exists():
        return _open_shards(source)
    if path.exists() or _kind(path) is not None or not HUB_ID.fullmatch(source.path):
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
    path, kind = Path(source.path), _kind(Path(source.path))
    try:
        with _open(path) as file:
            start = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror or error}); give a .jsonl, .json, .csv, .parquet or .arrow file, "
            f"a folder of `datasets`, or the id of a data set on the hub"
        ) from error
    if kind == ".parquet":
        return Records(name=str(path), records=_parquet(path), fills_none=True)
    if kind == ".arrow":
        return Records(name=str(path), records=_arrow(path), fills_none=True)
    if kind in TABLES:
        return Records(name=str(path), records=_table(path, delimiter=TABLES[kind]))
    if kind == ".json" and not start.startswith(b"{"):
        return Records(name=str(path), records=_json_list(path))
    if kind is not None:
        return open_lines(path)
    raise DataError(
        f"{path}: is of no known kind; known are .jsonl, .ndjson, .json, .csv, .tsv (each also with .gz), .parquet and "
        f".arrow"
    )


def _kind(path: Path) -> str | None:
    """The suffix that says what a file is, without .gz; None of an unknown one."""
    packed = path.suffix == ".gz"
    suffix = path.with_suffix("").suffix if packed else path.suffix
    return suffix if suffix in (*LINES, ".json", *TABLES, *(() if packed else (".parquet", ".arrow"))) else None


def _open(path: Path) -> Any:
    """A file of bytes, unpacked if it is packed."""
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _open_shards(source: Source) -> Records:
    paths = sorted(glob.glob(source.path, recursive=True))  # noqa: PTH207 - a pattern may be absolute
    if not paths:
        raise DataError(f"{source.path}: no file has a name of this pattern")
    shards = [_open_file(replace(source, path=path)) for path in paths]
    records = itertools.chain.from_iterable(shard.records for shard in shards)
    return Records(name=source.path, records=records, fills_none=any(shard.fills_none for shard in shards))


def _table(path: Path, *, delimiter: str) -> Iterator[Record]:
    """Rows of a file with a header. Every value is text; one that is missing is None."""
    try:
        with _open(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            reader = csv.DictReader(text, delimiter=delimiter, strict=True)
            for columns in reader:
                where = f"{path}:{reader.line_num}"
                if None in columns:
                    raise DataError(f"{where}: has more values than the header has names ({reader.fieldnames})")
                yield where, columns
    except (csv.Error, UnicodeDecodeError, OSError, EOFError) as error:
        raise DataError(f"{path}: cannot be read as a table ({error})") from error


def _arrow(path: Path) -> Iterator[Record]:
    ipc, errors = (_import(module, needed_by=str(path)) for module in ("pyarrow.ipc", "pyarrow.lib"))
    index = 0
    try:
        with path.open("rb") as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = ipc.open_file(file) if is_file else ipc.open_stream(file)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            for batch in batches:
                for columns in batch.to_pylist():
                    yield f"{path}[{index}]", columns
                    index += 1
    except (OSError, errors.ArrowException) as error:
        raise DataError(f"{path}: cannot be read as Arrow, after {index} rows ({error})") from error


def open_lines(path: Path) -> Records:
    """A file of one JSON object a line, whatever its name; blank lines are skipped."""
    return Records(name=str(path), records=_lines(path))


def _lines(path: Path) -> Iterator[Record]:
    try:
        with _open(path) as file:  # split at \n alone: strings of JSON may hold what else ends a line of text
            for number, line in enumerate(file, start=1):
                content = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if content.strip():
                    yield f"{path}:{number}", content.rstrip(b"\r\n")
    except (OSError, EOFError) as error:  # a packed file that was cut off ends early
        raise DataError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}); give a JSONL file with one row per "
            f"line"
        ) from error


def _json_list(path: Path) -> Iterator[Record]:
    with _open(path) as file:
        rows = _parse(str(path), file.read().removeprefix(BYTE_ORDER_MARK))
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
        saved = _pick_split(source, {str(saved.split or "train"): saved})
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
    if source.split in names:
        return splits[source.split]
    datasets = _import("datasets", needed_by=source.path)
    try:  # as `datasets` reads `train[:1000]`, `train[10%:]` and `train+validation`
        sizes = {name: len(splits[name]) for name in names}
        parts = datasets.ReadInstruction.from_spec(source.split).to_absolute(sizes)
    except Exception as error:
        asked = re.split(r"\W", source.split)[0]
        reason = f" ({error})" if asked in names else ""
        raise DataError(
            f"{source.path}: has no split {source.split!r}; it has {', '.join(names)}{nearest(asked, names)}{reason}"
        ) from error
    selected = [
        splits[part.splitname].select(range(*slice(part.from_, part.to).indices(sizes[part.splitname])))
        for part in parts
    ]
    return selected[0] if len(selected) == 1 else datasets.concatenate_datasets(selected)


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

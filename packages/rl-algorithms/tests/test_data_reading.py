"""Claims about reading: every source gives the same rows, one at a time, and no row is lost without a word."""

import itertools
import json
import sys

import pytest

from rl_algorithms.data import (
    ConversationRow,
    DataError,
    PreferenceRow,
    Row,
    SkippedRows,
    Source,
    read_rows,
    stream_rows,
)

NEEDS_DATA = "reads Parquet and data sets, which the extra rl-algorithms[data] brings"
CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
TALK = [{"role": "user", "content": "2+2="}, CALL, {"role": "tool", "content": "4"}]
COLUMNS = [
    {"prompt": TALK, "answer": "4", "level": 3, "info": {"x": [1, 2]}},
    {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2", "level": 4, "info": {"x": []}},
]


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow", reason=NEEDS_DATA)
    parquet = pytest.importorskip("pyarrow.parquet", reason=NEEDS_DATA)
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def dataset_of(rows):
    datasets = pytest.importorskip("datasets", reason=NEEDS_DATA)
    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(rows)


def check(rows, wheres):
    assert [row.messages for row in rows] == [tuple(TALK), tuple(COLUMNS[1]["prompt"])]
    assert [row.answer for row in rows] == ["4", "2"]
    assert [{name: row.columns[name] for name in ("level", "info")} for row in rows] == [
        {name: columns[name] for name in ("level", "info")} for columns in COLUMNS
    ]
    assert [row.where for row in rows] == wheres


def test_lines_and_lists_of_json_are_the_same_rows(tmp_path):
    lines, listed = write(tmp_path / "a.jsonl", COLUMNS), tmp_path / "a.json"
    check(read_rows(lines, kind=Row), [f"{lines}:1", f"{lines}:2"])
    listed.write_text(json.dumps(COLUMNS, indent=2))
    check(read_rows(str(listed), kind=Row), [f"{listed}[0]", f"{listed}[1]"])
    as_lines = write(tmp_path / "b.json", COLUMNS)
    check(read_rows(as_lines, kind=Row), [f"{as_lines}:1", f"{as_lines}:2"])
    check(read_rows(COLUMNS, kind=Row), ["list[0]", "list[1]"])


def test_parquet_gives_the_rows_that_json_gives(tmp_path):
    file = write_parquet(tmp_path / "a.parquet", COLUMNS)
    check(read_rows(file, kind=Row), [f"{file}[0]", f"{file}[1]"])


def test_keys_that_arrow_adds_to_messages_are_no_keys_of_them(tmp_path):
    def row(name, parameter):
        call = {"function": {"name": name, "arguments": {parameter: 1}}}
        schema = {"name": name, "parameters": {"properties": {parameter: {"type": "integer"}}}}
        messages = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"type": "function", "function": schema}]}

    rows = [row("f", "a"), row("g", "b")]
    file = write_parquet(tmp_path / "a.parquet", rows)
    read = read_rows(file, kind=ConversationRow)
    assert [[*row.messages] for row in read] == [row["messages"] for row in rows]
    assert [[*row.tools] for row in read] == [row["tools"] for row in rows]


@pytest.mark.parametrize("how", ["object", "saved", "saved splits", "folder"])
def test_data_sets_give_the_rows_that_json_gives(tmp_path, how, monkeypatch):
    dataset = dataset_of(COLUMNS)
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "set"
    if how == "object":
        check(read_rows(dataset, kind=Row), ["Dataset[0]", "Dataset[1]"])
    elif how == "saved":
        dataset.save_to_disk(folder)
        check(read_rows(folder, kind=Row), [f"{folder}[0]", f"{folder}[1]"])
        assert [row.answer for row in read_rows(Source(path=str(folder), split="train[:1]"), kind=Row)] == ["4"]
        with pytest.raises(DataError, match="has no split 'test'; it has train"):
            read_rows(Source(path=str(folder), split="test"), kind=Row)
    elif how == "saved splits":
        datasets.DatasetDict({"train": dataset, "test": dataset}).save_to_disk(folder)
        source = Source(path=str(folder), split="test")
        assert [row.answer for row in read_rows(source, kind=Row)] == ["4", "2"]
        with pytest.raises(DataError, match=r"set: has the splits train, test; say which, as in split='train'"):
            read_rows(folder, kind=Row)
        with pytest.raises(DataError, match=r"no split 'tset'; it has train, test; 'test' is the nearest"):
            read_rows(Source(path=str(folder), split="tset"), kind=Row)
    else:
        folder.mkdir()
        write(folder / "train.jsonl", COLUMNS)
        check(
            read_rows(Source(path=str(folder), split="train"), kind=Row), [f"{folder}:train[0]", f"{folder}:train[1]"]
        )
        with pytest.raises(DataError, match=r"set: `datasets` cannot load it with split='test': ValueError"):
            read_rows(Source(path=str(folder), split="test"), kind=Row)


def test_the_hub_is_asked_for_what_does_not_exist_here(monkeypatch):
    datasets = pytest.importorskip("datasets", reason=NEEDS_DATA)
    asked = []

    def load_dataset(*args, **options):
        asked.append((args, options))
        if options["split"] == "gone":
            raise FileNotFoundError("no such split")
        return dataset_of(COLUMNS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)  # there is no network in a test
    source = Source(path="someone/sums", name="easy", split="train", revision="abc")
    assert [row.where for row in read_rows(source, kind=Row)] == ["someone/sums[0]", "someone/sums[1]"]
    assert asked == [(("someone/sums", "easy"), {"split": "train", "revision": "abc"})]
    with pytest.raises(DataError, match=r"someone/sums: .*taken for its id\) with split='gone': FileNotFoundError"):
        read_rows(Source(path="someone/sums", split="gone"), kind=Row)


@pytest.mark.parametrize("module", ["pyarrow.parquet", "datasets"])
def test_a_missing_extra_is_named(tmp_path, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    source = tmp_path / "a.parquet" if module.startswith("pyarrow") else "someone/sums"
    with pytest.raises(ImportError, match=r"(a.parquet|someone/sums): .* pip install 'rl-algorithms\[data\]'"):
        read_rows(source, kind=Row)


def test_a_broken_parquet_file_is_refused(tmp_path):
    pytest.importorskip("pyarrow", reason=NEEDS_DATA)
    file = tmp_path / "a.parquet"
    file.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"a\.parquet: cannot be read as Parquet, after 0 rows"):
        read_rows(file, kind=Row)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a.xls", "cannot be read|is of no known kind; known are .jsonl"),
        ("./nowhere", "cannot be read .*; give a .jsonl"),
        (Source(path="a.jsonl", split="train"), "split='train' is for data sets, and this is a file"),
        ([], "list: has no rows"),
        (iter(["a"]), r"list_iterator\[0\]: each row must be a mapping of columns, found str"),
    ],
)
def test_what_cannot_be_read_is_refused(tmp_path, source, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.xls").touch()
    with pytest.raises(DataError, match=message):
        read_rows(source, kind=Row)


def test_a_source_without_a_path_is_refused():
    with pytest.raises(ValueError, match="path='' must not be empty"):
        Source(path="")


def test_a_file_is_read_line_by_line(tmp_path):
    file = write(tmp_path / "a.jsonl", [COLUMNS[0], COLUMNS[1], "broken"])
    rows = stream_rows(file, kind=Row)
    assert [row.answer for row in itertools.islice(rows, 2)] == ["4", "2"]
    with pytest.raises(DataError, match=r"a\.jsonl:3: is not valid JSON"):
        next(rows)


def test_columns_are_mapped_and_theirs_stay(tmp_path):
    columns = {"question": "2+2=", "meta": {"solution": "4"}, "level": 3}
    file = write(tmp_path / "a.jsonl", [columns])
    (row,) = read_rows(file, kind=Row, columns={"prompt": "question", "answer": "meta.solution"})
    assert (row.prompt, row.answer) == ("2+2=", "4")
    assert row.columns == {**columns, "prompt": "2+2=", "answer": "4"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": "question"}, "a Row has no 'promt'; it has prompt, answer, tools; 'prompt' is the nearest"),
        (
            {"prompt": "questions"},
            r"list\[0\]: field 'questions' is missing; the row has 'question', .*; 'question' is",
        ),
        ({"prompt": "meta.solutoin"}, r"field 'meta.solutoin' is missing; what is there has 'solution'; 'solution' is"),
        ({"prompt": "question", "answer": "meta.solution"}, "a field 'answer' of its own, which would be lost"),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(columns, message):
    rows = [{"question": "2+2=", "meta": {"solution": "4"}, "answer": "because"}]
    with pytest.raises(DataError, match=message):
        read_rows(rows, kind=Row, columns=columns)


def test_skipped_rows_are_counted_and_the_first_are_named(tmp_path):
    file = write(tmp_path / "a.jsonl", [COLUMNS[0], "broken", *[{"prompt": 3}] * 9, COLUMNS[1]])
    skipped = SkippedRows(keep=2)
    assert [row.answer for row in read_rows(file, kind=Row, skipped=skipped)] == ["4", "2"]
    assert (skipped.read, skipped.count) == (12, 10)
    lines = str(skipped).split("\n  ")
    assert lines[0] == "skipped 10 of 12 rows"
    assert lines[1].startswith(f"{file}:2: is not valid JSON")
    assert lines[2].startswith(f"{file}:3: field 'prompt' must be text")
    assert lines[3:] == ["... and 8 more"]
    skipped.leave_out(DataError("too long"))
    assert (skipped.read, skipped.count) == (12, 11)


def test_nothing_but_bad_rows_is_an_error_even_when_they_may_be_skipped(tmp_path):
    file = write(tmp_path / "a.jsonl", [{"prompt": 3}] * 7)
    with pytest.raises(DataError, match=r"a\.jsonl: none of its 7 rows can be used; of the last: .*a\.jsonl:7: field"):
        read_rows(file, kind=Row, skipped=SkippedRows())


def test_what_an_adapter_raises_names_the_row():
    def halve(columns):
        return {"prompt": columns["text"], "answer": str(columns["n"] // 2)}

    rows = [{"text": "a", "n": 4}, {"text": "b", "n": "4"}]
    assert read_rows(rows[:1], kind=Row, adapter=halve)[0].answer == "2"
    with pytest.raises(DataError, match=r"list\[1\]: halve cannot read the row: TypeError"):
        read_rows(rows, kind=Row, adapter=halve)


def test_a_row_of_a_file_that_is_no_text_is_named(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2: is not UTF-8 text \(byte 12\)"):
        read_rows(file, kind=Row)
    listed = tmp_path / "a.json"
    listed.write_text('[{"prompt": "a"},\n{"prompt" "b"}]')
    with pytest.raises(DataError, match=r"a\.json: is not valid JSON \(.* at line 2 column 11\)"):
        read_rows(listed, kind=Row)


def test_reading_json_imports_nothing_heavy(tmp_path):
    import subprocess

    file = write(tmp_path / "a.jsonl", [{"chosen": "a b", "rejected": "a c"}])
    code = (
        "import sys; from rl_algorithms.data import PreferenceRow, read_rows; "
        f"read_rows({str(file)!r}, kind=PreferenceRow); "
        "assert not {'pyarrow', 'datasets', 'pandas'} & set(sys.modules)"
    )
    assert PreferenceRow  # the name that the program imports
    subprocess.run([sys.executable, "-c", code], check=True)

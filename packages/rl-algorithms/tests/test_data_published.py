"""Data as the field publishes it: answers of any kind, tables, packed files, shards, slices, mixtures, streams."""

import csv
import gzip
import itertools
import json

import pytest

from rl_algorithms.data import (
    DataError,
    MixedSource,
    PromptTemplate,
    Row,
    Source,
    StreamedBatches,
    load_dataset,
    make_row,
    read_rows,
    stream_rows,
)
from rl_algorithms.data.config import DataConfig, read_configured
from rl_algorithms.data.reading import SkippedRows

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(12)]


def prompts(source, **options):
    return [row.prompt for row in read_rows(source, kind=Row, **options)]


@pytest.mark.parametrize("answer", [70, 0.5, [1, 2], {"x": 1}, None, True, "4"])
def test_an_answer_may_be_any_json_and_reaches_the_reward_as_it_is(answer):
    row = make_row({"prompt": "?", "answer": answer}, where="row 0")
    assert row.columns["answer"] is answer
    wanted = {70: "70", 0.5: "0.5", "4": "4"}
    assert row.answer == (wanted.get(answer) if isinstance(answer, str | int | float) and answer is not True else None)


def test_parts_that_are_all_text_are_joined():
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2="}]
    row = make_row({"prompt": [{"role": "user", "content": parts}]}, where="row 0")
    assert row.prompt == "2+2="
    picture = [*parts, {"type": "image_url", "image_url": {"url": "x"}}]
    with pytest.raises(DataError, match=r"row 0: field 'prompt\[0\].content\[2\]' is a part of type 'image_url'"):
        make_row({"prompt": [{"role": "user", "content": picture}]}, where="row 0")


def test_tables_and_packed_files_are_read(tmp_path):
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, ["prompt", "answer"], delimiter=delimiter)
            writer.writeheader()
            writer.writerows(ROWS)
    for name, text in {
        "a.jsonl.gz": "\n".join(map(json.dumps, ROWS)),
        "a.json.gz": json.dumps(ROWS),
        "a.csv.gz": (tmp_path / "a.csv").read_text(),
    }.items():
        with gzip.open(tmp_path / name, "wt") as file:
            file.write(text)
    wanted = [row["prompt"] for row in ROWS]
    for name in ("a.csv", "a.tsv", "a.jsonl.gz", "a.json.gz", "a.csv.gz"):
        assert prompts(str(tmp_path / name)) == wanted, name
    (tmp_path / "b.csv").write_text("prompt,answer\n1,2,3\n")
    with pytest.raises(DataError, match=r"b\.csv:2: has more values than the header"):
        prompts(str(tmp_path / "b.csv"))


def test_shards_are_read_in_the_order_of_their_names(tmp_path):
    for shard in (2, 0, 1):
        lines = map(json.dumps, ROWS[4 * shard : 4 * shard + 4])
        (tmp_path / f"train-{shard}.jsonl").write_text("\n".join(lines))
    assert prompts(str(tmp_path / "train-*.jsonl")) == [row["prompt"] for row in ROWS]
    with pytest.raises(DataError, match="no file has a name of this pattern"):
        prompts(str(tmp_path / "test-*.jsonl"))


def test_arrow_files_and_slices_of_saved_sets_are_read(tmp_path):
    datasets = pytest.importorskip("datasets")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "plain"))
    datasets.DatasetDict(train=saved, test=saved.select(range(3))).save_to_disk(str(tmp_path / "both"))
    wanted = [row["prompt"] for row in ROWS]
    (arrow,) = (tmp_path / "plain").glob("*.arrow")
    assert prompts(str(arrow)) == wanted
    for split, rows in {
        "train[:5]": wanted[:5],
        "train[50%:]": wanted[6:],
        "test+train[:1]": [*wanted[:3], wanted[0]],
        "train": wanted,
    }.items():
        assert prompts(Source(path=str(tmp_path / "both"), split=split)) == rows
    assert prompts(Source(path=str(tmp_path / "plain"), split="train[-2:]")) == wanted[-2:]
    with pytest.raises(DataError, match="has no split 'trian"):
        prompts(Source(path=str(tmp_path / "both"), split="trian[:5]"))


def test_prompts_are_put_into_a_template_behind_a_system_prompt():
    template = PromptTemplate(system_prompt="Be brief.", prompt_template="{level}: {prompt} Box it: \\boxed{{}}.")
    given = [
        {"prompt": "2+2=", "level": 3},
        {"prompt": [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}], "level": 1},
    ]
    first, second = read_rows(given, kind=Row, prompts=template)
    assert first.messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3: 2+2= Box it: \\boxed{}."},
    )
    assert [each["content"] for each in second.messages] == ["Mine.", "1: x Box it: \\boxed{}."]
    assert first.columns["prompt"] == "2+2="
    with pytest.raises(DataError, match=r"list\[0\]: prompt_template=.*cannot be filled.*'level'"):
        read_rows([{"prompt": "2"}], kind=Row, prompts=template)
    with pytest.raises(ValueError, match=r"has no \{prompt\}"):
        PromptTemplate(prompt_template="Say it.")


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_sets_are_mixed_by_weight_and_what_one_holds_out_no_other_trains_on(tmp_path):
    other = write(tmp_path / "b.jsonl", [{"prompt": f"b{n}"} for n in range(30)] + ROWS[:3])
    first = write(tmp_path / "a.jsonl", [{"prompt": f"a{n}"} for n in range(10)] + ROWS[:3])
    data = load_dataset(first, form="prompts", mix={"b": MixedSource(source=other, weight=3.0)}, seed=1)
    drawn = [row.prompt for row in data.train]
    ours = sum(row.where.startswith(first) for row in data.train)
    assert abs(len(drawn) - 4 * ours) <= 4
    held_out = {row.prompt for row in data.held_out}
    assert not held_out & {*drawn}
    assert {*drawn} | held_out == {row["prompt"] for row in ROWS[:3]} | {f"a{n}" for n in range(10)} | {
        f"b{n}" for n in range(30)
    }
    with pytest.raises(DataError, match="raise the weight of 'b'"):
        load_dataset(first, form="prompts", mix={"b": MixedSource(source=other, weight=1e-4)})


def test_a_recipe_names_validation_set_mixture_and_template(tmp_path):
    config = DataConfig(
        source=write(tmp_path / "a.jsonl", ROWS[:6]),
        held_out=write(tmp_path / "v.jsonl", ROWS[6:9]),
        mix={"more": write(tmp_path / "m.jsonl", ROWS[9:])},
        mix_weights={"more": 2.0},
        prompt_template="Q: {prompt}",
    )
    data = read_configured(config, sampled_by="grpo", skipped=SkippedRows())
    assert {row.prompt for row in data.held_out} == {f"Q: {row['prompt']}" for row in ROWS[6:9]}
    assert {row.prompt for row in data.train} == {f"Q: {row['prompt']}" for row in [*ROWS[:6], *ROWS[9:]]}
    for wrong, message in (
        ({"held_out_share": 0.1, "held_out": "v"}, "set one of them"),
        ({"mix_weights": {"b": 2.0}}, "mix_weights names b, and the sets are source"),
        ({"mix_splits": {"b": "train"}}, "mix_splits names b"),
        ({"mix_weights": {"source": 0.0}}, "must be finite and > 0"),
        (
            {"prompt_format": "plain", "chat_template_kwargs": {"enable_thinking": False}},
            "plain has none",
        ),
        ({"prompt_template": "x"}, r"has no \{prompt\}"),
    ):
        with pytest.raises(ValueError, match=message):
            DataConfig(source="a", **wrong)


@pytest.mark.parametrize("buffer", [1, 4, 100])
def test_a_stream_goes_on_from_any_position(tmp_path, buffer):
    path = write(tmp_path / "a.jsonl", ROWS)

    def stream():
        return StreamedBatches(lambda: stream_rows(path, kind=Row), size=5, buffer=buffer, seed=3)

    whole = stream()
    seen, states = [], []
    for batch in itertools.islice(whole, 7):
        seen.append([row.prompt for row in batch])
        states.append(json.loads(json.dumps(whole.state())))
    for place, state in enumerate(states):
        rest = stream()
        rest.load_state(state)
        assert [[row.prompt for row in batch] for batch in itertools.islice(rest, 7 - place - 1)] == seen[place + 1 :]
    flat = list(itertools.chain(*seen))
    assert sorted(flat[:12]) == sorted(flat[12:24]) == sorted(row["prompt"] for row in ROWS)
    assert (flat[:12] == [row["prompt"] for row in ROWS]) == (buffer == 1)
    other = StreamedBatches(lambda: iter([1]), size=1, buffer=buffer, seed=4)
    with pytest.raises(DataError, match="seed=3"):
        other.load_state(states[0])
    with pytest.raises(DataError, match="no items"):
        next(StreamedBatches(list, size=1, seed=0))

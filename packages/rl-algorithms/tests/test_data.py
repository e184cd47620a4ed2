"""Claims about data: what is read, what is refused, what is held out, in which order it comes."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_algorithms.data import DataError, Dataset, batches, make_row, read_jsonl, split_held_out


def write(tmp_path, *lines):
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_rows_keep_every_column_and_know_their_line(tmp_path):
    file = write(
        tmp_path, {"prompt": "2+2=", "answer": "4", "level": 3}, "", {"prompt": [{"role": "user", "content": "hi"}]}
    )
    first, second = read_jsonl(file)
    assert (first.prompt, first.answer, first.columns["level"]) == ("2+2=", "4", 3)
    assert (second.prompt, second.answer, second.where) == ("hi", None, f"{file}:3")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a"', "2: is not valid JSON"),
        ("[1]", "2: each line must be a JSON object, found list"),
        ({"question": "a"}, "2: field 'prompt' is missing; the row has 'question'"),
        ({"prompt": ""}, "2: field 'prompt' is empty"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "2: field 'prompt' ends with the assistant's message"),
        ('{"prompt": "a", "level": ' + "9" * 5000 + "}", "2: cannot be read"),
        ('{"prompt": "a", "level": ' + "[" * 100000 + "}", "2: cannot be read"),
        ('{"prompt": "a", "answer": "\\ud800"}', "2: cannot be read"),
        ('{"prompt": "a", "prompt": "b"}', r"2: cannot be read \('prompt' occurs twice in one object"),
        ('{"prompt": "a", "level": {"x": 1, "x": 1}}', r"2: cannot be read \('x' occurs twice"),
        ('{"prompt": "a", "level": NaN}', r"2: cannot be read \(NaN is no JSON; write null"),
        ('{"prompt": "a", "level": [-Infinity]}', r"2: cannot be read \(-Infinity is no JSON"),
        ({"prompt": 3}, "2: field 'prompt' must be text or a list of messages"),
        ({"prompt": [{"role": "user"}]}, r"2: field 'prompt\[0\]' must have a text"),
    ],
)
def test_a_malformed_row_is_refused_by_file_line_and_field(tmp_path, line, message):
    with pytest.raises(DataError, match=rf"rows\.jsonl:{message}"):
        read_jsonl(write(tmp_path, {"prompt": "fine"}, line))


def test_a_missing_or_empty_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl: cannot be read"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="has no rows"):
        read_jsonl(write(tmp_path, ""))


def rows_of(prompts):
    return [make_row({"prompt": prompt}, where=f"row {index}") for index, prompt in enumerate(prompts)]


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=2, max_size=30).filter(lambda p: len(set(p)) > 1),
    st.floats(0.01, 0.99),
)
def test_no_prompt_is_both_trained_on_and_held_out(prompts, share):
    rows = rows_of(prompts)
    train, held_out = split_held_out(rows, share=share, seed=0)
    assert train
    assert held_out
    assert len(train) + len(held_out) == len(rows)
    Dataset(train=train, held_out=held_out, demonstrations=train)  # refuses an overlap


def test_an_overlap_is_refused():
    rows = rows_of("abc")
    with pytest.raises(DataError, match="row 2: the held-out prompt 'c' is also trained on"):
        Dataset(train=rows, held_out=rows[2:], demonstrations=[])


@pytest.mark.parametrize("share", [-1.0, 0.0, 1.0, 5.0, float("nan")])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(ValueError, match=f"share={share} must be between 0 and 1"):
        split_held_out(rows_of("abc"), share=share, seed=0)


def test_one_distinct_prompt_cannot_be_split():
    with pytest.raises(DataError, match="one distinct prompt"):
        split_held_out(rows_of("aaa"), share=0.5, seed=0)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_every_pass_is_a_shuffle_of_all_items(num_items, size, seed):
    drawn = list(
        itertools.chain.from_iterable(itertools.islice(batches(range(num_items), size=size, seed=seed), 2 * num_items))
    )
    for start in range(0, len(drawn) - num_items + 1, num_items):
        assert sorted(drawn[start : start + num_items]) == list(range(num_items))


def test_the_order_depends_on_the_seed_alone():
    def first(seed):
        return next(batches(range(50), size=50, seed=seed))

    assert first(1) == first(1) != first(2)


def test_a_byte_order_mark_and_odd_line_separators_inside_strings_are_no_obstacle(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + '{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n'.encode())
    assert [row.prompt for row in read_jsonl(file)] == ["a\u2028b", "c"]


def test_conversations_that_end_alike_are_different_prompts():
    def conversation(first):
        return [
            {"role": "user", "content": first},
            {"role": "assistant", "content": "?"},
            {"role": "user", "content": "go"},
        ]

    rows = [make_row({"prompt": conversation(first)}, where=first) for first in "abcd"]
    train, held_out = split_held_out(rows, share=0.5, seed=0)
    assert len(train) == len(held_out) == 2

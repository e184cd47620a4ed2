import argparse
import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_generation.commands.console import CommandError
from rl_generation.commands.flags import add_engine_arguments, add_sampling_arguments, override, sampling_of, spec_of
from rl_generation.commands.generate import Job, _cut_to_whole_chunks, _open_locked, _save
from rl_generation.commands.prompt_rows import check_limits, read_rows
from rl_generation.loading import EngineSpec
from rl_generation.requests import Limits, Sampling

BASE = Sampling(max_new_tokens=4, seed=3)


def rows_of(tmp_path, *lines, **options):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_rows(path, BASE, encode=encode, **options)


def encode(kind, content):
    return [len(kind), len(content)]


def test_every_field_of_sampling_has_a_flag_and_a_json_type():
    flags = ["--max-new-tokens=4", "--n=2", "--temperature=0.5", "--top-p=0.5", "--top-k=3", "--min-p=0.25"]
    flags += ["--stop-token-id=5", "--stop-token-id=6", "--stop=a", "--bad-word=b", "--ignore-eos", "--seed=7"]
    flags += ["--presence-penalty=1", "--frequency-penalty=1", "--repetition-penalty=2", "--logit-bias=5=-100"]
    flags += ["--json-schema={}", "--top-logp=2"]
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser)
    sampling = sampling_of(parser.parse_args(flags))
    changed = {field.name for field in dataclasses.fields(Sampling) if getattr(sampling, field.name) != field.default}
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert names - changed == {"min_new_tokens", "regex"}  # which are not beside the others
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((5, 6), ((5, -100.0),))
    for name in names:
        with pytest.raises(ValueError, match=f"sampling.{name} must be"):
            override(BASE, {name: object()})


def test_every_field_of_an_engine_has_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert {field.name for field in dataclasses.fields(EngineSpec)} - {action.dest for action in parser._actions} == {
        "vllm_kwargs"  # which has a flag for each of its keys
    }
    spec = spec_of(parser.parse_args(["m", "--engine=vllm", "--no-tokenizer", "--enforce-eager", "--vllm-kwarg=a=[1]"]))
    assert (spec.with_tokenizer, spec.enforce_eager, spec.vllm_kwargs) == (False, True, {"a": [1]})


@pytest.mark.parametrize("text", ["5", "5=x", "x=1", "5=-inf", "5=nan"])
def test_a_bias_is_a_token_and_a_finite_number(text, capsys):
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser, max_new_tokens=4)
    assert sampling_of(parser.parse_args(["--logit-bias", "5=-100"])).logit_bias == ((5, -100.0),)
    with pytest.raises(SystemExit):
        parser.parse_args(["--logit-bias", text])
    assert "must be a token id and a finite number" in capsys.readouterr().err


def test_rows_of_each_kind_are_read_with_their_ids_and_lines(tmp_path):
    messages = [{"role": "user", "content": "x"}]
    rows = rows_of(tmp_path, {"prompt": "a", "id": 7}, "", {"messages": messages}, {"prompt_token_ids": [1, 2]})
    assert [(row.line, row.prompt, row.id) for row in rows] == [(1, (6, 1), 7), (3, (8, 1), None), (4, (1, 2), None)]


def test_the_seed_of_a_row_is_that_of_its_place_unless_it_has_its_own(tmp_path):
    rows = rows_of(tmp_path, {"prompt": "a"}, {"prompt": "a"}, {"prompt": "a", "sampling": {"seed": 9, "n": 2}})
    spread = BASE.spread(3)
    assert [row.sampling.seed for row in rows] == [spread[0].seed, spread[1].seed, 9]
    assert rows[2].sampling.n == 2
    assert rows[2].sampling.max_new_tokens == BASE.max_new_tokens


def test_overrides_of_a_row_reach_every_field(tmp_path):
    wanted = {
        "max_new_tokens": 2,
        "n": 3,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "stop_token_ids": [5],
        "stop": ["."],
        "bad_words": ["x"],
        "ignore_eos": True,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 2,
        "logit_bias": {"5": -100, "6": 0.5},
        "regex": "a+",
        "top_logp": 3,
    }
    (row,) = rows_of(tmp_path, {"prompt": "a", "sampling": wanted})
    assert row.sampling.logit_bias == ((5, -100), (6, 0.5))
    del wanted["logit_bias"]
    (other,) = rows_of(tmp_path, {"prompt": "a", "sampling": {"min_new_tokens": 3, "json_schema": "{}"}})
    assert (other.sampling.min_new_tokens, other.sampling.json_schema) == (3, "{}")
    for name, value in wanted.items():
        assert getattr(row.sampling, name) == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "not JSON"),
        ("[1]", "must be a JSON object"),
        ({"id": 1}, "needs one of prompt, messages, prompt_token_ids; it has none"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "it has prompt and prompt_token_ids"),
        ({"prompt": 4}, "prompt must be text; got 4"),
        ({"messages": []}, "messages must be a list, not empty"),
        ({"messages": ["hi"]}, "messages must be a list, not empty"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a list of integers"),
        ({"prompt": "a", "answer": 1}, "'answer'; give --carry answer"),
        ({"prompt": "a", "id": [1]}, "id must be text or an integer"),
        ({"prompt": "a", "sampling": 3}, "sampling must be an object"),
        ({"prompt": "a", "sampling": {"temprature": 1}}, "no field 'temprature'"),
        ({"prompt": "a", "sampling": {"temperature": "1"}}, "sampling.temperature must be a number; got '1'"),
        ({"prompt": "a", "sampling": {"n": True}}, "sampling.n must be an integer; got True"),
        ({"prompt": "a", "sampling": {"n": 0}}, "n=0"),
        ({"prompt": "a", "sampling": {"stop": "x"}}, "sampling.stop must be a list of strings"),
        ({"prompt": "a", "sampling": {"logit_bias": {"x": 1}}}, "must be an object of numbers by token id"),
        ({"prompt": "a", "sampling": {"logit_bias": {"5": 1, "05": 2}}}, "logit_bias must name a token once"),
        ({"prompt": "a", "sampling": {"json_schema": {}}}, "sampling.json_schema must be text"),
        ('{"prompt": "a", "sampling": {"temperature": NaN}}', "holds NaN"),
        ('{"prompt": "a", "prompt": "b"}', "has the field 'prompt' twice"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(tmp_path, line, reason):
    with pytest.raises(CommandError, match=r"1 bad row\(s\); nothing was generated") as refusal:
        rows_of(tmp_path, {"prompt": "good"}, "", line)
    assert reason in str(refusal.value).partition("\n  line 3: ")[2]


def test_all_bad_rows_are_counted_and_the_first_ten_shown(tmp_path):
    with pytest.raises(CommandError, match=r"12 bad row\(s\)") as refusal:
        rows_of(tmp_path, *[{"prompt": 1}] * 12)
    assert str(refusal.value).count("\n  line ") == 10
    assert "and 2 more" in str(refusal.value)


def test_rows_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(CommandError, match="line 1: is not UTF-8"):
        read_rows(path, BASE, encode=encode)


def test_a_file_without_rows_and_a_file_that_is_missing_are_refused(tmp_path):
    with pytest.raises(CommandError, match="has no rows"):
        rows_of(tmp_path, "", " ")
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_rows(tmp_path / "nowhere", BASE, encode=encode)


def test_fields_are_carried_only_where_asked_for(tmp_path):
    (row,) = rows_of(tmp_path, {"prompt": "a", "answer": [1]}, carry=["answer", "level"])
    assert row.carried == {"answer": [1]}


def test_rows_beyond_the_engine_are_refused_by_line(tmp_path):
    rows = rows_of(tmp_path, {"prompt_token_ids": [1, 1]}, "", {"prompt_token_ids": [99]})
    limits = Limits(vocab_size=10, max_length=5)
    with pytest.raises(CommandError, match="2 bad row") as refusal:
        check_limits(tmp_path / "prompts.jsonl", rows, limits)
    assert "line 1: the prompt has 2 tokens, and with max_new_tokens=4 passes" in str(refusal.value)
    assert "line 3: the prompt has token id 99 at position 0" in str(refusal.value)


def lines_of(answers):
    return [
        {"index": index, "sample_index": sample, "text": "é", "finish_reason": "stop"}
        for index, count in enumerate(answers)
        for sample in range(count)
    ]


def chunks_of(answers, chunk_prompts):
    rows = lines_of(answers)
    for start in range(0, len(answers), chunk_prompts):
        yield [row for row in rows if start <= row["index"] < start + chunk_prompts]


def job_of(tmp_path, answers, *, chunk_prompts):
    rows = rows_of(tmp_path, *[{"prompt": "a", "sampling": {"n": count}} for count in answers])
    return Job(rows=rows, tokenizer=None, identity={}, circumstances={}, chunk_prompts=chunk_prompts, begun=True)


@settings(max_examples=60, deadline=None)
@given(
    answers=st.lists(st.integers(1, 3), min_size=1, max_size=7),
    chunk_prompts=st.integers(1, 4),
    share=st.floats(0, 1),
    junk=st.booleans(),
)
def test_a_file_torn_anywhere_goes_on_after_its_last_whole_chunk(tmp_path_factory, answers, chunk_prompts, share, junk):
    folder = tmp_path_factory.mktemp("torn")
    path, job = folder / "answers.jsonl", job_of(folder, answers, chunk_prompts=chunk_prompts)
    chunks = list(chunks_of(answers, chunk_prompts))
    with _open_locked(path) as output:
        assert _cut_to_whole_chunks(output, path, job) == (0, {})
        for chunk in chunks:
            _save(output, *(json.dumps(row, ensure_ascii=False) for row in chunk))
    whole = path.read_bytes()
    ends = [0]
    for chunk in chunks:
        ends.append(ends[-1] + sum(len(json.dumps(row, ensure_ascii=False).encode()) + 1 for row in chunk))
    cut = int(share * len(whole))
    kept = max(index for index, end in enumerate(ends) if end <= cut)
    # A crash of the machine may leave zeros where the end of the file should be.
    path.write_bytes(whole[:cut] + (b"\0" * min(3, len(whole) - cut) if junk else b""))
    with _open_locked(path) as output:
        done, finished = _cut_to_whole_chunks(output, path, job)
        assert done == min(kept * chunk_prompts, len(answers))
        assert finished.total() == sum(map(len, chunks[:kept]))
        assert path.stat().st_size == ends[kept]
        for chunk in chunks[kept:]:
            _save(output, *(json.dumps(row, ensure_ascii=False) for row in chunk))
    assert path.read_bytes() == whole


def test_lines_that_this_run_did_not_write_are_refused_and_stay(tmp_path):
    path = tmp_path / "answers.jsonl"
    lines = [json.dumps(row) + "\n" for row in lines_of([1, 1, 1])]
    path.write_text("".join([lines[0], lines[2], lines[1]]))
    with (
        pytest.raises(CommandError, match="after the 1 answers of its first 1 prompts"),
        _open_locked(path) as output,
    ):
        _cut_to_whole_chunks(output, path, job_of(tmp_path, [1, 1, 1], chunk_prompts=1))
    path.write_text("".join(lines) + lines[0])
    with pytest.raises(CommandError, match="holds what this run did not write"), _open_locked(path) as output:
        _cut_to_whole_chunks(output, path, job_of(tmp_path, [1, 1, 1], chunk_prompts=2))
    assert path.read_text() == "".join(lines) + lines[0]


def test_two_runs_cannot_write_one_file(tmp_path):
    path = tmp_path / "answers.jsonl"
    with _open_locked(path), pytest.raises(CommandError, match="another run"), _open_locked(path):
        pass
    assert not path.exists()  # nothing was made

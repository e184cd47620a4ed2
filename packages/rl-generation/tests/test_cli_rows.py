import argparse
import dataclasses
import json

import pytest

from rl_generation.commands import CommandError
from rl_generation.commands.flags import add_engine_arguments, add_sampling_arguments, sampling_of, spec_of
from rl_generation.commands.generate import read_rows
from rl_generation.loading import EngineSpec
from rl_generation.requests import Sampling

BASE = Sampling(max_new_tokens=4, seed=3)


def rows_of(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_rows(path, BASE, encode)


def encode(kind, content):
    return content if kind == "prompt_token_ids" else [len(kind), len(content)]


def test_every_field_of_sampling_has_a_flag():
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


def test_every_field_of_an_engine_has_a_flag():
    parser = argparse.ArgumentParser()
    add_engine_arguments(parser)
    assert {field.name for field in dataclasses.fields(EngineSpec)} - {action.dest for action in parser._actions} == {
        "vllm_kwargs"  # which has a flag for each of its keys
    }
    spec = spec_of(parser.parse_args(["m", "--engine=vllm", "--no-tokenizer", "--enforce-eager", "--vllm-kwarg=a=[1]"]))
    assert (spec.with_tokenizer, spec.vllm_kwargs) == (False, {"enforce_eager": True, "a": [1]})
    with pytest.raises(CommandError, match="--vllm-kwarg sets max_model_len=2, which is given as 1 already"):
        spec_of(parser.parse_args(["m", "--engine=vllm", "--max-model-len=1", "--vllm-kwarg=max_model_len=2"]))


@pytest.mark.parametrize("text", ["5", "5=x", "x=1", "5=-inf", "5=nan"])
def test_a_bias_is_a_token_and_a_finite_number(text, capsys):
    parser = argparse.ArgumentParser()
    add_sampling_arguments(parser, max_new_tokens=4)
    assert sampling_of(parser.parse_args(["--logit-bias", "5=-100"])).logit_bias == ((5, -100.0),)
    with pytest.raises(SystemExit):
        parser.parse_args(["--logit-bias", text])
    assert "must be a token id and a finite number" in capsys.readouterr().err


def test_rows_of_each_kind_are_read_with_their_lines(tmp_path):
    messages = [{"role": "user", "content": "x"}]
    rows = rows_of(tmp_path, {"prompt": "a"}, "", {"messages": messages}, {"prompt_token_ids": [1, 2]})
    assert [(row.line, row.prompt) for row in rows] == [(1, (6, 1)), (3, (8, 1)), (4, (1, 2))]


def test_the_seed_of_a_row_is_that_of_its_place(tmp_path):
    assert [row.sampling for row in rows_of(tmp_path, *[{"prompt": "a"}] * 3)] == BASE.spread(3)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a"', "Expecting ',' delimiter"),
        ("[1]", "must be a JSON object"),
        ({"id": 1}, "with one of prompt, messages, prompt_token_ids; got {'id': 1}"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "got prompt and prompt_token_ids"),
        ({"prompt": 4}, "prompt must be text; got 4"),
        ({"messages": []}, 'messages must be a list of objects with a "role", not empty; got []'),
        ({"messages": [{"content": "hi"}]}, 'messages must be a list of objects with a "role"'),
        ({"messages": ["hi"]}, "messages must be a list of objects"),
        ({"prompt_token_ids": [1, True]}, "prompt_token_ids must be a list of integers"),
        ({"prompt_token_ids": []}, "prompt_token_ids must be a list of integers, not empty"),
    ],
)
def test_a_bad_row_is_refused_with_its_line_and_reason(tmp_path, line, reason):
    with pytest.raises(CommandError, match="nothing was generated") as refusal:
        rows_of(tmp_path, {"prompt": "good"}, "", line)
    assert reason in str(refusal.value).partition("prompts.jsonl, line 3: ")[2]


def test_rows_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(CommandError, match=r"line 1: .* codec can't decode byte 0xff"):
        read_rows(path, BASE, encode)


def test_a_file_without_rows_and_a_file_that_is_missing_are_refused(tmp_path):
    with pytest.raises(CommandError, match="has no rows"):
        rows_of(tmp_path, "", " ")
    with pytest.raises(CommandError, match="cannot be read: No such file"):
        read_rows(tmp_path / "nowhere", BASE, encode)


def test_fields_that_mean_nothing_here_are_kept_for_the_answers(tmp_path):
    (row,) = rows_of(tmp_path, {"prompt": "a", "id": "x", "answer": [1]})
    assert row.others == {"id": "x", "answer": [1]}

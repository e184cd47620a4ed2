import dataclasses
import json
import re

import pytest
import tyro

from rl_generation.commands import CommandError
from rl_generation.commands.flags import EngineFlags
from rl_generation.commands.generate import Generate, read_rows
from rl_generation.loading import EngineSpec
from rl_generation.requests import Sampling

BASE = Sampling(max_new_tokens=4, seed=3)


def rows_of(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return read_rows(path, BASE, encode)


def encode(kind, content):
    return content if kind == "prompt_token_ids" else [len(kind), len(content)]


def read(*flags):
    how = (tyro.conf.OmitArgPrefixes, tyro.conf.UseAppendAction)
    return tyro.cli(Generate, args=["m", "--input=a", "--output=b", *flags], config=how)


def test_every_field_of_sampling_has_a_flag():
    flags = ["--max-new-tokens=4", "--n=2", "--temperature=0.5", "--top-p=0.5", "--top-k=3", "--min-p=0.25"]
    flags += ["--stop-token-ids=5", "--stop-token-ids=6", "--stop=a", "--bad-words=b", "--ignore-eos", "--seed=7"]
    flags += ["--presence-penalty=1", "--frequency-penalty=1", "--repetition-penalty=2", "--logit-bias", "5", "-100"]
    flags += ["--json-schema={}", "--top-logp=2"]
    sampling = read(*flags).sampling
    changed = {field.name for field in dataclasses.fields(Sampling) if getattr(sampling, field.name) != field.default}
    names = {field.name for field in dataclasses.fields(Sampling)}
    assert names - changed == {"min_new_tokens", "regex"}  # which are not beside the others
    assert (sampling.stop_token_ids, sampling.logit_bias) == ((5, 6), ((5, -100.0),))
    assert read("--min_new_tokens=2", "--regex=a").sampling.min_new_tokens == 2


def test_every_field_of_an_engine_has_a_flag():
    flags = {field.name for field in dataclasses.fields(EngineFlags)}
    assert {field.name for field in dataclasses.fields(EngineSpec)} - flags == {
        "with_tokenizer",  # which is --no-tokenizer
        "vllm_kwargs",  # which has a flag for each of its keys
    }
    spec = read("--engine=vllm", "--no-tokenizer", "--enforce-eager", "--vllm-kwarg=a=[1]").engine.spec()
    assert (spec.with_tokenizer, spec.vllm_kwargs) == (False, {"enforce_eager": True, "a": [1]})


def test_of_several_engines_each_takes_the_options_that_are_its_own():
    flags = ["--engine=vllm", "--engine=transformers", "--device=cpu", "--max-model-len=9", "--max-batch-size=2"]
    first, second = read(*flags).engine.specs()
    assert (first.engine, first.device, first.vllm_kwargs, first.max_batch_size) == (
        "vllm", None, {"max_model_len": 9}, 2
    )  # fmt: skip
    assert (second.engine, second.device, second.vllm_kwargs, second.max_batch_size) == ("transformers", "cpu", {}, 2)
    with pytest.raises(CommandError, match="takes one engine; got --engine vllm --engine transformers"):
        read(*flags).engine.spec()


@pytest.mark.parametrize("bias", [["5"], ["5", "x"], ["x", "1"], ["5", "nan"]])
def test_a_bias_is_a_token_and_a_number(bias, capsys):
    assert read("--logit-bias", "5", "-100").sampling.logit_bias == ((5, -100.0),)
    with pytest.raises(SystemExit) as end:
        read("--logit-bias", *bias)
    assert end.value.code == 2
    assert re.search("logit.bias", capsys.readouterr().err)


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

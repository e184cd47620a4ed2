"""The commands over real vLLM: the same answers as the embedded engine's, resumed, and timed out."""

import json
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

from rl_generation.cli import main

FLAGS = ["--dtype", "float32", "--max-batch-size", "8"]
VLLM_FLAGS = [*FLAGS, "--enforce-eager", "--kv-cache-memory-bytes", str(32 << 20), "--max-model-len=512"]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "x" * (1 + i)} for i in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def generate(model, prompts, output, *flags):
    return main(["generate", model, "--input", str(prompts), "--output", str(output), *flags])


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_torn_run_goes_on_and_its_answers_are_those_of_one_that_was_not(checkpoints, prompts, tmp_path):
    model, output = checkpoints("llama"), tmp_path / "answers.jsonl"
    flags = ["--engine", "vllm", "--seed", "4", "--max-new-tokens", "12", *VLLM_FLAGS]
    assert generate(model, prompts, output, *flags) == 0
    whole = output.read_bytes()
    output.write_bytes(whole[: len(whole) // 2])
    assert generate(model, prompts, output, *flags, "--resume") == 0
    before, after = [json.loads(line) for line in whole.splitlines()], read(output)
    assert [answer["token_ids"] for answer in after] == [answer["token_ids"] for answer in before]
    for one, other in zip(before, after, strict=True):
        assert one.pop("logp") == pytest.approx(other.pop("logp"), abs=1e-4)
        assert one == other


def test_greedy_answers_are_those_of_the_embedded_engine(checkpoints, prompts, tmp_path):
    model = checkpoints("llama")
    flags = ["--temperature", "0", "--max-new-tokens", "12"]
    assert generate(model, prompts, tmp_path / "vllm.jsonl", "--engine", "vllm", *flags, *VLLM_FLAGS) == 0
    assert generate(model, prompts, tmp_path / "embedded.jsonl", *flags, *FLAGS) == 0
    for one, other in zip(read(tmp_path / "vllm.jsonl"), read(tmp_path / "embedded.jsonl"), strict=True):
        assert one.pop("logp") == pytest.approx(other.pop("logp"), abs=1e-4)
        assert one == other


@pytest.mark.slow
def test_samples_that_time_out_have_lines_of_their_own_and_the_others_are_kept(
    checkpoints, prompts, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", "1e-3")
    model, output = checkpoints("llama"), tmp_path / "answers.jsonl"
    flags = ["--engine", "vllm", "--seed", "4", "--max-new-tokens", "400", "--ignore-eos", *VLLM_FLAGS, "--json"]
    assert generate(model, prompts, output, *flags) == 1
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = read(output)
    assert len(lines) == 6
    lost = [line for line in lines if line["finish_reason"] == "timeout"]
    assert figures["finished"]["timeout"] == len(lost) > 0
    assert all(line["logp"] is None for line in lost)
    assert figures["holds"] is False
    assert generate(model, prompts, output, *flags, "--resume") == 1
    assert "6 of 6 prompts are answered" in capsys.readouterr().err


def test_bench_puts_engines_side_by_side_and_each_agrees_with_the_model(checkpoints, capfd):
    # capfd, since vLLM before 0.32 asks for the descriptor of stdout
    flags = ["--prompts", "4", "--rounds", "2", "--max-new-tokens", "8", "--json", *VLLM_FLAGS]
    assert main(["bench", checkpoints("llama"), "--engine", "transformers", "--engine", "vllm", *flags]) == 0
    figures = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert list(figures["engines"]) == ["transformers", "vllm"]
    assert all(engine["max_abs_difference"] < 1e-4 for engine in figures["engines"].values())
    assert figures["engines"]["vllm"]["ratio"] > 0


def test_an_argument_that_vllm_does_not_know_is_refused_before_anything_starts(checkpoints, prompts, tmp_path, capsys):
    flags = ["--engine", "vllm", *VLLM_FLAGS, "--vllm-kwarg", "enforce_eagre=true"]
    assert generate(checkpoints("llama"), prompts, tmp_path / "answers.jsonl", *flags) == 2
    assert "did you mean 'enforce_eager'" in capsys.readouterr().err
    assert not (tmp_path / "answers.jsonl").exists()

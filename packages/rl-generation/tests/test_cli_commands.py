import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import saved_model

from rl_generation import model_flags
from rl_generation.cli import COMMANDS, main
from rl_generation.vllm.preparing import installed_version

# The doors of the packages open to all of them; here the commands are entered beside those.
HELP_OF_ALL = """
import importlib.machinery, sys, types
folder = importlib.machinery.PathFinder.find_spec("rl_generation").submodule_search_locations[0]
for name, path in (("rl_generation", folder), ("rl_generation.vllm", folder + "/vllm")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from rl_generation.cli import COMMANDS, main
for arguments in ([], *([command] for command in COMMANDS)):
    try:
        main([*arguments, "--help"])
    except SystemExit as end:
        assert end.code == 0
heavy = [name for name in ("torch", "transformers", "vllm", "uvicorn", "tqdm") if name in sys.modules]
assert not heavy, heavy
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(saved_model.save(tmp_path_factory.mktemp("model")))


def test_help_of_every_command_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP_OF_ALL], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for command in COMMANDS:
        assert f"usage: rl-generation {command}" in done.stdout


@pytest.mark.parametrize("arguments", [[], ["dance"], ["generate"], ["explain", "m", "--engine", "sglang"]])
def test_misuse_ends_with_2_and_says_where_the_help_is(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert re.search(r"For full helptext, (run|see):?[\s│]+rl-generation.* --help", capsys.readouterr().err)


def explain(capsys, *arguments):
    code = main(["explain", *arguments])
    return code, capsys.readouterr()


def test_explain_says_what_it_is_without_loading_weights(model, capsys, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in Path(model).iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    code, said = explain(capsys, str(bare))
    # 2 of keys and values, 2 layers, 2 heads of 32, 4 bytes.
    assert (code, "1.0 KiB a token in 2 layers, 128.0 KiB for 128 tokens" in said.out) == (0, True)


def test_explain_counts_what_fits_and_ends_with_1_where_nothing_does(model, capsys):
    sequence = saved_model.MAX_LENGTH * 1024
    flags = ("--engine", "vllm", "--vllm-kwarg", "block_size=32", "--kv-cache-memory-bytes")
    code, said = explain(capsys, model, *flags, str(3 * sequence))
    assert (code, "fits     3.0 of that length" in said.out) == (0, True)
    code, said = explain(capsys, model, *flags, str(sequence // 2), "--json")
    assert (code, "fits     0.5 of that length" in said.out) == (1, True)
    figures = json.loads(said.out.splitlines()[-1])
    assert (figures["holds"], figures["memory"]["kv_cache_bytes"]) == (False, sequence // 2)


def test_explain_knows_the_quirks_of_a_family(capsys, tmp_path, monkeypatch):
    import transformers

    transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2).save_pretrained(tmp_path)
    known = replace(model_flags.MODEL_FLAGS[0], model_types=frozenset({"gpt2"}), versions="")
    monkeypatch.setattr(model_flags, "MODEL_FLAGS", (known,))
    code, said = explain(capsys, str(tmp_path), "--no-tokenizer")
    assert (code, "vllm" in said.out) == (0, False)
    code, said = explain(capsys, str(tmp_path), "--no-tokenizer", "--engine", "vllm")
    assert re.search(r"quirk of vLLM [\d.]+: vllm_load_format_auto \(every vllm\)", said.out)


def test_explain_refuses_a_model_that_is_missing(capsys, tmp_path):
    code, said = explain(capsys, str(tmp_path / "nowhere"))
    assert code == 2
    assert "is no folder, so there is no model to load" in said.err


def test_bench_measures_and_compares_with_the_model(model, capsys):
    flags = ["--prompts", "4", "--prompt-tokens", "5", "--rounds", "2", "--max-new-tokens", "6", "--json"]
    assert main(["bench", model, *flags]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].split()[:3] == ["engine", "tokens/s", "ratio"]
    assert out[1].split()[0] == "transformers"
    figures = json.loads(out[-1])
    measured = figures["engines"]["transformers"]
    assert figures["holds"] is True
    assert len(measured["rounds_tokens_per_s"]) == 2
    assert min(measured["rounds_tokens_per_s"]) <= measured["tokens_per_s"] <= max(measured["rounds_tokens_per_s"])
    assert measured["ratio"] == 1.0
    assert 1.0 <= measured["token_mult_prob_error"] < 1.0001
    assert measured["max_abs_difference"] < 1e-4


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--engine", "transformers", "--engine", "transformers"], "an engine stands twice"),
        (["--enforce-eager"], "vllm_kwargs={'enforce_eager': True} means nothing"),
        (["--prompt-tokens", "200"], "passes the model's max_position_embeddings=128"),
    ],
)
def test_bench_refuses_misuse(model, capsys, flags, reason):
    assert main(["bench", model, *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--enforce-eager"], "vllm_kwargs={'enforce_eager': True} means nothing"),
        (["--kv-cache-memory-bytes", "64"], "{'kv_cache_memory_bytes': 64} means nothing"),
        (["--tensor-parallel-size", "2"], "{'tensor_parallel_size': 2} means nothing"),
    ],
)
def test_an_option_of_another_engine_is_refused(model, capsys, flags, reason):
    assert main(["explain", model, *flags]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.skipif(installed_version() is not None, reason="vLLM is installed")
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("generate", ["--engine", "vllm", "--input", "nowhere.jsonl", "--output", "nowhere.out"]),
        ("serve", ["--engine", "vllm"]),
    ],
)
def test_an_engine_that_is_not_installed_is_refused_before_anything_is_loaded(capsys, command, flags):
    if command == "serve" and (find_spec("starlette") is None or find_spec("uvicorn") is None):
        pytest.skip("the server's extra is not installed")
    assert main([command, "./nowhere", *flags]) == 2
    said = capsys.readouterr().err
    assert "vLLM is not installed" in said
    assert "loading" not in said


@pytest.mark.parametrize(
    ("given", "meant"),
    [("--max-tokens=5", "--max-new-tokens"), ("--engines", "--engine"), ("--vllm-args", "--vllm-kwarg")],
)
def test_an_unknown_flag_is_answered_with_the_one_it_may_have_meant(capsys, given, meant):
    with pytest.raises(SystemExit) as end:
        main(["generate", "m", "--input=a", "--output=b", given])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert f"Unrecognized options: {given}" in said
    assert f" {meant} " in said.partition("Perhaps you meant:")[2]


# What `python -m` does, without the seconds that a new interpreter takes to import torch.
@pytest.mark.filterwarnings("ignore:'rl_generation.cli' found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", ["rl_generation", "rl_generation.cli"])
def test_the_commands_are_also_run_as_a_module(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: rl-generation")


needs_server = pytest.mark.skipif(
    find_spec("starlette") is None or find_spec("uvicorn") is None, reason="the server's extra is not installed"
)


@needs_server
def test_serve_answers_over_http_until_it_is_terminated(model):
    command = [sys.executable, "-m", "rl_generation", "serve", model, "--port", "0", "--served-model-name", "tiny"]
    with subprocess.Popen(
        [*command, "--control-port", "0", "--control-token-env", "A_TOKEN"],
        env={**os.environ, "OMP_NUM_THREADS": "1", "A_TOKEN": "secret"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), process.stderr.read()
            body = json.dumps({"model": "tiny", "prompt": [1, 5], "max_tokens": 3, "temperature": 0}).encode()
            asked = urllib.request.Request(
                f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
            )
            with urllib.request.urlopen(asked, timeout=240) as answer:
                assert json.load(answer)["usage"]["completion_tokens"] >= 1
            lines = iter(process.stderr.readline, "")
            control = next(line.removeprefix("control port: ").strip() for line in lines if "control port" in line)
            asked = urllib.request.Request(f"{control}/state", headers={"Authorization": "Bearer secret"})
            with urllib.request.urlopen(asked, timeout=240) as answer:
                assert json.load(answer) == {"paused": False, "weight_version": 0}
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=240)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "secret" not in said
    assert said.endswith("ended\n")


@needs_server
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--host", "0.0.0.0"], "give an api_key"),
        (["--api-key-env", "NO_SUCH_KEY"], "the environment variable NO_SUCH_KEY is not set"),
        (["--api-key-env", "A_BAD_KEY"], "api_key must be printable ASCII"),
        (["--no-tokenizer"], "a server of texts needs a tokenizer"),
        (["--host", "203.0.113.1", "--api-key-env", "A_KEY"], "cannot serve at 203.0.113.1:8000"),
        (["--control-port", "0"], "a control port needs a token"),
        (["--control-port", "0", "--control-token-file", "./nowhere"], "the token of the control port cannot be read"),
        (["--control-token-env", "A_KEY"], "a token of the control port was named, and no --control-port"),
    ],
)
def test_serve_refuses_what_it_should_not_do_before_it_loads_a_model(capsys, monkeypatch, flags, reason):
    monkeypatch.delenv("RL_GENERATION_API_KEY", raising=False)
    monkeypatch.setenv("A_KEY", "secret")
    monkeypatch.setenv("A_BAD_KEY", "\n")
    assert main(["serve", "./nowhere", *flags]) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "loading" not in said


@needs_server
def test_serve_refuses_a_port_that_is_taken_before_it_loads_a_model(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "./nowhere", "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"cannot serve at 127.0.0.1:{port}" in said
    assert "loading" not in said

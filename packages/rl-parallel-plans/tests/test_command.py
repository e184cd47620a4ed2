"""The command line: what it prints, how it ends, and how little it imports."""

import json
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import transformers
from parallel_plans_cases.models import SHAPE

from rl_parallel_plans.__main__ import COMMANDS, main


@pytest.fixture
def folder(tmp_path):
    """A model's folder with a configuration and no weights."""
    transformers.Qwen3Config(**SHAPE, architectures=["Qwen3ForCausalLM"], dtype="bfloat16").save_pretrained(tmp_path)
    return str(tmp_path)


def shell(*arguments):
    """A fresh interpreter; its stderr ends with the imports that -X importtime lists."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rl_parallel_plans", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )


def test_help_names_every_command_and_imports_neither_torch_nor_transformers():
    done = shell("--help")
    assert done.returncode == 0
    assert all(f"  {name}" in done.stdout for name in ("explain", "verify", "memory", "parity"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "rl_parallel_plans" in imported
    assert not imported & {"torch", "transformers"}


def test_help_of_explain_imports_neither_torch_nor_transformers():
    done = shell("explain", "--help")
    assert done.returncode == 0
    assert all(
        option in done.stdout for option in ("--tp", "--dp", "--sequence-parallel", "--plan", "--json", "--html")
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    assert not imported & {"torch", "transformers"}


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_there(name, capsys):
    with pytest.raises(SystemExit) as ending:
        main([name, "--help"])
    assert ending.value.code == 0
    assert f"usage: rl-parallel-plans {name}" in capsys.readouterr().out


def test_explain_prints_the_plan_of_a_model_that_is_nowhere(folder, capsys):
    assert main(["explain", folder, "--tp", "2", "--dp", "2", "--sequence-parallel"]) == 0
    out = capsys.readouterr().out
    assert "plan for transformers.models.qwen3.modeling_qwen3.Qwen3ForCausalLM, tp=2" in out
    assert "dp=2" in out.splitlines()[0]
    assert "2 all-gather, 2 reduce-scatter" in out


def test_explain_prints_json(folder, capsys):
    assert main(["explain", f"{folder}/config.json", "--tp", "2", "--dp", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["tp"], told["dp"], told["sequence_parallel"]) == (2, 4, False)
    head = next(row for row in told["parameters"] if row["name"] == "lm_head.weight")
    assert (head["shape"], head["rank_shape"], head["rank_bytes"]) == ([128, 64], [16, 64], 16 * 64 * 2)


def test_explain_writes_a_page(folder, tmp_path, capsys):
    page = tmp_path / "plan.html"
    assert main(["explain", folder, "--tp", "2", "--html", str(page)]) == 0
    assert page.read_text().startswith("<!doctype html>")
    assert str(page) in capsys.readouterr().out


def test_explain_of_a_type_of_model_takes_a_plan_of_ones_own(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_plans.py").write_text("mine = {'lm_head': 'colwise'}\n")
    monkeypatch.syspath_prepend(tmp_path)
    allowed = ["--allow", "large_replicated"]
    assert main(["explain", "qwen3", "--tp", "2", "--plan", "my_plans:mine", *allowed]) == 0
    out = capsys.readouterr().out
    assert "source: custom: my_plans:mine" in out
    assert "allowed: " in out


def test_plan_with_problems_is_printed_and_ends_in_1(folder, capsys):
    assert main(["explain", folder, "--tp", "3"]) == 1
    first, *problems = capsys.readouterr().out.partition("\n\n")[0].splitlines()  # before the table
    assert first.startswith(f"{len(problems)} problem(s)")
    assert any(line.startswith("PROBLEM: model.layers.*.self_attn.k_proj") for line in problems)


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_refusal_is_one_message_without_traceback_and_ends_in_2(form, tmp_path, capsys):
    transformers.BertConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--tp", "2", *form]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("rl-parallel-plans explain: no plan for ")
    assert "Traceback" not in captured.err
    if form:
        told = json.loads(captured.out)
        assert told.keys() == {"format", "refused"}
        assert told["refused"] in captured.err
    else:
        assert captured.out == ""


def test_page_that_cannot_be_written_is_refused(folder, tmp_path, capsys):
    assert main(["explain", folder, "--html", str(tmp_path / "missing" / "plan.html")]) == 2
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["explian"],
        ["explain"],
        ["explain", "qwen3", "--tp", "0"],
        ["explain", "qwen3", "--tp", "two"],
        ["explain", "qwen3", "--json", "--html", "plan.html"],
    ],
)
def test_misuse_ends_in_2(arguments, capsys):
    with pytest.raises(SystemExit) as ending:
        main(arguments)
    assert ending.value.code == 2
    assert "usage: rl-parallel-plans" in capsys.readouterr().err


def test_reader_of_a_pipe_may_leave_early():
    talkative = """
import sys, types
import rl_parallel_plans.__main__ as program
run = lambda arguments: print("x" * 10**6) or 0
sys.modules["talkative"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
program.COMMANDS["explain"] = ("talkative", "talk")
sys.exit(program.main(["explain"]))
"""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-c", talkative],
            check=False,
            stdout=pipe,
            stderr=subprocess.PIPE,
            text=True,
            timeout=240,
            env={"PYTHONPATH": ":".join(filter(None, sys.path))},
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_console_script_is_this_command():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["scripts"]["rl-parallel-plans"].partition(":")
    assert getattr(import_module(module), function) is main

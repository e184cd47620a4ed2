"""`rl-algorithms`: what it prints, what it refuses, how it exits."""

import json
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from rl_algorithms import grpo
from rl_algorithms.__main__ import LOSSES, main


@pytest.mark.parametrize("name", LOSSES)
def test_every_algorithm_is_explained_and_the_last_line_of_json_holds_what_is_printed(name, capsys):
    needed = ["max_length=100"] if name == "dr_grpo" else []
    assert main(["explain", name, *needed, "--json"]) == 0
    *printed, last = capsys.readouterr().out.splitlines()
    assert json.loads(last)["loss"] == printed != []


def test_without_an_algorithm_all_are_listed(capsys):
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(LOSSES)


def test_settings_reach_the_formula_and_are_replaced_together(capsys):
    # One alone would be refused: a correction compares with a proximal policy that is not the sampler.
    assert main(["explain", "dapo", "correction.weight=token", "ratio.proximal=recomputed", "kl.weight=0.5"]) == 0
    out = capsys.readouterr().out
    assert "exp(logp_proximal - logp_old)" in out
    assert "0.5 * (exp(" in out
    assert main(["explain", "dapo"]) == 0
    assert capsys.readouterr().out.rstrip("\n") == grpo.dapo().explain()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["dap"], "no algorithm 'dap'; did you mean 'dapo'?"),
        (["dapo", "kl.weigh=1"], "kl.weigh: there is no 'weigh'; did you mean 'weight'?"),
        (["dapo", "aggregation.kind=1"], "aggregation is 'token-mean', and has no fields of its own"),
        (["dapo", "kl.weight=-1.0"], "weight=-1.0 must be >= 0"),
        (["dapo", "kl.weight"], "'kl.weight' is not key=value"),
        (["dr_grpo"], "max_length has no default"),
    ],
)
def test_a_refusal_exits_with_2_and_says_why_on_stderr(arguments, said, capsys):
    assert main(["explain", *arguments]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_misuse_exits_with_2():
    with pytest.raises(SystemExit) as ended:
        main(["explian"])
    assert ended.value.code == 2


def test_the_console_script_and_the_module_are_the_same_command():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    module, _, function = pyproject["project"]["scripts"]["rl-algorithms"].partition(":")
    assert getattr(import_module(module), function) is main
    done = subprocess.run(
        [sys.executable, "-m", "rl_algorithms", "explain", "sft"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.startswith("L = ")) == (0, True)

"""`refit_tools.py simulate`: what it prints, what it refuses, how it exits; and the document that quotes it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from refit_tools import main

SMALL = "--model qwen3-8b --train-gpus 8 --train-layout fsdp=8 --engine-gpus 8 --engine-layout tp=4"
DOCUMENT = Path(__file__).parents[3] / "docs" / "scaling-refit.md"
QUOTED = re.findall(r"```sh\n(.*?)```\n+```text\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


def run(capsys, arguments):
    code = main(["simulate", *shlex.split(arguments)])
    return code, capsys.readouterr()


def test_a_prediction_shows_every_term_and_its_bound(capsys):
    code, printed = run(capsys, SMALL)
    assert code == 0
    for word in (
        "wire",
        "nvlink",
        "hbm",
        "tensors",
        "control",
        "apply",
        "predicted",
        "bound",
        "<- dominates",
        "GB of a GPU",
    ):
        assert word in printed.out


def test_json_is_one_last_line_with_every_figure(capsys):
    code, printed = run(capsys, f"{SMALL} --json")
    answer = json.loads(printed.out.splitlines()[-1])
    assert code == 0
    total = max(answer["overlapped_seconds"].values()) + sum(answer["serial_seconds"].values())
    assert answer["predicted_seconds"] == pytest.approx(total)
    assert f"{answer['predicted_seconds']:.3f}" in printed.out
    assert f"{answer['bound_seconds']:.3f}" in printed.out
    assert answer["holds"] is True
    assert answer["engine"] == {"gpus": 8, "layout": "tp=4"}
    assert answer["traffic"]["pieces_received"] > 0


def test_a_limit_that_does_not_hold_exits_with_1(capsys):
    code, printed = run(capsys, f"{SMALL} --within 0.001 --json")
    assert code == 1
    assert "s is more than the 0.001 s allowed" in printed.out
    assert json.loads(printed.out.splitlines()[-1])["holds"] is False
    assert run(capsys, f"{SMALL} --within 1000")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model qwen3-8b", "a prediction needs --train-gpus, --engine-gpus, --train-layout, --engine-layout"),
        (f"{SMALL} --engine-layout tp=5", "pp·tp·fsdp=5 must divide the 8 GPUs"),
        (f"{SMALL} --engine-layout dp=8", "expected each of tp, pp, ep, fsdp at most once"),
        (f"{SMALL} --scheme ipc", "both sides must be colocated"),
        (f"{SMALL} --nic 0", "every figure of 'h100' must be positive"),
        (f"{SMALL} --cost piece_s=-1", "wrong: ['piece_s']"),
        (f"{SMALL} --changed 2", "at most 1; got 2.0"),
    ],
)
def test_a_wrong_value_exits_with_2_and_says_what_is_allowed(capsys, arguments, said):
    code, printed = run(capsys, arguments)
    assert code == 2
    assert printed.err.startswith("simulate: ")
    assert said in printed.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (f"{SMALL} --model gpt-5", "choose from"),
        (f"{SMALL} --hardware tpu", "gb200"),
        (f"{SMALL} --scheme pigeon", "slices_direct"),
        (f"{SMALL} --train-gpus none", "'none' is no number of at least 1"),
        (f"{SMALL} --cost speed=1", "no cost 'speed'; choose from nic_share"),
        (f"{SMALL} --cost piece_s=fast", "'fast' is no number"),
    ],
)
def test_argparse_refuses_with_2_and_says_what_is_allowed(capsys, arguments, said):
    with pytest.raises(SystemExit) as refusal:
        main(["simulate", *shlex.split(arguments)])
    assert refusal.value.code == 2
    assert said in capsys.readouterr().err


def test_an_unknown_command_is_refused_with_those_that_exist(capsys):
    with pytest.raises(SystemExit) as refusal:
        main(["teleport"])
    assert refusal.value.code == 2
    assert "explain" in capsys.readouterr().err


def test_costs_and_bandwidths_can_be_given(capsys):
    _, usual = run(capsys, f"{SMALL} --json")
    _, other = run(capsys, f"{SMALL} --nic 5 --cost piece_s=1e-3 --json")
    first, second = (json.loads(printed.out.splitlines()[-1]) for printed in (usual, other))
    assert second["overlapped_seconds"]["wire"] == pytest.approx(10 * first["overlapped_seconds"]["wire"])
    assert second["serial_seconds"]["tensors"] == pytest.approx(first["serial_seconds"]["tensors"] / 36e-6 * 1e-3)


def test_it_runs_as_a_program():
    program = [sys.executable, str(DOCUMENT.parent / "tools" / "refit_tools.py")]
    result = subprocess.run([*program, "simulate", *shlex.split(SMALL)], capture_output=True, text=True, check=True)
    assert "predicted" in result.stdout
    refused = subprocess.run(program, capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "simulate" in refused.stderr


def test_the_document_quotes_commands():
    assert len(QUOTED) >= 8
    assert all("python docs/tools/refit_tools.py simulate" in command for command, _ in QUOTED)


@pytest.mark.parametrize(("command", "shown"), QUOTED, ids=[f"{place}" for place in range(len(QUOTED))])
def test_the_document_shows_what_its_commands_print(capsys, command, shown):
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["python", "docs/tools/refit_tools.py"]
    main(words[2:])
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    quoted = [line.rstrip() for line in shown.splitlines()]
    if "…" in quoted:  # lines between are left out
        assert [line for line in quoted if line != "…"] == [line for line in printed if line in set(quoted)]
    else:
        assert printed == quoted


def test_every_second_in_the_documents_prose_is_in_an_output():
    prose = re.sub(r"```.*?```", "", DOCUMENT.read_text(), flags=re.DOTALL)
    printed = "".join(shown for _, shown in QUOTED)
    said = re.findall(r"\d+\.\d{3}|\d+\.\d GB|\d{1,3}(?:,\d{3})+", prose)
    assert len(said) > 5
    assert [figure for figure in said if figure not in printed] == []

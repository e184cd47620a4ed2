"""Claims about exactness: however Megatron lays a model over ranks, the steps are those of one plain process.

The tests run each layout over ranks with one model; `PARITY=usual` in the environment, as in the nightly run, with each
model, and `PARITY=whole` or `EVERY_TEST=1` the whole table. `python -m megatron_parity`, in the folder above, runs the
whole of it and writes the table; the tests run it too where the shapes of every call are checked in their own process
(`CHECK_SHAPES=1`), at twice the cost of all that it does. They are checked under each layout by test_backend_ranks.py.
"""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from megatron_parity import cases, judge, launch
from megatron_parity.problems import Problem

CHOSEN = "whole" if os.environ.get("EVERY_TEST") == "1" else os.environ.get("PARITY", "quick")
CELLS = getattr(cases, CHOSEN)()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, imported):
    """Of all cells, each layout over ranks in one launch."""
    if os.environ.get("CHECK_SHAPES") != "1":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the ranks too, as below: megatron-core and torch warn of each other
            return launch.run(CELLS, folder=tmp_path_factory.mktemp("megatron_parity"))
    file = tmp_path_factory.mktemp("megatron_parity") / "outcomes.json"
    options = ["--outcomes", str(file), "--launches", "3", "--cells", CHOSEN]
    command = [sys.executable, "-W", "ignore", "-m", "megatron_parity", *options]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=2400, check=False
    )
    assert file.exists(), done.stderr
    return json.loads(file.read_text())


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_steps_are_those_of_one_plain_process_or_refused_by_name(outcomes, cell):
    assert judge.complaints(cell, outcomes[cell.name]) == []


@pytest.mark.parametrize("other", ["Llama, rope of Llama 3", "Llama, yarn", "Mistral, window of 6"])
def test_what_the_table_would_see_of_a_wrong_rope_or_window_is_far_above_its_bar(other):
    """The same weights with the rope and the attention of Llama."""
    right = Problem(other).answer()["logits"]
    wrong = Problem("Llama").answer()["logits"]
    assert (right - wrong).abs().max() / right.abs().max() > 100 * cases.BAR


def test_a_rank_that_fails_fails_its_cell_and_those_after_it_run(tmp_path, monkeypatch, imported):
    def run_cells(cells, folder, outcomes):
        for cell in cells:
            if cell.name == names[1] and outcomes.name == "outcomes1.jsonl":
                raise FloatingPointError("overflow")
            with outcomes.open("a") as lines:
                print(f'{{"cell": "{cell.name}"}}', file=lines)

    cells = [cell for cell in cases.table() if cell.mesh == "TP2"][:3]
    names = [cell.name for cell in cells]
    monkeypatch.setattr(launch.program, "run_cells", run_cells)
    monkeypatch.setattr(launch.problems.problems, "answers", lambda problems, folder: None)
    found = launch.run(cells, folder=tmp_path)
    assert found[names[0]] == [{"cell": names[0]}] * 2
    assert "FloatingPointError: overflow" in found[names[1]][0]["died"]
    assert found[names[2]] == [{"cell": names[2]}] * 2
    assert torch.get_num_threads() == 1

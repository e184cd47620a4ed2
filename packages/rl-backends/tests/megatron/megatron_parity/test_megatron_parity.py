"""Claims about exactness: however Megatron lays a model over ranks, the steps are those of one plain process.

`PARITY=whole` in the environment runs the whole table, and otherwise each model once on each layout over ranks.
`python -m megatron_parity`, in the folder above, runs the whole of it and writes the table.
"""

import os

import pytest
import torch

from megatron_parity import cases, judge, launch
from megatron_parity.document import document
from megatron_parity.problems import Problem

CELLS = cases.whole() if os.environ.get("PARITY") == "whole" else cases.usual()


@pytest.fixture(scope="module")
def outcomes(imported, tmp_path_factory):
    """Of all cells, each layout over ranks in one launch."""
    found = launch.run(CELLS, folder=tmp_path_factory.mktemp("megatron_parity"))
    print("", document(found), sep="\n")  # `pytest -s` shows it
    return found


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

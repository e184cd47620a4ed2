"""Claims about exactness: however a model and a batch are cut, the steps are those of one plain process, or refused.

The last cell of the package's matrix runs each model on one rank, and each mesh with one; `PARITY=usual` in the
environment, as in the nightly run, each model in each layout and on each mesh, and `PARITY=whole` or `EVERY_TEST=1` the
whole table.
Older releases of transformers run a small selection, one for each thing that a release could break.
`python -m parity`, in the folder above, runs the whole of it on any release and writes the table.
"""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import transformers

from rl_backends import DTensorConfig

sys.path.insert(0, str(Path(__file__).parents[1]))  # parity, here and in the processes that it starts

from parity import cases, judge, launch
from parity.document import document

PACKAGE = Path(__file__).parents[2]
NEWEST = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["tool"]["matrix"]["cells"][-1]["transformers"]
if os.environ.get("EVERY_TEST") == "1" or os.environ.get("PARITY") == "whole":
    CELLS = cases.whole()
else:
    newest = cases.usual if os.environ.get("PARITY") == "usual" else cases.quick
    CELLS = newest() if transformers.__version__.startswith(f"{NEWEST}.") else cases.small()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of all cells, each number of ranks in one launch of ranks that are forked."""
    found = launch.run(CELLS, folder=tmp_path_factory.mktemp("parity"))
    print("", document(found), sep="\n")  # `pytest -s` shows it
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_steps_are_those_of_one_plain_process_or_refused_by_name(outcomes, cell):
    assert judge.complaints(cell, outcomes[cell.name]) == []


def test_the_usual_cells_have_every_two_of_a_model_a_mesh_and_a_layout_that_the_table_has():
    """So that what is wrong with any two together, or with one, fails in one of them as it would in the whole table."""

    def pairs(cells):
        met = [((each.model, each.mesh), (each.model, each.layout), (each.mesh, each.layout)) for each in cells]
        return {pair for each in met for pair in each}

    several = [each for each in cases.table() if each.ranks > 1 and each.refusal is None]
    assert pairs(each for each in cases.usual() if each in several) == pairs(several)
    alone = {each.name for each in cases.table() if each.ranks == 1 or each.refusal is not None}
    assert alone <= {each.name for each in cases.usual()}


def test_the_quick_cells_have_every_mesh_every_layout_every_model_and_every_refusal():
    quick, several = cases.quick(), [each for each in cases.table() if each.ranks > 1 and each.refusal is None]
    assert {each.mesh for each in several} <= {each.mesh for each in quick}
    assert {each.model for each in several} <= {each.model for each in quick if each.ranks > 1}
    assert {each.model for each in several} <= {each.model for each in quick if each.ranks == 1}
    assert all(
        {each.layout for each in quick if (each.ranks > 1) == over} >= set(cases.LAYOUTS) for over in (True, False)
    )
    assert all(each in quick for each in cases.table() if each.refusal is not None)


@pytest.mark.parametrize(("config", "words"), cases.REFUSED_CONFIGURATIONS, ids=str)
def test_configurations_that_cannot_be_are_refused_by_name(config, words):
    with pytest.raises(ValueError, match=words):
        DTensorConfig(**config)


def test_a_rank_that_dies_takes_its_launch_with_it_and_is_named(tmp_path, monkeypatch):
    programs = ["import time; time.sleep(90)", "raise SystemExit('gone')"]

    def start(task, log):
        with log.open("w") as output:
            return subprocess.Popen([sys.executable, "-c", programs[task["rank"]]], stderr=output)

    monkeypatch.setattr(launch, "_start", start)
    outcomes = launch._launch(["a cell", "another"], ranks=2, folder=tmp_path, trace_only=True)
    assert outcomes == {"a cell": [{"died": "rank 1 ended with code 1:\ngone\n"}]}


def test_a_cell_in_which_native_code_crashes_is_run_once_more_and_no_more(tmp_path, monkeypatch, capfd):
    programs = ["import time; time.sleep(90)", "import os; os.abort()"]

    def start(task, log):
        with log.open("w") as output:
            return subprocess.Popen([sys.executable, "-c", programs[task["rank"]]], stderr=output)

    monkeypatch.setattr(launch, "_start", start)
    cell = next(cell for cell in cases.table() if cell.ranks == 2 and cell.refusal is None)
    outcomes = launch.run([cell], folder=tmp_path)
    assert outcomes == {cell.name: [{"died": "rank 1 ended with code -6:\n", "crashed": True}]}
    assert capfd.readouterr().out.count(f"{cell.name} is run once more: rank 1 ended with code -6") == 1

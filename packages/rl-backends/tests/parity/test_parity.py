"""Claims about exactness: however a model and a batch are cut, the steps are those of one plain process, or refused.

The last cell of the package's matrix runs the table, on four ranks one layout of three; older releases of transformers
a small selection, one for each thing that a release could break. `PARITY=whole` in the environment runs all of it.
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
if os.environ.get("PARITY") == "whole":
    CELLS = cases.whole()
else:
    CELLS = cases.usual() if transformers.__version__.startswith(f"{NEWEST}.") else cases.small()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    """Of all cells, each number of ranks in one launch."""
    found = launch.run(CELLS, folder=tmp_path_factory.mktemp("parity"))
    print("", document(found), sep="\n")  # `pytest -s` shows it
    return found


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_steps_are_those_of_one_plain_process_or_refused_by_name(outcomes, cell):
    assert judge.complaints(cell, outcomes[cell.name]) == []


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

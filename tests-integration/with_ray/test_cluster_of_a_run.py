"""The Ray cluster that a run starts itself: nobody else can reach it, it keeps secrets, and it ends with the run."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import json
import os
import subprocess
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "cluster_of_a_run.py"
SECRET = "open-sesame-5f3c9a"
PATIENCE_S = 120


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """What the cluster looked like from within, while it ran and after its end."""
    task = {"folder": str(tmp_path_factory.mktemp("run")), "secret": SECRET}
    command = [sys.executable, str(PROGRAM), json.dumps(task)]
    elsewhere = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1"}  # of a cluster that is not the run's: it is left alone
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=elsewhere, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert not done.stderr.strip(), "Ray's own noise is not the user's"
    (line,) = done.stdout.splitlines()
    return json.loads(line)


def test_it_listens_on_loopback_alone(seen):
    assert seen["num_processes"] > 3
    assert seen["beyond_loopback"] == []


def test_environment_variables_reach_the_processes_and_no_file(seen):
    assert seen["variable"] == SECRET
    assert seen["files"] > 5
    assert seen["written"] == []


def test_it_leaves_nothing(seen):
    assert not seen["session_left"]
    deadline = time.monotonic() + PATIENCE_S  # what Ray's processes have started ends when it sees that they have
    while seen["session"] in (processes := command_lines()) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert seen["session"] not in processes


def command_lines():
    return subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout

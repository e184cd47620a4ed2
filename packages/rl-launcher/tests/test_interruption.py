"""Claims about Ctrl-C and SIGTERM: the state is saved, the message says where, and the run can go on."""

import json
import signal
import subprocess
import sys
import time

import pytest

from rl_launcher.recipe import load_recipe
from rl_launcher.recipe_schema import Recipe
from rl_launcher.running import run


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_saves_its_state_and_can_go_on(recipe, tmp_path, number):
    command = [sys.executable, "-m", "rl_launcher.cli", "run", str(recipe), "grpo.max_num_steps=100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    metrics = tmp_path / "run" / "metrics.jsonl"
    try:
        deadline = time.monotonic() + 90
        while not (metrics.exists() and '"grpo"' in metrics.read_text()):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    said = " ".join(errors.split())
    assert "interrupted" in said
    folder = tmp_path / "run" / "interrupted"
    assert f"policy.model_name={folder}" in said
    steps = [json.loads(line) for line in metrics.read_text().splitlines()]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["interrupted"] is True
    assert summary["steps"] == steps[-1]["version"]
    assert (tmp_path / "run" / "report.html").is_file()
    go_on = [f"policy.model_name={folder}", "grpo=null", f"run_dir={tmp_path}/on"]
    assert run(load_recipe(recipe, schema=Recipe, overrides=go_on))["steps"] == 6

"""What `nox -s gpu` runs on a GPU is dry-run here, so that the day is not spent on typos."""

import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).parents[1] / "scripts" / "gpu_day.py"
PARTS = ["parity", "logp", "refit", "engine", "training", "forecast", "run", "lora", "offload"]


def test_every_part_runs_dry_on_a_cpu(tmp_path):
    command = [sys.executable, str(PROGRAM), "--dry-run", "--parts", *PARTS, "--out", str(tmp_path / "out.json")]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert "FAILED" not in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 0, ran.stderr

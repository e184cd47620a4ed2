"""A run that is killed with SIGKILL at random moments, again and again, has the curve of an uninterrupted one."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pausable_reward import REWARD, RunPause

RECIPE = Path(__file__).parents[1] / "recipes" / "quickstart.yaml"
SHORT = (
    "sft.max_num_steps=30",
    "grpo.max_num_steps=40",
    "sft.optimizer.warmup_steps=2",
    "grpo.optimizer.warmup_steps=0",
)
HELD_AT = 24  # of the steps of GRPO: before the run can end, it has been killed as often as it should
CHECKPOINTS = "checkpointing={save_period: 4, ft_keep_latest_k: 2, keep_top_k: 1}"
OF_THE_MACHINE = ("time_s", "tokens_per_s", "refit_s", "phase_s", "memory_")


def launch(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "rl_launcher", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def curve(run_dir: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if not name.startswith(OF_THE_MACHINE)} for line in lines]


def wait_for_growth(process: subprocess.Popen[str], file: Path, more: int) -> None:
    """Until so many lines more are there, or the process has ended."""
    before, deadline = _lines(file), time.monotonic() + 240
    while _lines(file) < before + more and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_is_the_run_that_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    first = launch("run", str(RECIPE), f"run_dir={whole}", *SHORT)
    _, errors = first.communicate(timeout=600)
    assert first.returncode == 0, errors
    moments, kills = random.Random(9), 0
    run_pause = RunPause(tmp_path, monkeypatch)
    run_pause.pause(killed, step=HELD_AT)
    process = launch("run", str(RECIPE), f"run_dir={killed}", f"env.reward={REWARD}", *SHORT, CHECKPOINTS)
    while kills < 3:
        wait_for_growth(process, killed / "metrics.jsonl", moments.randint(6, 12))
        time.sleep(moments.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        kills += 1
        process = launch("resume", str(killed))
    run_pause.resume()
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    assert curve(killed) == curve(whole)
    results = [json.loads((folder / "summary.json").read_text()) for folder in (whole, killed)]
    assert results[1]["conditions"] == {"resumed": 3}
    assert json.loads(said.splitlines()[-1]) == results[1]
    for name in ("steps", "tokens", "held_out_sampled_before", "held_out_sampled_after", "held_out_greedy_after"):
        assert results[0][name] == results[1][name]

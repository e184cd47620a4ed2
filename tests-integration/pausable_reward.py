"""The quickstart's reward, which a test can pause: a run then gets no further than the test wants.

A recipe uses it with `env.reward=REWARD`. The run finds the pause file through an environment variable.
"""

import json
import os
import time
from pathlib import Path

from rl_launcher.quickstart import sort_digits

REWARD = f"{Path(__file__).resolve()}:reward"
VARIABLE = "PAUSE_OF_A_RUN"


class RunPause:
    """Pauses runs that are started after this was created."""

    def __init__(self, folder, monkeypatch):
        self._file = folder / "pause.json"
        monkeypatch.setenv(VARIABLE, str(self._file))

    def pause(self, run_dir, *, step):
        """Compute no more rewards once the log has this step of GRPO."""
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps([str(run_dir / "metrics.jsonl"), step]))
        unfinished.replace(self._file)

    def resume(self):
        """Compute rewards again."""
        self._file.unlink()


def reward(completions, answer):
    """Return the quickstart's rewards, as soon as the run is not paused."""
    while _is_paused():
        time.sleep(0.02)
    return sort_digits.reward(completions, answer)


def _is_paused():
    try:
        log, step = json.loads(Path(os.environ[VARIABLE]).read_text())
    except FileNotFoundError:
        return False
    rows = map(json.loads, Path(log).read_text().splitlines())  # complete lines, since this process wrote them
    return any(row["stage"] == "grpo" and row["step"] >= step for row in rows)

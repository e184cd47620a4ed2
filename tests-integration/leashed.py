"""Runs that get no further than a test wants, however late it looks at them: their reward waits.

A run on a leash has `env.reward=REWARD`, the quickstart's, and finds its leash by an environment variable.
"""

import json
import os
import time
from pathlib import Path

from rl_launcher.quickstart import sort_digits

REWARD = f"{Path(__file__).resolve()}:reward"
VARIABLE = "LEASH_OF_A_RUN"


class Leash:
    """Holds runs that are started after `monkeypatch` has told them of it."""

    def __init__(self, folder, monkeypatch):
        self._file = folder / "leash.json"
        monkeypatch.setenv(VARIABLE, str(self._file))

    def hold(self, run_dir, *, step):
        """From now on no batch is rewarded once the log has this step of GRPO."""
        unfinished = self._file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps([str(run_dir / "metrics.jsonl"), step]))
        unfinished.replace(self._file)

    def let_go(self):
        """From now on nothing is held."""
        self._file.unlink()


def reward(completions, answer):
    """As the recipe's, when the leash is long enough."""
    while _is_held():
        time.sleep(0.02)
    return sort_digits.reward(completions, answer)


def _is_held():
    try:
        log, step = json.loads(Path(os.environ[VARIABLE]).read_text())
    except FileNotFoundError:
        return False
    rows = map(json.loads, Path(log).read_text().splitlines())  # written by this process, and whole
    return any(row["stage"] == "grpo" and row["step"] >= step for row in rows)

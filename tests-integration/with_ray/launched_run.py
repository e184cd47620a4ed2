"""Run `rl-launcher` in another process, watch its run directory, and kill its processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PATIENCE_S = 420  # starting Ray, two ranks and vLLM on two busy cores takes a minute or two

MARK = "RL_TEST_LAUNCHED_RUN"


class LaunchedRun:
    """`rl-launcher COMMAND ...` in its own process session."""

    def __init__(self, *arguments, run_dir, cwd):
        self.run_dir = Path(run_dir)
        self._mark = f"{self.run_dir.name}-{time.monotonic_ns()}"
        self._log = (Path(cwd) / f"{self._mark}.log").open("w+")
        command = [sys.executable, "-m", "rl_launcher", *map(str, arguments)]
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
            env={**os.environ, MARK: self._mark},
        )

    @property
    def output(self):
        self._log.seek(0)
        return self._log.read()

    def rows(self, stage="grpo"):
        """Return the logged steps of a stage, except the one before training."""
        return [row for row in json_lines(self.run_dir / "metrics.jsonl") if row["stage"] == stage and row["step"]]

    def wait_for_step(self, step, *, stage="grpo"):
        """Wait until the log has this step."""
        self.wait_until(lambda: any(row["step"] >= step for row in self.rows(stage)), what=f"step {step}")

    def wait_until_it_says(self, words):
        """Wait until its output contains these words."""
        self.wait_until(lambda: words in self.output, what=repr(words))

    def wait_until(self, holds, *, what="it"):
        """Wait until `holds()`; fail if the run ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while not holds():
            assert self.process.poll() is None or holds(), f"ended before {what}:\n{self.output[-4000:]}"
            assert time.monotonic() < deadline, f"{what} did not happen:\n{self.output[-4000:]}"
            time.sleep(0.05)

    def all_pids(self):
        """Return all living processes that this run has started: they inherit a variable of their environment."""
        mark = f"{MARK}={self._mark}".encode()
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found

    def pids(self, role):
        """Return the process ids of the ranks or engines that are running, by index."""
        entries = json.loads((self.run_dir / "processes.json").read_text())
        return {entry["index"]: entry["pid"] for entry in entries if entry["role"] == role}

    def kill(self, role, index=0):
        self.signal(role, index, signal.SIGKILL)

    def signal(self, role, index, number):
        os.kill(self.pids(role)[index], number)

    def kill_driver(self):
        """Kill the driver as a power failure would: nothing is cleaned up."""
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=PATIENCE_S)

    def terminate(self):
        os.kill(self.process.pid, signal.SIGTERM)

    def end(self):
        """Wait for the run to end, and return the exit code."""
        return self.process.wait(timeout=PATIENCE_S)

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=PATIENCE_S)
        self._log.close()


def json_lines(path):
    """Return the complete lines of a file that may still be written to."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def curve(rows):
    """Return what a repeated run must reproduce: everything except times and memory."""
    timed = ("time_s", "tokens_per_s", "refit_s", "engine_tokens_per_s")
    return [
        {
            name: value
            for name, value in row.items()
            if name not in timed and not name.startswith(("phase_s/", "memory"))
        }
        for row in rows
    ]


def gone(pids, *, within_s=60):
    """Wait for these processes to end, and return those that are still alive."""
    deadline = time.monotonic() + within_s
    while alive := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > deadline:
            return alive
        time.sleep(0.2)
    return []


def command_line(pid):
    """Return the command of a process as text, for messages."""
    with contextlib.suppress(OSError):
        return f"{pid}: {Path(f'/proc/{pid}/cmdline').read_text()}".replace("\0", " ")
    return str(pid)


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False

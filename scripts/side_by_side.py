"""Run sessions of nox side by side, one more at a time than the machine has cores, up to four.

    python scripts/side_by_side.py                             the sessions of a plain `nox`
    python scripts/side_by_side.py -s lint layers -- --fix     these sessions, with arguments for each
    python scripts/side_by_side.py -t rl-refit --at-once 1     by tag, one after the other

Most tests have one thread and wait for processes and disks a third of the time, so three sessions keep two cores busy.
Each session is a separate nox process. Its output is kept in `.nox/logs` and printed when it ends; the last lines of
failed sessions are printed again at the end. A session that takes longer than `LIMIT_S` is killed and named.

It needs only the standard library, and the nox of this interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

LIMIT_S = 60 * 60.0  # twice as long as the longest session
GRACE_S = 10.0
MOST_AT_ONCE = 4  # a session may need 6 GB
LAST_LINES = 80

# At most one of each at a time: tests with vLLM look at all of the machine's shared memory, ports and processes.
LANES = ("vllm",)

# Minutes on two cores beside two others, if more than one or two; those of a lane by the lane's name as well. They only
# decide the order: long sessions start first, so that none is left over to run alone.
MINUTES = {
    "integration-vllm": 20,
    "tests-rl-generation, vllm": 15,
    "tests-rl-refit, vllm": 5,
    "tests-rl-backends": 25,
    "tests-rl-parallel-plans": 20,
    "tests-rl-launcher": 14,
    "tests-rl-generation": 9,
    "integration": 9,
    "tests-rl-refit": 8,
    "tests-rl-algorithms": 7,
    "typecheck": 4,
    "tests-rl-observe": 2,
}
FIRST = ("lint", "layers", "scripts")  # seconds each, and they fail most often


@dataclass
class Running:
    """A session that is running."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    began: float
    killed: bool = False


@dataclass(frozen=True)
class Ended:
    """A session that has ended, with its exit code, seconds and log file."""

    name: str
    code: int
    seconds: float
    log: Path
    killed: bool = False

    @property
    def verdict(self) -> str:
        """The result, in a few words."""
        if self.killed:
            return f"KILLED after {LIMIT_S / 60:g} minutes: it hangs"
        return "ok" if self.code == 0 else f"FAILED with {self.code}"


@dataclass
class Crew:
    """Runs the sessions `waiting`, at most `at_once` at a time; `command` returns the command line of a session."""

    waiting: list[str]
    command: Callable[[str], Sequence[str]]
    logs: Path
    at_once: int
    limit_s: float = LIMIT_S
    running: list[Running] = field(default_factory=list)

    def run(self) -> Iterable[Ended]:
        """Yield sessions as they end. Closing the generator kills those that still run."""
        self.logs.mkdir(parents=True, exist_ok=True)
        try:
            while self.waiting or self.running:
                while len(self.running) < self.at_once and (name := next_of(self.waiting, self._names())) is not None:
                    self.waiting.remove(name)
                    self.running.append(self._begin(name))
                time.sleep(0.05)
                yield from self._ended()
        finally:
            for session in self.running:
                _kill(session.process)

    def _names(self) -> list[str]:
        return [session.name for session in self.running]

    def _begin(self, name: str) -> Running:
        log = self.logs / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name).strip('-')}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(  # in its own session, so that everything that it starts can be killed with it
                self.command(name),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Running(name, process, log, time.monotonic())

    def _ended(self) -> Iterable[Ended]:
        for session in tuple(self.running):
            seconds = time.monotonic() - session.began
            if seconds > self.limit_s and session.process.poll() is None:
                session.killed = True
                _kill(session.process)
            code = session.process.poll()
            if code is not None:
                self.running.remove(session)
                yield Ended(session.name, code, seconds, session.log, session.killed)


def main(arguments: Sequence[str]) -> int:
    """Run the sessions that `arguments` select; return the exit status, 1 if any session failed."""
    chosen, posargs, at_once = parse(arguments)
    nox = [sys.executable, "-m", "nox"]
    listed = subprocess.run([*nox, *chosen, "--list", "--json"], stdout=subprocess.PIPE, check=False)
    if listed.returncode:
        return listed.returncode
    names = in_order(session["session"] for session in json.loads(listed.stdout))
    if not names:
        print("no session is selected: `nox --list` shows them all")
        return 2
    print(f"{len(names)} sessions, {at_once} at a time: {', '.join(names)}", flush=True)
    crew = Crew(names, lambda name: [*nox, "--session", name, "--", *posargs], Path(".nox/logs"), at_once)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # kills what runs, as Ctrl-C does
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it by default
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)  # some tests of the sessions send it
    ended: list[Ended] = []
    began = time.monotonic()
    for session in crew.run():
        ended.append(session)
        print(f"\n{_rule(session)}\n{_text(session)}\n", flush=True)
        print(f"{len(ended)} ended, running: {', '.join(crew._names()) or 'none'}", flush=True)  # noqa: SLF001
    print("\n".join(report(ended, seconds=time.monotonic() - began)), flush=True)
    return int(any(session.code or session.killed for session in ended))


def parse(arguments: Sequence[str]) -> tuple[list[str], list[str], int]:
    """Return nox's options that select sessions, the arguments for each session, and how many run at a time."""
    place = [*arguments, "--"].index("--")
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="For everything else, call nox itself.", allow_abbrev=False
    )
    parser.add_argument("-s", "--session", nargs="+", default=[], help="names of sessions")
    parser.add_argument("-t", "--tags", nargs="+", default=[], help="tags of sessions")
    parser.add_argument("-k", "--keywords", help="an expression over names and tags")
    parser.add_argument("--at-once", type=int, default=min((os.cpu_count() or 1) + 1, MOST_AT_ONCE), help="how many")
    asked = parser.parse_args(arguments[:place])
    if asked.at_once < 1:
        parser.error(f"--at-once must be at least 1; got {asked.at_once}")
    options = {
        "--session": asked.session,
        "--tags": asked.tags,
        "--keywords": [asked.keywords] if asked.keywords else [],
    }
    chosen = [word for option, values in options.items() if values for word in (option, *values)]
    return chosen, [*arguments[place + 1 :]], asked.at_once


def in_order(names: Iterable[str], minutes: Mapping[str, float] | None = None) -> list[str]:
    """Return the sessions that take seconds first, then those of a lane, as they cannot overlap, then the longest."""
    known = MINUTES if minutes is None else minutes

    def key(name: str) -> tuple[bool, bool, float]:
        plain = name.partition("(")[0]
        lane = next((lane for lane in LANES if lane in name), None)
        return plain not in FIRST, lane is None, -known.get(f"{plain}, {lane}", known.get(plain, 1))

    return sorted(names, key=key)


def next_of(waiting: Iterable[str], running: Sequence[str]) -> str | None:
    """Return the first session that may run beside those that are running, or None."""
    taken = {lane for lane in LANES if any(lane in name for name in running)}
    return next((name for name in waiting if not any(lane in name for lane in taken)), None)


def report(ended: Sequence[Ended], *, seconds: float) -> list[str]:
    """Return the last lines of failed sessions, and a line for each session, the failures last."""
    failed = [session for session in ended if session.code or session.killed]
    lines = []
    for session in failed:
        text = _text(session).splitlines()
        whole = f"the last {LAST_LINES} lines of {session.log}" if len(text) > LAST_LINES else str(session.log)
        lines += ["", f"{_rule(session)}", f"({whole})", *text[-LAST_LINES:]]
    lines += ["", "minutes  session"]
    for session in sorted(ended, key=lambda session: (session in failed, -session.seconds)):
        lines.append(f"{session.seconds / 60:7.1f}  {session.name}: {session.verdict}")
    total = sum(session.seconds for session in ended)
    lines.append(f"{seconds / 60:7.1f}  all of them, {total / 60:.1f} one after the other: {len(failed)} failed")
    return lines


def _rule(session: Ended) -> str:
    return f"==== {session.name}: {session.verdict} ({session.seconds:.0f} s) ".ljust(110, "=")


def _text(session: Ended) -> str:
    return session.log.read_text(errors="replace").rstrip()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and everything in its session: first by SIGTERM, then by SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

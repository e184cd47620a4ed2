"""Runs cases of chaos, some at a time: a JSON list of cases on stdin, a line of JSON for each that is over.

Imports torch once and forks a process for each party. Has one thread, so that forking is safe; a case is a generator
that is resumed until it ends. Whoever has not ended after `HANG_S` seconds is asked for a traceback and killed: that is
what a hang is.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import party

HANG_S = 180.0
_hosts = 0


class Child:
    def __init__(self, name, spec, scratch):
        self.name, self.spec = name, spec
        commands, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        self.log = scratch / f"{name.replace(' ', '-')}.log"
        self.pid = os.fork()
        if self.pid == 0:
            for descriptor in _open_descriptors:
                os.close(descriptor)
            os.close(self._commands)
            os.close(self._answers)
            log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            party.main(spec, os.fdopen(commands), os.fdopen(answers, "w"))
        os.close(commands)
        os.close(answers)
        _open_descriptors.update((self._commands, self._answers))
        os.set_blocking(self._answers, False)
        self._text = b""
        self.struck = None
        self.status = None
        self.where = None

    def say(self, **command):
        with contextlib.suppress(BrokenPipeError):
            os.write(self._commands, (json.dumps(command) + "\n").encode())

    def answer(self):
        """The next answer; None while there is none."""
        with contextlib.suppress(BlockingIOError):
            self._text += os.read(self._answers, 2**20)
        while b"\n" in self._text:
            line, _, self._text = self._text.partition(b"\n")
            said = json.loads(line)
            if "struck" not in said:
                return said
            self.struck = said["struck"]
        return None

    @property
    def dead(self):
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def last_words(self):
        """What a process that is dead has said before."""
        return self.answer() or {"dead": self.status}

    @property
    def stopped(self):
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def resume(self):
        os.kill(self.pid, signal.SIGCONT)

    def end(self):
        if not self.dead:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGKILL)
            self.status = os.waitpid(self.pid, 0)[1]
        for descriptor in (self._commands, self._answers):
            _open_descriptors.discard(descriptor)
            os.close(descriptor)


_open_descriptors = set()


def answers(children, hang_s=HANG_S):
    """Yield until each of the children has answered, died, or stopped; return name → answer."""
    until = time.monotonic() + hang_s
    said = {}
    while True:
        for child in children:
            answer = None if child.name in said else child.answer() or (child.dead and child.last_words())
            if answer:
                said[child.name] = answer
        silent = [child for child in children if child.name not in said]
        if not silent or all(child.stopped for child in silent):
            return said
        if time.monotonic() > until:
            said |= yield from tracebacks(silent)
            return said
        yield


def tracebacks(children):
    """Of processes that hang; then they are killed."""
    for child in children:
        os.kill(child.pid, signal.SIGUSR1)
    until = time.monotonic() + 1
    while time.monotonic() < until:
        yield
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    return {child.name: {"hang": child.log.read_text()[-6000:]} for child in children}


def address():
    """An address of this host that no other case has."""
    global _hosts  # noqa: PLW0603
    _hosts += 1
    return f"tcp://127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 250}.{_hosts % 250 + 1}:{29000 + _hosts // 250}"


def names(case):
    return [
        *(f"source {rank}" for rank in range(case["sources"])),
        *(f"sink {rank}" for rank in range(case["sinks"])),
    ]


def processes(case):
    """Name of each process → the ranks that it has."""
    if case.get("colocated"):
        return {f"source {rank}": {"source_rank": rank, "sink_rank": rank} for rank in range(case["sources"])}
    return {name: {f"{name.split()[0]}_rank": int(name.split()[1])} for name in names(case)}


def start(case, name, ranks, scratch, *, faulty):
    spec = {
        key: case[key]
        for key in ("transport", "mode", "deadline_s", "liveness_s", "verify", "receive_s")
        if key in case
    }
    spec |= ranks | {"num_sources": case["sources"], "num_sinks": case["sinks"], "directory": str(scratch / "memory")}
    spec["files"] = str(scratch / "files")
    if faulty:
        spec |= case.get("settings", {}).get(name, {})
        spec |= {"fault": case["fault"]} if case["fault"]["party"] == name else {}
    return Child(name, spec, scratch)


def run(case):
    """Yields until the case is over; returns what happened."""
    scratch = Path(tempfile.mkdtemp(prefix="rl-refit-chaos-", dir=case.get("scratch")))
    memory = Path(tempfile.mkdtemp(prefix="rl-refit-chaos-", dir="/dev/shm"))
    (scratch / "memory").symlink_to(memory)
    children = {}
    try:
        children.update(
            (name, start(case, name, ranks, scratch, faulty=True)) for name, ranks in processes(case).items()
        )
        outcome = yield from play(case, children, scratch)
        outcome["left"] = sorted(str(path.name) for path in memory.iterdir())
    finally:
        for child in children.values():
            child.end()
        shutil.rmtree(memory)
        shutil.rmtree(scratch)
    return outcome


def play(case, children, scratch):
    outcome = {"name": case["name"]}
    party_of_store = {"sink": "sink 0", "trainer": "source 0"}[case.get("store", "sink")]
    host = next(name for name, c in children.items() if party_of_store in (name, *both(c.spec)))
    where, deadline_s = address(), case["deadline_s"]
    children[host].where = where
    for child in children.values():
        child.say(do="meet", address=where, name="first", hosts=child.name == host)
    outcome["meet"] = yield from answers(children.values())
    if case.get("first", True):
        for child in children.values():
            child.say(do="bring", version=1)
        outcome["first"] = yield from answers(children.values())
    began = time.monotonic()
    for child in children.values():
        child.say(do="bring", version=2, armed=True)
    outcome["fault"] = yield from answers(children.values())
    stopped = [child for child in children.values() if child.name not in outcome["fault"]]
    for child in stopped:
        child.resume()
    outcome["fault"] |= yield from answers(stopped)
    struck = [child.struck for child in children.values() if child.struck is not None]
    outcome["struck"] = bool(struck)
    ended = {name: said["ended"] for name, said in outcome["fault"].items() if "ended" in said}
    since = struck[0] if struck else began
    outcome["seconds"] = {name: time_ - since for name, time_ in ended.items() if name not in {c.name for c in stopped}}
    outcome["limit_s"] = deadline_s + case["liveness_s"]
    outcome["stopped"] = [child.name for child in stopped]
    after = case["next"]
    if after in ("same", "broken", "either"):
        for child in children.values():
            child.say(do="bring", version=3)
        said = yield from answers(children.values())
        if after == "either":
            after = "broken" if any("error" in answer for answer in said.values()) else "same"
        outcome["next" if after == "same" else "broken"] = said
    if after in ("fresh", "broken"):
        outcome["next"] = yield from again(case, children, (scratch, host))
    return outcome


def both(spec):
    return [f"{side} {spec[f'{side}_rank']}" for side in ("source", "sink") if spec.get(f"{side}_rank") is not None]


def again(case, children, place):
    """Fresh processes for the dead, and a new rendezvous for all, in the old store where its host is alive."""
    scratch, host = place
    survivors = [child for child in children.values() if not child.dead]
    for child in survivors:
        child.say(do="close")
    yield from answers(survivors)
    reuse = case.get("reuse", True) and not children[host].dead
    for name, ranks in processes(case).items():
        if children[name].dead:
            children[name].end()
            children[name] = start(case, name, ranks, scratch, faulty=False)
    where = children[host].where if reuse else address()
    for child in children.values():
        child.say(do="meet", address=where, name="again", hosts=child.name == host, reuse=reuse and child in survivors)
    yield from answers(children.values())
    for child in children.values():
        child.say(do="bring", version=3)
    return (yield from answers(children.values()))


def main():
    cases = json.load(sys.stdin)
    gc.freeze()  # each party looks for garbage after each refit: not in torch
    for case, outcome in run_all(cases, at_once=int(sys.argv[1])):
        print(json.dumps([case["name"], outcome]), flush=True)


def run_all(cases, *, at_once):
    """Yield (case, outcome) as they end."""
    waiting, running = list(reversed(cases)), []
    while waiting or running:
        while waiting and len(running) < at_once:
            case = waiting.pop()
            running.append((case, run(case)))
        for entry in tuple(running):
            try:
                next(entry[1])
            except StopIteration as end:
                running.remove(entry)
                yield entry[0], end.value
        select.select([], [], [], 0.005)


if __name__ == "__main__":
    main()

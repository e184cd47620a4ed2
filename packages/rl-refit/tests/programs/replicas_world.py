"""Processes of trainers and replicas, forked from one that has imported torch; each obeys lines of JSON.

The program reads `{"name": …, "role": …, "options": …}` lines and forks for each; a party reads commands from the pipe
`<name>.in` of the directory that is the program's argument, and answers into `<name>.out`. `World` is the test's side.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

from rl_refit import (
    Binding,
    DeadlineError,
    ModuleSink,
    ModuleSource,
    PoisonedError,
    RefitError,
    Region,
    Replica,
    Replicas,
)

LAYERS, HIDDEN = 4, 16
PATIENCE_S = 120.0


# -- A party -----------------------------------------------------------------------------------------------------------


class Rows(nn.Module):
    """A rank's rows of each tensor of a model of linear layers; with one rank, all of them."""

    def __init__(self, version, rank=0, ranks=1):
        super().__init__()
        each = HIDDEN // ranks
        self.first, self.last = rank * each, (rank + 1) * each
        shapes = {
            f"{layer}.{name}": more for layer in range(LAYERS) for name, more in (("weight", (HIDDEN,)), ("bias", ()))
        }
        self.names = [*shapes]
        self.kept = nn.ParameterList(torch.empty(each, *more) for more in shapes.values())
        self.take(version)

    def take(self, version):
        """From now on these are the weights of a version."""
        generator = torch.Generator().manual_seed(1000 + version)
        with torch.no_grad():
            for kept in self.kept:
                kept.copy_(torch.randn(HIDDEN, *kept.shape[1:], generator=generator)[self.first : self.last])

    def name_of(self, own):
        return self.names[int(own.removeprefix("kept."))]

    def bind(self, module):
        for name, kept in zip(self.names, module.kept, strict=True):
            start = (self.first, *(0 for _ in kept.shape[1:]))
            yield Binding(Region(name, start, tuple(kept.shape)), (HIDDEN, *kept.shape[1:]), kept)


class Strikes:
    """Wraps methods of an object, and acts at the nth call of one of them."""

    def __init__(self, thing):
        self.thing, self.due = thing, {}

    def arm(self, point, action, nth=0):
        self.due[point] = [action, nth]
        before = getattr(self.thing, point)

        def struck(*arguments, **options):
            if self.due.get(point) is not None:
                self.due[point][1] -= 1
                if self.due[point][1] < 0:
                    action, _ = self.due.pop(point)
                    if action == "raise":
                        raise OSError("a fault of the test")
                    os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[action])
            return before(*arguments, **options)

        setattr(self.thing, point, struck)

    def disarm(self):
        self.due.clear()


class Trainer:
    def __init__(self, *, address, rank=0, ranks=1, **options):
        self.module = Rows(0, rank, ranks)
        source = ModuleSource(self.module, bindings=self.module.bind)
        self.strikes = Strikes(source)
        self.replicas = Replicas(
            source, address=address, num_sources=ranks, source_rank=rank, bucket_bytes=1024, verify="full", **options
        )

    def refit(self, version, **options):
        self.module.take(version)
        return self._report(lambda: self.replicas(version, **options))

    def catch_up(self):
        return self._report(self.replicas.catch_up)

    def train(self, version):
        self.module.take(version)
        return {}

    def arm(self, point, action, nth=0):
        self.strikes.arm(point, action, nth)
        return {}

    def disarm(self):
        self.strikes.disarm()
        return {}

    def await_joined(self, names, versions=None):
        until = time.monotonic() + PATIENCE_S / 4
        while sorted(joined := self.replicas.joined()) != sorted(names) or (versions or joined) != joined:
            if time.monotonic() > until:
                return {"error": f"joined: {joined}, failed: {self.replicas._failed}"}
            time.sleep(0.01)
        return {"joined": joined}

    def _report(self, call):
        try:
            report = call()
        except (RefitError, OSError, KeyboardInterrupt) as error:
            return {
                "error": type(error).__name__,
                "message": str(error),
                "peer": getattr(error, "peer", None),
                "notes": list(getattr(error, "__notes__", ())),
            }
        return {
            "version": report.version,
            "versions": dict(report.versions),
            "failures": dict(report.failures),
            "refits": {name: each.version for name, each in report.refits.items()},
            "bytes": {name: each.bytes for name, each in report.refits.items()},
            "digests": len({each.digest for each in report.refits.values()}),
            "metrics": report.metrics(),
            "text": report.explain(),
        }

    def close(self):
        self.replicas.close()
        return {}


class ReplicaParty:
    def __init__(self, *, name, trainer, mode="staged", rank=0, ranks=1, **options):
        self.rank, self.ranks = rank, ranks
        self.module = Rows(-1, rank, ranks)
        names = {"bindings": self.module.bind} if ranks > 1 else {"rename": self.module.name_of}
        self.sink = ModuleSink(self.module, mode=mode, **names)
        self.strikes = Strikes(self.sink)
        self.replica = Replica(
            self.sink, name=name, trainer=trainer, rank=rank, num_ranks=ranks, bucket_bytes=1024, **options
        )
        self.log = []
        self.thread = None
        self.leaving = False

    def serve(self):
        """Receive in a loop, whatever happens."""
        self.leaving = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()
        return {}

    def _serve(self):
        while not self.leaving:
            try:
                self.log.append({"version": self.replica.receive(timeout_s=0.2).version})
            except DeadlineError as error:
                if "no refit began" not in str(error):
                    self.log.append({"error": type(error).__name__, "message": str(error)})
            except (RefitError, OSError) as error:
                self.log.append({"error": type(error).__name__, "message": str(error)})
                time.sleep(0.02)

    def receive(self, timeout_s):
        try:
            return {"version": self.replica.receive(timeout_s=timeout_s).version}
        except RefitError as error:
            return {"error": type(error).__name__, "message": str(error)}

    def arm(self, point, action, nth=0):
        self.strikes.arm(point, action, nth)
        return {}

    def disarm(self):
        self.strikes.disarm()
        return {}

    def state(self, until=None):
        """What it has; waits until it has the version `until`."""
        limit = time.monotonic() + PATIENCE_S
        while until is not None and self.sink.version != until and time.monotonic() < limit:
            time.sleep(0.01)
        with contextlib.suppress(PoisonedError), self.sink.serving():
            pass
        held = None
        for version in range(-1, (self.sink.version or 0) + 4):
            if all(map(torch.equal, self.module.kept, Rows(version, self.rank, self.ranks).kept)):
                held = version
        return {"version": self.sink.version, "poisoned": self.sink.poisoned, "held": held, "log": self.log}

    def leave(self):
        self.leaving = True
        if self.thread is not None:
            self.thread.join()
        self.replica.close()
        return {}


def held_by_process():
    """File descriptors and threads of this process, once no thread ends any more."""
    gc.collect()
    before = None
    while before != (before := (len([*Path("/proc/self/fd").iterdir()]), threading.active_count())):
        time.sleep(0.3)
    return {"descriptors": before[0], "threads": before[1]}


def obey(role, options, commands, answers):
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    party = None
    for line in commands:
        command = json.loads(line)
        what = command.pop("do")
        if what == "make":
            try:
                party = {"trainer": Trainer, "replica": ReplicaParty}[role](**options)
                said = {}
            except RefitError as error:
                said = {"error": type(error).__name__, "message": str(error)}
        elif what == "measure":
            said = held_by_process()
        else:
            said = getattr(party, what)(**command)
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def fork_parties(directory):
    """What the program does: never has a second thread, so that forking is safe."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who is killed is gone at once
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            log = os.open(directory / f"{order['name']}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(log, 1)
            os.dup2(log, 2)
            status = 1
            try:
                commands, answers = (directory / f"{order['name']}.{end}" for end in ("in", "out"))
                obey(order["role"], order["options"], commands.open(), answers.open("w"))
                status = 0
            except BaseException:  # noqa: BLE001 - the test reads the log
                import traceback

                traceback.print_exc()
            sys.stderr.flush()
            os._exit(status)
        print(json.dumps({"pid": pid}), flush=True)


def free_address():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


# -- The test's side ---------------------------------------------------------------------------------------------------


class World:
    """Starts parties, and ends all that are left."""

    def __init__(self, directory):
        self.directory, self.parties, self.count = Path(directory), {}, 0
        self.program = subprocess.Popen(
            [sys.executable, __file__, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, role, label, options):
        self.count += 1
        party = Party(self, f"{label}-{self.count}", role, options)
        self.parties[party.name] = party
        return party

    def trainer(self, **options):
        return self.start("trainer", f"trainer {options.get('rank', 0)}", options)

    def replica(self, name, **options):
        return self.start("replica", f"{name} {options.get('rank', 0)}", {"name": name, **options})

    def clear(self):
        for party in self.parties.values():
            party.end()
        self.parties = {}

    def close(self):
        self.clear()
        self.program.stdin.close()
        self.program.wait()
        self.program.stdout.close()


class Party:
    def __init__(self, world, name, role, options):
        self.address = options.get("address")
        self.name, self.log = name, world.directory / f"{name}.log"
        ends = [world.directory / f"{name}.{end}" for end in ("in", "out")]
        for end in ends:
            os.mkfifo(end)
        world.program.stdin.write(json.dumps({"name": name, "role": role, "options": options}) + "\n")
        world.program.stdin.flush()
        self.pid = json.loads(world.program.stdout.readline())["pid"]
        self.commands = ends[0].open("w")
        self.answers = os.fdopen(os.open(ends[1], os.O_RDONLY))
        self.ended = False
        self.begin("make")
        self.made = self.answer()

    def begin(self, do, **command):
        """Say what to do; `answer` waits for it."""
        self.commands.write(json.dumps({"do": do, **command}) + "\n")
        self.commands.flush()

    def answer(self, patience_s=PATIENCE_S):
        found = []
        reading = threading.Thread(target=lambda: found.append(self.answers.readline()), daemon=True)
        reading.start()
        until = time.monotonic() + patience_s
        while reading.is_alive() and time.monotonic() < until:
            reading.join(1.0)
            self.kill(signal.SIGCONT)  # one that stops itself late is not to be waited for
        if not found:
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(1)
            raise AssertionError(f"{self.name} hangs: {self.log.read_text()[-6000:]}")
        return json.loads(found[0]) if found[0] else {"dead": self.log.read_text()[-3000:]}

    def do(self, what, **command):
        self.begin(what, **command)
        return self.answer()

    @property
    def is_gone(self):
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        return False

    def await_stop(self):
        until = time.monotonic() + PATIENCE_S
        while Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < until, f"{self.name} was to be stopped, and is not"
            time.sleep(0.005)

    def kill(self, number=signal.SIGKILL, *, wait=True):
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            while wait and number == signal.SIGKILL:  # until it is gone, and what it listened to is free
                os.kill(self.pid, 0)
                time.sleep(0.005)

    def end(self):
        if self.ended:
            return
        self.ended = True
        self.kill(signal.SIGCONT)
        self.kill()
        with contextlib.suppress(BrokenPipeError):
            self.commands.close()
        self.answers.close()


if __name__ == "__main__":
    fork_parties(Path(sys.argv[1]))

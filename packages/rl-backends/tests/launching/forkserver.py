"""Programs of one rank each, forked from one process that has imported what all of them need.

Importing torch, transformers and their models takes a process 6 s of its processor, and a session has thirty of them;
forking one that has imported them takes 0.05 s. Knows processes and what is imported; does not know what is tested.
rl_backends is among that unless the shapes of its calls are checked (`CHECK_SHAPES=1`): a program checks them, or does
not, by what it imports first.
"""

import functools
import gc
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
from pathlib import Path

HERE = Path(__file__).parent


class Program:
    """One that runs, as `subprocess.Popen` shows it."""

    def __init__(self, process):
        self._process = process
        self.pid = process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        """What it ended with, or None."""
        return self._process.exitcode

    def wait(self, timeout=None):
        """The same, once it has ended or `timeout` seconds are over."""
        self._process.join(timeout)
        return self._process.exitcode

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)


def start(program, task, *, log=None):
    """Run `main(task)` of the file `program` in a process and a session of its own, whose output goes to `log`."""
    process = _context().Process(target=_run, args=(str(program), task, log and str(log)))
    process.start()
    return Program(process)


@functools.cache
def _context():
    """With the server running, which finds what it is to import by the environment alone."""
    if str(HERE) not in sys.path:
        sys.path.append(str(HERE))  # for the processes
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "imported_beforehand"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), path]))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return context


def _run(program, task, log):
    assert "imported_beforehand" in sys.modules, "the server could not import it, and says so nowhere"
    os.setsid()  # so that whoever ends it ends what it has forked, too
    gc.freeze()  # what came along is nobody's to collect
    if log is not None:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
    spec = importlib.util.spec_from_file_location(f"program_{Path(program).stem}", program)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(task)

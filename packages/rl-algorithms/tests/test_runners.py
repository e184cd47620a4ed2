"""Runners behind a real boundary: a sandbox service over HTTP, and bubblewrap where it is installed."""

import http.server
import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest

from rl_algorithms.environments.code import CodeTests
from rl_algorithms.environments.runners import Bubblewrap, RemoteSandbox
from rl_algorithms.environments.sandbox import Limits, Runner, SandboxError

LIMITS = Limits(wall_s=30.0)


@contextmanager
def service(answer):
    """A server of the form `run_code`: `answer` makes the reply of a request."""
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(request)
            body = json.dumps(answer(request)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/run_code", asked
    finally:
        server.shutdown()
        server.server_close()


def run_here(request):
    """What SandboxFusion answers, by a plain process."""
    done = subprocess.run(
        [sys.executable, "-c", request["code"]], input=request["stdin"], capture_output=True, text=True, check=False
    )
    result = {"status": "Finished", "return_code": done.returncode, "stdout": done.stdout, "stderr": done.stderr}
    return {"status": "Success" if not done.returncode else "Failed", "run_result": result}


def test_a_service_runs_programs_and_tests():
    with service(run_here) as (url, asked):
        runner = RemoteSandbox(url)
        assert isinstance(runner, Runner)
        execution = runner("import sys; print(input()[::-1]); sys.exit(3)", stdin="abc\n", limits=LIMITS)
        assert (execution.ending, execution.code, execution.stdout) == ("exit", 3, "cba\n")
        assert (asked[0]["language"], asked[0]["run_timeout"], asked[0]["memory_limit_MB"]) == ("python", 30.0, 512)
        tests = [[{"function": "add", "args": [1, 2], "expected": 3}], [{"input": "4\n", "output": "5\n"}]]
        programs = ["def add(a, b): return a + b", "print(int(input()) + 1)"]
        assert CodeTests(runner=runner)(programs, tests) == [1.0, 1.0]
        assert CodeTests(runner=runner)(["def add(a, b): return a", "print(1)"], tests) == [0.0, 0.0]


def test_a_deadline_and_a_failure_of_the_service_are_told_apart():
    with service(lambda _: {"status": "Failed", "run_result": {"status": "TimeLimitExceeded"}}) as (url, _):
        assert RemoteSandbox(url)("", stdin="", limits=LIMITS).ending == "timeout"
    with service(lambda _: {"status": "SandboxError", "message": "no workers"}) as (url, _):
        with pytest.raises(SandboxError, match="failed: no workers"):
            RemoteSandbox(url)("", stdin="", limits=LIMITS)
        (score,) = CodeTests(runner=RemoteSandbox(url))(["x"], [[{"input": "", "output": ""}]])
        assert "no workers" in score.failed
    with pytest.raises(SandboxError, match="did not answer"):
        RemoteSandbox(url)("", stdin="", limits=LIMITS)  # it is gone
    with pytest.raises(ValueError, match="must begin with http"):
        RemoteSandbox("file:///etc/passwd")


def test_bubblewrap_that_is_not_there_and_a_network_that_it_has_not_are_refused():
    with pytest.raises(SandboxError, match="apt-get install bubblewrap"):
        Bubblewrap(bwrap="/nowhere/bwrap")("", stdin="", limits=LIMITS)
    with pytest.raises(SandboxError, match="network='host' and bubblewrap"):
        Bubblewrap()("", stdin="", limits=Limits(network="host"))


@pytest.fixture
def bubblewrap():
    if shutil.which("bwrap") is None or shutil.which("python3", path="/usr/bin") is None:
        pytest.skip("bubblewrap, or a system's python3, is not installed")
    runner = Bubblewrap()
    try:
        runner("", stdin="", limits=LIMITS)
    except SandboxError as error:
        pytest.skip(str(error))
    return runner


def test_bubblewrap_runs_programs_that_see_neither_network_nor_files(bubblewrap):
    execution = bubblewrap("print(input()[::-1])", stdin="abc\n", limits=LIMITS)
    assert (execution.ending, execution.code, execution.stdout) == ("exit", 0, "cba\n")
    seen = bubblewrap(
        "import os, socket; print(os.path.exists('/root'), os.listdir('/tmp'), len(os.environ) < 5)\n"
        "socket.create_connection(('127.0.0.1', 9), 1)",
        stdin="",
        limits=LIMITS,
    )
    assert seen.stdout == "False [] True\n"
    assert "Error" in seen.stderr
    assert bubblewrap("while True: pass", stdin="", limits=Limits(wall_s=1.0)).ending in ("timeout", "signal")
    full = bubblewrap(
        "import os; open(os.path.join('/tmp', 'x'), 'wb').write(b'x' * (4 << 20))",
        stdin="",
        limits=Limits(wall_s=30.0, disk_bytes=1 << 20),
    )
    assert "No space left" in full.stderr

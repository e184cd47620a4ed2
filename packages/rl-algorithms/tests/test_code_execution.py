"""Claims about programs that run under limits: each limit holds, nothing stays behind, and wrong code is wrong."""

import contextlib
import math
import os
import shutil
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_algorithms.contracts import Conversation
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.environments.code import CodeTests, code_tests
from rl_algorithms.environments.sandbox import Execution, Limits, Runner, SandboxError, run_python
from rl_algorithms.environments.scores import CannotJudgeError


def readable_python():
    """An interpreter that every user can read: as root, programs run as another user."""
    if os.geteuid() != 0:
        return sys.executable
    for candidate in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        if candidate and all(folder.stat().st_mode & 0o001 for folder in Path(candidate).resolve().parents):
            return candidate
    return None


PYTHON = readable_python()
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="limits are those of Linux"),
    pytest.mark.skipif(PYTHON is None, reason="run by root, and no interpreter that other users can read"),
]


def limits(**changed):
    return Limits(**{"python": PYTHON, "wall_s": 60.0, **changed})


def run(source, *, stdin="", **changed):
    return run_python(source, stdin=stdin, limits=limits(**changed))


def test_a_program_reads_prints_and_ends():
    execution = run("import sys; print(input()[::-1]); print('é', file=sys.stderr); sys.exit(3)", stdin="abc\n")
    assert execution == Execution(
        ending="exit", code=3, stdout="cba\n", stderr="é\n", cut=False, isolated=execution.isolated
    )
    assert run("print(1)").succeeded


def test_an_endless_loop_is_killed():
    assert run("while True: pass", wall_s=0.5).ending == "timeout"


def test_sleeping_for_ever_is_killed():
    assert run("import time; time.sleep(1000)", wall_s=0.5).ending == "timeout"


def test_memory_is_refused_beyond_the_limit():
    assert "MemoryError" in run("x = bytearray(10**9)", memory_bytes=128 << 20).stderr
    assert run("x = bytearray(10**6)", memory_bytes=128 << 20).succeeded


def test_a_file_cannot_grow_beyond_the_limit():
    assert "File too large" in run("open('f', 'wb').write(bytes(10**6))", file_bytes=10**5).stderr
    assert run("open('f', 'wb').write(bytes(10**4))", file_bytes=10**5).succeeded


def test_output_is_cut_and_says_so():
    execution = run("print('x' * 5000)", output_bytes=1000)
    assert execution.cut
    assert execution.stdout == "x" * 1000
    assert not execution.succeeded


def test_open_files_are_limited():
    assert "Too many open files" in run("files = [open('/dev/null') for _ in range(100)]", open_files=20).stderr


FORK = """
import os, time
forked = 0
try:
    while forked < 50:
        if os.fork() == 0:
            time.sleep(1000)
        forked += 1
except OSError:
    pass
print(forked)
"""


@pytest.mark.parametrize("allowed", [0, 3])
def test_processes_are_limited(allowed):
    assert int(run(FORK, processes=allowed).stdout) <= allowed


BOMB = """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
RABBIT = """
import os
while True:
    try:
        if os.fork():
            os._exit(0)
    except OSError:
        pass
"""


@pytest.mark.parametrize("source", [BOMB, RABBIT])
def test_a_fork_bomb_leaves_nothing_behind(source):
    for wall_s in (0.5, 5.0, 50.0):  # a busy machine needs longer to begin
        execution = run("import os\nprint(os.getcwd(), flush=True)" + source, wall_s=wall_s)
        if execution.stdout:
            break
    assert execution.ending in {"timeout", "exit"}
    assert not running_in(execution.stdout.strip())


def running_in(directory):
    """Processes whose directory it is, or was before it was removed."""
    assert "rl-program-" in directory
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # not ours to look at, or gone
            if entry.name.isdigit() and directory in str((entry / "cwd").readlink()):
                found.append(entry.name)
    return found


ESCAPED = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
print(os.getcwd(), flush=True)
time.sleep(WAIT)
"""


@pytest.mark.parametrize(("seconds", "ending"), [("0", "exit"), ("1000", "timeout")])
def test_a_child_in_another_session_is_killed_when_the_program_ends(seconds, ending):
    for wall_s in (60.0,) if ending == "exit" else (3.0, 60.0):  # a busy machine needs longer to begin
        execution = run(ESCAPED.replace("WAIT", seconds), wall_s=wall_s)
        if execution.stdout:
            break
    assert execution.ending == ending
    directory = execution.stdout.strip()
    assert not running_in(directory)
    assert not Path(directory).exists()


def test_the_environment_and_its_secrets_are_invisible(monkeypatch):
    monkeypatch.setenv("API_KEY", "hunter2")
    printed = run("import os; print(dict(os.environ)); print(open(f'/proc/{os.getppid()}/environ').read())")
    assert "hunter2" not in printed.stdout
    assert "API_KEY" not in printed.stdout


def test_nothing_installed_can_be_imported():
    assert "No module named 'pytest'" in run("import pytest").stderr


def test_a_program_begins_in_an_empty_directory_which_is_removed():
    execution = run("import os; print(os.listdir()); print(os.getcwd())")
    files, directory = execution.stdout.split("\n")[:2]
    assert files == "['main.py']"
    assert not Path(directory).exists()


def test_a_directory_that_cannot_be_walked_is_removed_all_the_same():
    source = "import os\nprint(os.getcwd())\nfor _ in range(1100):\n    os.mkdir('d'); os.chdir('d')\nos.chmod('.', 0)"
    execution = run(source)
    assert execution.succeeded
    assert not Path(execution.stdout.strip()).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root's programs become another user")
def test_a_program_of_roots_is_nobody():
    uid, groups = run("import os; print(os.getuid()); print(os.getgroups())").stdout.split("\n")[:2]
    assert int(uid) > 1000
    assert groups == "[]"
    assert "PermissionError" in run("import os; os.kill(os.getppid(), 9)").stderr


def test_a_network_of_its_own_is_given_or_refused():
    try:
        said = run("import socket; socket.create_connection(('192.0.2.1', 9), 1)", network="none").stderr
    except SandboxError as refused:
        said = str(refused)
    assert "Network is unreachable" in said or "unshare says" in said


WRITES = """
import os
for folder in ("/tmp", "/var/tmp", "/dev/shm", os.getcwd()):
    written, name = 0, folder + "/rl-test-WHO"
    try:
        with open(name, "wb", buffering=0) as file:
            for _ in range(3):
                written += file.write(b"x" * (1 << 20))
    except OSError as error:
        print(folder, written >> 20, error.strerror)
    else:
        print(folder, written >> 20)
"""


def test_what_a_program_writes_is_bounded_and_gone_where_the_kernel_allows_it():
    source = WRITES.replace("WHO", str(os.getpid()))
    execution = run(source, disk_bytes=2 << 20)
    names = [Path(folder, f"rl-test-{os.getpid()}") for folder in ("/tmp", "/var/tmp", "/dev/shm")]
    if "files" not in execution.isolated:
        for name in names:
            name.unlink(missing_ok=True)
        pytest.skip("this kernel makes no mount namespace here")
    assert execution.stdout.count("No space left on device") == 4, execution
    assert not any(name.exists() for name in names)
    assert run(source, files="private").stdout.count("No space") == 0


def test_nothing_of_the_host_is_mounted_over():
    before = Path("/proc/self/mounts").read_text()
    run("print(1)")
    assert Path("/proc/self/mounts").read_text() == before


def test_a_program_has_no_network_unless_it_is_asked_for():
    source = "import socket; print(socket.if_nameindex()); socket.create_connection(('127.0.0.1', 9), 1)"
    execution = run(source)
    if "network" in execution.isolated:
        assert "unreachable" in execution.stderr
    else:
        assert "refused" in execution.stderr
    assert "refused" in run(source, network="host").stderr
    assert "network" not in run(source, network="host").isolated


def test_an_interpreter_that_programs_cannot_run_falls_on_one_that_they_can_and_says_so(monkeypatch, caplog):
    from rl_algorithms.environments import sandbox

    sandbox._runnable_python.cache_clear()
    tried = []
    original = sandbox._run

    def run_but_not_ours(source, *, stdin, limits):
        tried.append(limits.python)
        if limits.python == sys.executable:
            raise SandboxError("it cannot be started: Permission denied")
        return original(source, stdin=stdin, limits=limits)

    monkeypatch.setattr(sandbox, "_run", run_but_not_ours)
    found = sandbox._runnable_python()
    assert tried == [sys.executable, found]
    assert f"programs are run by {found}: it cannot be started: Permission denied" in caplog.text
    assert run_python("print(1)").stdout == "1\n"
    sandbox._runnable_python.cache_clear()
    monkeypatch.setattr(sandbox.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SandboxError, match=r"Permission denied.*set Limits\(python='/usr/bin/python3'\)"):
        run_python("print(1)")
    sandbox._runnable_python.cache_clear()


def test_an_interpreter_that_is_not_there_is_refused():
    with pytest.raises(SandboxError, match=r"nowhere/python cannot be started.*not a security boundary"):
        run("print(1)", python="/nowhere/python")


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"wall_s": 0.0}, "wall_s=0.0 must be > 0"),
        ({"wall_s": math.inf}, "wall_s=inf must be a finite number"),
        ({"processes": -1}, "processes=-1"),
    ],
)
def test_limits_refuse_nonsense(changed, match):
    with pytest.raises(ValueError, match=match):
        Limits(**changed)


def test_the_documentation_says_what_this_is_not():
    from rl_algorithms.environments import code, sandbox

    for module in (code, sandbox):
        assert "NOT A SECURITY BOUNDARY" in " ".join(module.__doc__.split())
    for place in ("/proc", "/tmp", "/dev/shm", "your files"):
        assert place in sandbox.__doc__


# -- Tests of answers ----------------------------------------------------------------------------------------------

ADD = "```python\ndef add(a, b):\n    return a + b\n```"
CALLED = [
    {"function": "add", "args": [3, 4], "expected": 7},
    {"function": "add", "args": [[1], [2]], "expected": [1, 2]},
]
PIPED = [{"input": "3 4\n", "output": "7"}, {"input": "1 1", "output": "2\n"}]


def score(answer, tests, **options):
    options = {"limits": limits(), **options}
    return CodeTests(**options)([answer], [tests])[0]


@pytest.mark.parametrize(
    ("answer", "tests", "share"),
    [
        (f"Here:\n{ADD}\nDone.", CALLED, 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        ("class Solution:\n    def add(self, a, b):\n        return a + b", CALLED, 1.0),
        ("def add(a, b): return 7", CALLED, 0.5),
        ("def add(a, b): return 7.0000000001", CALLED[:1], 1.0),
        (
            "def add(a, b): return 1",
            [{"function": "add", "args": [], "kwargs": {"a": 1, "b": 2}, "expected": True}],
            0.0,
        ),
        ("print(sum(map(int, input().split())))", PIPED, 1.0),
        ("print(7)", PIPED, 0.5),
        ("print(7); raise SystemExit(1)", PIPED, 0.0),
        (ADD, '[{"function": "add", "args": [3, 4], "expected": 7}]', 1.0),
        (ADD, "assert add(2, 2) == 4", 1.0),
        (ADD, [*CALLED, "assert add(1, 2) == 4"], 2 / 3),
    ],
)
def test_the_share_of_tests_that_pass(answer, tests, share):
    partial = score(answer, tests, partial=True)
    assert (partial, partial.metrics) == (pytest.approx(share), {"tests_passed": share, "timed_out": 0.0})
    assert score(answer, tests) == float(share == 1.0)


@pytest.mark.parametrize(
    "answer",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "syntax error(",
        "\0",
        "\ud800",
        "",
        "raise BaseException",
        "def add(a, b): import os; os._exit(0)",
        "def add(a, b): return object()",
        "def add(a, b): return 10 ** 5000",
        "import sys; sys.modules.clear(); del __builtins__",
        "import os; os.close(1)",
        "import os; os.write(1, b'\\n' + b'x' * 2000000)",
    ],
)
def test_code_that_leaves_early_or_lies_passes_nothing(answer):
    assert score(answer, [*CALLED, "assert add(1, 2) == 3"]).metrics["tests_passed"] == 0.0


def test_a_program_that_hangs_is_asked_once_and_counted():
    hung = score("import time; time.sleep(1000)", PIPED * 50, limits=limits(wall_s=0.5))
    assert (hung, hung.metrics["timed_out"]) == (0.0, 1.0)
    hung = score("def add(a, b):\n    while True: pass", CALLED, limits=limits(wall_s=0.5))
    assert (hung, hung.metrics["timed_out"]) == (0.0, 1.0)


def test_all_tests_of_an_answer_have_one_deadline():
    hung = score("import time; time.sleep(1000)", PIPED * 50, partial=True, sample_timeout_s=0.5)
    assert (hung, hung.metrics["timed_out"]) == (0.0, 1.0)


def test_expected_values_never_reach_the_program():
    seen = []

    def spy(source, *, stdin, limits):
        seen.append(source + stdin)
        return Execution(ending="exit", code=0, stdout="", stderr="", cut=False)

    assert isinstance(spy, Runner)
    tests = [{"function": "add", "args": [1], "expected": "gold-1"}, {"input": "x", "output": "gold-2"}]
    assert score(ADD, tests, runner=spy, partial=True) == 0.0
    assert len(seen) == 2
    assert "gold" not in "".join(seen)


def test_answers_of_a_batch_are_tested_at_once_and_in_order():
    verify = CodeTests(limits=limits(), num_workers=2)
    assert verify([ADD, "x", ADD], [CALLED, CALLED, None]) == [1.0, 0.0, None]


@pytest.mark.parametrize(
    "tests",
    [
        [],
        {},
        7,
        [7],
        [{"input": "x"}],
        "[]",
        [{"function": "f", "expected": {1}}],
        [{"function": "add", "args": 5, "expected": 3}],
        [{"function": "add", "args": 0, "expected": 3}],
        [{"function": "add", "args": [{1}], "expected": 3}],
        [{"function": "add", "args": "ab", "expected": "ab"}],
        [{"function": "add", "kwargs": [1], "expected": 3}],
        [{"function": 1, "args": [1, 2], "expected": 3}],
        [{"function": "add", "args": [1, 2], "expected": math.nan}],
        [{"input": ["1", "2"], "output": "3"}],
        [{"input": "1", "output": None}],
        ["assert add(1, 2) ==="],
        "return 1",
        '[{"function": "add", "args": [1, 2], "expec',
        '{"function": "add", "function": "sub", "args": [1, 2], "expected": 3}',
    ],
)
def test_tests_that_are_none_are_the_rows_fault(tests):
    assert "column 'tests' cannot be used" in score(ADD, tests).failed


def test_none_that_arrow_fills_in_was_never_there():
    filled = {"input": None, "output": None, "function": "add", "args": [3, 4], "kwargs": None, "expected": 7}
    assert score(ADD, [filled]) == 1.0


def test_a_runner_that_cannot_run_is_a_failure_and_no_zero():
    def refuses(source, *, stdin, limits):
        raise SandboxError("it is full")

    assert score(ADD, CALLED, runner=refuses).failed == "the program could not be run: it is full"


@pytest.mark.parametrize("on_error", ["zero", "fail"])
def test_a_machine_that_runs_no_program_stops_the_run_whatever_is_asked(on_error):
    verify = CodeTests(limits=limits(python="/nowhere/python"))
    environment = RewardFunctionEnvironment(reward=verify, on_error=on_error)
    asked = Conversation(messages=({"role": "user", "content": "Add."},), answer=ADD, row={"tests": CALLED})
    with pytest.raises(CannotJudgeError, match=r"no program can be run here: .*nowhere/python cannot be started"):
        environment.step([asked])


def test_limits_that_not_even_an_empty_program_keeps_stop_the_run():
    with pytest.raises(CannotJudgeError, match=r"an empty one ended by .*memory_bytes=1000000"):
        score(ADD, CALLED, limits=limits(memory_bytes=10**6))


def test_without_tests_it_does_not_apply():
    assert code_tests([ADD], [None]) == [None]


@settings(max_examples=6, deadline=None)
@given(st.text(max_size=60))
def test_no_text_makes_it_raise(text):
    assert score(text, CALLED) in {0.0, 1.0}

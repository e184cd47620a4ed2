"""Tests of side_by_side.py: who runs beside whom, what is told of it, and that nothing outlives it. Real processes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from side_by_side import Crew, Ended, in_order, next_of, parse, report

SCRIPT = Path(__file__).parents[1] / "side_by_side.py"
NOXFILE = """
import nox

@nox.session(venv_backend="none", tags=["quick"])
def good(session):
    session.run("python", "-c", "import sys; print('I was given', *sys.argv[1:])", *session.posargs)
    session.run("python", "-c", "import os, signal; os.kill(os.getpid(), signal.SIGINT)", success_codes=[130, -2])

@nox.session(venv_backend="none", tags=["quick"])
def bad(session):
    session.run("python", "-c", "print('all is', 'lost'); raise SystemExit(3)")

@nox.session(venv_backend="none", default=False)
def never(session):
    session.error("nobody asked for this one")
"""
MEETS_ANOTHER = """
import sys, time
from pathlib import Path
mine, other = map(Path, sys.argv[1:])
mine.touch()
until = time.monotonic() + 60
while not other.exists():
    assert time.monotonic() < until
    time.sleep(0.01)
"""
IS_ALONE = """
import os, sys, time
os.mkdir(sys.argv[1])
time.sleep(0.1)
os.rmdir(sys.argv[1])
"""
HANGS = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def crew(tmp_path, programs, **options):
    """Sessions that are Python programs, by name."""
    return Crew([*programs], lambda name: [sys.executable, "-c", *programs[name]], tmp_path / "logs", **options)


def is_gone(process):
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state in "ZX"


def test_what_takes_seconds_comes_first_and_then_the_longest():
    names = [
        "docs",
        "tests-b(3.11)",
        "lint",
        "tests-a(3.11)",
        "tests-b(3.11-vllm)",
        "integration",
        "tests-c(3.11-vllm)",
    ]
    minutes = {"tests-b": 9, "tests-a": 5, "integration": 7, "tests-b, vllm": 3, "tests-c": 4}
    after = ["tests-b(3.11)", "integration", "tests-a(3.11)", "docs"]
    assert in_order(names, minutes) == ["lint", "tests-c(3.11-vllm)", "tests-b(3.11-vllm)", *after]


def test_sessions_of_vllm_are_never_beside_one_another():
    waiting = ["integration-vllm", "docs"]
    assert next_of(waiting, []) == "integration-vllm"
    assert next_of(waiting, ["tests-rl-refit(3.11-vllm0.32)"]) == "docs"
    assert next_of(waiting[:1], ["tests-rl-refit(3.11-vllm0.32)"]) is None


def test_the_choice_goes_to_nox_and_the_rest_to_the_sessions():
    assert parse(["-s", "lint", "layers", "--at-once", "3", "--", "--fix"]) == (
        ["--session", "lint", "layers"],
        ["--fix"],
        3,
    )
    assert parse(["-t", "rl-refit", "-k", "not vllm"])[0] == ["--tags", "rl-refit", "--keywords", "not vllm"]
    assert parse([])[:2] == ([], [])


@pytest.mark.parametrize("arguments", [["--at-once", "0"], ["--reuse-venv"], ["lint"]])
def test_what_it_does_not_know_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as refused:
        parse(arguments)
    assert refused.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def test_two_run_at_the_same_time(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    programs = {"one": [MEETS_ANOTHER, a, b], "two": [MEETS_ANOTHER, b, a]}
    assert [session.code for session in crew(tmp_path, programs, at_once=2).run()] == [0, 0]


def test_one_at_a_time_is_one_at_a_time(tmp_path):
    programs = {name: [IS_ALONE, str(tmp_path / "alone")] for name in ("one", "two", "three")}
    ended = [*crew(tmp_path, programs, at_once=1).run()]
    assert [(session.name, session.code) for session in ended] == [("one", 0), ("two", 0), ("three", 0)]


def test_sessions_of_one_lane_wait_for_one_another_and_others_do_not(tmp_path):
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    alone = str(tmp_path / "alone")
    programs = {
        "x-vllm": [
            f"import sys\nsys.argv[1:] = [{alone!r}]\n{IS_ALONE}\nsys.argv[1:] = [{a!r}, {b!r}]\n{MEETS_ANOTHER}"
        ],
        "y-vllm": [IS_ALONE, alone],
        "z": [MEETS_ANOTHER, b, a],
    }
    ended = [*crew(tmp_path, programs, at_once=3).run()]
    assert [session.code for session in ended] == [0, 0, 0]
    assert ended[-1].name == "y-vllm"


def test_a_session_that_hangs_is_killed_with_all_that_it_started_and_named(tmp_path, monkeypatch):
    programs = {"hangs(3.11)": [HANGS, str(tmp_path / "child")], "works": ["print('done')"]}
    now, until = [0.0], time.monotonic() + 60
    monkeypatch.setattr("side_by_side.time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))
    running = iter(crew(tmp_path, programs, at_once=2, limit_s=5.0).run())
    worked = next(running)
    while not ((tmp_path / "child").exists() and (tmp_path / "child").read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    now[0] = 6.0  # however long it took to get there
    (hung,) = running
    assert hung.killed
    assert "it hangs" in hung.verdict
    assert (worked.code, worked.verdict, worked.log.read_text()) == (0, "ok", "done\n")
    until = time.monotonic() + 60
    while not is_gone((tmp_path / "child").read_text()):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert "KILLED" in "\n".join(report([hung, worked], seconds=2.0))


def test_who_stops_listening_ends_what_runs(tmp_path):
    programs = {"works": ["print('done')"], "hangs": [HANGS, str(tmp_path / "child")]}
    team = crew(tmp_path, programs, at_once=2)
    running = team.run()
    assert next(running).name == "works"
    (hanging,) = team.running
    running.close()
    assert hanging.process.poll() is not None


def test_failures_are_told_last_and_in_short(tmp_path):
    (long := tmp_path / "long.log").write_text("".join(f"line {number}\n" for number in range(1000)))
    (short := tmp_path / "short.log").write_text("fine\n")
    lines = report([Ended("bad", 1, 90.0, long), Ended("good", 0, 30.0, short)], seconds=100.0)
    text = "\n".join(lines)
    assert "line 999" in text
    assert "line 900" not in text
    assert "fine" not in text
    assert lines[-3:] == [
        "    0.5  good: ok",
        "    1.5  bad: FAILED with 1",
        "    1.7  all of them, 2.0 one after the other: 1 failed",
    ]


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "noxfile.py").write_text(NOXFILE)

    def run(*arguments, shell=()):
        command = [*shell, sys.executable, str(SCRIPT), *arguments]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NOX")}
        return subprocess.run(command, cwd=tmp_path, env=kept, capture_output=True, text=True, timeout=240, check=False)

    return run


def test_it_runs_what_nox_would_run_and_fails_where_one_fails(toy, tmp_path):
    done = toy()
    assert done.returncode == 1, done.stderr
    assert done.stdout.startswith("2 sessions, ")
    assert "I was given" in done.stdout
    assert done.stdout.count("all is lost") == 2  # when it ended, and at the end
    assert done.stdout.index("good: ok") < done.stdout.rindex("bad: FAILED with 1")
    assert "all is lost" in (tmp_path / ".nox" / "logs" / "bad.log").read_text()
    assert "never" not in done.stdout


def test_chosen_sessions_get_their_arguments_and_a_success_is_one(toy):
    done = toy("--session", "good", "--", "this", "--and", "that")
    assert (done.returncode, done.stderr) == (0, "")
    assert "I was given this --and that" in done.stdout


def test_sessions_hear_an_interrupt_also_where_a_shell_has_put_all_in_the_background(toy):
    done = toy("--session", "good", shell=["sh", "-c", "trap '' INT QUIT; exec \"$@\"", "sh"])
    assert done.returncode == 0, done.stdout


def test_a_session_that_there_is_not_is_an_error(toy):
    assert toy("--session", "absent").returncode != 0

"""Where processes stand that do not answer: their stacks out of their logs, and those at one place told together."""

import subprocess
import sys
import time

import pytest

from rl_launcher.ray.stack_dump import collect_stacks, describe_stacks, find_awaited, innermost_calls
from rl_launcher.ray.worker_failures import ProcessInfo, RemoteTimeoutError

PROGRAM = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
def stands_here():
    print("ready", flush=True)
    time.sleep(600)
def begins_here(depth):
    begins_here(depth - 1) if depth else stands_here()
begins_here(20)
"""


COLLECTIVE = 'File "/lib/torch/distributed/distributed_c10d.py", line 2958 in all_reduce'
ELSEWHERE = 'File "/srv/reward.py", line 3 in load'


def who(index, log=""):
    return ProcessInfo(role="trainer", index=index, node="node-a", pid=4711, log=str(log))


@pytest.fixture
def start(tmp_path):
    started = []

    def start(index):
        log = tmp_path / f"{index}.log"
        log.write_text('Current thread 0x1 (most recent call first):\n  File "earlier.py", line 1 in old_news\n')
        with log.open("a") as file:
            process = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=file)
        started.append(process)
        assert process.stdout.readline() == b"ready\n"
        return process, who(index, log)

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_each_tells_its_innermost_calls_of_now(start):
    late = []
    for index in range(2):
        process, named = start(index)
        late.append((named, lambda process=process: process.send_signal(10)))
    stacks = collect_stacks(late, timeout_s=60.0)
    assert len(stacks) == 2
    for stack in stacks:
        lines = stack.splitlines()
        assert lines[0].endswith("in stands_here")
        assert len(lines) == 8
        assert "old_news" not in stack


def test_who_writes_nothing_is_waited_for_as_long_as_was_said_and_has_no_stack(start, tmp_path):
    process, named = start(0)
    began = time.monotonic()
    asked = []
    late = [(named, lambda: process.send_signal(10)), (who(1, tmp_path / "unseen" / "1.log"), lambda: asked.append(1))]
    answered, silent = collect_stacks(late, timeout_s=3.0)
    assert time.monotonic() - began >= 3.0
    assert asked == [1]
    assert answered
    assert silent == ""


def test_those_at_one_place_are_told_together_and_the_odd_one_apart():
    same, odd = 'File "a.py", line 3 in all_reduce', 'File "b.py", line 7 in sleeps'
    stacks = [same, odd, same, ""]
    said = describe_stacks([who(index) for index in range(6)], stacks)
    assert said.splitlines() == [
        "Where they hang, innermost call first:",
        "  trainer rank 0 (node-a, pid 4711), trainer rank 2 (node-a, pid 4711):",
        f"    {same}",
        "  trainer rank 1 (node-a, pid 4711):",
        f"    {odd}",
        "  trainer rank 3 (node-a, pid 4711):",
        "    wrote no stack in time: it is stopped, or its log cannot be read from this node",
        "  2 more have not answered; their stacks were not collected",
    ]
    error = RemoteTimeoutError(who=who(0), call="refit", timeout_s=3.0, key="cluster.call_timeout_s", stacks=said)
    assert said in str(error)


def test_without_any_stack_the_error_says_how_to_find_one():
    assert describe_stacks([who(0)], [""]) == ""
    assert innermost_calls("nothing of the kind") == ""
    error = RemoteTimeoutError(who=who(0), call="refit", timeout_s=3.0, key="cluster.call_timeout_s")
    assert "py-spy dump --pid 4711" in str(error)


@pytest.mark.parametrize(
    ("stacks", "awaited"),
    [
        ([COLLECTIVE, ELSEWHERE, COLLECTIVE], [1]),
        ([COLLECTIVE, "", COLLECTIVE], [1]),  # it is stopped, and wrote none
        ([ELSEWHERE, "", COLLECTIVE], [1]),
        ([COLLECTIVE, COLLECTIVE], [0, 1]),
        ([ELSEWHERE, ELSEWHERE], []),  # all may be computing
    ],
)
def test_the_process_that_the_others_wait_for_is_found(stacks, awaited):
    assert find_awaited(stacks) == awaited

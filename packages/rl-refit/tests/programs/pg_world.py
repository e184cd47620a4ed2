"""Runs a case in several processes that are forked from one helper, which has imported torch once.

In a test: `World(folder).run("shapes", processes=3, seed=1)` returns what each process returned, None for one that the
case lets die. As a program: the helper, which reads one case a line and forks its processes. Cases are the functions
of `pg_cases.py` and are called with `Place` and the arguments.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

DEADLINE_S = 240


class World:
    """The helper, at the other end of two pipes."""

    def __init__(self, folder: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._helper = subprocess.Popen(
            [sys.executable, "-W", "ignore", __file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def run(self, case: str, *, processes: int, dying: tuple[int, ...] = (), **arguments: object) -> list:
        """What each process returned."""
        request = {"case": case, "processes": processes, "dying": dying, "arguments": arguments}
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.write(json.dumps(request) + "\n")
        self._helper.stdin.flush()
        answer = json.loads(self._helper.stdout.readline() or '{"failed": "the helper died"}')
        assert "failed" not in answer, f"{case} {arguments}:\n{answer['failed']}"
        return answer["results"]

    def close(self) -> None:
        """End the helper."""
        assert self._helper.stdin is not None
        assert self._helper.stdout is not None
        self._helper.stdin.close()
        self._helper.wait(timeout=DEADLINE_S)
        self._helper.stdout.close()


@dataclass(frozen=True)
class Place:
    """Where a process of a case is."""

    process: int
    processes: int
    folder: Path


def serve() -> None:
    """The helper's main loop."""
    import torch

    sys.path.insert(0, str(Path(__file__).parent))
    import gpu_cases
    import pg_cases

    torch.set_num_threads(1)
    folder, answers = Path(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a process prints is no answer
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        home = folder / str(number)
        home.mkdir()
        case = getattr(pg_cases, request["case"], None) or getattr(gpu_cases, request["case"])
        for module in pg_cases.NEEDS.get(request["case"], ()):
            import_module(module)  # once, before processes are forked
        places = [Place(process, request["processes"], home) for process in range(request["processes"])]
        children = [_fork(place, case, request["arguments"]) for place in places]
        answers.write(json.dumps(_gather(children, set(request["dying"]), home)) + "\n")
        answers.flush()
    os._exit(0)  # an interpreter full of torch takes seconds to end


def _fork(place: Place, case, arguments: dict) -> int:
    if child := os.fork():
        return child
    try:
        result = case(place, **arguments)
        (place.folder / f"{place.process}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
        (place.folder / f"{place.process}.error").write_text(f"process {place.process}: {traceback.format_exc()}")
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _gather(children: list[int], dying: set[int], home: Path) -> dict:
    """Wait for those that are to live; end the others, which may be stopped."""
    running = {number: child for number, child in enumerate(children) if number not in dying}
    failed, deadline = "", time.monotonic() + DEADLINE_S
    while running and not failed:
        for number, child in tuple(running.items()):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                del running[number]
                failed = failed or (f"process {number} ended with status {status}" if status else "")
        if time.monotonic() > deadline:
            failed = f"processes {sorted(running)} did not end in {DEADLINE_S} s"
        time.sleep(0.002)
    for child in [*running.values(), *(children[number] for number in dying)]:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if failed:
        return {"failed": "\n".join([failed, *(path.read_text() for path in sorted(home.glob("*.error")))])}
    files = [home / f"{number}.json" for number in range(len(children))]
    return {"results": [json.loads(file.read_text()) if file.exists() else None for file in files]}


if __name__ == "__main__":
    serve()

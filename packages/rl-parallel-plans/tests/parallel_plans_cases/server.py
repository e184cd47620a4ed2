"""The helper process of `ranks`: reads one case per line, forks its ranks, prints what they returned."""

import gc
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

import parallel_plans_cases.cases  # noqa: F401 - imported once, before any rank is forked
import rl_parallel_plans

DEADLINE_S = 240


def main() -> None:
    folder, answers = Path(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a rank prints is no answer
    torch.set_num_threads(1)
    for module in pkgutil.walk_packages(rl_parallel_plans.__path__, "rl_parallel_plans."):
        if not module.name.endswith("__main__"):
            import_module(module.name)
    gc.freeze()  # else each rank looks through all of it for garbage, and copies the pages: half of a small case
    for number, line in enumerate(sys.stdin):
        request = json.loads(line)
        home = folder / str(number)
        home.mkdir()
        children = [_fork(rank, home, **request) for rank in range(request["world"])]
        answers.write(json.dumps(_gathered(children, home)) + "\n")
        answers.flush()


def _fork(rank: int, home: Path, *, case: str, world: int, arguments: dict) -> int:
    if child := os.fork():
        return child
    try:
        rendezvous = f"file://{home}/rendezvous"
        dist.init_process_group(
            "gloo", init_method=rendezvous, rank=rank, world_size=world, timeout=timedelta(seconds=DEADLINE_S / 2)
        )
        result = _function(case)(**arguments)
        dist.barrier()
        dist.destroy_process_group()
        (home / f"{rank}.json").write_text(json.dumps(result))
        status = 0
    except BaseException:  # noqa: BLE001 - the child ends here, whatever happened
        (home / f"{rank}.error").write_text(traceback.format_exc())
        status = 1
    sys.stderr.flush()
    os._exit(status)


def _function(case: str) -> Callable[..., object]:
    """`function` of `cases`, or `module:function` of another module of this folder."""
    module, _, name = case.rpartition(":")
    function: Callable[..., object] = getattr(import_module(f"parallel_plans_cases.{module or 'cases'}"), name)
    return function


def _gathered(children: list[int], home: Path) -> dict:
    failed = None
    deadline = time.monotonic() + DEADLINE_S
    running = set(children)
    while running and failed is None:
        for child in list(running):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                running.discard(child)
                if status:
                    failed = f"rank {children.index(child)} ended with status {status}"
        if time.monotonic() > deadline:
            failed = f"ranks {sorted(children.index(child) for child in running)} did not end in {DEADLINE_S} s"
        time.sleep(0.005)
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if failed:
        return {"failed": "\n".join([failed, *(path.read_text() for path in sorted(home.glob("*.error")))])}
    return {"results": [json.loads((home / f"{rank}.json").read_text()) for rank in range(len(children))]}


if __name__ == "__main__":
    main()

"""Run a function on ranks that are forked from this process, which has imported everything already.

Importing torch, transformers and Megatron takes a process 5 to 15 s, and forking one that has them 0.05 s. Knows
processes and gloo; does not know what is tested. A fork is safe because this process has no process group of its own
when it forks (refused otherwise), and each rank computes on one thread, so that no pool of threads that stayed behind
is waited for.
"""

import contextlib
import ctypes
import faulthandler
import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

DEADLINE_S = 300
"""For all that a function does on its ranks."""
GRACE_S = 60
"""For other ranks, once one has failed: most of them see its connections close, and raise too. And for what ranks have
started, once they have ended."""
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37


class RanksFailedError(AssertionError):
    """A rank raised, died, or went past the deadline, or something that it had started outlived it."""


def run(function, *, ranks, folder, deadline_s=DEADLINE_S, grace_s=GRACE_S):
    """What `function(rank)` returned on each rank: tensors, numbers, texts, and dicts and lists of them.

    Ranks of more than one are joined over gloo; a lone one is not, as a user's is not.

    Args:
        function: closures and lambdas are as good as any.
        ranks: how many.
        folder: an empty one, for the rendezvous, logs and results.
        deadline_s: for all of it.
        grace_s: for what should end by itself after that.

    Raises:
        RanksFailedError: with the whole log of each rank that failed.
    """
    if dist.is_initialized():
        raise RuntimeError("this process has a process group, which ranks forked from it would share: close it first")
    folder.mkdir(parents=True, exist_ok=True)
    let_go_of_groups()
    context = multiprocessing.get_context("fork")
    with adopted_orphans() as before:
        processes = [
            context.Process(target=_rank, args=(function, rank, ranks, folder, deadline_s)) for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            trouble = _wait(processes, deadline_s=deadline_s, grace_s=grace_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
        trouble += [f"it left {each} behind" for each in end_all(started_since(before), grace_s=grace_s)]
    if trouble:
        logs = (f"--- rank {rank} ---\n{_log(folder, rank).read_text()}" for rank in range(ranks))
        raise RanksFailedError("\n".join([*trouble, *logs]))
    return [torch.load(_result(folder, rank), weights_only=True) for rank in range(ranks)]


def let_go_of_groups():
    """Destroy those that are closed and still held, here, where their threads are: a rank would wait for these."""
    from rl_backends import rank_agreement as ranks

    ranks.forget_process_group()
    if (parallel_state := sys.modules.get("megatron.core.parallel_state")) is not None:
        for name, value in list(vars(parallel_state).items()):  # its own destruction leaves some out
            if isinstance(value, dist.ProcessGroup):
                setattr(parallel_state, name, None)
    gc.collect()


def _rank(function, rank, ranks, folder, deadline_s):
    """The life of one rank; what it says on stdout and stderr goes to its log."""
    gc.freeze()  # what came along is its parent's to destroy
    log = _log(folder, rank).open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.register(signal.SIGUSR1, file=log, chain=True)  # and then the signal ends it
    torch.set_num_threads(1)
    try:
        if ranks > 1:
            rendezvous = f"file://{folder / 'rendezvous'}"
            timeout = timedelta(seconds=2 * deadline_s)  # the parent's comes first, and is told where each rank was
            dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
        torch.save(function(rank), _result(folder, rank))
        if ranks > 1:
            dist.barrier()  # a rank that leaves early tears connections that another still reads
            dist.destroy_process_group()
    except BaseException:  # noqa: BLE001 - pytest's failures are none of Exception's
        traceback.print_exc()
        log.flush()
        sys.exit(1)


def _wait(processes, *, deadline_s, grace_s):
    """Until all have ended well; else what went wrong, and every rank that hangs has written down where."""
    until, failed = time.monotonic() + deadline_s, []
    running = {process.sentinel: process for process in processes}
    while running and time.monotonic() < until:
        for sentinel in multiprocessing.connection.wait(running, timeout=max(0.0, until - time.monotonic())):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode != 0:
                if not failed:
                    until = min(until, time.monotonic() + grace_s)
                failed.append(f"rank {processes.index(process)} ended with code {process.exitcode}")
    for process in running.values():
        os.kill(process.pid, signal.SIGUSR1)
    for process in running.values():
        process.join(grace_s)  # once its stack is written down
    waited = "after another had failed" if failed else f"after {deadline_s} s"
    return failed + [f"rank {processes.index(process)} still ran {waited}" for process in running.values()]


def _log(folder, rank) -> Path:
    return folder / f"rank{rank}.log"


def _result(folder, rank) -> Path:
    return folder / f"rank{rank}.pt"


# -- Processes that outlive those who started them -----------------------------------------------


@contextlib.contextmanager
def adopted_orphans():
    """Processes whose parent ends become this one's children, so that it sees what was left behind.

    Yields the children that it has already.
    """
    prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else lambda *_: None
    was = ctypes.c_int(0)
    prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(was), 0, 0, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield children()
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, was.value, 0, 0, 0)


def children():
    """Of this process, and theirs."""
    import psutil

    return set(psutil.Process().children(recursive=True))


def started_since(before):
    """The children that are not in `before` and have not ended."""
    import psutil

    alive = set()
    for process in children() - before:
        with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)  # an orphan that was adopted has nobody else to do so
            else:
                alive.add(process)
    return alive


def end_all(processes, *, grace_s=GRACE_S):
    """End them, and return those that had not ended by themselves, in words."""
    import psutil

    def words(process):
        with contextlib.suppress(psutil.NoSuchProcess):
            return f"process {process.pid} ({' '.join(process.cmdline())})"

    named = {process: words(process) for process in processes}
    _, alive = psutil.wait_procs(list(processes), timeout=grace_s)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=GRACE_S)
    return [name for process in alive if (name := named[process])]

"""An engine of worker processes, each with some rows of every weight: the least that an `EngineSink` needs.

A worker does what the driver calls in its main thread, and refits in another. `python toy_workers.py driver …` is an
engine of its own whose trainer is elsewhere.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time

import torch
from torch import nn

from rl_refit import Binding, EngineSink, ModuleSink, Refit, RefitError, Region, Rendezvous
from rl_refit.engine import InMainThread, WorkerEnd, answering

ROWS, COLUMNS, LAYERS = 12, 5, 3


def weights(version):
    """Of the trainer, at a version."""
    generator = torch.Generator().manual_seed(version)
    return {f"layers.{number}": torch.randn(ROWS, COLUMNS, generator=generator) for number in range(LAYERS)}


class Shard(nn.Module):
    """Rows of each weight, kept transposed."""

    def __init__(self, rank, ranks):
        super().__init__()
        self.rows = ROWS // ranks
        self.first = rank * self.rows
        self.kept = nn.ParameterList(
            nn.Parameter(torch.zeros(COLUMNS, self.rows), requires_grad=False) for _ in range(LAYERS)
        )

    def bind(self, module):
        for number, kept in enumerate(module.kept):
            region = Region(f"layers.{number}", (self.first, 0), (self.rows, COLUMNS))
            yield Binding(region, (ROWS, COLUMNS), kept.t())


class Worker:
    def __init__(self, rank, ranks):
        self.rank, self.shard, self.end = rank, Shard(rank, ranks), WorkerEnd(rank, self.make_sink)
        self.fault = ""

    def make_sink(self, end):
        sink = ModuleSink(self.shard, bindings=self.shard.bind, before_commit=lambda _: self.strike())
        return InMainThread(sink, end)

    def strike(self):
        if self.fault == "raise":
            self.fault = ""
            raise OSError("a fault in the commit")
        if self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def rl_refit(self, *args):
        return self.end.do(*args)

    @answering
    def read(self):
        return {"rows": [kept.t().tolist() for kept in self.shard.kept]}

    @answering
    def break_next(self, rank, how):
        self.fault = how if rank == self.rank else ""
        return {"pid": os.getpid()}


def serve(rank, ranks, pipe):
    torch.set_num_threads(1)
    worker = Worker(rank, ranks)
    while (call := pipe.recv()) is not None:
        method, *arguments = call
        pipe.send(getattr(worker, method)(*arguments))


class ToyEngine:
    """As `rl_refit.engine.Engine`; `log` says what was called while it was paused, and whether it is."""

    def __init__(self, ranks):
        context = multiprocessing.get_context("spawn")
        self.num_ranks, self.paused, self.log, self.refuses = ranks, False, [], False
        self.forgets = True
        self.pipes, self.processes = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve, args=(rank, ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, method, *arguments):
        self.log.append((method, self.paused))
        for pipe in self.pipes:
            pipe.send((method, *arguments))
        return [pipe.recv() for pipe in self.pipes]

    def ready(self):
        if self.refuses:
            raise RefitError("2 requests are unfinished")

    def pause(self):
        self.paused = True

    def renew(self, version):
        self.log.append((f"renew {version}", self.paused))
        if not self.forgets:
            raise OSError("the cache cannot be reset")

    def drop_requests(self):
        self.log.append(("drop", self.paused))

    def resume(self):
        self.paused = False

    def holds(self, version):
        """Whether the workers together have the weights of `version`."""
        parts = [answer["rows"] for answer in self.call("read")]
        wanted = weights(version)
        return all(
            torch.equal(torch.cat([torch.tensor(part[number]) for part in parts]), wanted[f"layers.{number}"])
            for number in range(LAYERS)
        )

    def close(self):
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                try:
                    pipe.send(None)
                except OSError:
                    process.kill()
            process.join(30)
            if process.is_alive():
                process.kill()


class ToySink(EngineSink):
    def __init__(self, engine, timeout_s=60.0):
        super().__init__(engine, timeout_s=timeout_s)


def main():
    """An engine whose trainer is elsewhere; prints a line of JSON for each refit."""
    address, sources, ranks, first, total, refits = sys.argv[1], *map(int, sys.argv[2:7])
    engine = ToyEngine(ranks)
    sink = ToySink(engine)
    meeting = Rendezvous(address, num_sources=sources, num_sinks=total, sink_rank=first)
    refit = Refit(sink=sink, rendezvous=meeting, deadline_s=60.0)
    for _ in range(refits):
        try:
            report = refit.receive(timeout_s=120)
            said = {"version": report.version, "holds": engine.holds(report.version), "bytes": report.bytes}
        except RefitError as error:
            said = {"error": type(error).__name__, "text": str(error), "poisoned": sink.poisoned}
        print(json.dumps(said), flush=True)
    refit.close()
    engine.close()


if __name__ == "__main__":
    main()
    time.sleep(0)

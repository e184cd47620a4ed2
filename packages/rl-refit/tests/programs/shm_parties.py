"""Runs parties of a refit as processes of its own: reads a JSON list of parties a line, answers with their results.

Forks a process for each party, so that torch is imported once. A party moves the tensors of `TENSORS` through a
transport by hand, without a transaction; its fault, if it has one, happens at the given bucket.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
import zlib
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.distributed import FileStore

from rl_refit import ModuleSink, ModuleSource, Refit, Rendezvous
from rl_refit.buckets import size_of
from rl_refit.errors import RefitError
from rl_refit.layout import Layout
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import plan_refit
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.stream import SlotStream

TRANSPORTS = {"ring": SlotStream, "arena": partial(SlotStream, arena=True)}
PATIENCE_S = 60.0  # what must succeed may take as long as this, however busy the machine is
TENSORS = {  # shape, dtype, the dim that the source's ranks cut, the dim that the sink's ranks cut
    "embed": ((37, 24), "float32", 0, 1),
    "bias": ((7,), "bfloat16", 0, None),
    "big": ((64, 100), "bfloat16", 0, 0),  # several buckets
    "row": ((1, 3000), "float16", 1, None),  # larger than a bucket, and cannot be cut by rows
    "scalar": ((), "float32", None, None),
    "ids": ((5, 3), "int64", None, 0),
    "mask": ((9,), "bool", 0, 0),
    "empty": ((0, 4), "float32", None, None),
}
TRANSPOSED = ("embed", "ids")  # not contiguous in the source


def manifest(side, ranks):
    def layout(dim):
        return Layout.from_placements((ranks,), (dim,)) if ranks > 1 else Layout.whole()

    return Manifest(
        tuple(
            TensorMeta(name=name, shape=shape, dtype=dtype, layout=layout(dims[side == "sink"]))
            for name, (shape, dtype, *dims) in TENSORS.items()
        )
    )


def expected(region, refit):
    """The new values of a box: different ones in each refit."""
    shape, dtype, *_ = TENSORS[region.name]
    whole = torch.empty(shape).numel()
    values = (7 * torch.arange(whole) + 13 * refit + zlib.crc32(region.name.encode())) % 251
    box = tuple(slice(start, start + size) for start, size in zip(region.offsets, region.shape, strict=True))
    return values.view(shape)[box].to(getattr(torch, dtype))


@dataclass
class Source:
    metas: Manifest
    rank: int
    device: str
    refit: int = 0

    def shards(self, names):
        for name in names:
            for region in self.metas.by_name[name].regions().get(self.rank, ()):
                tensor = expected(region, self.refit).to(self.device)
                yield region, tensor.t().contiguous().t() if name in TRANSPOSED else tensor


@dataclass
class Sink:
    metas: Manifest
    rank: int
    device: str
    staged: dict = field(default_factory=dict)

    def stage(self, region, tensor, *, stays=False):
        self.staged[region] = tensor if stays else tensor.clone()

    def require_arrived(self, refit):
        got = dict.fromkeys(TENSORS, 0)
        for region, tensor in self.staged.items():
            assert torch.equal(tensor.cpu(), expected(region, refit)), region
            got[region.name] += region.numel
        for meta in self.metas.tensors:
            assert got[meta.name] == sum(box.numel for box in meta.regions().get(self.rank, ())), meta.name
        self.staged.clear()


@dataclass
class Party:
    spec: dict
    barrier: object
    answer: int  # the descriptor for the result

    def run(self):
        spec, device = self.spec, self.spec.get("device", "cpu")
        self.source_rank, self.sink_rank = spec.get("source_rank"), spec.get("sink_rank")
        metas = {side: manifest(side, spec[f"{side}s"]) for side in ("source", "sink")}
        self.transport = TRANSPORTS[spec["transport"]](directory=spec["directory"])
        bucket_bytes = spec["bucket_bytes"] if self.transport.bounded else None
        plan = plan_refit(metas["source"], metas["sink"])
        self.schedule = make_schedule(plan, bucket_bytes=bucket_bytes)
        store = FileStore(spec["store"], spec["sources"] + spec["sinks"])
        channel = Channel(
            schedule=self.schedule,
            source_rank=self.source_rank,
            sink_rank=self.sink_rank,
            slots=spec["slots"],
            device=torch.device(device),
            store=store,
        )
        self.source = None if self.source_rank is None else Source(metas["source"], self.source_rank, device)
        self.sink = None if self.sink_rank is None else Sink(metas["sink"], self.sink_rank, device)
        self.transport.open(channel, Watch(deadline_s=spec.get("open_deadline_s", PATIENCE_S)))
        if spec.get("barrier", True):
            self.barrier.wait(PATIENCE_S)
        after_open = list_names(spec["directory"])
        held = {"extra_bytes": self.transport.extra_bytes, "mapped": mapped_bytes(spec["directory"])}
        refits, usage = spec.get("refits", 1), []
        for refit in range(1, refits + 1):
            self.refit(refit)
            if refit in (refits // 2, refits):
                usage.append(measure(spec["directory"]))
        self.transport.close()
        return {
            "buckets": self.schedule.num_buckets,
            "slot_bytes": max(size_of(bucket) for stream in self.schedule.streams for bucket in stream.buckets),
            "after_open": after_open,
            **held,
            "usage": usage,
        }

    def impatient_watch(self):
        """Its deadline is the spec's while it waits for a peer: what else takes long is the machine's doing."""

        def look_around():
            watch.deadline_s = self.spec["deadline_s"] if watch.peer else PATIENCE_S

        watch = Watch(deadline_s=PATIENCE_S, look_around=look_around)
        return watch

    def refit(self, refit):
        disturbed = self.spec.get("disturbed", refit) == refit
        watch = self.impatient_watch() if disturbed and "deadline_s" in self.spec else Watch(deadline_s=PATIENCE_S)
        outbox = inbox = None
        if self.source is not None:
            self.source.refit = refit
            outbox = Outbox(self.source, self.schedule, watch, refit)
        if self.sink is not None:
            inbox = Inbox(self.sink, self.schedule, watch, refit)
        with watch.phase("transfer"):
            fault = self.spec.get("fault", {})
            if fault.get("refit", 1) == refit and fault:
                FAULTS[fault["kind"]](self, fault["bucket"], watch)
            try:
                self.transport.transfer(outbox, inbox, watch)
            except RefitError:
                if self.spec.get("disturbed") != refit:
                    raise
            else:
                if self.sink is not None:
                    self.sink.require_arrived(refit)
        if self.spec.get("barrier", True):
            self.barrier.wait(PATIENCE_S)
        self.transport.finish()
        if self.sink is not None:
            self.sink.staged.clear()


def mapped_bytes(directory):
    """Of files that were made in `directory`, and have no name any more."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    rows = [line.split() for line in lines if "(deleted)" in line and directory in line]
    return sum(int(end, 16) - int(start, 16) for start, end in (row[0].split("-") for row in rows))


def refit_a_module(spec):
    """The same through the public names; the policy's parameters live in the arena, where there is one."""
    torch.manual_seed(0)
    source = "source_rank" in spec
    ranks = {name: spec[name] for name in ("source_rank", "sink_rank") if name in spec}
    meeting = Rendezvous(f"file://{spec['store']}", num_sources=spec["sources"], num_sinks=spec["sinks"], **ranks)
    module = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 50, bias=False), nn.Linear(50, 7))
    module[1].weight = module[0].weight
    hold = {"hold": module} if source and spec["transport"] == "arena" else {}
    side = {"source": ModuleSource(module)} if source else {"sink": ModuleSink(module)}
    refit = Refit(
        **side,
        transport=TRANSPORTS[spec["transport"]](directory=spec["directory"], **hold),
        rendezvous=meeting,
        bucket_bytes=spec["bucket_bytes"],
        buckets=spec["slots"],
        verify="full",
        deadline_s=PATIENCE_S,
    )
    for version in range(1, 4):
        if source:
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.fill_(version)
        report = refit(version=version) if source else refit.receive(timeout_s=PATIENCE_S)
        assert all((parameter == version).all() for parameter in module.parameters())
    refit.close()
    return {"verified": report.verified, "digest": report.digest, "extra_bytes": report.extra_bytes}


def measure(directory):
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"resident": resident, "fds": len(list_names("/proc/self/fd")), "files": list_names(directory)}


def list_names(directory):
    return [path.name for path in Path(directory).iterdir()]


def at_bucket(party, bucket, watch, action):
    """Call `action` when the party begins with its bucket number `bucket`."""
    note, seen = watch.at, iter(range(10**9))

    def at(**what):
        if "bucket" in what and next(seen) == bucket:
            action()
        note(**what)

    watch.at = at


def signalling(number):
    return lambda party, bucket, watch: at_bucket(party, bucket, watch, lambda: os.kill(os.getpid(), number))


def die_with_a_child(party, bucket, watch):
    """As a trainer with a worker that was forked for it and outlives it."""

    def fork_and_die():
        child = os.fork()
        if child == 0:
            os.close(party.answer)
            time.sleep(2 * PATIENCE_S)
            os._exit(0)
        Path(party.spec["child"]).write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    at_bucket(party, bucket, watch, fork_and_die)


def give_up(party, bucket, watch):
    def fail():
        raise RefitError("given up")

    at_bucket(party, bucket, watch, fail)


def tampering(tamper):
    """Put `tamper(tokens so far, token, send)` between the party and its links."""

    def install(party, bucket, watch):
        for link in party.transport._open.links.values():
            counter, send = iter(range(10**9)), link.send

            def tampered(token, watch, *, counter=counter, link=link, send=send):
                if next(counter) == bucket:
                    tamper(link, token, lambda token: send(token, watch))
                else:
                    send(token, watch)

            object.__setattr__(link, "send", tampered)

    return install


def swap_with_next(link, token, send):
    send(token._replace(numbers=token.numbers._replace(bucket=token.numbers.bucket + 1)))
    send(token)


FAULTS = {
    "kill": signalling(signal.SIGKILL),
    "stop": signalling(signal.SIGSTOP),
    "die with a child": die_with_a_child,
    "give up": give_up,
    "drop": tampering(lambda link, token, send: None),
    "duplicate": tampering(lambda link, token, send: (send(token), send(token))),
    "reorder": tampering(swap_with_next),
    "garbage": tampering(lambda link, token, send: link._socket.send(b"hello")),
}


def run_party(spec, barrier, answer):
    torch.set_num_threads(1)
    try:
        result = refit_a_module(spec) if spec.get("public") else Party(spec, barrier, answer).run()
    except RefitError as error:
        result = {
            "error": type(error).__name__,
            "message": str(error),
            "peer": error.peer,
            "bucket": error.bucket,
            "phase": error.phase,
        }
    os.write(answer, json.dumps(result).encode())


def run_parties(specs):
    """Each party's result; None where it was killed."""
    barrier = multiprocessing.get_context("fork").Barrier(len(specs))
    pipes, children = [], []
    for spec in specs:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            code = 1
            with contextlib.suppress(BaseException):
                run_party(spec, barrier, write)
                code = 0
            os._exit(code)
        os.close(write)
        pipes.append(read)
        children.append(child)
    faulty = [bool(spec.get("fault")) for spec in specs]
    results = [None] * len(specs)
    for number in sorted(range(len(specs)), key=lambda number: faulty[number]):  # a stopped one is ended by the others
        if faulty[number] and not all(faulty):
            with contextlib.suppress(ProcessLookupError):
                if specs[number]["fault"]["kind"] == "stop":
                    os.kill(children[number], signal.SIGKILL)
        text = b"".join(iter(lambda read=pipes[number]: os.read(read, 1 << 16), b""))
        results[number] = json.loads(text) if text else None
        os.close(pipes[number])
    for child in children:
        os.waitpid(child, 0)
    return results


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(run_parties(json.loads(line))), flush=True)

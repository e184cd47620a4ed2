"""What the processes of `pg_world.py` do: transports over torch.distributed, under channels made by hand."""

import itertools
import math
import os
import random
import signal
import threading
import time
import zlib
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import gpu_cases
import pg_models
import torch
import torch.distributed as dist
from torch.distributed import FileStore, PrefixStore

from rl_refit.contracts import Coverage
from rl_refit.errors import AbortedError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import Topology, plan_refit
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.schedule import make_schedule
from rl_refit.sink import ModuleSink
from rl_refit.source import ModuleSource
from rl_refit.transaction.liveness import Heartbeat
from rl_refit.transports import peers
from rl_refit.transports.base import Channel, Inbox, Outbox, Watch
from rl_refit.transports.messages import Group
from rl_refit.transports.stream import SlotStream

TRANSPORTS = ("messages", "hosts", "ring")
NEEDS = {"modules": ["torch._dynamo"]}  # which fully_shard imports
PATIENCE_S = float(
    os.environ.get("PG_PATIENCE_S", "60")
)  # what must succeed may take as long as this, however busy the machine is
DTYPES = ("float32", "bfloat16", "int64", "float8_e4m3fn", "bool")


# -- Ways --------------------------------------------------------------------------------------------

HERE = peers._this_process


def carrier(way, process):
    """A transport of this process, which from now on believes that it is on such a machine.

    "ring": one host; "messages": a host that shares no memory; "hosts": even and odd processes are on two hosts;
    "gpus …": the same, of GPUs; see `gpu_cases`.
    """
    if way in gpu_cases.WAYS:
        return gpu_cases.carrier(way, process)
    peers._this_process = HERE
    if way == "hosts":
        peers._this_process = lambda *own: replace(HERE(*own), host=f"host {process % 2}")
    return SlotStream(share_memory=way in ("ring", "hosts"))


# -- Sides made of plain tensors --------------------------------------------------------------------


def values(meta, refit):
    """Every element of a tensor as it is at a refit: bytes from a seed."""
    seed = torch.Generator("cpu").manual_seed(zlib.crc32(f"{meta.name} {refit}".encode()))
    count, ends = math.prod(meta.shape) * meta.torch_dtype.itemsize, 2 if meta.dtype == "bool" else 256
    data = torch.randint(0, ends, (count,), dtype=torch.uint8, generator=seed, device="cpu")
    return data.view(meta.torch_dtype).view(meta.shape).to(torch.get_default_device())


def whole(meta):
    return Region(meta.name, (0,) * len(meta.shape), meta.shape)


class PlainSource:
    """The boxes of one rank of a manifest."""

    def __init__(self, manifest, rank, on_yield=lambda: None):
        self._manifest, self._rank, self._on_yield = manifest, rank, on_yield
        self.refit = 0

    def manifest(self):
        return self._manifest

    def shards(self, names):
        for name in names:
            meta = self._manifest.by_name[name]
            full = values(meta, self.refit)
            for region in meta.regions().get(self._rank, ()):
                self._on_yield()
                yield region, full[region.index_within(whole(meta))]


class PlainSink:
    """Counts how often each byte of one rank's boxes is staged."""

    def __init__(self, manifest, rank, on_stage=lambda: None):
        self._manifest, self._rank, self._on_stage = manifest, rank, on_stage
        self.clear()

    def clear(self):
        self.staged = {meta.name: torch.zeros(meta.shape, dtype=meta.torch_dtype) for meta in self._manifest.tensors}
        self.times = {meta.name: torch.zeros(meta.shape, dtype=torch.int32) for meta in self._manifest.tensors}

    def prepare(self, manifest):
        return Coverage(manifest_hash=manifest.hash(), sink=self._manifest, version=None)

    def stage(self, region, tensor, *, stays=False):
        self._on_stage()
        index = region.index_within(whole(self._manifest.by_name[region.name]))
        self.staged[region.name][index] = tensor
        self.times[region.name][index] += 1

    def assert_holds(self, refit):
        for meta in self._manifest.tensors:
            full = values(meta, refit).flatten().view(torch.uint8)
            staged, times = self.staged[meta.name].flatten().view(torch.uint8), self.times[meta.name]
            mine = torch.zeros(meta.shape, dtype=torch.bool)
            for region in meta.regions().get(self._rank, ()):
                index = region.index_within(whole(meta))
                mine[index] = True
            assert torch.equal(times, mine.int()), f"{meta.name}: an element arrived never or twice"
            size = meta.torch_dtype.itemsize
            where = mine.flatten().repeat_interleave(size)
            assert torch.equal(full[where], staged[where]), f"{meta.name} differs"


# -- Any number of ranks, any layout ----------------------------------------------------------------


def shapes(place, *, seeds, device="cpu", ways=TRANSPORTS):
    """For each seed a random world, every way, two refits: all arrives once, and no more than the bound."""
    store = FileStore(str(place.folder / "store"), -1)
    if device == "cuda":
        torch.cuda.set_device(place.process)
    torch.set_default_device(device)
    met = 0
    for seed, transport in itertools.product(range(*seeds), ways):
        if _random_world(seed, place, PrefixStore(f"{seed} {transport}", store), transport):
            met += 1
    return met


def _random_world(seed, place, store, way):
    chance = random.Random(seed)
    num_sources, num_sinks = chance.randint(1, place.processes), chance.randint(1, place.processes)
    places = chance.sample(range(place.processes), num_sinks)  # some processes are both, some neither
    source_rank = place.process if place.process < num_sources else None
    sink_rank = places.index(place.process) if place.process in places else None
    metas = [(f"t{n}", _random_shape(chance), chance.choice(DTYPES)) for n in range(chance.randint(1, 6))]
    source = _random_manifest(metas, num_sources, chance)
    sink = _random_manifest(metas, num_sinks, chance)
    nodes = tuple(chance.choice("ab") for _ in range(num_sinks))
    topology = chance.choice([None, Topology(source_nodes=("c",) * num_sources, sink_nodes=nodes)])
    plan = plan_refit(source, sink, topology)
    bucket_bytes, slots = chance.choice([512, 1024, 4096]), chance.randint(1, 3)
    if source_rank is None and sink_rank is None:
        return False
    transport = carrier(way, place.process)
    schedule = make_schedule(plan, bucket_bytes=bucket_bytes)
    watch = Watch(deadline_s=PATIENCE_S)
    transport.open(_channel(schedule, (source_rank, sink_rank), store, slots=slots), watch)
    for refit in (1, 2):
        _transfer(transport, schedule, (source_rank, sink_rank), (source, sink), refit=refit, watch=watch)
    _assert_least(transport, plan, sink_rank, slots=slots, bucket_bytes=bucket_bytes)
    transport.finish()
    transport.close()
    transport.close()
    return True


def _transfer(transport, schedule, ranks, manifests, *, refit, watch, hook=lambda: None):
    outbox = inbox = None
    if ranks[0] is not None:
        plain = PlainSource(manifests[0], ranks[0], hook)
        plain.refit = refit
        outbox = Outbox(plain, schedule, watch, refit=refit)
    if ranks[1] is not None:
        sink = PlainSink(manifests[1], ranks[1], hook)
        inbox = Inbox(sink, schedule, watch, refit=refit)
    with watch.phase("transfer"):
        transport.transfer(outbox, inbox, watch)
    if inbox is not None:
        sink.assert_holds(refit)


def _assert_least(transport, plan, sink_rank, *, slots, bucket_bytes):
    traffic = transport.traffic
    assert transport.extra_bytes <= 2 * slots * (bucket_bytes + 512)
    if sink_rank is None:
        assert traffic.copied == 0
        assert traffic.received == 0
    else:
        assert traffic.received + traffic.copied == plan.lower_bound(sink_rank)
        assert traffic.relayed <= sum(
            map(plan.bytes_relayed, plan.sink.ranks)
        )  # nothing goes back to where it came from


def _channel(schedule, ranks, store, *, slots=2):
    return Channel(
        schedule=schedule,
        source_rank=ranks[0],
        sink_rank=ranks[1],
        slots=slots,
        device=gpu_cases.device() or torch.get_default_device(),
        store=store,
    )


def _random_shape(chance):
    return tuple(chance.choice([1, 2, 3, 7, 16, 33]) for _ in range(chance.randint(0, 3)))


def _random_manifest(metas, num_ranks, chance):
    return Manifest(
        tuple(
            TensorMeta(name=name, shape=shape, dtype=dtype, layout=_random_layout(shape, num_ranks, chance))
            for name, shape, dtype in metas
        )
    )


def _random_layout(shape, num_ranks, chance):
    first = chance.choice([n for n in range(1, num_ranks + 1) if num_ranks % n == 0])
    dims = [chance.choice([None, *range(len(shape))]) for _ in range(2)]
    ranks = list(range(num_ranks))
    chance.shuffle(ranks)
    return Layout.from_placements((first, num_ranks // first), dims, ranks=ranks)


# -- Real modules, through Refit --------------------------------------------------------------------


def modules(place, *, worlds, model, sources, sinks, colocated=False):
    """A trainer and an engine of real modules, each in a world of its own or both in one; two refits a transport."""
    (_, num_sources), (_, num_sinks) = sources, sinks
    assert place.processes == num_sinks if colocated else num_sources + num_sinks
    trains = place.process < num_sources
    source_rank = place.process if trains else None
    sink_rank = place.process if colocated else None if trains else place.process - num_sources
    _default_group(place, *(("trainer", (source_rank, num_sources)) if trains else ("engine", (sink_rank, num_sinks))))
    policy = pg_models.laid_out(model, 0, *sources) if trains else None
    engine = None if sink_rank is None else pg_models.laid_out(model, 0, *sinks)
    found = {}
    for name in worlds:
        transport = carrier(name, place.process)
        refit = Refit(
            ModuleSource(policy) if policy is not None else None,
            ModuleSink(engine) if engine is not None else None,
            transport,
            rendezvous=Rendezvous(
                FileStore(str(place.folder / name), -1),
                num_sources=num_sources,
                num_sinks=num_sinks,
                source_rank=source_rank,
                sink_rank=sink_rank,
            ),
            bucket_bytes=2048,
            verify="full",
        )
        for version in (1, 2):
            if policy is not None:
                pg_models.advance(policy, model, version, *sources)
            report = refit(version=version) if policy is not None else refit.receive(timeout_s=PATIENCE_S)
            assert engine is None or pg_models.wrong_tensors(engine, model, version, *sinks) == [], (name, version)
        if engine is not None:
            traffic = transport.traffic
            assert traffic.received + traffic.copied == refit.plan.lower_bound(sink_rank)
        found[name] = [report.digest, report.transport, transport.traffic.relayed]
        refit.close()
    dist.destroy_process_group()
    return found


def _default_group(place, name, seat):
    store = FileStore(str(place.folder / name), -1)
    dist.init_process_group("gloo", store=store, rank=seat[0], world_size=seat[1])


# -- Deaths, through Refit --------------------------------------------------------------------------


class Hooked:
    """A source or a sink that calls a function before each tensor that it gives or takes."""

    def __init__(self, side, hook):
        self._side, self._hook = side, hook

    def __getattr__(self, name):
        return getattr(self._side, name)

    def shards(self, names):
        for pair in self._side.shards(names):
            self._hook()
            yield pair

    def stage(self, region, tensor, *, stays=False):
        self._hook()
        self._side.stage(region, tensor, stays=stays)


def death(place, *, transport, victim, deed, at):
    """One source, two sinks of one host. After a refit that succeeds, the victim dies or stops in the next."""
    party = ("source 0", "sink 0", "sink 1")[place.process]
    calls = itertools.count(1)
    module = pg_models.build("llama", 0)
    armed, beat, beating = [], Heartbeat._beat, threading.Lock()

    def beat_alone(heart, count):
        with beating:
            beat(heart, count)

    def strike():
        if armed and next(calls) == at and party == victim:
            with beating:  # whoever is stopped while its heart beats into the store's file keeps that locked
                os.kill(os.getpid(), {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[deed])

    Heartbeat._beat = beat_alone

    refit = Refit(
        Hooked(ModuleSource(module), strike) if place.process == 0 else None,
        Hooked(ModuleSink(module), strike) if place.process else None,
        carrier(transport, place.process),
        rendezvous=Rendezvous(
            FileStore(str(place.folder / "store"), -1),
            num_sources=1,
            num_sinks=2,
            source_rank=0 if place.process == 0 else None,
            sink_rank=place.process - 1 if place.process else None,
            liveness_s=PATIENCE_S if deed == "kill" else 10.0,  # a heart beats late on a busy machine
        ),
        bucket_bytes=512,
        deadline_s=PATIENCE_S,
    )
    found = {"party": party, "errors": []}
    for version in (1, 2, 3):
        try:
            if place.process == 0:
                pg_models.advance(module, "llama", version, "whole", 1)
                refit(version=version)
            else:
                refit.receive(timeout_s=PATIENCE_S)
        except RefitError as error:
            found["errors"].append([type(error).__name__, str(error), error.peer])
        armed.append(version)
    found["wrong"] = pg_models.wrong_tensors(module, "llama", 1, "whole", 1)
    refit.close()
    return found


# -- What a wire may confuse, and who is to blame: without a rendezvous ------------------------------


def meddle(fault, at):
    """From now on this process sends wrongly: drops, repeats or delays the message number `at`."""
    start, calls, held, kept = Group.start, itertools.count(), [], []

    def meddling(group, operation, slot, rank, *, tag):
        if operation != "send" or tag == 2**30 - 1:  # that one connects
            return start(group, operation, slot, rank, tag=tag)
        if next(calls) == at:
            if fault in ("drop", "delay"):
                held.extend([slot.clone()] if fault == "delay" else [])
                return Done()
            copy = slot.clone()
            kept.append((copy, start(group, operation, copy, rank, tag=tag)))
        work = start(group, operation, slot, rank, tag=tag)
        while held:
            late = held.pop()
            kept.append((late, start(group, operation, late, rank, tag=tag)))
        return work

    Group.start = meddling


class Done:
    """Work that has been done."""

    def wait(self):
        return True


def bare(place, *, transport, fault=None, victim=None, deed=None, at=0):
    """One source, and sinks that each hold all of ten tensors, each of one bucket; two transfers.

    The deadline of who waits for a victim that has stopped is over at once.
    """
    party, ranks = ("source 0", (0, None)) if place.process == 0 else _sink_at(place.process - 1)
    tensors = [(f"t{n}", (128 - n,), "float32") for n in range(10)]
    source, sink = _whole_manifest(tensors, 1), _whole_manifest(tensors, place.processes - 1)
    store = FileStore(str(place.folder / "store"), -1)
    way = carrier(transport, place.process)
    if fault is not None and place.process == 0:
        meddle(fault, at)
    schedule = make_schedule(plan_refit(source, sink), bucket_bytes=512)
    report = PrefixStore("report", store)
    way.open(_channel(schedule, ranks, PrefixStore("channel", store)), Watch(deadline_s=PATIENCE_S))

    def look_around():
        _look_at(report)
        if watch.peer == victim and report.check(["stopped"]):
            watch.deadline_s = 0.0

    watch = Watch(deadline_s=PATIENCE_S, look_around=look_around)
    calls = itertools.count()
    errors = []
    for refit in (1, 2):
        try:
            strike = partial(_strike, report, deed) if victim == party else lambda call: None
            _transfer(
                way,
                schedule,
                ranks,
                (source, sink),
                refit=refit,
                watch=watch,
                hook=lambda strike=strike: strike(next(calls) - at),
            )
        except RefitError as error:
            errors.append([type(error).__name__, str(error), error.peer, error.bucket])
        if deed == "raise":  # nobody leaves before all have seen why
            report.set(f"{refit} is over for {place.process}", "")
            everybody = [f"{refit} is over for {process}" for process in range(place.processes)]
            report.wait(everybody, timedelta(seconds=PATIENCE_S))
        way.finish()
    way.close()
    return [party, errors]


def _sink_at(rank):
    return f"sink {rank}", (None, rank)


def _strike(report, deed, call):
    if call == 0 and deed == "raise":
        report.set("why", "the disk is full")
        raise RefitError("the disk is full")
    if call == 0 and deed == "stop":
        report.set("stopped", "")
        os.kill(os.getpid(), signal.SIGSTOP)
    if call == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _look_at(report):
    if report.check(["why"]):
        raise AbortedError(f"somebody gave up: {report.get('why').decode()}")


def _whole_manifest(tensors, num_ranks):
    layout = Layout.from_placements((num_ranks,), (None,))
    return Manifest(
        tuple(TensorMeta(name=name, shape=shape, dtype=dtype, layout=layout) for name, shape, dtype in tensors)
    )


# -- Nothing grows ----------------------------------------------------------------------------------


def many(place, *, transport, transfers):
    """Descriptors, threads and resident bytes after a third of many transfers, and after all of them."""
    tensors = [(f"t{n}", (2**14,), "float32") for n in range(4)]
    manifests = _whole_manifest(tensors, 1), _whole_manifest(tensors, 1)
    ranks = (0, None) if place.process == 0 else (None, 0)
    store = FileStore(str(place.folder / "store"), -1)
    watch = Watch(deadline_s=PATIENCE_S)
    way = carrier(transport, place.process)
    schedule = make_schedule(plan_refit(*manifests), bucket_bytes=2**16)
    way.open(_channel(schedule, ranks, PrefixStore("first", store)), watch)
    found = []
    for refit in range(1, transfers + 1):
        _transfer(way, schedule, ranks, manifests, refit=refit, watch=watch)
        way.finish()
        if refit in (transfers // 3, transfers):
            found.append(_resources(*found))
    way.close()
    return found


def often(place, *, transport, times):
    """The same after opening and closing a few times, and after many times more."""
    tensors = [("t", (64,), "float32")]
    manifests = _whole_manifest(tensors, 1), _whole_manifest(tensors, 1)
    ranks = (0, None) if place.process == 0 else (None, 0)
    store = FileStore(str(place.folder / "store"), -1)
    found = []
    way = carrier(transport, place.process)
    schedule = make_schedule(plan_refit(*manifests), bucket_bytes=512)
    for time_ in range(1, times + 1):
        way.open(_channel(schedule, ranks, PrefixStore(f"{time_}", store)), watch := Watch(deadline_s=PATIENCE_S))
        _transfer(way, schedule, ranks, manifests, refit=1, watch=watch)
        way.close()
        if time_ in (times // 3, times):
            found.append(_resources(*found))
    return found


def _resources(early=None):
    """What is in use; waits for threads that have nothing to do any more, until no more is in use than `early`."""
    before, found, until = None, _count(), time.monotonic() + PATIENCE_S
    while before is None or before["threads"] != found["threads"] or _is_more(found, early, until):
        time.sleep(0.2)
        before, found = found, _count()
    return found


def _is_more(found, early, until):
    more = early is not None and any(found[name] > early[name] for name in ("descriptors", "threads"))
    return more and time.monotonic() < until


def _count():
    process = Path("/proc/self")
    return {
        "descriptors": sum(1 for _ in (process / "fd").iterdir()),
        "threads": sum(1 for _ in (process / "task").iterdir()),
        "resident": int((process / "statm").read_text().split()[1]) * 4096,
    }

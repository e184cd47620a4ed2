"""What the processes of `pg_world.py` do on faked GPUs; each returns what it recorded, for `gpu_order`."""

import gc
import itertools
from importlib import import_module

import fake_gpus
import pg_models
import torch.distributed as dist
from torch.distributed import FileStore

from rl_refit.errors import RefitError
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.sink import ModuleSink
from rl_refit.source import ModuleSource
from rl_refit.transports import stream
from rl_refit.transports.base import Inbox
from rl_refit.transports.memory import Link
from rl_refit.transports.messages import Group
from rl_refit.transports.stream import SlotStream

WAYS = ("gpus of one host", "gpus of two hosts", "gpus far apart", "gpus of two containers", "one gpu", "some gpus")

_fakes = []


def pg_cases():
    return import_module("pg_cases")  # which imports this module


def device():
    """The GPU of this process; None where it has none."""
    return _fakes[0].device if _fakes else None


def fake(process, folder=None):
    if not _fakes:
        _fakes.append(fake_gpus.install(process, folder))
    return _fakes[0]


def carrier(way, process, **options):
    """A transport of this process, which has a GPU from now on, and sees those of its host in an order of its own.

    "gpus of one host" is CUDA IPC, "gpus far apart" NCCL, "gpus of two hosts" both. Of "gpus of two containers" each
    has one for all its processes, and "one gpu" is all that there is, and nothing maps memory: NCCL is for neither. Of
    "some gpus" every other process has none.
    """
    hosts = {"gpus of two hosts": process % 2, "gpus of two containers": process % 2, "gpus far apart": process}
    host = hosts.get(way, 0)
    step = {"gpus of one host": 1, "some gpus": 2, "gpus of two hosts": 2}.get(way, 8)
    number = process if step < 8 else host
    seen = [f"GPU-{host}-{other}" for other in range(host, 8, step)]
    turn = process % len(seen)
    fake(process).place(host=f"host {host}", seen=(*seen[turn:], *seen[:turn]), own=f"GPU-{host}-{number}")
    return SlotStream(share_memory=way != "one gpu", **options)


def gpu_worlds(place, *, way, seeds):
    """`pg_cases.shapes` on GPUs: how many worlds this process was in, and what it recorded."""
    recorded = fake(place.process, place.folder).events
    return [pg_cases().shapes(place, seeds=seeds, ways=[way]), recorded]


def gpu_refits(
    place, *, way, sources, sinks, colocated=False, fault=None, arena=False, gives_up=None, refits=3, **options
):
    """Refits from a trainer that steps in a stream of its own into an engine that runs in a stream of its own.

    Returns:
        What went wrong; the medium; and what this process recorded. Sink 0 may give up at one of its tensors.
    """
    (_, num_sources), (_, num_sinks) = sources, sinks
    assert place.processes == (num_sinks if colocated else num_sources + num_sinks)
    own = fake(place.process, place.folder)
    trains = place.process < num_sources
    source_rank = place.process if trains else None
    sink_rank = place.process if colocated else None if trains else place.process - num_sources
    seat = ("trainer", (source_rank, num_sources)) if trains else ("engine", (sink_rank, num_sinks))
    pg_cases()._default_group(place, *seat)
    policy = pg_models.laid_out("llama", 0, *sources) if trains else None
    engine = None if sink_rank is None else pg_models.laid_out("llama", 0, *sinks)
    transport = carrier(way, place.process, arena=arena)
    mode, staged = options.pop("mode", "staged"), itertools.count()

    def strike():
        if sink_rank == 0 and next(staged) == gives_up:
            raise RefitError("the sink gives up")

    meeting = Rendezvous(
        FileStore(str(place.folder / "store"), -1),
        num_sources=num_sources,
        num_sinks=num_sinks,
        source_rank=source_rank,
        sink_rank=sink_rank,
    )
    refit = Refit(
        ModuleSource(policy) if policy is not None else None,
        pg_cases().Hooked(ModuleSink(engine, mode=mode), strike) if engine is not None else None,
        transport,
        rendezvous=meeting,
        bucket_bytes=1024,
        deadline_s=30.0,
        **options,
    )
    own.hang_s = 20.0 if fault is None else 2.0
    FAULTS.get(fault, lambda: setattr(own, "omitted", fault))()
    media, wrong = None, []
    for version in range(1, refits + 1):
        try:
            if policy is not None:
                pg_models.advance(policy, "llama", version, *sources)
                with own.in_stream("the trainer's stream"):
                    own.kernel("an optimizer step", writes=map(pg_models._local, policy.parameters()))
            report = refit(version=version) if policy is not None else refit.receive(timeout_s=30.0)
            media = report.transport
            if engine is not None:
                assert fault or pg_models.wrong_tensors(engine, "llama", version, *sinks) == [], version
                with own.in_stream("the engine's stream"):
                    own.kernel("a forward", reads=map(pg_models._local, engine.parameters()))
        except (RefitError, AssertionError) as error:
            if fault is None and gives_up is None:
                raise
            wrong.append(f"{type(error).__name__}: {error}")
    refit.close()
    del refit, transport
    dist.destroy_process_group()
    return [wrong, media, own.events]


def gpu_death(place, *, of="death", sees_deaths=False, **arguments):
    """A case in which a process dies, on GPUs; adds whether NCCL was aborted, and what this process recorded."""
    own = fake(place.process, place.folder)
    own.sees_deaths = sees_deaths
    found = getattr(pg_cases(), of)(place, **arguments)
    gc.collect()
    return [found, own.aborted, own.events]


# -- Faults: of what a refit does, one thing is left out, or done in another stream ------------------------------------


def _in_another_stream(owner, name):
    call = getattr(owner, name)

    def elsewhere(*arguments, **more):
        with _fakes[0].in_stream("another stream"):
            return call(*arguments, **more)

    setattr(owner, name, elsewhere)


def _reuse_at_once():
    hand_on = stream._Transfer._hand_on
    stream._Transfer._hand_on = lambda *arguments, **more: hand_on(*arguments, **more) and []


def _read_without_a_token():
    take = Link.take
    Link.take = lambda link, token, watch: token if token.full else take(link, token, watch)


def _hang():
    def until_copied(transfer, bucket):
        transfer.watch.deadline_s = 0.0  # which is over at once
        yield from until(transfer, bucket)

    _fakes[0].hangs, until, stream._Transfer._until_copied = True, stream._Transfer._until_copied, until_copied


FAULTS = {
    "the GPU hangs": _hang,
    "slots are filled again at once": _reuse_at_once,
    "slots are read before they are full": _read_without_a_token,
    "messages are over at once": lambda: setattr(Group, "has_ended", lambda *arguments: True),
    "slots are filled in another stream": lambda: _in_another_stream(stream._Transfer, "_fill"),
    "slots are read in another stream": lambda: _in_another_stream(Inbox, "deliver"),
}

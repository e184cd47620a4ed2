"""Parties of a refit as threads of one process: each with its own end of one real store."""

from __future__ import annotations

import contextlib
import dataclasses
import threading

import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit, Rendezvous
from rl_refit.transaction.control import Control
from rl_refit.transports.base import Watch
from rl_refit.transports.stream import SlotStream

PATIENCE_S = 120.0  # what must succeed may take as long as this, however busy the machine is
HANG_S = 2 * PATIENCE_S


def together(*functions):
    """What each function returns or raises, run at the same time."""
    results = [None] * len(functions)

    def run(place, function):
        try:
            results[place] = function()
        except BaseException as error:  # noqa: BLE001 - the test looks at it
            results[place] = error

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), "a party hangs"
    return results


def all_well(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def watch(control=None, *, deadline_s=PATIENCE_S):
    return Watch(deadline_s=deadline_s, look_around=None if control is None else control.look_around)


def rendezvous(store, *, sources=1, sinks=1, liveness_s=PATIENCE_S, name="test", **rank):
    return Rendezvous(store, num_sources=sources, num_sinks=sinks, liveness_s=liveness_s, name=name, **rank)


def ranks(sources, sinks):
    return [*({"source_rank": rank} for rank in range(sources)), *({"sink_rank": rank} for rank in range(sinks))]


@contextlib.contextmanager
def controls(stores, *, sources, sinks, **more):
    """Every party's control, met; `stores` gives each party its own client."""
    made = [
        Control(rendezvous(store, sources=sources, sinks=sinks, **rank, **more))
        for store, rank in zip(stores, ranks(sources, sinks), strict=True)
    ]
    try:
        all_well(together(*(lambda control=control: control.meet(watch(control)) for control in made)))
        yield made
    finally:
        together(*(control.close for control in made))


def model(seed):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))


def same_weights(first, second):
    return all(torch.equal(mine, theirs) for mine, theirs in zip(first.parameters(), second.parameters(), strict=True))


class World:
    """Refits of `sources` ranks that all hold one policy, and of `sinks` replicas of an engine, over a ring."""

    def __init__(self, store, directory, *, sources=1, sinks=1, transport=SlotStream, **more):
        self.policy = model(1)
        self.engines = [model(100 + rank) for rank in range(sinks)]
        self.sinks = [ModuleSink(engine) for engine in self.engines]
        shared = {"bucket_bytes": 1024, "deadline_s": PATIENCE_S, "verify": "full"}

        def refit(**rank):
            source = ModuleSource(self.policy) if "source_rank" in rank else None
            sink = self.sinks[rank["sink_rank"]] if "sink_rank" in rank else None
            met = rendezvous(store, sources=sources, sinks=sinks, **rank, **more)
            return Refit(source, sink, transport(directory=str(directory)), rendezvous=met, **shared)

        self.trainers = [refit(source_rank=rank) for rank in range(sources)]
        self.receivers = [refit(sink_rank=rank) for rank in range(sinks)]

    def calls(self, version, *, timeout_s=HANG_S):
        """One refit at each party, to be run together."""
        trainers = [lambda refit=refit: refit(version=version) for refit in self.trainers]
        return [*trainers, *(lambda refit=refit: refit.receive(timeout_s=timeout_s) for refit in self.receivers)]

    def wait_in_vain(self, version, *, waiting_for):
        """The first trainer's call, whose deadline is over as soon as it waits for `waiting_for`, and not before."""
        trainer = self.trainers[0]
        make_watch = trainer._watch

        def impatient_watch():
            watch = make_watch()

            def look_around():
                trainer.look_around()
                watch.deadline_s = 0.0 if watch.peer == waiting_for else PATIENCE_S

            watch._look_around = look_around
            return watch

        trainer._watch = impatient_watch
        try:
            return trainer(version=version)
        finally:
            trainer._watch = make_watch

    @contextlib.contextmanager
    def impatient(self, *refits, deadline_s):
        """Meanwhile these give up soon: only what must fail, wherever it is by then, goes in here."""
        patient = [refit._config for refit in refits]
        for refit in refits:
            refit._config = dataclasses.replace(refit._config, deadline_s=deadline_s)
        try:
            yield
        finally:
            for refit, config in zip(refits, patient, strict=True):
                refit._config = config

    def train(self):
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.add_(1)

    def close(self):
        together(*(refit.close for refit in (*self.trainers, *self.receivers)))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

"""Deadlines, with a clock that tests move; and what the arguments of a refit may be."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_refit import DeadlineError, ModuleSink, ModuleSource, Refit, RefitConfig
from rl_refit.transports import base as watch


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(watch, "monotonic", lambda: self.now)


def slow(clock, method, seconds):
    def slowed(*arguments, **options):
        clock.now += seconds
        return method(*arguments, **options)

    return slowed


def models():
    """A policy and an engine."""
    return nn.Linear(24, 64), nn.Linear(24, 64)


def test_a_deadline_is_per_phase_and_names_phase_bucket_and_seconds(monkeypatch):
    clock = Clock(monkeypatch)
    policy, engine = (nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(5))) for _ in range(2))
    before, sink = engine[0].weight.detach().clone(), ModuleSink(engine)
    monkeypatch.setattr(sink, "prepare", slow(clock, sink.prepare, 4.0))
    monkeypatch.setattr(sink, "stage", slow(clock, sink.stage, 4.0))
    with pytest.raises(DeadlineError) as caught:
        Refit(ModuleSource(policy), sink, deadline_s=10.0)(version=1)
    assert (caught.value.phase, caught.value.seconds) == ("transfer", 12.0)
    assert str(caught.value) == (
        "phase transfer, bucket 0, tensor '2.weight': 12.000 s so far, and a phase may take deadline_s=10.0"
    )
    assert torch.equal(engine[0].weight, before)


@pytest.mark.parametrize(("method", "phase"), [("prepare", "prepare"), ("digest", "verify")])
def test_the_phases_without_buckets_have_a_deadline_too(monkeypatch, method, phase):
    clock, (policy, engine) = Clock(monkeypatch), models()
    sink = ModuleSink(engine)
    monkeypatch.setattr(sink, method, slow(clock, getattr(sink, method), 11.0))
    with pytest.raises(DeadlineError, match=f"phase {phase}: 11.000 s so far, and a phase may take deadline_s=10.0"):
        Refit(ModuleSource(policy), sink, deadline_s=10.0)(version=1)
    assert sink.version is None


def test_a_commit_that_has_begun_is_let_finish(monkeypatch):
    clock, (policy, engine) = Clock(monkeypatch), models()
    sink = ModuleSink(engine, on_commit=lambda _: setattr(clock, "now", clock.now + 99.0))
    assert Refit(ModuleSource(policy), sink, deadline_s=10.0)(version=1).seconds["commit"] == 99.0
    assert sink.version == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"bucket_bytes": 1000}, "bucket_bytes must be a positive multiple of 512; got 1000"),
        ({"buckets": 0}, "buckets must be at least 1; got buckets=0"),
        ({"deadline_s": 0}, "deadline_s must be positive; got deadline_s=0"),
        ({"deadline_s": math.nan}, "deadline_s=nan"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, complaint):
    with pytest.raises(ValueError, match=complaint):
        RefitConfig(**arguments)
    with pytest.raises(ValueError, match=complaint):
        Refit(ModuleSource(models()[0]), ModuleSink(models()[1]), **arguments)

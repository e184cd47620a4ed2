"""A thousand refits leave nothing behind."""

from __future__ import annotations

import gc
import os
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, Refit


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_files():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads memory and open files from /proc")
def test_a_thousand_refits_leave_no_memory_and_no_files():
    policy, engine = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))) for _ in range(2))
    refit = Refit(ModuleSource(policy), ModuleSink(engine), bucket_bytes=16 * 1024)
    for version in range(50):
        refit(version=version)
    gc.collect()
    tracemalloc.start()
    files, resident, (traced, _) = open_files(), resident_bytes(), tracemalloc.get_traced_memory()
    for version in range(50, 1050):
        refit(version=version)
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    assert grown < 64 * 1024  # 64 bytes a refit would be a leak of one object each
    assert resident_bytes() - resident < 32 * 2**20  # the weights are 66 KB: one leaked copy each would be 66 MB
    assert open_files() <= files


def test_a_refit_that_fails_leaves_no_more_than_one_that_succeeds():
    """Its traceback goes with the exception, and the stage is used again."""
    policy, engine = nn.Linear(512, 512), nn.Linear(512, 512)
    sink = ModuleSink(engine, mode="swap", on_commit={}.__getitem__)
    refit = Refit(ModuleSource(policy), sink)
    addresses = set()
    for _ in range(20):
        with pytest.raises(KeyError):
            refit(version=1)
        addresses |= {sink._bank["weight"][0][1].data_ptr(), engine.weight.data_ptr()}
    assert len(addresses) == 2  # the two banks, in turn


@pytest.mark.parametrize(("mode", "copies"), [("staged", 0), ("swap", 1)])
def test_what_a_mode_allocates(monkeypatch, mode, copies):
    """Counted where torch allocates: every torch.empty that the package asks for."""
    allocated = []
    original = torch.empty

    def counting(*arguments, **options):
        tensor = original(*arguments, **options)
        allocated.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    policy, engine = (nn.Linear(300, 100, bias=False, dtype=torch.bfloat16) for _ in range(2))
    allocated.clear()
    refit = Refit(ModuleSource(policy), ModuleSink(engine, mode=mode))
    report = refit(version=1)
    assert sum(allocated) == copies * report.bytes
    assert report.extra_bytes == 0
    allocated.clear()
    refit(version=2)
    assert allocated == []

"""Conversions that are killed, at every moment at which anything reaches the disk, and several writers at once."""

import functools
import os
import shutil
import signal
import time
from pathlib import Path

import conversions
import pytest
import torch
from forked import RanksFailedError

from rl_backends.errors import CheckpointError
from rl_backends.megatron.conversion.lock import WriterLock


def _killed_at(moment, calls, function):
    """`function`, which kills its process instead of its `moment`-th call."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        calls.append(function.__name__)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return wrapped


def _watch(moment):
    """From here on, the calls that make files last and give them their names; kills instead of the `moment`-th."""
    calls = []
    os.fsync = _killed_at(moment, calls, os.fsync)
    Path.rename = _killed_at(moment, calls, Path.rename)
    return calls


def test_a_kill_at_any_moment_leaves_all_or_nothing_and_the_next_run_goes_on(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")

    def counted(rank):
        calls = _watch(0)
        conversions.convert(model, tmp_path / "whole")
        return calls

    def next_run(rank):
        conversion = conversions.convert(model, directory)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return conversion.why

    (calls,) = on_ranks(counted, ranks=1)
    renamed = max(number for number, call in enumerate(calls, start=1) if call == "rename")
    assert len(calls) > 8
    for moment in range(1, len(calls) + 1):
        directory = tmp_path / f"killed at {moment}"

        def killed(rank, moment=moment, directory=directory):
            _watch(moment)
            conversions.convert(model, directory)

        with pytest.raises(RanksFailedError, match="ended with code -9"):
            on_ranks(killed, ranks=1)
        visible = [path for path in directory.iterdir() if not path.name.startswith(".")]
        assert bool(visible) == (moment > renamed)
        if moment in {1, renamed - 1, renamed, renamed + 1, len(calls)}:  # the others left the same
            (why,) = on_ranks(next_run, ranks=1)
            assert why == ("found" if moment > renamed else "there was none")
            conversions.only(directory)  # what was left is gone
        shutil.rmtree(directory)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_all_and_the_next_run_goes_on(world, tmp_path, on_ranks, victim):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    layout = {"tensor_model_parallel_size": 2}

    def killed(rank):
        if rank == victim:
            _watch(1)
        conversions.convert(model, directory, **layout)

    with pytest.raises(RanksFailedError, match=f"rank {victim} ended with code -9"):
        on_ranks(killed, ranks=2)
    assert not [path for path in directory.iterdir() if not path.name.startswith(".")]
    assert on_ranks(lambda rank: conversions.convert(model, directory, **layout).why, ranks=2) == ["there was none"] * 2
    conversions.only(directory)


def test_one_of_two_writers_converts_and_the_other_uses_it(world, tmp_path, on_ranks):
    """Two jobs of one process each, not joined to one another."""
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"

    def meet(where, rank):
        (tmp_path / f"{rank}.{where}").touch()
        _until((tmp_path / f"{1 - rank}.{where}").exists)

    def two_jobs(rank):
        meet("joined", rank)  # both have, and nobody tears a connection that the other still makes
        torch.distributed.destroy_process_group()  # from here they know nothing of each other
        told = []

        def progress(line):
            told.append(line)
            if line.startswith("writing"):
                _until((tmp_path / "waits").exists)
            if line.startswith("waiting for"):
                (tmp_path / "waits").touch()

        conversion = conversions.convert(model, directory, progress=progress)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        meet("done", rank)
        rendezvous = f"file://{tmp_path / 'again'}"
        torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
        return conversion.why, "\n".join(told), os.getpid()

    found = {why: (told, pid) for why, told, pid in on_ranks(two_jobs, ranks=2)}
    assert set(found) == {"there was none", "found"}
    assert f"waiting for process {found['there was none'][1]} on " in found["found"][0]
    conversions.only(directory)


def _until(true):
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_who_waits_too_long_says_for_whom(world, tmp_path, on_ranks):
    from rl_backends.loading import open_model
    from rl_backends.megatron.config import MegatronConfig
    from rl_backends.megatron.conversion.content import source_content
    from rl_backends.megatron.groups import ParallelGroups

    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    directory.mkdir()
    lock = WriterLock(directory / source_content(open_model(str(model))).name)
    assert lock.try_acquire()

    def two_ranks(rank):
        from rl_backends.errors import RankError

        groups = ParallelGroups.join(MegatronConfig())  # with ranks that are waited for longer than the other writer
        with pytest.raises(RankError if rank else CheckpointError) as raised:
            conversions.convert(model, directory, timeout_s=0.5)
        groups.leave()
        return str(raised.value)

    try:
        for told in on_ranks(two_ranks, ranks=2):
            assert f"is being written by process {os.getpid()} on " in told
            assert "not done after 0.5 s" in told
    finally:
        lock.release()


def test_a_lock_goes_with_its_holder_and_not_with_the_holders_children(tmp_path, on_ranks):
    def holds_and_dies(rank):
        assert WriterLock(tmp_path / "target").try_acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RanksFailedError, match="ended with code -9"):
        on_ranks(holds_and_dies, ranks=1)
    lock, other = WriterLock(tmp_path / "target"), WriterLock(tmp_path / "target")
    assert lock.try_acquire()
    assert not other.try_acquire()
    assert f"process {os.getpid()} on " in other.holder()

    def forked_while_it_is_held(rank):
        lock.release()  # of the parent's, by whoever shares its descriptor: explicitly, and for all

    on_ranks(forked_while_it_is_held, ranks=1)
    assert other.try_acquire()
    other.release()

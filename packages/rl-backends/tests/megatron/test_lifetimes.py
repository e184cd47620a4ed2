"""Claims about how long process groups live: as long as somebody computes in them, and nobody else's."""

import contextlib
import functools
import gc
import inspect
import re
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from rl_backends import DTensorBackend, DTensorConfig, ModelError, OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

SGD = OptimizerConfig(lr=1e-2)
PF_EXITING = 0x4
"""Of a thread's flags in Linux."""


def forked_on(ranks):
    """Run the whole test on as many ranks, forked for it; several have a process group of their own making."""

    def decorate(test):
        def run(on_ranks, **given):
            on_ranks(lambda rank: test(**given), ranks=ranks)

        own = inspect.signature(test).parameters.values()
        fixture = inspect.Parameter("on_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        run.__signature__ = inspect.Signature([fixture, *own])
        run.__name__, run.__doc__ = test.__name__, test.__doc__
        return run

    return decorate


alone = forked_on(1)


def megatron(world, **config):
    from rl_backends.megatron.backend import MegatronBackend

    return MegatronBackend(make_model(world), MegatronConfig(**config))


def dtensor(world, **config):
    return DTensorBackend(make_model(world), DTensorConfig(**config))


def make_model(world):
    return world.make_model("Qwen3", pad_token_id=None, num_hidden_layers=2)


def step(world, backend):
    """The norm of a step's gradient: finite only if the ranks could compute it."""
    examples = world.make_examples()
    backend.start_training(SGD, num_steps=1)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.forward_backward(examples, loss)
    return backend.optim_step()


def join(**config):
    from rl_backends.megatron.groups import ParallelGroups

    return ParallelGroups.join(MegatronConfig(**config))


def megatron_is_arranged():
    from megatron.core import parallel_state

    return parallel_state.is_initialized()


def make_process_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def held_by_process():
    """What a group that nobody can reach any more would add to: groups, threads, and open files."""
    gc.collect()
    return len(dist.distributed_c10d._world.pg_map), num_threads(), psutil.Process().num_fds()


def num_threads():
    """Without those that are ending, which the kernel may still count after they were joined."""
    flags = []
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            flags.append(int((thread / "stat").read_text().rpartition(")")[2].split()[6]))
    return sum(not each & PF_EXITING for each in flags)


@alone
def test_groups_are_destroyed_by_the_last_to_leave_and_leaving_twice_counts_once():
    first, second = join(), join()
    for _ in range(3):
        first.leave()
    assert first.left
    assert not second.left
    assert dist.is_initialized()
    assert megatron_is_arranged()
    second.leave()
    assert not dist.is_initialized()
    assert not megatron_is_arranged()
    second.leave()
    third = join()  # is not refused, and has what it needs
    first.leave()
    assert megatron_is_arranged()
    third.leave()


@pytest.mark.parametrize("forgotten", [megatron, dtensor])
@pytest.mark.parametrize("closed", [megatron, dtensor])
@alone
def test_a_backend_that_nobody_can_reach_keeps_no_group(world, forgotten, closed):
    backends = [forgotten(world), closed(world)]
    del backends[0]
    backends.pop().close()
    assert not dist.is_initialized()


@alone
def test_sizes_are_told_after_leaving_too():
    groups = join()
    expected = {"tp": 1, "cp": 1, "ep": 1, "dp": 1, "pp": 1}
    assert groups.sizes == expected
    groups.leave()
    assert groups.sizes == expected


@pytest.mark.parametrize("theirs", [False, True])
@alone
def test_a_refused_join_leaves_the_process_as_it_was(theirs):
    if theirs:
        make_process_group()
    before = held_by_process() if theirs else None
    with pytest.raises(ValueError, match="1 ranks cannot be cut into groups of 2"):
        join(tensor_model_parallel_size=2)
    assert dist.is_initialized() == theirs
    assert before is None or held_by_process() == before
    join().leave()


@alone
def test_a_join_that_fails_inside_megatron_leaves_no_group_behind(monkeypatch):
    from megatron.core.tensor_parallel import random

    def fail(*_, **__):
        raise OSError("no more of them")

    make_process_group()
    join().leave()  # what is imported at the first
    before = held_by_process()
    with monkeypatch.context() as patched:
        patched.setattr(random, "model_parallel_cuda_manual_seed", fail)
        with pytest.raises(OSError, match="no more"):
            join()
    assert held_by_process() == before
    assert not megatron_is_arranged()
    join().leave()


@forked_on(2)
def test_another_layout_is_refused_while_one_lives_and_that_one_goes_on(world):
    backend = megatron(world, tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="Megatron has one layout a process"):
        join()
    assert step(world, backend) > 0
    backend.close()
    groups = join()
    dist.barrier()  # a rank that leaves early tears connections that another still makes
    groups.leave()


@pytest.mark.parametrize("first", [megatron, dtensor])
@pytest.mark.parametrize("closed", [0, 1])
@alone
def test_either_backend_goes_on_when_the_other_is_closed(world, first, closed):
    second = dtensor if first is megatron else megatron
    backends = [first(world), second(world)]
    expected = step(world, backends[1 - closed])
    backends[closed].close()
    backends[closed].close()
    assert dist.is_initialized()
    assert step(world, backends[1 - closed]) > 0
    assert expected > 0
    backends[1 - closed].close()
    assert not dist.is_initialized()


@pytest.mark.parametrize("make", [megatron, dtensor])
@alone
def test_the_process_group_of_the_user_outlives_backends_which_take_no_more_at_each_cycle(world, make):
    make_process_group()
    cycles = []
    for _ in range(4):
        backend = make(world)
        step(world, backend)
        backend.close()
        del backend
        cycles.append(held_by_process())
    assert dist.is_initialized()
    assert cycles[1:] == [cycles[1]] * 3
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("make", "config"),
    [
        (megatron, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
        (megatron, {"pipeline_model_parallel_size": 2}),
        (dtensor, {"tensor_parallel_size": 2}),
        (dtensor, {"context_parallel_size": 2}),
    ],
)
@forked_on(2)
def test_backends_that_follow_one_another_compute_the_same_and_take_no_more(world, make, config):
    norms, cycles = [], []
    for _ in range(3):
        backend = make(world, **config)
        norms.append(step(world, backend))
        backend.close()
        del backend
        dist.barrier()
        cycles.append(held_by_process())
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-5)
    assert cycles[1] == cycles[2]


@forked_on(2)
def test_layouts_that_follow_one_another_do_not_meet_their_groups(world):
    norms = []
    for config in ({"tensor_model_parallel_size": 2}, {}, {"context_parallel_size": 2}) * 2:
        backend = megatron(world, **config)
        norms.append(step(world, backend))
        backend.close()
    assert norms == pytest.approx(norms[:1] * len(norms), rel=1e-4)


@alone
def test_a_user_who_takes_the_process_group_away_can_begin_anew(world):
    lost = join()
    dist.destroy_process_group()
    make_process_group()
    backend = megatron(world)
    lost.leave()  # of groups that are gone: not of these
    assert step(world, backend) > 0
    backend.close()
    assert dist.is_initialized()
    dist.destroy_process_group()


@alone
def test_a_dtensor_backend_that_is_closed_says_so_and_its_reference_too(world):
    backend, examples = dtensor(world), world.make_examples()
    reference = backend.freeze_reference()
    backend.close()
    assert not dist.is_initialized()
    for ask in (backend.logp, reference.logp):
        with pytest.raises(RuntimeError, match="this backend is closed"):
            ask(examples)


@alone
def test_a_refused_dtensor_backend_leaves_no_process_group(world):
    with pytest.raises(ValueError, match=re.escape("1 ranks cannot be cut into groups of 2")):
        dtensor(world, tensor_parallel_size=2)
    assert not dist.is_initialized()
    with pytest.raises(ModelError):
        DTensorBackend(torch.nn.Linear(2, 2), DTensorConfig())
    assert not dist.is_initialized()


@pytest.mark.parametrize("make", [megatron, dtensor])
@alone
def test_a_save_that_failed_does_not_keep_the_process_group(world, make):
    class FailedWrite:
        def unseen_error(self):
            return OSError("disk full")

        def wait(self):
            raise self.unseen_error()

    backend = make(world)
    backend._last_write = FailedWrite()
    with pytest.raises(OSError, match="disk full"):
        backend.close()
    assert not dist.is_initialized()
    backend.close()

"""Claims about the ranks of these tests: they compute together, and nothing that goes wrong on one is lost."""

import os
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from forked import RanksFailedError


def test_ranks_compute_together_though_this_process_has_computed_before(on_ranks):
    weight = torch.ones(3, requires_grad=True)
    (weight.sum() ** 2).backward()  # autograd's and torch's threads, where they have any

    def scaled_gradient(rank):
        total = (weight * (rank + 1)).sum() ** 2
        (gradient,) = torch.autograd.grad(total, weight)
        dist.all_reduce(gradient)
        return {"gradient": gradient, "rank": rank, "threads": torch.get_num_threads()}

    found = on_ranks(scaled_gradient, ranks=2)
    assert [each["rank"] for each in found] == [0, 1]
    assert [each["threads"] for each in found] == [1, 1]
    for each in found:
        torch.testing.assert_close(each["gradient"], torch.full((3,), 6.0 + 24.0))


def test_a_lone_rank_has_no_process_group(on_ranks):
    assert on_ranks(lambda rank: dist.is_initialized(), ranks=1) == [False]


def test_an_error_on_one_rank_is_shown_whole_and_the_others_are_not_waited_for(on_ranks):
    def divide(rank):
        print(f"rank {rank} was here")
        if rank == 1:
            return 1 / 0
        return dist.barrier()

    with pytest.raises(RanksFailedError) as raised:
        on_ranks(divide, ranks=2)
    for words in ("rank 1 ended with code 1", "return 1 / 0", "ZeroDivisionError", "rank 0 was here"):
        assert words in str(raised.value)


@pytest.mark.slow
def test_a_rank_that_hangs_is_ended_and_says_where_it_was(on_ranks):
    def hangs_here(rank):
        if rank == 0:
            time.sleep(1000)

    with pytest.raises(RanksFailedError, match=r"(?s)rank 0 still ran after 30 s.*in hangs_here"):
        on_ranks(hangs_here, ranks=2, deadline_s=30)  # which is time to get there, too


def test_a_process_that_outlives_its_rank_is_named_and_ended(on_ranks, tmp_path):
    def leaves_one_behind(rank):
        started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        (tmp_path / "pid").write_text(str(started.pid))
        started.returncode = 0  # as if it had been waited for

    with pytest.raises(RanksFailedError, match=r"it left process \d+ \(.*time.sleep\(1000\)\) behind"):
        on_ranks(leaves_one_behind, ranks=1, grace_s=3)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_ranks_are_not_forked_from_a_process_with_a_group_of_its_own(on_ranks, tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="close it first"):
            on_ranks(lambda rank: None, ranks=1)
    finally:
        dist.destroy_process_group()

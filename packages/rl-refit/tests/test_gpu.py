"""What `rl_refit.gpu` does on a real GPU, and what the fake in the other tests takes for granted: seconds."""

import time
from datetime import timedelta

import pytest
import torch
from torch.distributed import HashStore

from rl_refit import gpu
from rl_refit.errors import DeadlineError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="asks an NVIDIA GPU, and there is none"),
]

LONG = 2 * 10**8  # cycles: a tenth of a second


@pytest.fixture
def device():
    gpu.use(torch.device("cuda", 0))
    return torch.device("cuda", gpu.index_of(torch.device("cuda")))


def test_each_gpu_has_a_name_that_other_processes_know(device):
    assert len(set(gpu.uuids())) == torch.cuda.device_count()
    assert device.index == 0


def test_an_event_is_over_when_its_stream_has_done_what_came_before(device):
    torch.cuda._sleep(LONG)
    is_over = gpu.record(device)
    assert not is_over()
    gpu.synchronize(device, 60.0)
    assert is_over()


def test_a_gpu_that_is_not_through_in_time_is_an_error(device):
    torch.cuda._sleep(20 * LONG)
    with pytest.raises(DeadlineError, match="does it hang"):
        gpu.synchronize(device, 0.1)
    gpu.synchronize(device, 60.0)


def test_whoever_waits_for_the_device_waits_for_all_its_streams(device):
    with torch.cuda.stream(torch.cuda.Stream(device)):
        torch.cuda._sleep(LONG)
        is_over = gpu.record(device)
    gpu.synchronize(device, 60.0)
    assert is_over()


@pytest.mark.skipif(not torch.distributed.is_nccl_available(), reason="this torch is built without NCCL")
@pytest.mark.parametrize("end", ["shutdown", "abort"])
def test_a_message_over_nccl_says_when_it_is_over(device, end):
    group = gpu.communicator((HashStore(), 0, 1), timedelta(seconds=60), device)
    sent, received = gpu.empty(2**20, device).fill_(7), gpu.empty(2**20, device)
    group._start_coalescing()
    group.send([sent], 0, 0)
    group.recv([received], 0, 0)
    work, until = group._end_coalescing(), time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < until
    work.wait()
    assert torch.equal(sent, received)
    getattr(group, end)()

"""Two workers, tensor parallel, in processes of their own: each takes its shard from the same memory, or none does."""

import os
import signal
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import psutil
import tiny

from rl_refit.errors import DigestError, PoisonedError, RefitError
from rl_refit.refit import Refit
from rl_refit.vllm import VllmSink

OLD, NEW = 0, 1
TOLERANCE = 1e-4  # two workers add in another order than one


@pytest.fixture(scope="module")
def llm(checkpoints, served):
    served("qwen3_moe", OLD), served("qwen3_moe", NEW)  # one engine at a time: the groups are one process's
    with tiny.engine(
        checkpoints("qwen3_moe", OLD),
        load_format="dummy",
        tensor_parallel_size=2,
        worker_extension_cls="faulty_worker.FaultyWorker",
    ) as llm:
        yield llm


@pytest.fixture
def sink(llm):
    sink = VllmSink(llm)
    Refit(source(OLD), sink)(version=0)
    return sink


def source(seed):
    return tiny.source(tiny.policy("qwen3_moe", seed))


def says(llm, served, seed):
    return tiny.same(tiny.generate(llm), served("qwen3_moe", seed), tolerance=TOLERANCE)


def test_two_workers_say_what_one_says_that_loaded_the_checkpoint(llm, sink, served):
    assert says(llm, served, OLD)
    report = Refit(source(NEW), sink)(version=1)
    assert says(llm, served, NEW)
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"}.isdisjoint(report.unreadable)  # on both


def test_both_workers_are_proved_to_be_fed(sink):
    text = sink.explain()
    assert "worker 0: " in text
    assert "worker 1: " in text


def test_a_bit_that_one_of_them_reads_differently_leaves_both_untouched(llm, sink, served):
    given = source(NEW)
    coverage = sink.prepare(given.manifest())
    for region, tensor in given.shards([meta.name for meta in coverage.sink.tensors if meta.travels]):
        sink.stage(region, tensor)
    sink.digest()
    sink._bank.tensors["lm_head.weight"][7, 7] += 1
    with pytest.raises(DigestError, match=r"loaded nothing: lm_head\.weight"):
        sink.commit(1)
    sink.abort()
    assert says(llm, served, OLD)


def test_a_fault_in_one_of_them_poisons_the_engine_until_a_refit_succeeds(llm, sink, served):
    llm.collective_rpc("fail_next_reload", args=(1, 20))
    with pytest.raises(RefitError, match=r"^worker 1: OSError: a fault after 20 tensors"):
        Refit(source(NEW), sink)(version=1)
    with pytest.raises(PoisonedError):
        sink.check()
    Refit(source(NEW), sink)(version=1)
    sink.check()
    assert says(llm, served, NEW)


def test_the_bank_is_in_memory_once_and_has_no_name(sink):
    inode = sink._identity[1]
    processes = [os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))]
    mapped = [tiny.shared_files(process).get(inode) for process in processes]
    assert mapped.count("(deleted)") == 3


def test_a_worker_that_dies_ends_the_commit_and_poisons(llm, sink):
    """The last test of this engine."""
    sink = VllmSink(llm)
    refits = [Refit(source(seed), sink) for seed in (OLD, NEW)]
    refits[0](version=0)
    sink._engine._timeout_s = 10.0
    os.kill(llm.collective_rpc("process_id")[1], signal.SIGKILL)
    with pytest.raises((RefitError, RuntimeError, TimeoutError)):
        refits[1](version=1)
    with pytest.raises(PoisonedError, match="the commit of version 1 failed with"):
        sink.check()

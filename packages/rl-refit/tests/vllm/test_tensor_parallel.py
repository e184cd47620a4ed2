"""Two workers, tensor parallel, in processes of their own: each is a rank of the sink, and receives its own shard."""

from importlib.metadata import version
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny

from rl_refit.errors import PoisonedError, RefitError
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
    yield sink
    sink.close()


def source(seed):
    return tiny.source(tiny.policy("qwen3_moe", seed))


def says(llm, served, seed):
    return tiny.same(tiny.generate(llm), served("qwen3_moe", seed), tolerance=TOLERANCE)


def test_two_workers_say_what_one_says_that_loaded_the_checkpoint(llm, sink, served):
    assert says(llm, served, OLD)
    report = Refit(source(NEW), sink)(version=1)
    assert says(llm, served, NEW)
    assert {"model.norm.weight", "model.layers.1.input_layernorm.weight"}.isdisjoint(report.unreadable)  # on both


def test_each_worker_receives_its_own_shard_and_nothing_else(llm, sink):
    refit = Refit(source(NEW), sink)
    refit(version=1)
    received = llm.collective_rpc("received")
    assert received == [refit.plan.lower_bound(rank) for rank in (0, 1)]
    assert received == [refit.plan.bytes_received(rank) for rank in (0, 1)]
    travelling = [meta for meta in refit.plan.sink.tensors if meta.travels]
    replicated = nbytes(meta for meta in travelling if "norm" in meta.name or ".gate.weight" in meta.name)
    tables = [meta for meta in travelling if "embed_tokens" in meta.name or "lm_head" in meta.name]
    halved = nbytes(travelling) - replicated - nbytes(tables)
    rows = [160, 100]  # of 260: vLLM fills the vocabulary up to a multiple of 64, and the last worker's half is short
    assert {meta.shape[0] for meta in tables} == {sum(rows)}
    assert received == [replicated + halved // 2 + nbytes(tables) * count // sum(rows) for count in rows]


def nbytes(metas):
    return sum(meta.total_bytes for meta in metas)


def test_a_bit_that_flips_in_one_of_them_before_the_commit_is_found_and_poisons(llm, sink, served):
    llm.collective_rpc("flip_a_bit", args=(1, "model.norm.weight"))
    with pytest.raises(RefitError, match=r"model\.norm\.weight"):
        Refit(source(NEW), sink)(version=1)
    with pytest.raises(PoisonedError):
        sink.check()
    Refit(source(NEW), sink)(version=2)
    sink.check()
    assert says(llm, served, NEW)


def test_a_fault_in_one_of_them_poisons_the_engine_until_a_refit_succeeds(llm, sink, served):
    llm.collective_rpc("fail_next_reload", args=(1, 20))
    with pytest.raises(RefitError, match="OSError: a fault after 20 tensors"):
        Refit(source(NEW), sink)(version=1)
    with pytest.raises(PoisonedError):
        sink.check()
    Refit(source(NEW), sink)(version=1)
    sink.check()
    assert says(llm, served, NEW)


@pytest.mark.skipif(
    version("vllm").startswith(("0.30.", "0.31.")),
    reason="before 0.32, vLLM's shutdown waits for ever for what it could not send to a dead worker",
)
def test_a_worker_that_dies_in_its_commit_ends_it_and_poisons(llm, served):
    """The last test of this engine."""
    sink = VllmSink(llm, timeout_s=10.0)
    Refit(source(OLD), sink)(version=0)
    llm.collective_rpc("die_in_commit", args=(1,))
    with pytest.raises((RefitError, RuntimeError, TimeoutError)):
        Refit(source(NEW), sink)(version=1)
    with pytest.raises(PoisonedError, match="the commit failed with"):
        sink.check()

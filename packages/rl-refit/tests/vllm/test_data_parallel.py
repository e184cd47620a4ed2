"""An `AsyncLLM` of two data-parallel replicas: each worker of each replica is a rank of one sink.

A dense model: on a CPU, vLLM 0.32 has no layer of experts for several replicas.
"""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny

from rl_refit.errors import PoisonedError, RefitError
from rl_refit.refit import Refit
from rl_refit.vllm import VllmSink

OLD, NEW = 0, 1


@pytest.fixture(scope="module")
def loop():
    loop = tiny.Loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def engine(loop, checkpoints, served):
    served("qwen3", OLD), served("qwen3", NEW)  # one engine at a time
    options = {"load_format": "dummy", "worker_extension_cls": "faulty_worker.FaultyWorker", "data_parallel_size": 2}
    with tiny.async_engine(loop, checkpoints("qwen3", OLD), **options) as engine:
        yield engine


@pytest.fixture
def sink(engine):
    sink = VllmSink(engine)
    Refit(source(OLD), sink)(version=0)
    yield sink
    sink.close()


def source(seed):
    return tiny.source(tiny.policy("qwen3", seed))


async def ask(engine, replica, number):
    from vllm import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=tiny.PROMPTS[number])
    name = f"replica {replica}, prompt {number}"
    async for output in engine.generate(prompt, tiny.sampling(), request_id=name, data_parallel_rank=replica):
        last = output
    return last


def says(engine, loop, replica):
    return [tiny.read(loop.run(ask(engine, replica, number))) for number in range(len(tiny.PROMPTS))]


def test_every_replica_has_each_version_and_one_refit_reaches_all(engine, loop, sink, served):
    assert sink.num_ranks == 2
    for version, seed in ((1, NEW), (2, OLD)):
        report = Refit(source(seed), sink)(version=version)
        for replica in (0, 1):
            assert tiny.same(says(engine, loop, replica), served("qwen3", seed)), (version, replica)
    assert report.verified == "every byte"


def test_a_fault_in_the_second_replica_poisons_the_engine_until_a_refit_succeeds(engine, loop, sink, served):
    call = sink._engine.call
    assert call("fail_next_reload", 1, 3) == [0, 1]
    with pytest.raises(RefitError, match="worker 1: OSError: a fault after 3 tensors"):
        Refit(source(NEW), sink)(version=1)
    with pytest.raises(PoisonedError):
        sink.check()
    Refit(source(NEW), sink)(version=1)
    sink.check()
    assert tiny.same(says(engine, loop, 1), served("qwen3", NEW))

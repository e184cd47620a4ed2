"""A real engine with two replicas, started in the midst of a running event loop, with adapters and for training."""

import asyncio
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import tiny
from watching import living, taken

from rl_generation.errors import ModelError
from rl_generation.sampling import Sampling
from rl_generation.vllm.async_engine import VllmAsyncEngine

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def test_two_replicas_are_one_engine(checkpoints):
    before = taken()
    options = tiny.options(
        checkpoints("qwen3"),
        data_parallel_size=2,
        for_training=True,
        load_format="auto",
        enable_sleep_mode=True,
        worker_extension_cls="weights_worker.WeightsWorker",
    )

    async def inside():
        with VllmAsyncEngine(options) as engine:
            await ask(engine)
            return engine.process_ids

    processes = asyncio.run(inside())
    assert living(processes) == []
    assert taken() <= before


async def ask(engine):
    model, prompts = tiny.policy("qwen3", 0), tiny.prompts(8)
    for prompt, rollout in zip(prompts, await engine.generate_async(prompts, GREEDY), strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=1e-4)
    assert engine.metrics().generated_tokens == 8 * 12
    assert [factor for _, factor in engine.collective_rpc("scale_norm", args=[1.0])] == [1.0, 1.0]
    engine.pause(mode="keep")
    engine.commit_version(5)
    engine.resume()
    assert {each.version for each in engine.generate(prompts, GREEDY)} == {5}
    await engine.check_health()
    engine.sleep(level=2)
    with pytest.raises(ModelError, match="slept at level 2, and no refit has been committed since"):
        engine.generate(prompts, GREEDY)
    engine.wake_up()
    with pytest.raises(ModelError, match="no refit has been committed since"):
        engine.generate(prompts, GREEDY)
    engine.commit_version(6)
    assert {each.version for each in engine.generate(prompts, GREEDY)} == {6}

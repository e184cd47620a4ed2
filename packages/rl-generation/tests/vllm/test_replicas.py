"""A real engine with two replicas, started in the midst of a running event loop, with adapters and for training;
and one of two stages."""

import asyncio
import json
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import safetensors.torch
import tiny
import torch
from watching import left_of, living, shared_memory, taken

from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.requests import Sampling
from rl_generation.vllm import LoraAdapter, VllmEngine

GREEDY = Sampling(max_new_tokens=12, temperature=0.0, ignore_eos=True)


def test_options_that_vllm_refuses_are_named_and_leave_nothing(checkpoints):
    before = taken()
    with pytest.raises(EngineOptionError, match=r"(?s)vLLM refuses these options: .*Sleep mode is not supported"):
        VllmEngine(tiny.options(checkpoints("qwen3"), enable_sleep_mode=True))
    assert taken() <= before


@pytest.mark.slow
def test_two_replicas_are_one_engine(checkpoints, tmp_path):
    before = taken()
    options = tiny.options(
        checkpoints("qwen3"),
        data_parallel_size=2,
        for_training=True,
        load_format="auto",
        enable_lora=True,
        max_lora_rank=8,
        worker_extension_cls="weights_worker.WeightsWorker",
    )

    async def inside():
        with VllmEngine(options) as engine:
            await ask(engine, tmp_path)
            return engine.process_ids, shared_memory(engine.process_ids)

    processes, files = asyncio.run(inside())
    assert living(processes) == []
    assert left_of(files) == set()
    assert taken() <= before


@pytest.mark.slow
def test_the_stages_of_a_pipeline_are_one_model(checkpoints):
    prompts = tiny.prompts(8)
    with VllmEngine(tiny.options(checkpoints("qwen3"), pipeline_parallel_size=2)) as engine:
        check(tiny.policy("qwen3", 0), prompts, engine.generate(prompts, GREEDY))


async def ask(engine, folder):
    model, prompts = tiny.policy("qwen3", 0), tiny.prompts(8)
    check(model, prompts, await asyncio.to_thread(engine.generate, prompts, GREEDY))
    assert engine.metrics().generated_tokens == 8 * 12
    adapter, merged = save_adapter(folder)
    check(merged, prompts, engine.generate(prompts, GREEDY, lora=adapter))
    check(model, prompts, engine.generate(prompts, GREEDY))
    assert [factor for _, factor in engine.collective_rpc("scale_norm", args=[1.0])] == [1.0, 1.0]
    engine.pause(mode="keep")
    engine.commit_version(5)
    engine.resume()
    assert {each.version for each in engine.generate(prompts, GREEDY)} == {5}
    await engine.check_health()
    check_sleep(engine, prompts)


def check(model, prompts, rollouts):
    """Each answer is the likeliest of a plain forward."""
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        logits = tiny.logits(model, prompt, rollout.tokens)
        assert list(rollout.tokens) == logits.argmax(-1).tolist()
        assert rollout.logp == pytest.approx(tiny.chosen(logits.log_softmax(-1), rollout.tokens), abs=1e-4)


def check_sleep(engine, prompts):
    """vLLM on a CPU answers the calls, without freeing anything."""
    engine.sleep(level=2)
    with pytest.raises(ModelError, match="slept at level 2, and no refit has been committed since"):
        engine.generate(prompts, GREEDY)
    engine.wake_up()
    with pytest.raises(ModelError, match="no refit has been committed since"):
        engine.generate(prompts, GREEDY)
    engine.commit_version(6)
    assert {each.version for each in engine.generate(prompts, GREEDY)} == {6}


def save_adapter(folder):
    """Rank 8, scaled by 2, of every query projection, as peft saves it; and the model that it makes."""
    generator = torch.Generator().manual_seed(0)
    down, up = torch.randn(8, 64, generator=generator) * 0.3, torch.randn(64, 8, generator=generator) * 0.3
    name = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    tensors = {name.format(layer, part): t.clone() for layer in (0, 1) for part, t in (("A", down), ("B", up))}
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = tiny.policy("qwen3", 0)
    for layer in merged.model.layers:
        layer.self_attn.q_proj.weight += 2.0 * up @ down
    return LoraAdapter(name="queries", number=1, path=str(folder)), merged

"""rl-refit's sink in rl-generation's vLLM engines."""

import asyncio
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import torch
import transformers

from rl_generation import Sampling, verify_logp
from rl_generation.vllm import VllmEngine, VllmOptions
from rl_refit import ModuleSource, PoisonedError, Refit
from rl_refit.vllm import WORKER_EXTENSION, VllmSink

PROMPTS = [list(range(5 + i, 25 + i)) * (1 + 3 * i) for i in range(3)]
SAMPLING = Sampling(max_new_tokens=12, n=2, temperature=0.7, top_p=0.9, seed=0)
PATIENCE_S = 120


@pytest.fixture
def policy():
    """A trainer's model: float32, random, with answers that depend on its weights."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=260,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.Qwen3ForCausalLM(config).float().eval()


@pytest.fixture
def options(policy, tmp_path):
    """An engine that starts with no weights and waits for the first refit."""
    policy.save_pretrained(tmp_path)
    return VllmOptions(
        model=str(tmp_path),
        for_training=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        worker_extension_cls=WORKER_EXTENSION,
    )


def train(policy):
    """What an optimizer step does, as far as an engine can tell."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


def test_every_step_reaches_an_engine_and_its_rollouts_say_which(policy, options):
    with VllmEngine(options, ready=lambda: sink.check()) as engine:  # noqa: PLW0108
        sink = VllmSink(engine.vllm, loop=engine.loop)
        refit = Refit(ModuleSource(policy), sink)
        for version in (1, 2, 3):
            train(policy)
            assert refit(version=version).version == version
            assert engine.version == version
            rollouts = engine.generate(PROMPTS, SAMPLING)
            assert {rollout.version for rollout in rollouts} == {version}
            assert verify_logp(engine, policy, prompts=PROMPTS, sampling=SAMPLING).max_abs_difference <= 1e-4
        sink.poison("a peer fell behind")
        with pytest.raises(PoisonedError, match="a peer fell behind"):
            engine.generate(PROMPTS, SAMPLING)
        refit.close()


def test_a_refit_in_flight_keeps_the_answers_that_are_under_way(policy, options):
    with VllmEngine(options) as engine:
        refit = Refit(ModuleSource(policy), VllmSink(engine.vllm, loop=engine.loop, pause="keep"))
        refit(version=1)
        assert verify_logp(engine, policy, prompts=PROMPTS, sampling=SAMPLING).max_abs_difference <= 1e-4

        async def refit_under_way():
            deltas = []
            async for delta in engine.stream([1, 5, 7], Sampling(max_new_tokens=200, ignore_eos=True, seed=0)):
                deltas.append(delta)
                if len(deltas) == 3:
                    train(policy)
                    await asyncio.to_thread(refit, version=2)
            return deltas

        last = asyncio.run(asyncio.wait_for(refit_under_way(), PATIENCE_S))[-1].rollout
        assert [span.version for span in last.versions] == [1, 2]
        assert last.versions[1].end == len(last.tokens) == len(last.logp) == 200
        assert engine.version == 2
        assert verify_logp(engine, policy, prompts=PROMPTS, sampling=SAMPLING).max_abs_difference <= 1e-4

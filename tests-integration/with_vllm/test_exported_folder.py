"""Model folders that rl-backends exports are served by rl-generation's engine in another process."""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import torch
import transformers

from rl_backends.export import export_pretrained
from rl_backends.loading.skeleton import materialize
from rl_backends.loading.source import open_model
from rl_backends.loading.weights import initialise
from rl_generation import Sampling, verify_logp
from rl_generation.vllm import VllmEngine, VllmOptions

SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(transformers.Qwen3Config(**SHAPE, tie_word_embeddings=True), id="tied", marks=pytest.mark.slow),
        pytest.param(transformers.Qwen3MoeConfig(**SHAPE, **MIXTURE), id="mixture"),
    ],
)
def test_an_exported_folder_is_served_as_it_was_trained(config, tmp_path):
    config.save_pretrained(tmp_path / "configuration")
    model = materialize(open_model(str(tmp_path / "configuration")).skeleton(), "cpu")
    initialise(model, seed=0)
    export_pretrained(model, tmp_path / "exported", max_shard_bytes=100_000)
    assert len(list((tmp_path / "exported").glob("*.safetensors"))) > 1
    options = VllmOptions(
        model=str(tmp_path / "exported"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
    )
    prompts = [list(range(5 + i, 25 + i)) for i in range(3)]
    with torch.no_grad(), VllmEngine(options) as engine:
        agreement = verify_logp(engine, model, prompts=prompts, sampling=Sampling(max_new_tokens=12, seed=0))
    assert agreement.max_abs_difference <= 1e-4

"""Claims about the estimate on the installed vLLM: it predicts the cache that the engine then has, exactly."""

from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed", allow_module_level=True)

import dummy_start

from rl_generation.memory import estimate_memory


def predicted(family):
    """The estimate under what the engine was given, and what the engine says."""
    engine = dummy_start.report()["engines"][family]
    return engine, estimate_memory(
        dummy_start.config(family),
        dtype="float32",
        max_model_len=512,
        max_num_batched_tokens=engine["in_flight"],
        block_size=engine["block_size"],
        kv_cache_memory_bytes=dummy_start.CACHE_BYTES,
    )


@pytest.mark.slow
@pytest.mark.parametrize("family", dummy_start.FAMILIES)
def test_the_engine_fits_as_many_sequences_and_tokens_as_were_predicted(family):
    engine, memory = predicted(family)
    assert memory.full_length_sequences == pytest.approx(engine["sequences"], rel=1e-12)
    assert memory.kv_cache_tokens == engine["tokens"]


@pytest.mark.parametrize("family", ["llama", "apertus"])
def test_where_layers_are_alike_the_blocks_are_those_predicted(family):
    engine, memory = predicted(family)
    assert engine["blocks"] * engine["block_size"] == memory.kv_cache_tokens

"""An engine beside a trainer: a spec that crosses processes, weights that only a refit brings, and what is refused."""

import math
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import saved_model

from rl_generation import (
    EngineConfig,
    EngineOptionError,
    Sampling,
    TrainingEngineSpec,
    VllmConfig,
    make_training_engine,
)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("saved"))


def spec_of(model="model", *, vllm=None, max_batch_size=256, **changes):
    chosen = {} if vllm is None else {"backend": "vllm", "vllm_cfg": VllmConfig(**vllm)}
    config = EngineConfig(max_new_tokens=8, max_batch_size=max_batch_size, **chosen)
    return TrainingEngineSpec(config=config, model=str(model), stop_token_ids=(2,), pad_token_id=0, **changes)


def test_the_transformers_engine_starts_with_zeros_and_asks_whether_it_may_generate(tiny_folder):
    asked = []
    engine = make_training_engine(spec_of(tiny_folder), ready=lambda: asked.append(1))
    assert not any(parameter.any() for parameter in engine.model.parameters())
    engine.generate([[1, 5]], Sampling(max_new_tokens=1, temperature=0.0))
    assert asked
    engine.close()


def test_a_model_that_is_given_is_taken_over_in_the_dtypes_that_are_sent(tiny_folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    names = [name for name, _ in model.named_parameters()]
    spec = spec_of(tiny_folder, dtypes=dict.fromkeys(names, "bfloat16"))
    engine = make_training_engine(spec, ready=lambda: None, model=model)
    assert engine.model is model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert any(parameter.any() for parameter in model.parameters())
    engine.close()


def test_a_spec_crosses_processes_and_moves_to_another_folder():
    spec = spec_of(vllm={}, dtypes={"a": "float32"})
    assert pickle.loads(pickle.dumps(spec)) == spec
    moved = replace(spec, model="elsewhere")
    assert (moved.model, moved.vllm.model) == ("elsewhere", "elsewhere")
    assert replace(spec_of(), model="elsewhere").vllm is None


def test_a_synchronous_vllm_engine_waits_for_its_batch_and_an_asynchronous_one_has_limits(monkeypatch):
    def made(**vllm):
        spec = spec_of(vllm={"kv_cache_memory_bytes": 1 << 20, **vllm})
        return make_training_engine(spec, ready=lambda: None)["timeout_s"]

    monkeypatch.setattr("rl_generation.vllm.VllmEngine", lambda _options, **given: given)
    monkeypatch.delenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", raising=False)
    assert made() == made(tensor_parallel_size=2) == math.inf
    assert made(async_engine=True) is None
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", "12.5")
    assert made() == 12.5


def test_options_of_another_engine_are_refused():
    with pytest.raises(EngineOptionError, match="vllm_cfg is given, and backend=transformers does not use it"):
        EngineConfig(max_new_tokens=8, vllm_cfg=VllmConfig(async_engine=True))
    with pytest.raises(EngineOptionError, match="needs async_engine=True"):
        spec_of(in_flight=True, vllm={})


def test_a_spec_says_in_one_line_what_it_is_and_what_it_casts():
    assert spec_of(max_batch_size=9).explain() == "transformers engine on cpu, up to 9 responses at once"
    vllm = {"precision": "bfloat16", "tensor_parallel_size": 2, "async_engine": True}
    spec = spec_of(vllm=vllm, device="cuda", dtypes={"a": "float32"})
    assert spec.casts
    assert (
        spec.explain() == "vLLM, asynchronous, 2 ranks on cuda, bfloat16, cast from the float32 that the policy sends"
    )
    assert not spec_of(vllm=vllm, dtypes={"a": "bfloat16"}).casts

"""An engine beside a trainer: a spec that crosses processes, weights that only a refit brings, and what is refused."""

import math
import pickle
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import saved_model

from rl_generation import EngineOptionError, Sampling, TrainingEngineSpec, VllmOptions, make_training_engine


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("saved"))


def spec_of(model="model", **changes):
    return TrainingEngineSpec(**{"model": str(model), "stop_token_ids": (2,), "pad_token_id": 0} | changes)


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
    spec = spec_of(vllm=VllmOptions(model="model"), dtypes={"a": "float32"})
    assert pickle.loads(pickle.dumps(spec)) == spec
    moved = spec.with_model("elsewhere")
    assert (moved.model, moved.vllm.model) == ("elsewhere", "elsewhere")
    assert spec_of().with_model("elsewhere").vllm is None


def test_a_synchronous_vllm_engine_waits_for_its_batch_and_an_asynchronous_one_has_limits(monkeypatch):
    def made(**changes):
        options = VllmOptions(model="model", kv_cache_memory_bytes=1 << 20, **changes.pop("options", {}))
        return make_training_engine(spec_of(vllm=options, **changes), ready=lambda: None)["timeout_s"]

    monkeypatch.setattr("rl_generation.vllm.VllmEngine", lambda _options, **given: given)
    monkeypatch.delenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", raising=False)
    assert made() == made(options={"tensor_parallel_size": 2}) == math.inf
    assert made(asynchronous=True) is None
    monkeypatch.setenv("NRL_VLLM_ASYNC_TIMEOUT_SECONDS", "12.5")
    assert made() == 12.5


def test_options_of_another_engine_are_refused():
    with pytest.raises(EngineOptionError, match="asynchronous=True is for a vLLM engine"):
        spec_of(asynchronous=True)
    with pytest.raises(EngineOptionError, match="needs asynchronous=True"):
        spec_of(in_flight=True, vllm=VllmOptions(model="model"))


def test_a_spec_says_in_one_line_what_it_is_and_what_it_casts():
    assert spec_of(max_batch_size=9).explain() == "transformers engine on cpu, up to 9 responses at once"
    vllm = VllmOptions(model="model", dtype="bfloat16", tensor_parallel_size=2)
    spec = spec_of(vllm=vllm, asynchronous=True, device="cuda", dtypes={"a": "float32"})
    assert spec.casts
    assert (
        spec.explain() == "vLLM, asynchronous, 2 ranks on cuda, bfloat16, cast from the float32 that the policy sends"
    )
    assert not spec_of(vllm=vllm, dtypes={"a": "bfloat16"}).casts

"""Engines as a recipe asks for them: without weights until a refit has brought some, and in the policy's dtypes."""

import pickle

import pytest
import torch

from rl_backends import DTensorBackend, DTensorConfig
from rl_generation import ModelError, Sampling
from rl_launcher.engines import EngineSpec, dtypes_of, make_engine, make_in_process
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.schema import GenerationConfig
from rl_launcher.schema.policy import VllmConfig
from rl_launcher.weight_sync import weight_source
from rl_refit import Refit

SAMPLING = Sampling(max_new_tokens=4, temperature=0.0)
PROMPT = [1, 5, 9]


def spec_of(model, **changes):
    options = {
        "model": str(model),
        "generation": GenerationConfig(max_new_tokens=4),
        "stop_token_ids": (2,),
        "pad_token_id": 0,
    }
    return EngineSpec(**options | changes)


@pytest.fixture
def folder(tmp_path):
    model, tokenizer = build(0)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_an_engine_of_an_actor_answers_only_what_a_refit_has_brought(folder):
    policy = DTensorBackend(build(0)[0], DTensorConfig())
    made = make_engine(spec_of(folder, dtypes=dtypes_of(policy.shards())))
    assert not any(parameter.any() for parameter in made.engine.model.parameters())
    with pytest.raises(ModelError, match="no refit has been committed"):
        made.engine.generate([PROMPT], SAMPLING)
    Refit(weight_source(policy), made.sink)(version=3)
    (rollout,) = made.engine.generate([PROMPT], SAMPLING)
    beside = make_in_process(spec_of(folder), model=build(0)[0])
    (expected,) = beside.engine.generate([PROMPT], SAMPLING)
    assert (rollout.tokens, rollout.version, expected.version) == (expected.tokens, 3, 0)
    made.close()
    beside.close()


def test_parameters_are_kept_in_the_dtypes_that_they_are_sent_in(folder):
    names = [name for name, _ in build(0)[0].named_parameters()]
    made = make_engine(spec_of(folder, dtypes=dict.fromkeys(names, "bfloat16")))
    assert {parameter.dtype for parameter in made.engine.model.parameters()} == {torch.bfloat16}
    made.close()


def test_a_spec_crosses_processes(folder):
    spec = spec_of(folder, dtypes={"a": "float32"})
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_weights_in_flight_ask_for_an_engine_that_takes_them(folder):
    with pytest.raises(ValueError, match="async_engine=true, or say weights=between_calls"):
        spec_of(folder, in_flight=True)


def test_vllm_computes_in_the_policys_precision_and_says_what_it_casts(folder):
    vllm = GenerationConfig(max_new_tokens=4, backend="vllm")
    spec = spec_of(folder, generation=vllm, precision="bfloat16", dtypes={"a": "float32"})
    assert (spec.dtype, spec.casts) == ("bfloat16", True)
    assert "bfloat16, cast from the float32 that the policy sends" in spec.explain()
    exact = GenerationConfig(max_new_tokens=4, backend="vllm", vllm_cfg=VllmConfig(precision="float32"))
    spec = spec_of(folder, generation=exact, precision="bfloat16", dtypes={"a": "float32"})
    assert (spec.dtype, spec.casts) == ("float32", False)

"""Engines as a recipe describes them: without weights until a refit brings some, fed by the policy's shards."""

import pytest

from rl_backends import DTensorBackend, DTensorConfig
from rl_generation import EngineConfig, ModelError, Sampling, TrainingEngineSpec
from rl_launcher.build.engines import dtypes_of, engine_spec, make_engine, make_in_process, weight_source
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe
from rl_refit import Refit

SAMPLING = Sampling(max_new_tokens=4, temperature=0.0)
PROMPT = [1, 5, 9]


def spec_of(model, **changes):
    given = {"config": EngineConfig(max_new_tokens=8), "model": str(model), "stop_token_ids": (2,), "pad_token_id": 0}
    return TrainingEngineSpec(**given | changes)


def spec_of_recipe(file, *overrides, dtypes=None):
    recipe = load_recipe(file, schema=Recipe, overrides=overrides).value
    return engine_spec(recipe, model_name="model", stop_token_ids=[2], pad_token_id=0, dtypes=dtypes or {})


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
    model, tokenizer = build(0)
    beside = make_in_process(spec_of(folder), model=model, tokenizer=tokenizer)
    (expected,) = beside.engine.generate([PROMPT], SAMPLING)
    assert (rollout.tokens, rollout.version, expected.version) == (expected.tokens, 3, 0)
    policy.close()
    made.close()
    beside.close()


VLLM = ("policy.generation.backend=vllm", "policy.generation.colocated={enabled: true}")
IN_FLIGHT = "grpo.async_grpo={max_staleness: 1, weights: in_flight}"


def test_an_asynchronous_engine_takes_weights_in_flight_where_the_recipe_says_so(recipe):
    spec = spec_of_recipe(recipe, IN_FLIGHT, *VLLM, "policy.generation.vllm_cfg.async_engine=true")
    assert (spec.asynchronous, spec.in_flight) == (True, True)
    spec = spec_of_recipe(recipe, *VLLM, "policy.generation.vllm_cfg.async_engine=true")
    assert (spec.asynchronous, spec.in_flight) == (True, False)


def test_vllm_computes_in_the_policys_precision_unless_the_recipe_says_otherwise(recipe):
    bfloat16 = "policy.dtensor_cfg.precision=bfloat16"
    spec = spec_of_recipe(recipe, *VLLM, bfloat16, dtypes={"a": "float32"})
    assert (spec.vllm.dtype, spec.casts) == ("bfloat16", True)
    assert "bfloat16, cast from the float32 that the policy sends" in spec.explain()
    exact = "policy.generation.vllm_cfg.precision=float32"
    spec = spec_of_recipe(recipe, *VLLM, bfloat16, exact, dtypes={"a": "float32"})
    assert (spec.vllm.dtype, spec.casts) == ("float32", False)


def test_options_of_vllm_and_of_the_recipe_reach_the_engine(recipe):
    spec = spec_of_recipe(recipe, *VLLM, "policy.generation.vllm_cfg={max_num_seqs: 7}", "seed=5")
    assert (spec.vllm.max_num_seqs, spec.vllm.seed, spec.vllm.for_training) == (7, 5, True)
    assert spec.vllm.worker_extension_cls
    assert spec_of_recipe(recipe, "policy.generation.max_batch_size=9").config.max_batch_size == 9

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))
import saved_model

from rl_generation import EngineOptionError, ModelError, Sampling
from rl_generation.loading import EngineSpec, load_engine, load_transformers_engine, vllm_options_of


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("saved"))


@pytest.fixture
def model(saved, tmp_path):
    """A copy that a test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


def change(path, **values):
    content = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in (content | values).items() if value is not None}))


def test_an_engine_of_a_folder_generates_and_has_its_tokenizer(model):
    engine, tokenizer = load_engine(EngineSpec(model=str(model), device="cpu"))
    assert engine.limits.tokenizer is tokenizer
    assert engine.limits.max_length == saved_model.MAX_LENGTH
    (rollout,) = engine.generate([tokenizer.encode("x")], Sampling(max_new_tokens=2, stop=("§",), seed=0))
    assert rollout.tokens


def test_stop_tokens_are_the_generation_config_s_and_the_tokenizer_s(model):
    change(model / "generation_config.json", eos_token_id=[7, 9])
    engine, tokenizer = load_transformers_engine(str(model), device="cpu")
    assert tokenizer.eos_token_id == 2
    rollouts = engine.generate([[1, 5 + i] for i in range(60)], Sampling(max_new_tokens=40, seed=0))
    assert {rollout.stop_reason for rollout in rollouts} == {2, 7, 9, None}
    assert all(rollout.stop_reason == rollout.tokens[-1] for rollout in rollouts if rollout.finish_reason == "stop")


def test_without_a_generation_config_the_config_s_eos_tokens_stop(model):
    (model / "generation_config.json").unlink()
    change(model / "config.json", eos_token_id=8)
    engine, _ = load_transformers_engine(str(model), device="cpu", with_tokenizer=False)
    rollouts = engine.generate([[1, 5 + i] for i in range(60)], Sampling(max_new_tokens=40, seed=0))
    assert {rollout.stop_reason for rollout in rollouts} == {8, None}


def test_the_checkpoint_s_dtype_is_kept_unless_another_is_asked_for(model):
    import transformers

    transformers.LlamaForCausalLM.from_pretrained(model).to(torch.bfloat16).save_pretrained(model)
    assert load_transformers_engine(str(model), device="cpu")[0].model.dtype == torch.bfloat16
    assert load_transformers_engine(str(model), device="cpu", dtype="float32")[0].model.dtype == torch.float32


def test_a_folder_that_is_missing_or_holds_no_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="nowhere is no folder, so there is no model to load"):
        load_transformers_engine(str(tmp_path / "nowhere"), with_tokenizer=False)
    with pytest.raises(ModelError, match=r"has no config\.json, so there is no model to load"):
        load_transformers_engine(str(tmp_path), with_tokenizer=False)


def test_a_model_that_is_missing_is_missed_before_its_tokenizer(tmp_path):
    with pytest.raises(ModelError, match="nowhere is no folder, so there is no model to load"):
        load_transformers_engine(str(tmp_path / "nowhere"))


def test_a_name_in_place_of_a_spec_is_refused_with_the_spec_to_give():
    with pytest.raises(EngineOptionError, match=r"takes an EngineSpec, such as EngineSpec\(model='tiny'\); got 'tiny'"):
        load_engine("tiny")


def test_a_model_without_a_tokenizer_is_refused_unless_it_shall_have_none(model):
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json or .* so there is no tokenizer to load"):
        load_transformers_engine(str(model))
    engine, tokenizer = load_transformers_engine(str(model), with_tokenizer=False)
    assert tokenizer is None
    assert engine.limits.tokenizer is None


def test_a_tokenizer_from_elsewhere_is_taken(model, saved):
    for path in model.glob("tokenizer*"):
        path.unlink()
    _, tokenizer = load_transformers_engine(str(model), tokenizer=str(saved))
    assert len(tokenizer) == 260


def test_weights_that_are_missing_are_not_drawn_at_random(model):
    from safetensors.torch import load_file, save_file

    weights = load_file(model / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        load_transformers_engine(str(model))


def test_weights_that_are_torn_or_absent_are_refused(model):
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:1000])
    with pytest.raises(ModelError, match="transformers cannot load the model"):
        load_transformers_engine(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="transformers cannot load the model"):
        load_transformers_engine(str(model))


def test_code_that_comes_with_a_model_is_not_run_unless_trusted(model):
    (model / "theirs.py").write_text("raise SystemExit('ran')\n")
    change(model / "config.json", model_type="theirs", auto_map={"AutoConfig": "theirs.TheirConfig"})
    with pytest.raises(ModelError, match=r"needs Python code that comes with it.*--trust-remote-code"):
        load_transformers_engine(str(model), with_tokenizer=False)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"engine": "sglang"}, "engine must be one of transformers, vllm;"),
        ({"vllm_kwargs": {"a": 1}}, "vllm_kwargs={'a': 1} means nothing"),
        ({"engine": "vllm", "device": "cpu"}, "device='cpu' means nothing to the engine 'vllm'"),
        ({"tokenizer": "x", "with_tokenizer": False}, "contradicts with_tokenizer=False"),
    ],
)
def test_options_of_another_engine_are_refused(options, reason):
    with pytest.raises(EngineOptionError, match=r"engine|with_tokenizer") as refusal:
        EngineSpec(model="m", **options)
    assert reason in str(refusal.value)


def test_options_of_vllm_go_where_they_belong():
    sizes = {"tensor_parallel_size": 2, "kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "max_model_len": 9}
    spec = EngineSpec(
        model="m", engine="vllm", max_batch_size=8, with_tokenizer=False, vllm_kwargs={**sizes, "swap_space": 3}
    )
    options = vllm_options_of(spec)
    assert (options.model, options.max_num_seqs, options.tensor_parallel_size) == ("m", 8, 2)
    assert (options.enforce_eager, options.kv_cache_memory_bytes, options.max_model_len) == (True, 64 << 20, 9)
    assert options.vllm_kwargs == {"swap_space": 3, "skip_tokenizer_init": True}
    twice = EngineSpec(model="m", engine="vllm", max_batch_size=9, vllm_kwargs={"max_num_seqs": 8})
    with pytest.raises(EngineOptionError, match="sets max_num_seqs=8, which is given as 9 already"):
        vllm_options_of(twice)

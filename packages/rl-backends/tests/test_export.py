"""Claims about exported folders, in one process: what transformers loads, what is refused, what a failure leaves."""

import json
import math

import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers.models import WordLevel

from rl_backends import DTensorBackend, DTensorConfig
from rl_backends.errors import ModelError
from rl_backends.export import export_pretrained
from rl_backends.loading.source import load_causal_lm


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


def listed(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("tied", [False, True])
def test_an_exported_model_is_loaded_by_transformers_bit_for_bit(world, tmp_path, tied):
    model = world.make_model("Qwen3", tie_word_embeddings=tied)
    export_pretrained(model, tmp_path / "deep" / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model")
    assert type(loaded) is transformers.Qwen3ForCausalLM
    torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    assert loaded.config.architectures == ["Qwen3ForCausalLM"]
    assert listed(tmp_path / "deep") == ["model"]
    files = listed(tmp_path / "deep" / "model")
    assert files == ["config.json", "generation_config.json", "model.safetensors"]


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_a_mixture_that_never_was_in_files_gets_the_names_that_transformers_gives(world, tmp_path, family):
    model = world.make_model(family, num_experts=4, num_local_experts=4, moe_intermediate_size=16)
    model.save_pretrained(tmp_path / "theirs")
    export_pretrained(model, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert any(".experts.3." in name for name in ours)


def test_a_folder_says_the_dtype_that_it_was_asked_for(world, tmp_path):
    model = world.make_model("Llama")
    export_pretrained(model, tmp_path / "model", dtype=torch.bfloat16)
    stored = load_file(tmp_path / "model" / "model.safetensors")
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(stored, expected, rtol=0, atol=0)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert model.config.dtype != torch.bfloat16  # the model itself is as it was


def test_by_default_a_backend_keeps_the_dtype_of_each_tensor_of_the_folder(world, tmp_path):
    model = world.make_model("Llama").to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "original")
    character_tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(WordLevel({"a": 0}, "a"))
    )
    expected = load_file(tmp_path / "original" / "model.safetensors")
    backend = DTensorBackend.from_pretrained(str(tmp_path / "original"), DTensorConfig())
    backend.save_pretrained(tmp_path / "auto", tokenizer=character_tokens)
    assert (tmp_path / "auto" / "tokenizer.json").is_file()
    torch.testing.assert_close(load_file(tmp_path / "auto" / "model.safetensors"), expected, rtol=0, atol=0)
    assert json.loads((tmp_path / "auto" / "config.json").read_text())["dtype"] == "bfloat16"
    backend.save_pretrained(tmp_path / "masters", dtype=None)
    masters = load_file(tmp_path / "masters" / "model.safetensors")
    assert {tensor.dtype for tensor in masters.values()} == {torch.float32}
    backend.close()
    in_hand = DTensorBackend(model, DTensorConfig())
    in_hand.save_pretrained(tmp_path / "in hand")
    in_hand.close()
    found = load_file(tmp_path / "in hand" / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_file_is_as_large_as_asked_unless_one_tensor_is_larger(world, tmp_path):
    model = world.make_model("Llama")
    for max_shard_bytes in (1, 9_000, 20_000):
        folder = tmp_path / str(max_shard_bytes)
        export_pretrained(model, folder, max_shard_bytes=max_shard_bytes)
        largest = 0
        for file in folder.glob("*.safetensors"):
            sizes = [tensor.nbytes for tensor in load_file(file).values()]
            assert sum(sizes) <= max_shard_bytes or len(sizes) == 1
            largest = max(largest, sum(sizes))
        assert math.isclose(largest, max(max_shard_bytes, 67 * 32 * 4), rel_tol=0.3)
        loaded = load_causal_lm(str(folder))
        torch.testing.assert_close(loaded.state_dict(), model.state_dict(), rtol=0, atol=0)
    with pytest.raises(ValueError, match="max_shard_bytes=0 must be >= 1"):
        export_pretrained(model, tmp_path / "none", max_shard_bytes=0)


def test_other_tensors_can_be_written_under_the_names_of_the_model(world, tmp_path):
    model = world.make_model("Llama")
    doubled = [(name, 2 * tensor) for name, tensor in model.state_dict().items()]
    export_pretrained(model, tmp_path / "model", tensors=doubled)
    torch.testing.assert_close(load_file(tmp_path / "model" / "model.safetensors"), dict(doubled), rtol=0, atol=0)
    export_pretrained(model, tmp_path / "shuffled", tensors=reversed(doubled), max_shard_bytes=20_000)
    found = {
        name: each for file in (tmp_path / "shuffled").glob("*.safetensors") for name, each in load_file(file).items()
    }
    torch.testing.assert_close(found, dict(doubled), rtol=0, atol=0)
    with pytest.raises(ModelError, match=r"1 tensors were not given to be written, the first is lm_head\.weight"):
        export_pretrained(model, tmp_path / "less", tensors=doubled[:-1])
    assert listed(tmp_path) == ["model", "shuffled"]


def test_adapters_are_not_written_as_if_they_were_the_model(world, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.inject_adapter_in_model(config, world.make_model("Llama"))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no .*q_proj.*: merge adapters"):
        export_pretrained(model, tmp_path / "model")
    assert listed(tmp_path) == []


def test_nothing_is_overwritten(world, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(FileExistsError, match="never overwritten"):
        export_pretrained(world.make_model("Llama"), tmp_path / "model")
    assert listed(tmp_path / "model") == []


def test_what_an_earlier_failure_left_is_cleared_away(world, tmp_path):
    (tmp_path / ".model.unfinished").mkdir()
    (tmp_path / ".model.unfinished" / "model-00009-of-00009.safetensors").write_text("half")
    export_pretrained(world.make_model("Llama"), tmp_path / "model")
    assert listed(tmp_path) == ["model"]
    assert not (tmp_path / "model" / "model-00009-of-00009.safetensors").exists()


def test_what_loads_can_be_exported_again(world, tmp_path):
    """Some releases of transformers refuse to save this contradiction, which they loaded without a word."""
    world.make_model("Llama").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").write_text('{"temperature": 0.7, "do_sample": false}')
    try:
        model = load_causal_lm(str(tmp_path / "model"))
    except ModelError as error:
        assert "generation_config.json contradicts itself" in str(error)  # noqa: PT017 - the other way out is below
    else:
        export_pretrained(model, tmp_path / "again")
        assert (tmp_path / "again" / "model.safetensors").is_file()

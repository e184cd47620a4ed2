"""Claims about loading: what is whole loads bit for bit, what is not is refused with the names and the reason."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from rl_backends.errors import ModelError
from rl_backends.loading.skeleton import materialize
from rl_backends.loading.source import check_vocabulary, load_causal_lm, load_tokenizer, open_model
from rl_backends.loading.weights import initialise

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module", autouse=True)
def quiet():
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture
def folder(world, tmp_path):
    world.make_model("Llama").to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def loaded(folder, **options):
    source = open_model(str(folder), **options)
    model = materialize(source.skeleton(), "cpu")
    source.load_into(model)
    return model


def edit(folder, change):
    """Let `change` do something to the tensors of a folder."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_skeleton_has_no_weights_and_every_computed_buffer(folder):
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    skeleton = open_model(str(folder)).skeleton()
    assert all(parameter.is_meta and parameter.dtype == torch.float32 for parameter in skeleton.parameters())
    assert [name for name, _ in skeleton.named_parameters()] == [name for name, _ in plain.named_parameters()]
    torch.testing.assert_close(dict(skeleton.named_buffers()), dict(plain.named_buffers()), rtol=0, atol=0)
    assert not skeleton.training
    assert skeleton.generation_config.to_dict() == plain.generation_config.to_dict()


def test_making_a_skeleton_consumes_no_random_numbers(folder):
    before = torch.get_rng_state()
    open_model(str(folder)).skeleton()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("tied", [False, True])
def test_a_loaded_model_equals_from_pretrained(world, tmp_path, tied):
    world.make_model("Qwen3", tie_word_embeddings=tied).save_pretrained(tmp_path, max_shard_size="20KB")
    model, plain = loaded(tmp_path), transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    ids = torch.arange(6)[None]
    torch.testing.assert_close(model(input_ids=ids).logits, plain(input_ids=ids).logits, rtol=0, atol=0)


def test_a_model_of_images_and_text_is_opened_as_one(tmp_path):
    text = transformers.LlamaConfig(
        vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    plain = transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    )
    plain.save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert type(model) is transformers.LlavaForConditionalGeneration
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


def test_missing_superfluous_and_misshaped_tensors_are_named_together(folder):
    def change(tensors):
        del tensors[Q_PROJ]
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2)
        tensors["model.norm.weight"] = torch.zeros(31)

    edit(folder, change)
    with pytest.raises(ModelError) as caught:
        loaded(folder)
    for part in (f"missing: {Q_PROJ}", "unexpected: model.layers.7.mlp", "[31] in the files, [32] in the model"):
        assert part in str(caught.value)


def test_what_transformers_ignores_in_files_is_ignored_and_reported(folder):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(folder, lambda tensors: tensors.update({name: torch.zeros(4)}))
    source = open_model(str(folder))
    assert source.load_into(materialize(source.skeleton(), "cpu")).ignored == (name,)


@pytest.mark.parametrize("same", [False, True])
def test_both_ends_of_a_tie_in_the_files_must_be_equal(world, tmp_path, same):
    world.make_model("Qwen2", tie_word_embeddings=True).save_pretrained(tmp_path)
    edit(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + (not same)})
    )
    if same:
        assert torch.equal(loaded(tmp_path).lm_head.weight, load_file(tmp_path / "model.safetensors")["lm_head.weight"])
    else:
        with pytest.raises(ModelError, match="two different tensors; set tie_word_embeddings to false"):
            loaded(tmp_path)


def test_a_damaged_file_and_a_missing_one_are_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        loaded(folder)
    file.unlink()
    with pytest.raises(ModelError, match=r"no file model\.safetensors; weights are read from safetensors alone"):
        loaded(folder)
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="is no index of safetensors files"):
        loaded(folder)


def test_quantized_weights_are_refused(folder):
    edit(folder, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn)}))
    with pytest.raises(ModelError, match=r"q_proj\.weight is stored as F8_E4M3; quantized"):
        loaded(folder)
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized"):
        open_model(str(folder))


def test_a_conversion_that_needs_more_than_slices_is_refused_by_name(folder):
    from transformers import conversion_mapping as mapping
    from transformers.core_model_loading import Interleave, WeightConverter

    converter = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Interleave(dim=0)])
    mapping.register_checkpoint_conversion_mapping("llama", [converter])
    try:
        with pytest.raises(ModelError, match=r"Interleave\(dim=0\).*reshape cannot be done.*load_causal_lm"):
            loaded(folder)
    finally:
        del mapping._checkpoint_conversion_mapping_cache["llama"]
        mapping.USER_REGISTERED_MAPPINGS.discard("llama")


def test_a_model_of_another_kind_or_without_memory_is_refused(world, folder, tmp_path):
    source = open_model(str(folder))
    with pytest.raises(ModelError, match=r"meta device: call materialize"):
        source.load_into(source.skeleton())
    with pytest.raises(ModelError, match=r"q_norm.weight \[8\] is unknown there"):
        source.load_into(world.make_model("Qwen3"))
    with pytest.raises(ModelError, match=r"\[68, 32\] is \[67, 32\] there"):
        source.load_into(world.make_model("Llama", vocab_size=68))


def test_a_new_head_is_made_only_where_it_is_asked_for(folder):
    source = open_model(str(folder), head="sequence_classification")
    model = materialize(source.skeleton(), "cpu")
    with pytest.raises(ModelError, match=r"missing: score.weight; unexpected: lm_head.weight; .*new_head=True"):
        source.load_into(model)
    report = source.load_into(model, new_head=True, seed=1)
    assert (report.new, report.ignored) == (("score.weight",), ("lm_head.weight",))
    first = model.score.weight.detach().clone()
    assert first.shape == (1, 32)
    assert 0.01 < first.std() < 0.03
    source.load_into(model, new_head=True, seed=1)
    assert torch.equal(model.score.weight, first)
    source.load_into(model, new_head=True, seed=2)
    assert not torch.equal(model.score.weight, first)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(model.model.state_dict(), plain.model.state_dict(), rtol=0, atol=0)


def test_a_trained_head_is_loaded_and_another_number_of_labels_refused(world, folder, tmp_path):
    model = materialize(open_model(str(folder), head="sequence_classification").skeleton(), "cpu")
    initialise(model, seed=0)
    model.save_pretrained(tmp_path / "reward")
    again = loaded(tmp_path / "reward", head="sequence_classification")
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
    edit(tmp_path / "reward", lambda tensors: tensors.update({"score.weight": torch.zeros(2, 32)}))
    with pytest.raises(ModelError, match=r"score.weight \(\[2, 32\] in the files, \[1, 32\] in the model\)"):
        loaded(tmp_path / "reward", head="sequence_classification")


def test_base_layers_of_adapters_are_fed_and_adapters_left_alone(folder):
    peft = pytest.importorskip("peft")
    source = open_model(str(folder))
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model = peft.inject_adapter_in_model(config, source.skeleton())
    materialize(model, "cpu")
    adapters = {name: p for name, p in model.named_parameters() if "lora_" in name}
    for parameter in adapters.values():
        torch.nn.init.constant_(parameter, 7)
    source.load_into(model)
    stored = load_file(folder / "model.safetensors")[Q_PROJ].float()
    assert torch.equal(model.model.layers[0].self_attn.q_proj.base_layer.weight, stored)
    assert adapters
    assert all((parameter == 7).all() for parameter in adapters.values())


def test_random_weights_follow_the_rules_of_the_class_and_the_seed(world, tmp_path):
    world.make_model("Qwen2", tie_word_embeddings=True, initializer_range=0.05).save_pretrained(tmp_path)
    model = materialize(open_model(str(tmp_path)).skeleton(), "cpu")
    before = torch.get_rng_state()
    initialise(model, seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    attention = model.model.layers[0].self_attn
    assert 0.04 < attention.q_proj.weight.std() < 0.06
    assert (attention.q_proj.bias == 0).all()
    assert (model.model.norm.weight == 1).all()
    assert (model.model.embed_tokens.weight[0] == 0).all()  # of padding
    assert not torch.equal(attention.q_proj.weight[:16], attention.k_proj.weight)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    initialise(model, seed=1)
    torch.testing.assert_close(model.state_dict(), first, rtol=0, atol=0)
    initialise(model, seed=2)
    assert not torch.equal(model.lm_head.weight, first["lm_head.weight"])


def test_random_weights_do_not_touch_the_generators_of_random_numbers(world, monkeypatch):
    """torch.manual_seed would reseed every GPU, which nothing puts back."""
    reseeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    before = torch.get_rng_state()
    model = world.make_model("Llama")
    torch.set_rng_state(before)
    reseeded.clear()
    initialise(model, seed=1)
    assert reseeded == []
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["../secret.safetensors", "{parent}/secret.safetensors", "..", 7, None])
def test_weights_outside_of_the_folder_are_never_read(folder, name):
    (folder / "model.safetensors").rename(folder.parent / "secret.safetensors")
    name = name.format(parent=folder.parent) if isinstance(name, str) else name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {Q_PROJ: name}}))
    with pytest.raises(ModelError, match=rf"weight_map names {re.escape(repr(name))}, which is no file of its own"):
        loaded(folder)


def test_a_model_of_the_hub_is_read_from_one_commit_of_the_cache(folder, tmp_path, monkeypatch):
    from huggingface_hub import constants

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--people--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(commit)
    (repository / "snapshots").mkdir()
    folder.rename(repository / "snapshots" / commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = open_model("people/tiny")
    assert source.folder.name == commit
    assert open_model("people/tiny", revision=commit).folder == source.folder
    source.load_into(materialize(source.skeleton(), "cpu"))
    with pytest.raises(ModelError, match="people/other is not a local folder, and the Hub has no model of this name"):
        open_model("people/other")
    with pytest.raises(ModelError, match="at revision v2"):
        open_model("people/tiny", revision="v2")


@pytest.mark.parametrize("load", [load_causal_lm, open_model], ids=["whole", "by shards"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "does not exist"),
        (lambda folder: folder.mkdir(), r"has no config\.json"),
        (
            lambda folder: (folder.mkdir(), (folder / "config.json").write_text("{}")),
            "transformers cannot load the model",
        ),
    ],
    ids=["absent", "empty", "no configuration"],
)
def test_a_folder_that_is_no_model_is_named(tmp_path, make, message, load):
    make(tmp_path / "model")
    with pytest.raises(ModelError, match=message):
        load(str(tmp_path / "model"))


def test_a_whole_model_is_loaded_in_float32(folder):
    assert {parameter.dtype for parameter in load_causal_lm(str(folder)).parameters()} == {torch.float32}


def test_a_missing_tokenizer_is_named(folder):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json or tokenizer_config\.json"):
        load_tokenizer(str(folder))


def test_another_vocabulary_than_the_tokenizers_is_refused():
    check_vocabulary(model_vocab_size=51, tokenizer_size=51)
    check_vocabulary(model_vocab_size=64, tokenizer_size=51, allow_padded=True)
    with pytest.raises(ModelError, match="51 tokens and the model only 40"):
        check_vocabulary(model_vocab_size=40, tokenizer_size=51, allow_padded=True)
    with pytest.raises(ModelError, match=r"policy\.padded_vocabulary=true"):
        check_vocabulary(model_vocab_size=64, tokenizer_size=51)


def test_a_whole_model_that_lacks_weights_is_refused(folder):
    edit(folder, lambda tensors: tensors.pop(Q_PROJ))
    with pytest.raises(ModelError, match=rf"missing keys: {Q_PROJ}"):
        load_causal_lm(str(folder))

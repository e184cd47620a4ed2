"""Claims about adapters on one process: where they go, what they change, how they are merged, saved and refused."""

import copy
import functools
import json
import math
import sys

import pytest
import torch
from safetensors.torch import load_file

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_backends.config import LoraConfig
from rl_backends.errors import CheckpointError, ModelError
from rl_backends.lora.files import save_adapter
from rl_backends.lora.inject import add_lora
from rl_backends.lora.layers import adapter_size, adapter_tensors, adapters_disabled, peft_names
from rl_backends.lora.merged import MergedWeights, export_merged
from rl_parallel_plans import PlanError, plan_for, to_local_if_dtensor

# peft 0.21 asks transformers 5.23 by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CONFIG = LoraConfig(rank=4, alpha=8)
TOKENS = torch.randint(67, (2, 9), generator=torch.Generator().manual_seed(0))
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}


def trained(world, config=CONFIG, family="Qwen3", **changes):
    """A model whose adapters have seen training: B is not zero."""
    model = add_lora(world.make_model(family, **changes), config, seed=1).eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1, generator=generator)
    return model


def adapted_names(model):
    return [name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")]


def test_adapters_go_into_every_linear_layer_of_the_decoder_and_change_nothing_at_first(world):
    bare = world.make_model("Llama").eval()
    model = add_lora(copy.deepcopy(bare), CONFIG)
    linears = [n for n, m in bare.model.layers.named_modules() if isinstance(m, torch.nn.Linear)]
    assert adapted_names(model) == [f"model.layers.{name}" for name in linears]
    assert type(model) is type(bare)
    assert torch.equal(model(TOKENS).logits, bare(TOKENS).logits)
    assert all((".lora_" in name) == p.requires_grad for name, p in model.named_parameters())


def test_experts_and_what_routes_to_them_stay_frozen(world):
    model = add_lora(world.make_model("Qwen3Moe", **MIXTURE), CONFIG)
    assert {name.split(".")[-2:][0] for name in adapted_names(model)} == {"self_attn"}
    assert len(adapted_names(model)) == 8


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        (("q_proj",), ["0.self_attn.q_proj", "1.self_attn.q_proj"]),
        (("layers.1.mlp.*_proj",), ["1.mlp.gate_proj", "1.mlp.up_proj", "1.mlp.down_proj"]),
        (("o_proj", "layers.0.mlp.up_proj"), ["0.self_attn.o_proj", "0.mlp.up_proj", "1.self_attn.o_proj"]),
    ],
)
def test_patterns_are_ends_of_names(world, patterns, expected):
    model = add_lora(world.make_model("Qwen3"), LoraConfig(target_modules=patterns))
    assert adapted_names(model) == [f"model.layers.{name}" for name in expected]


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("q_prj",), "'q_prj' is the end of no module's name.*self_attn.q_proj"),
        (("q_proj", "proj"), "'proj' is the end of no module's name"),
        (("input_layernorm",), "input_layernorm, which cannot be adapted: it is a Qwen3MoeRMSNorm"),
        (("mlp.gate",), "mlp.gate, which cannot be adapted: what routes to experts stays frozen"),
        (("*",), "cannot be adapted"),
    ],
)
def test_a_pattern_that_fits_nothing_or_the_wrong_thing_is_refused(world, patterns, message):
    model = world.make_model("Qwen3Moe", **MIXTURE)
    before = [name for name, _ in model.named_parameters()]
    with pytest.raises(ModelError, match=message):
        add_lora(model, LoraConfig(target_modules=patterns))
    assert [name for name, p in model.named_parameters() if p.requires_grad] == before


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank=0 must be >= 1"),
        ({"alpha": 0}, "alpha=0 must be >= 1"),
        ({"target_modules": "q_proj"}, "target_modules='q_proj' must be 'all-linear' or a tuple"),
        ({"target_modules": ()}, "must hold names"),
        ({"modules_to_save": ("",)}, "must hold names"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        LoraConfig(**fields)


def test_the_scaling_is_that_of_lora_or_of_rslora():
    assert LoraConfig(rank=4, alpha=8).scaling == 2
    assert LoraConfig(rank=4, alpha=8, use_rslora=True).scaling == 4


def test_a_model_with_adapters_and_a_quantized_one_are_refused(world):
    with pytest.raises(ModelError, match="has adapters already"):
        add_lora(trained(world), CONFIG)
    model = world.make_model("Qwen3")
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.requires_grad_(requires_grad=False).data = weight.data.to(torch.int8)
    with pytest.raises(ModelError, match=r"up_proj.weight is torch.int8: the model is quantized"):
        add_lora(model, CONFIG)


def test_functions_for_adapters_refuse_a_model_without(world, tmp_path):
    model = world.make_model("Qwen3")
    for function in (MergedWeights, adapter_tensors, adapter_size):
        with pytest.raises(ModelError, match="has no adapters; call add_lora"):
            function(model)
    with pytest.raises(ModelError, match="has no adapters"), adapters_disabled(model):
        pass
    with pytest.raises(ModelError, match="has no adapters"):
        save_adapter(model, tmp_path / "a", base_model_name="base")


def test_without_peft_the_refusal_says_how_to_install_it(world, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"pip install 'rl-backends\[lora\]'"):
        add_lora(world.make_model("Qwen3"), CONFIG)


def test_first_values_are_uniform_in_the_bound_of_peft_and_leave_the_random_state_alone(world):
    model = world.make_model("Qwen3")
    state = torch.get_rng_state()
    add_lora(model, LoraConfig(rank=8), seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    values = {name: p.detach() for name, p in model.named_parameters() if ".lora_A." in name}
    for name, value in values.items():
        bound = 1 / math.sqrt(value.shape[1])
        assert value.abs().max() <= bound, name
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
    assert len({value.flatten()[0].item() for value in values.values()}) == len(values)
    other = add_lora(world.make_model("Qwen3"), LoraConfig(rank=8), seed=6)
    assert not torch.equal(dict(other.named_parameters())[name], values[name])


def test_frozen_weights_are_stored_in_bfloat16_and_adapters_in_float32(world):
    model = add_lora(world.make_model("Qwen3", tie_word_embeddings=True), LoraConfig(base_dtype="bfloat16"))
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def tensors_of(merged):
    return {shard.name: shard.tensor for shard in merged.shards()}


def test_a_hundred_refreshes_leave_the_frozen_weights_bit_for_bit_and_do_not_drift(world):
    model = trained(world, LoraConfig(rank=4, alpha=8, base_dtype="bfloat16"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    merged = MergedWeights(model)
    objects = {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_of(merged).items()}
    for _ in range(100):
        merged.refresh()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in tensors_of(merged).items()} == objects
    for layer in adapted_names(model):
        base, a, b = (before[f"{layer}.{end}.weight"] for end in ("base_layer", "lora_A.default", "lora_B.default"))
        assert torch.equal(tensors_of(merged)[f"{layer}.weight"], (base.float() + (b @ a) * 2.0).bfloat16())


def test_a_refresh_follows_training_and_is_what_peft_merges(world):
    model = trained(world)
    merged = MergedWeights(model)
    stale = {name: tensor.clone() for name, tensor in tensors_of(merged).items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.mul_(-1.5)
    merged.refresh()
    for layer in adapted_names(model):
        peft_layer = model.get_submodule(layer)
        expected = peft_layer.base_layer.weight + peft_layer.get_delta_weight("default")
        assert torch.equal(tensors_of(merged)[f"{layer}.weight"], expected)
        assert not torch.equal(tensors_of(merged)[f"{layer}.weight"], stale[f"{layer}.weight"])


def test_released_weights_have_no_memory_and_come_back_as_the_same_tensors(world):
    model = trained(world)
    merged = MergedWeights(model)
    names = [f"{name}.weight" for name in adapted_names(model)]
    tensors = {name: tensors_of(merged)[name] for name in names}
    values = {name: tensor.clone() for name, tensor in tensors.items()}
    merged.release()
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors.values())
    with pytest.raises(RuntimeError, match="were released; call refresh"):
        next(merged.shards())
    merged.refresh()
    assert all(tensors_of(merged)[name] is tensors[name] and torch.equal(tensors[name], values[name]) for name in names)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_what_engines_are_fed_from_stays_the_same_objects_through_offload_and_onload(world, precision):
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig(precision=precision, lora_cfg=CONFIG))
    before = {shard.name: shard for shard in backend.shards()}
    values = {name: shard.local.clone() for name, shard in before.items()}
    backend.offload()
    backend.onload()
    assert all(torch.equal(before[name].local, value) for name, value in values.items())
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            if ".lora_B." in name:
                to_local_if_dtensor(parameter).fill_(0.1)
    after = {shard.name: shard for shard in backend.shards()}
    assert all(after[name].tensor is shard.tensor for name, shard in before.items())
    changed = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(before[changed].local, values[changed])


def test_merged_weights_have_the_names_of_the_bare_model_and_memory_only_for_what_is_merged(world):
    bare = world.make_model("Qwen2", tie_word_embeddings=True)
    model = trained(world, family="Qwen2", tie_word_embeddings=True)
    merged = MergedWeights(model)
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    made = {name for name, tensor in tensors_of(merged).items() if id(tensor) not in own}
    assert made == {f"{name}.weight" for name in adapted_names(model)}
    assert merged.extra_bytes == adapter_size(model).merged_bytes
    assert [shard.name for shard in merged.shards()] == list(bare.state_dict())[:-1]  # a tie once


def test_a_bare_model_with_merged_weights_has_the_policys_logits(world):
    model, bare = trained(world, family="Phi3"), world.make_model("Phi3").eval()
    bare.load_state_dict(dict(export_merged(model)))
    torch.testing.assert_close(bare(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)


def test_a_saved_model_has_merged_weights_in_the_dtype_of_the_frozen_ones(world, tmp_path):
    lora = LoraConfig(rank=4, alpha=8, base_dtype="bfloat16")
    backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(lora_cfg=lora))
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            if ".lora_B." in name:
                to_local_if_dtensor(parameter).fill_(0.1)
    backend.save_pretrained(tmp_path / "model")
    saved = load_file(tmp_path / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    sent = {shard.name: shard.local for shard in backend.shards()}
    assert all(torch.equal(saved[name], sent[name]) for name in saved)


def test_without_adapters_the_policy_is_the_bare_model_and_errors_and_nesting_put_them_back(world):
    model, bare = trained(world), world.make_model("Qwen3").eval()
    with_adapters = model(TOKENS).logits
    with adapters_disabled(model):
        assert torch.equal(model(TOKENS).logits, bare(TOKENS).logits)
        with adapters_disabled(model):
            pass
        assert torch.equal(model(TOKENS).logits, bare(TOKENS).logits)
    with pytest.raises(RuntimeError, match="boom"), adapters_disabled(model):
        raise RuntimeError("boom")
    assert torch.equal(model(TOKENS).logits, with_adapters)
    assert all((".lora_" in name) == p.requires_grad for name, p in model.named_parameters())


@pytest.mark.parametrize("family", ["Llama", "Phi3", "Qwen3Moe"])
def test_a_saved_adapter_loads_into_peft_with_the_same_logits(world, tmp_path, family):
    import peft

    changes = MIXTURE if family == "Qwen3Moe" else {}
    model = trained(world, LoraConfig(rank=4, alpha=6, use_rslora=True), family, **changes)
    save_adapter(model, tmp_path / "adapter", base_model_name="org/base")
    bare = world.make_model(family, **changes).eval()
    loaded = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    assert isinstance(loaded, peft.PeftModelForCausalLM)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    held = peft.get_peft_model_state_dict(loaded, save_embedding_layers=False)
    assert (
        held.keys() == adapter_tensors(model).keys() == load_file(tmp_path / "adapter/adapter_model.safetensors").keys()
    )
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "org/base"
    assert config["target_modules"] == sorted({name.split(".")[-1] for name in adapted_names(model)})


def test_an_adapter_of_some_layers_names_them_whole(world, tmp_path):
    import peft

    model = trained(world, LoraConfig(target_modules=("layers.1.self_attn.q_proj",)))
    save_adapter(model, tmp_path / "adapter", base_model_name="base")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["model.layers.1.self_attn.q_proj"]
    loaded = peft.PeftModel.from_pretrained(world.make_model("Qwen3").eval(), tmp_path / "adapter")
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


def test_a_head_is_trained_whole_and_saved_with_the_adapter(world, tmp_path):
    import peft
    import transformers

    def reward_model():
        torch.manual_seed(0)
        config = world.make_model("Qwen3").config
        config.num_labels = 1
        return transformers.Qwen3ForSequenceClassification(config).eval()

    config = LoraConfig(rank=4, modules_to_save=("score",), base_dtype="bfloat16")
    model = add_lora(reward_model(), config, seed=1)
    assert model.score.weight.requires_grad
    assert model.score.weight.dtype == torch.float32
    model.float()
    with torch.no_grad():
        model.score.weight.add_(0.3)
    with pytest.raises(ModelError, match=r"score.weight is trained whole.*freeze a copy"), adapters_disabled(model):
        pass
    save_adapter(model, tmp_path / "adapter", base_model_name="base")
    bare = reward_model()
    for parameter in bare.parameters():
        parameter.data = parameter.data.bfloat16().float()
    loaded = peft.PeftModel.from_pretrained(bare, tmp_path / "adapter").eval()
    assert isinstance(loaded, peft.PeftModelForSequenceClassification)
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (("scores",), "'scores' is the end of no name of a module with parameters"),
        (("lm_head",), "lm_head.weight is tied to another parameter"),
        (("self_attn",), "self_attn is to be trained whole, and .*q_proj to have an adapter"),
    ],
)
def test_what_cannot_be_trained_whole_is_refused(world, modules, message):
    with pytest.raises(ModelError, match=message):
        add_lora(world.make_model("Qwen3", tie_word_embeddings=True), LoraConfig(modules_to_save=modules))


def test_a_saved_adapter_has_the_bits_of_the_model_and_is_never_overwritten(world, tmp_path):
    model = trained(world)
    save_adapter(model, tmp_path / "adapter", base_model_name="base")
    held, adapters = load_file(tmp_path / "adapter" / "adapter_model.safetensors"), adapter_tensors(model)
    assert held.keys() == adapters.keys()
    assert all(torch.equal(held[name], parameter) for name, parameter in adapters.items())
    with pytest.raises(FileExistsError, match="never overwritten"):
        save_adapter(model, tmp_path / "adapter", base_model_name="base")
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        save_adapter(model, tmp_path / "file" / "adapter", base_model_name="base")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "file"]


def test_the_cost_is_counted_without_weights(world):
    bare = world.make_model("Qwen3")
    with torch.device("meta"):
        skeleton = type(bare)(bare.config)
    size = adapter_size(add_lora(skeleton, LoraConfig(rank=4, base_dtype="bfloat16")))
    linears = [m for m in bare.model.layers.modules() if isinstance(m, torch.nn.Linear)]
    assert size.layers == len(linears)
    assert size.trainable == sum(4 * (m.in_features + m.out_features) for m in linears)
    assert size.trainable_bytes == 4 * size.trainable
    assert size.frozen_bytes == 2 * sum(p.numel() for p in bare.parameters())
    assert size.merged_bytes == 2 * sum(m.weight.numel() for m in linears)
    assert f"{size.trainable:,} of {size.total:,} parameters train" in size.explain()


def test_a_checkpoint_of_adapters_holds_no_frozen_weight_and_goes_on_from_the_same_base_alone(world, tmp_path):
    examples = world.make_examples()

    def start(*, seed=0):
        backend = DTensorBackend(world.make_model("Qwen3", seed=seed), DTensorConfig(lora_cfg=CONFIG), seed=seed)
        backend.start_training(OptimizerConfig(lr=1e-2), num_steps=4)
        return backend

    def step(backend):
        loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
        backend.forward_backward(examples, loss)
        return backend.optim_step()

    backend = start()
    step(backend)
    backend.save_checkpoint(tmp_path / "step-1")
    held = "".join(path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*.safetensors"))
    assert "weights/model.layers.0.self_attn.q_proj.lora_A.default.weight" in held
    assert "base_layer" not in held
    assert "weights/lm_head.weight" not in held
    expected = step(backend), backend.logp(examples)

    resumed = start()
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            if parameter.requires_grad:
                parameter.fill_(7.0)
    resumed.load_checkpoint(tmp_path / "step-1")
    assert (step(resumed), resumed.version) == (expected[0], 2)
    assert torch.equal(resumed.logp(examples), expected[1])

    other = start(seed=1)
    before = {name: each.clone() for name, each in other.model.state_dict().items()}
    with pytest.raises(CheckpointError, match="frozen weights that they were trained on are not those of this model"):
        other.load_checkpoint(tmp_path / "step-1")
    assert all(torch.equal(each, before[name]) for name, each in other.model.state_dict().items())


DORA = LoraConfig(rank=4, alpha=8, use_dora=True)


def test_dora_has_the_numbers_of_peft(world, tmp_path):
    import peft

    backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(lora_cfg=DORA))
    examples = world.make_examples()
    bare = world.plain_logp(world.make_model("Qwen3").eval(), examples).detach()
    torch.testing.assert_close(backend.logp(examples), bare, rtol=1e-5, atol=1e-5)  # nothing at first

    # The gradient of peft's own model with the same values, and the policy after three steps of it.
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    config = peft.LoraConfig(r=4, lora_alpha=8, use_dora=True, target_modules="all-linear")
    theirs = peft.get_peft_model(world.make_model("Qwen3").eval(), config).eval()
    values = {name.replace("base_model.model.", ""): each for name, each in theirs.named_parameters()}
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            values[name].copy_(parameter)
    optimizer = torch.optim.AdamW(
        [each for each in theirs.parameters() if each.requires_grad], lr=1e-2, eps=1e-4, weight_decay=0
    )
    backend.start_training(
        OptimizerConfig(lr=1e-2, eps=1e-4, weight_decay=0.0, betas=(0.9, 0.999), max_grad_norm=None), num_steps=3
    )
    for _ in range(3):
        backend.forward_backward(examples, loss)
        loss(world.plain_logp(theirs, examples), examples)[0].backward()
        for name, parameter in backend.model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, values[name].grad, rtol=1e-3, atol=5e-6)
        backend.optim_step()
        optimizer.step()
        optimizer.zero_grad()
    moved = [name for name, _ in backend.model.named_parameters() if "lora_magnitude_vector" in name]
    assert len(moved) == 14
    expected = world.plain_logp(theirs, examples).detach()
    torch.testing.assert_close(backend.logp(examples), expected, rtol=1e-4, atol=1e-4)
    assert (expected - bare).abs().max() > 0.01

    # What engines get, a saved folder and a saved adapter are the same policy.
    merged = world.make_model("Qwen3").eval()
    merged.load_state_dict({shard.name: shard.local.detach() for shard in backend.shards()})
    torch.testing.assert_close(
        world.plain_logp(merged, examples).detach(), backend.logp(examples), rtol=1e-4, atol=1e-4
    )
    backend.save_pretrained(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(saved, {name: merged.state_dict()[name] for name in saved})
    backend.save_adapter(tmp_path / "adapter", base_model_name="base")
    loaded = peft.PeftModel.from_pretrained(world.make_model("Qwen3").eval(), tmp_path / "adapter").eval()
    torch.testing.assert_close(
        world.plain_logp(loaded, examples).detach(), backend.logp(examples), rtol=1e-4, atol=1e-4
    )


def test_dora_under_tensor_parallelism_is_refused():
    with pytest.raises(ValueError, match="use_dora=True cannot be combined with tensor_parallel_size > 1"):
        DTensorConfig(lora_cfg=DORA, tensor_parallel_size=2)


ENDS = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "embed_tokens", "lm_head"))


def with_values_of_training(model):
    """Neither A nor B is zero, so that both have a gradient."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                to_local_if_dtensor(parameter).normal_(std=0.1, generator=generator)


def test_adapters_on_the_embeddings_and_the_head_have_the_numbers_of_peft(world, tmp_path):
    import peft

    backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig(lora_cfg=ENDS))
    examples = world.make_examples()
    bare = world.plain_logp(world.make_model("Qwen3").eval(), examples).detach()
    torch.testing.assert_close(backend.logp(examples), bare, rtol=1e-5, atol=1e-5)  # nothing at first
    with_values_of_training(backend.model)

    asked = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens", "lm_head"])
    theirs = peft.inject_adapter_in_model(asked, world.make_model("Qwen3").eval())
    values = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parameter in backend.model.named_parameters():
            values[name].copy_(parameter)
    expected = world.plain_logp(theirs, examples)
    torch.testing.assert_close(backend.logp(examples), expected.detach(), rtol=1e-5, atol=1e-5)
    assert (expected - bare).abs().max() > 0.01

    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=1)
    backend.forward_backward(examples, loss)
    loss(expected, examples)[0].backward()
    trained = {name: each for name, each in backend.model.named_parameters() if each.requires_grad}
    assert len([name for name in trained if "embed_tokens" in name or "lm_head" in name]) == 4
    for name, parameter in trained.items():
        torch.testing.assert_close(parameter.grad, values[name].grad, rtol=1e-5, atol=1e-5)

    # The reference, what engines get, a saved folder and a saved adapter.
    reference = backend.freeze_reference(without_adapters=True)
    torch.testing.assert_close(reference.logp(examples), bare, rtol=1e-5, atol=1e-5)
    merged = world.make_model("Qwen3").eval()
    merged.load_state_dict({shard.name: shard.local.detach() for shard in backend.shards()})
    torch.testing.assert_close(world.plain_logp(merged, examples).detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    backend.save_pretrained(tmp_path / "merged")
    saved = load_file(tmp_path / "merged" / "model.safetensors")
    torch.testing.assert_close(saved, {name: merged.state_dict()[name] for name in saved})
    backend.save_adapter(tmp_path / "adapter", base_model_name="base")
    loaded = peft.PeftModel.from_pretrained(world.make_model("Qwen3").eval(), tmp_path / "adapter").eval()
    torch.testing.assert_close(world.plain_logp(loaded, examples).detach(), expected.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_end_of_a_tie_is_refused(world, end):
    model = world.make_model("Qwen3", tie_word_embeddings=True)
    with pytest.raises(ModelError, match=f"{end}, which cannot be adapted: .* are one weight"):
        add_lora(model, LoraConfig(target_modules=(end,)))


def test_an_adapter_on_the_embeddings_or_the_head_with_dora_or_on_megatron_is_refused(world):
    dora = LoraConfig(target_modules=("lm_head",), use_dora=True)
    with pytest.raises(ModelError, match="lm_head, and use_dora=True is for linear layers of the decoder"):
        add_lora(world.make_model("Qwen3"), dora)
    with pytest.raises(ModelError, match="on the embeddings and the head are the DTensor backend's"):
        add_lora(world.make_model("Qwen3"), ENDS, layers_only=True)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_on_the_embeddings_or_the_head_under_tensor_parallelism_is_refused(world, end):
    model = add_lora(world.make_model("Qwen3"), LoraConfig(target_modules=(end,)))
    with pytest.raises(PlanError, match=f"{end} has an adapter, and is sharded by .*, which has no rule for one"):
        plan_for(model, tp=2)


MIXTURES = {
    "Qwen3Moe": MIXTURE,
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attn_implementation": "eager"},  # experts transposed
}
BOTH = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("family", "modules", "parameters"),
    [("Qwen3Moe", ("q_proj",), BOTH), ("Qwen3Moe", (), BOTH[1:]), ("GptOss", ("q_proj",), BOTH)],
)
def test_adapters_on_stacked_experts_have_the_numbers_of_peft(world, tmp_path, family, modules, parameters):
    import peft

    from rl_backends.lora.layers import to_peft

    def bare_model():
        return world.make_model(family, **MIXTURES[family]).eval()

    config = DTensorConfig(lora_cfg=LoraConfig(rank=4, alpha=8, target_modules=modules, target_parameters=parameters))
    backend = DTensorBackend(bare_model(), config)
    examples = world.make_examples()
    bare = world.plain_logp(bare_model(), examples).detach()
    torch.testing.assert_close(backend.logp(examples), bare, rtol=1e-5, atol=1e-5)  # nothing at first
    with_values_of_training(backend.model)
    backend.save_adapter(tmp_path / "adapter", base_model_name="base")
    theirs = peft.PeftModel.from_pretrained(bare_model(), tmp_path / "adapter", is_trainable=True).eval()
    expected = world.plain_logp(theirs, examples)
    torch.testing.assert_close(backend.logp(examples), expected.detach(), rtol=1e-5, atol=1e-5)
    assert (expected - bare).abs().max() > 0.01

    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=1)
    backend.forward_backward(examples, loss)
    loss(expected, examples)[0].backward()
    gradients = {name.replace(".default", ""): each.grad for name, each in theirs.named_parameters()}
    in_file = peft_names(backend.model)
    trained = {name: each for name, each in backend.model.named_parameters() if each.requires_grad}
    assert len([name for name in trained if ".experts." in name]) == 4 * len(parameters)
    assert all("lora_" in name for name in trained)
    for name, parameter in trained.items():
        torch.testing.assert_close(to_peft(name, parameter.grad), gradients[in_file(name)], rtol=1e-4, atol=1e-6)

    # The reference, and what engines get.
    reference = backend.freeze_reference(without_adapters=True)
    torch.testing.assert_close(reference.logp(examples), bare, rtol=1e-5, atol=1e-5)
    merged = bare_model()
    merged.load_state_dict({shard.name: shard.local.detach() for shard in backend.shards()})
    torch.testing.assert_close(world.plain_logp(merged, examples).detach(), expected.detach(), rtol=1e-5, atol=1e-5)
    exported = dict(export_merged(backend.model))
    torch.testing.assert_close(exported, {name: merged.state_dict()[name] for name in exported})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (("experts.up",), "'experts.up' is the end of no parameter's name.*experts.gate_up_proj"),
        (("q_proj.weight",), "q_proj.weight, .*which is no stacked weight of experts"),
    ],
)
def test_a_target_parameter_that_is_no_stack_of_experts_is_refused(world, parameters, message):
    with pytest.raises(ModelError, match=message):
        add_lora(world.make_model("Qwen3Moe", **MIXTURE), LoraConfig(target_parameters=parameters))


def test_adapters_on_experts_with_what_does_not_go_with_them_are_refused(world):
    with pytest.raises(ValueError, match=r"target_parameters=.* cannot be combined with use_dora=True"):
        LoraConfig(target_parameters=BOTH, use_dora=True)
    with pytest.raises(ValueError, match="one of the first two at least one"):
        LoraConfig(target_modules=())
    config = LoraConfig(target_parameters=BOTH)
    for field in ({"tensor_parallel_size": 2}, {"expert_parallel_size": 2}, {"compile": True}):
        with pytest.raises(ValueError, match="target_parameters cannot be combined with"):
            DTensorConfig(lora_cfg=config, **field)
    with pytest.raises(ModelError, match="adapters on experts are the DTensor backend's"):
        add_lora(world.make_model("Qwen3Moe", **MIXTURE), config, layers_only=True)

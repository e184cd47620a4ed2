"""Claims about what trains and what is computed: what the Hugging Face model freezes, and what its own code does."""

import functools

import pytest
import torch

from rl_backends import ModelError, OptimizerConfig
from rl_backends.megatron.config import MegatronConfig

ADAMW = OptimizerConfig(lr=1e-2, eps=1e-4)


@pytest.fixture
def make(imported):
    from rl_backends.megatron.backend import MegatronBackend

    made = []

    def make_one(model, **config):
        made.append(MegatronBackend(model, MegatronConfig(**config)))
        return made[-1]

    yield make_one
    for backend in made:
        backend.close()


def step(world, backend):
    examples = world.make_examples()
    backend.forward_backward(examples, functools.partial(world.token_loss, num_tokens=examples.trainable.sum()))
    return backend.optim_step()


def plain_norm(world, model):
    examples = world.make_examples()
    world.token_loss(world.plain_logp(model, examples), examples, num_tokens=examples.trainable.sum())[0].backward()
    return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])


def test_what_is_frozen_stays_and_is_no_part_of_the_norm(world, make):
    model = world.make_model("Qwen3", pad_token_id=None)
    for part in (model.model.embed_tokens, model.model.layers[0]):
        part.requires_grad_(requires_grad=False)
    backend = make(model)
    backend.start_training(ADAMW, num_steps=2)
    assert step(world, backend) == pytest.approx(float(plain_norm(world, model)), rel=1e-5)
    before = dict(model.named_parameters())
    for held in backend.shards():
        (box,) = held.boxes() if len(held.boxes()) == 1 else (None,)
        same = box is not None and torch.equal(box.of_local(held.local), before[held.name])
        if box is not None:
            assert same != before[held.name].requires_grad, held.name


def test_frozen_routers_choose_experts_as_before_and_the_rest_learns(world, make):
    model = world.make_model("Qwen3Moe")
    backend = make(model, freeze_moe_router=True)
    backend.start_training(ADAMW, num_steps=2)
    step(world, backend)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    moved = {
        held.name: not torch.equal(held.boxes()[0].of_local(held.local), before[held.name])
        for held in backend.shards()
        if len(held.boxes()) == 1
    }
    routers = {name for name in moved if name.endswith("mlp.gate.weight")}
    assert len(routers) == model.config.num_hidden_layers
    assert {name for name, has_moved in moved.items() if not has_moved} == routers


def test_a_router_of_a_model_without_experts_is_not_frozen(world, make):
    with pytest.raises(ModelError, match=r"freeze_moe_router=True, and the model has no experts; leave it out"):
        make(world.make_model("Qwen3"), freeze_moe_router=True)


def test_a_part_of_a_fused_parameter_is_not_frozen_alone(world, make):
    model = world.make_model("Qwen3")
    model.model.layers[0].self_attn.q_proj.requires_grad_(requires_grad=False)
    with pytest.raises(ModelError, match=r"q_proj\.weight is frozen, and Megatron holds it in .*linear_qkv\.weight"):
        make(model)


def test_a_model_of_which_nothing_trains_is_read_and_not_trained(world, make):
    model = world.make_model("Qwen3").requires_grad_(requires_grad=False)
    backend = make(model)
    assert backend.logp(world.make_examples()).shape == (6, 13)
    with pytest.raises(ModelError, match="nothing to optimize"):
        backend.start_training(ADAMW, num_steps=2)


def test_full_recomputation_below_a_frozen_embedding_gives_the_same_gradients(world, make):
    examples, found = world.make_examples(), []
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    for recomputed in (None, "full"):
        model = world.make_model("Qwen3", tie_word_embeddings=False)
        model.model.embed_tokens.requires_grad_(requires_grad=False)
        backend = make(model, recompute_granularity=recomputed)
        backend.start_training(ADAMW, num_steps=2)
        backend.forward_backward(examples, loss)
        named = backend.model.named_parameters()
        found.append({name: each.main_grad.clone() for name, each in named if each.requires_grad})
    assert len(found[0]) > 10
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


def test_code_of_somebodys_own_is_refused(world, make):
    model = world.make_model("Qwen3")
    model.__class__ = type("Mine", (type(model),), {"__module__": "mine"})
    with pytest.raises(ModelError, match=r"mine\.Mine is no class of transformers"):
        make(model)


@pytest.mark.parametrize("change", ["a hook", "a buffer"])
def test_a_model_that_computes_something_else_is_found_out(world, make, change):
    model = world.make_model("Qwen3")
    if change == "a hook":
        model.model.layers[0].mlp.register_forward_hook(lambda *given: given[-1] * 1.5)
    else:
        model.model.rotary_emb.inv_freq.mul_(0.7)
    with pytest.raises(ModelError, match=r"differ by .* from those of the same weights on Megatron"):
        make(model)


def test_a_gradient_is_computed_whatever_mode_the_caller_is_in(world, make):
    backend = make(world.make_model("Qwen3"))
    backend.start_training(ADAMW, num_steps=3)
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    norms = []
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            backend.logp(examples)
            backend.forward_backward(examples, loss)
        norms.append(backend._distributed.gpt.decoder.final_layernorm.weight.main_grad.clone())
        backend._clear_gradient()
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    assert norms[0].abs().max() > 0


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_a_temperature_that_cannot_divide_is_refused(world, make, temperature):
    with pytest.raises(ValueError, match="temperature"):
        make(world.make_model("Qwen3")).start_training(ADAMW, num_steps=2, temperature=temperature)


@pytest.mark.parametrize("k", [0, 68])
def test_more_words_than_there_are_cannot_be_asked_for(world, make, k):
    with pytest.raises(ValueError, match="from 1 to the 67 tokens"):
        make(world.make_model("Qwen3")).topk_logits(world.make_examples(), k)


def test_references_are_gone_with_whoever_held_them(world, make):
    import gc
    import weakref

    backend = make(world.make_model("Qwen3"))
    models = [weakref.ref(backend.freeze_reference()._model.gpt) for _ in range(3)]
    gc.collect()
    assert [model() for model in models] == [None, None, None]


def test_a_backend_that_is_closed_says_so(world, make):
    backend = make(world.make_model("Qwen3"))
    backend.close()
    backend.close()
    with pytest.raises(RuntimeError, match="closed"):
        backend.logp(world.make_examples())

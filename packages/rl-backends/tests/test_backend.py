"""Claims about one rank: log-probabilities, gradients and steps equal those of plain Hugging Face and torch."""

import dataclasses
import functools
from typing import ClassVar

import pytest
import torch

from rl_backends import BatchError, DTensorBackend, DTensorConfig, ModelError, NonFiniteGradientError, OptimizerConfig

FAMILIES = ["Llama", "Qwen2", "Qwen3", "Mistral", "Gemma2"]
TIED = {"Qwen3": {"tie_word_embeddings": True}}


def make_backend(model, *, lr=1e-2, **config):
    backend = DTensorBackend(model, DTensorConfig(**config))
    backend.start_training(OptimizerConfig(lr=lr, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01), num_steps=10)
    return backend


def loss_for(world, examples):
    return functools.partial(world.token_loss, num_tokens=examples.trainable.sum())


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_is_the_log_softmax_of_plain_logits(world, family, temperature):
    examples = world.make_examples()
    with torch.no_grad():
        expected = world.plain_logp(world.make_model(family).eval(), examples, temperature=temperature)
    backend = make_backend(world.make_model(family))
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=1, temperature=temperature)
    logp = backend.logp(examples)
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    assert (logp[~examples.trainable] == 0).all()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 6, 64])
def test_the_gradient_does_not_depend_on_the_cut(world, micro_batch_size):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    expected, _ = world.plain_steps(world.make_model("Qwen3"), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(world.make_model("Qwen3"), micro_batch_size=micro_batch_size)
    sums = backend.forward_backward(examples, loss)
    gradients = {name: full(parameter.grad) for name, parameter in backend.model.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)
    assert sums["tokens"].item() == examples.trainable.sum().item()


@pytest.mark.parametrize("layout", ["padded", "packed", "shared prefixes"])
def test_the_model_reads_each_row_up_to_the_place_before_its_last_asked_token(world, layout):
    examples = world.make_examples()
    trainable = examples.trainable.clone()
    trainable[0, 3:] = False  # ends before its row does
    trainable[1] = False  # asks for nothing
    examples = dataclasses.replace(examples, trainable=trainable)
    expected = world.plain_logp(world.make_model("Qwen3").eval(), examples).detach()
    packed = layout != "padded"
    backend = make_backend(
        world.make_model("Qwen3"), sequence_packing=packed, share_prefixes=layout == "shared prefixes"
    )
    shapes = []
    backend.model.model.embed_tokens.register_forward_hook(lambda _, given, __: shapes.append(tuple(given[0].shape)))
    torch.testing.assert_close(backend.logp(examples), expected, rtol=1e-5, atol=1e-5)
    last = [int(row.nonzero().max()) if row.any() else 1 for row in trainable]
    assert shapes == [(1, sum(last)) if packed else (len(last), max(last))]


@pytest.mark.parametrize("family", FAMILIES)
def test_three_steps_are_those_of_a_plain_loop(world, family):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    model = world.make_model(family, **TIED.get(family, {}))
    _, expected = world.plain_steps(model, examples, loss, steps=3, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(model, micro_batch_size=4)
    for _ in range(3):
        backend.forward_backward(examples, loss)
        backend.optim_step()
    weights = {name: full(parameter.detach()) for name, parameter in backend.model.named_parameters()}
    torch.testing.assert_close(weights, expected, rtol=1e-4, atol=1e-5)
    assert backend.version == 3


def test_a_loss_over_pairs_sees_both_rows_of_each(world):
    examples = world.make_examples(kind=world.Pairs)
    loss = functools.partial(world.pair_loss, num_tokens=examples.trainable.sum())
    expected, _ = world.plain_steps(world.make_model("Qwen3"), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(world.make_model("Qwen3"), micro_batch_size=2)
    backend.forward_backward(examples, loss)
    gradients = {name: full(parameter.grad) for name, parameter in backend.model.named_parameters()}
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-6)


def test_a_loss_that_fails_leaves_no_part_of_a_gradient(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Llama"), micro_batch_size=2)
    calls = []

    def fails_later(logp, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise RuntimeError("no")
        return loss_for(world, examples)(logp, rows)

    with pytest.raises(RuntimeError, match="no"):
        backend.forward_backward(examples, fails_later)
    assert all(parameter.grad is None for parameter in backend.model.parameters())


def test_a_gradient_that_is_not_finite_changes_no_weight(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Llama"))
    before = {name: full(parameter.detach()).clone() for name, parameter in backend.model.named_parameters()}
    backend.forward_backward(examples, lambda logp, rows: (logp.sum() * torch.nan, {}))
    with pytest.raises(NonFiniteGradientError, match="gradient norm of step 1 is nan"):
        backend.optim_step()
    after = {name: full(parameter.detach()) for name, parameter in backend.model.named_parameters()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert all(parameter.grad is None for parameter in backend.model.parameters())
    assert backend.version == 0


def test_the_learning_rate_follows_the_schedule(world):
    examples = world.make_examples()
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    backend.start_training(OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.5), num_steps=5)
    rates = []
    for _ in range(5):
        rates.append(backend.learning_rate)
        backend.forward_backward(examples, loss_for(world, examples))
        backend.optim_step()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])


def test_dropout_is_off_so_that_trainer_and_engine_are_one_function(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Llama", attention_dropout=0.5))
    torch.testing.assert_close(backend.logp(examples), backend.logp(examples), rtol=0, atol=0)
    with torch.no_grad():
        expected = world.plain_logp(world.make_model("Llama").eval(), examples)
    torch.testing.assert_close(backend.logp(examples), expected, rtol=1e-5, atol=1e-5)


def test_no_tensor_as_large_as_the_logits_is_made(world):
    examples = world.make_examples(rows=8, vocabulary=4001)
    backend = make_backend(world.make_model("Llama", vocab_size=4001))
    largest = Largest()
    with largest:
        backend.forward_backward(examples, loss_for(world, examples))
    assert largest.numel < examples.tokens.numel() * 4001
    assert largest.numel >= 4001 * 32  # it did see the embedding's gradient


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_weights(world):
    examples = world.make_examples()
    with torch.no_grad():
        expected = world.plain_logp(world.make_model("Llama"), examples)
    backend = make_backend(world.make_model("Llama"), precision="bfloat16")
    logp = backend.logp(examples)
    assert 0 < (logp - expected).abs().max() < 0.1
    backend.forward_backward(examples, loss_for(world, examples))
    assert all(parameter.grad.dtype == parameter.dtype == torch.float32 for parameter in backend.model.parameters())


@pytest.mark.parametrize(("family", "scale"), [("Granite", {"logits_scaling": 8.0}), ("Cohere", {"logit_scale": 0.5})])
def test_logits_that_the_configuration_scales_are_scaled(world, family, scale):
    examples = world.make_examples()
    with torch.no_grad():
        expected = world.plain_logp(world.make_model(family, **scale).eval(), examples)
    torch.testing.assert_close(make_backend(world.make_model(family, **scale)).logp(examples), expected)


def test_a_model_that_does_something_unknown_to_its_logits_is_refused(world):
    model = world.make_model("Llama")
    model.register_forward_hook(lambda module, given, output: type(output)(logits=output.logits * 1.5))
    with pytest.raises(ModelError, match=r"something to its logits that this backend does not know"):
        make_backend(model)


def test_entropy_and_the_most_probable_words_are_those_of_plain_logits(world):
    examples = world.make_examples()
    model = world.make_model("Qwen3").eval()
    with torch.no_grad():
        logp = torch.stack([model(input_ids=row[None]).logits[0] for row in examples.tokens]).log_softmax(-1)
    before = torch.cat([logp[:, :1], logp[:, :-1]], dim=1)  # what predicts each token
    entropy = torch.where(examples.trainable, -(before.exp() * before).sum(-1), 0.0)
    top = before.topk(3)
    backend = make_backend(model)
    torch.testing.assert_close(backend.entropy(examples), entropy, rtol=1e-5, atol=1e-5)
    found = backend.topk_logits(examples, 3)
    torch.testing.assert_close(found.logp, top.values * examples.trainable[..., None], rtol=1e-5, atol=1e-5)
    assert torch.equal(found.token_ids, top.indices * examples.trainable[..., None])


def test_the_reference_stays_what_the_policy_was(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Qwen3"))
    reference, first = backend.freeze_reference(), backend.logp(examples)
    backend.forward_backward(examples, loss_for(world, examples))
    backend.optim_step()
    torch.testing.assert_close(reference.logp(examples), first, rtol=0, atol=0)
    assert (backend.logp(examples) - first).abs().max() > 1e-3


def test_a_model_without_weights_is_refused(world):
    with torch.device("meta"), pytest.raises(ModelError, match="without weights: load it by from_pretrained"):
        DTensorBackend(world.make_model("Llama"), DTensorConfig())


def test_nothing_is_computed_with_weights_that_are_away(world, tmp_path):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Llama"))
    before = backend.logp(examples)
    report = backend.offload(directory=tmp_path)
    assert sum(report.bytes_moved.values()) > 0
    with pytest.raises(RuntimeError, match=r"onload\(\)"):
        backend.logp(examples)
    with pytest.raises(RuntimeError, match=r"onload\(\)"):
        backend.forward_backward(examples, loss_for(world, examples))
    backend.onload()
    torch.testing.assert_close(backend.logp(examples), before, rtol=0, atol=0)


def test_the_metrics_of_a_step_count_its_tokens(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Llama"), sequence_packing=True)
    assert backend.metrics() is None
    backend.forward_backward(examples, loss_for(world, examples))
    norm = backend.optim_step()
    metrics = backend.metrics()
    assert metrics.tokens == metrics.tokens_read == examples.lengths.sum()
    assert metrics.asked_tokens == examples.trainable.sum()
    assert metrics.grad_norm == norm
    assert metrics.model_flops > 0


def test_a_step_without_an_optimizer_says_what_to_call(world):
    backend = DTensorBackend(world.make_model("Llama"), DTensorConfig())
    with pytest.raises(RuntimeError, match="start_training"):
        backend.optim_step()


def test_a_step_without_a_gradient_says_what_to_call(world):
    with pytest.raises(RuntimeError, match="forward_backward"):
        make_backend(world.make_model("Llama")).optim_step()


def test_a_gpu_that_is_not_there_is_refused(world):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="device='cuda' was asked for"):
        make_backend(world.make_model("Llama"), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares the GPU with the CPU, and there is no GPU")
def test_the_gpu_agrees_with_the_cpu(world):
    examples = world.make_examples()
    with torch.no_grad():
        expected = world.plain_logp(world.make_model("Qwen3"), examples)
    backend = make_backend(world.make_model("Qwen3"), device="cuda")
    torch.testing.assert_close(backend.logp(examples), expected, rtol=1e-4, atol=1e-4)
    backend.forward_backward(examples, loss_for(world, examples))
    assert backend.optim_step() > 0


def test_explain_names_the_mesh_and_the_plan(world):
    text = make_backend(world.make_model("Qwen3")).explain()
    assert "1 dp_replicate x 1 dp x 1 ep x 1 cp x 1 tp ranks, without FSDP" in text
    assert "float32" in text


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_bfloat16_model_in_hand_trains_float32_masters(world, precision):
    model = world.make_model("Qwen2", tie_word_embeddings=True).bfloat16()
    backend = make_backend(model, lr=1e-6, precision=precision)
    before = {name: full(each.detach()).clone() for name, each in backend.model.named_parameters()}
    examples = world.make_examples()
    for _ in range(10):
        backend.forward_backward(examples, loss_for(world, examples))
        backend.optim_step()
    after = dict(backend.model.named_parameters())
    moved = sum(int((full(after[name]) != each).sum()) for name, each in before.items())
    assert {each.dtype for each in after.values()} == {torch.float32}
    assert moved > 0.9 * sum(each.numel() for each in before.values())
    assert {each.dtype for state in backend._optimizers.each[0].state.values() for each in state.values()} == {
        torch.float32
    }
    assert "trained weights in float32, optimizer state in float32" in backend.explain()


def test_explain_measures_the_dtypes_of_the_parameters(world):
    backend = make_backend(world.make_model("Qwen3"))
    backend.model.get_submodule("lm_head").weight.data = torch.zeros(67, 32, dtype=torch.bfloat16)
    assert "trained weights in float32 (" in backend.explain()
    assert "%) and bfloat16 (" in backend.explain()


def test_a_step_with_nothing_trainable_changes_nothing_and_says_so(world):
    examples = world.make_examples()
    backend = make_backend(world.make_model("Qwen3"))
    masked = dataclasses.replace(examples, trainable=torch.zeros_like(examples.trainable))
    for batch in (examples, masked):
        before = {name: full(each.detach()).clone() for name, each in backend.model.named_parameters()}
        rate = backend.learning_rate
        backend.forward_backward(batch, functools.partial(world.token_loss, num_tokens=torch.tensor(1)))
        norm = backend.optim_step()
    after = {name: full(each.detach()) for name, each in backend.model.named_parameters()}
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert (norm, backend.version, backend.learning_rate) == (0.0, 1, rate)
    assert backend.metrics().skipped
    # A batch that trains nothing beside one that does leaves the latter's gradient as it is.
    backend.forward_backward(examples, loss_for(world, examples))
    backend.forward_backward(masked, functools.partial(world.token_loss, num_tokens=torch.tensor(1)))
    assert backend.optim_step() > 0
    assert backend.version == 2
    with pytest.raises(RuntimeError, match="there is no gradient to step along"):
        backend.optim_step()


@pytest.mark.parametrize("family", ["GPT2", "OPT"])
def test_a_row_past_the_table_of_positions_is_refused_before_the_model_runs(family):
    import transformers

    sizes = {"vocab_size": 67, "max_position_embeddings": 12}
    if family == "GPT2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=67, n_positions=12)
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.OPTConfig(
            hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32, **sizes
        )
        model = transformers.OPTForCausalLM(config)
    backend = DTensorBackend(model, DTensorConfig())
    assert backend.logp(rows_of_length(12)).shape == (2, 12)
    with pytest.raises(BatchError, match="row 0 has 13 tokens, and the model has a table of 12 positions"):
        backend.logp(rows_of_length(13))


def rows_of_length(length):
    @dataclasses.dataclass(frozen=True)
    class Rows:
        rows_per_unit: ClassVar[int] = 1
        tokens: torch.Tensor
        lengths: torch.Tensor
        trainable: torch.Tensor

    trainable = torch.ones(2, length, dtype=torch.bool)
    trainable[:, 0] = False
    return Rows(torch.full((2, length), 5), torch.tensor([length, length]), trainable)


@pytest.mark.parametrize("sequence_packing", [False, True])
def test_a_row_with_an_image_token_is_refused_by_name(sequence_packing):
    import transformers

    text = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **text},
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **vision},
        image_token_index=60,
        tie_word_embeddings=False,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    try:
        backend = DTensorBackend(model, DTensorConfig(sequence_packing=sequence_packing))
    except ModelError as error:
        assert sequence_packing, error  # refused as a whole, for another reason  # noqa: PT017
        return
    rows = rows_of_length(9)
    assert backend.logp(rows).isfinite().all()
    rows.tokens[1, 4] = 60
    with pytest.raises(
        BatchError, match=r"row 1: token 4 is 60, the model's image_token_(id|index).*rows of text alone"
    ):
        backend.logp(rows)


def test_dropout_and_router_loss_of_the_model_are_named_as_ignored(world):
    model = world.make_model("Qwen3", attention_dropout=0.5)
    assert "ignored: attention_dropout=0.5 of the model" in make_backend(model).explain()
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
    asking = {**experts, "output_router_logits": True, "router_aux_loss_coef": 0.1}
    assert "ignored: router_aux_loss_coef=0.1" in make_backend(world.make_model("Qwen3Moe", **asking)).explain()
    obeyed = make_backend(world.make_model("Qwen3Moe", **asking), router_aux_loss_coef=0.1)
    assert "ignored" not in obeyed.explain()


def test_gpus_that_stay_idle_are_told_of(world, monkeypatch):
    backend = make_backend(world.make_model("Qwen3"))
    assert "idle" not in backend.explain()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert "this machine has 8 GPUs, which device='cpu' leaves idle" in backend.explain()

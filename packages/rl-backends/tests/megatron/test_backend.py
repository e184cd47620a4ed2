"""Claims about one rank of Megatron: what it computes is what plain Hugging Face and torch compute, and DTensorBackend.

The same claims over ranks, and the figures, are the parity table's (`megatron_parity`).
"""

import functools

import pytest
import torch

from rl_backends import (
    BatchError,
    DTensorBackend,
    DTensorConfig,
    ModelError,
    NonFiniteGradientError,
    OptimizerConfig,
)
from rl_backends.megatron.config import MegatronConfig

ADAMW = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01)


@pytest.fixture
def make_backend(imported):
    """Backends that are closed at the end, all at once in one process."""
    from rl_backends.megatron.backend import MegatronBackend

    made = []

    def make(model, *, optimizer=ADAMW, num_steps=3, temperature=1.0, **config):
        made.append(MegatronBackend(model, MegatronConfig(**config)))
        made[-1].start_training(optimizer, num_steps=num_steps, temperature=temperature)
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    assert not torch.distributed.is_initialized(), "closed backends have left their process group"


def make_model(world, family="Qwen3", **config):
    """Without a word whose embedding Hugging Face does not train."""
    return world.make_model(family, **{"pad_token_id": None, **config})


def loss_for(world, examples):
    return functools.partial(world.token_loss, num_tokens=examples.trainable.sum())


def whole(backend, of=lambda parameter: parameter.detach()):
    """Every tensor of the Hugging Face model, from what this one rank holds."""
    tensors = {}
    for held in backend.shards():
        tensor = tensors.setdefault(held.name, torch.full(held.shape, torch.nan))
        for box in held.boxes():
            box.of_whole(tensor).copy_(box.of_local(held.view(of(held.parameter))))
    return tensors


def gradients(backend):
    return whole(backend, of=lambda parameter: parameter.main_grad)


def rows_of(examples, *rows):
    """Some of the rows, in this order."""
    return type(examples)(**{name: getattr(examples, name)[list(rows)] for name in vars(examples)})


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("packed", [False, True])
def test_logp_is_the_log_softmax_of_plain_logits(world, make_backend, temperature, packed):
    examples = world.make_examples()
    with torch.no_grad():
        expected = world.plain_logp(make_model(world).eval(), examples, temperature=temperature)
    backend = make_backend(make_model(world), temperature=temperature, sequence_packing=packed)
    logp = backend.logp(examples)
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)
    assert (logp[~examples.trainable] == 0).all()


@pytest.mark.parametrize(
    "cut",
    [
        {"micro_batch_size": 1},
        {"micro_batch_size": 2},
        {"micro_batch_tokens": 30},
        {"sequence_packing": True},
        {"sequence_packing": True, "micro_batch_size": 2},
        {"sequence_packing": True, "micro_batch_tokens": 30},
    ],
    ids=str,
)
def test_the_gradient_does_not_depend_on_the_cut(world, make_backend, cut):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    expected, _ = world.plain_steps(make_model(world), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(make_model(world), **cut)
    sums = backend.forward_backward(examples, loss)
    torch.testing.assert_close(gradients(backend), expected, rtol=1e-4, atol=1e-6)
    assert sums["tokens"].item() == examples.trainable.sum().item()


def test_a_row_means_the_same_wherever_it_stands(world, make_backend):
    examples = world.make_examples()
    order = (4, 1, 5, 0, 3, 2)
    backend = make_backend(make_model(world), sequence_packing=True, micro_batch_size=2)
    torch.testing.assert_close(
        backend.logp(rows_of(examples, *order)), backend.logp(examples)[list(order)], rtol=1e-5, atol=1e-5
    )


def test_two_calls_before_a_step_are_one_call_with_all_rows(world, make_backend):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    together, apart = make_backend(make_model(world)), make_backend(make_model(world))
    sums = together.forward_backward(examples, loss)
    parts = [apart.forward_backward(rows_of(examples, *rows), loss) for rows in ((0, 1, 2, 3), (4, 5))]
    torch.testing.assert_close(parts[0]["loss"] + parts[1]["loss"], sums["loss"])
    torch.testing.assert_close(gradients(apart), gradients(together), rtol=1e-5, atol=1e-7)
    assert apart.optim_step() == pytest.approx(together.optim_step(), rel=1e-5)
    torch.testing.assert_close(whole(apart), whole(together), rtol=1e-5, atol=1e-6)


def test_three_steps_are_those_of_a_plain_loop(world, make_backend):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    model = make_model(world, "Qwen2", tie_word_embeddings=True)
    _, expected = world.plain_steps(model, examples, loss, steps=3, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(model, micro_batch_size=4)
    for step in range(3):
        assert backend.version == step
        backend.forward_backward(examples, loss)
        backend.optim_step()
    torch.testing.assert_close(whole(backend), expected, rtol=1e-4, atol=1e-5)
    assert backend.version == 3


def test_the_word_that_pads_is_trained_where_hugging_face_trains_it(world, make_backend):
    """The input embedding of `pad_token_id` gets no gradient from what is read there."""
    examples = world.make_examples()
    assert (examples.tokens[examples.trainable] == 0).any()
    loss = loss_for(world, examples)
    model = make_model(world, pad_token_id=0)
    expected, _ = world.plain_steps(model, examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(model)
    backend.forward_backward(examples, loss)
    torch.testing.assert_close(gradients(backend), expected, rtol=1e-4, atol=1e-6)


def test_a_loss_over_pairs_sees_both_rows_of_each(world, make_backend):
    examples = world.make_examples(kind=world.Pairs)
    loss = functools.partial(world.pair_loss, num_tokens=examples.trainable.sum())
    expected, _ = world.plain_steps(make_model(world), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    backend = make_backend(make_model(world), micro_batch_size=2)
    backend.forward_backward(examples, loss)
    torch.testing.assert_close(gradients(backend), expected, rtol=1e-4, atol=1e-6)


def test_a_loss_that_fails_leaves_no_part_of_a_gradient(world, make_backend):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    backend = make_backend(make_model(world, "Llama"), micro_batch_size=2)
    calls = []

    def fails_later(logp, rows):
        calls.append(rows)
        if len(calls) == 2:
            raise ZeroDivisionError("no rewards")
        return loss(logp, rows)

    backend.forward_backward(examples, loss)  # which goes too: a retry must not start from a part
    with pytest.raises(ZeroDivisionError, match="no rewards"):
        backend.forward_backward(examples, fails_later)
    assert all((gradient == 0).all() for gradient in gradients(backend).values())
    with pytest.raises(RuntimeError, match="forward_backward"):
        backend.optim_step()
    backend.forward_backward(examples, loss)
    expected, _ = world.plain_steps(make_model(world, "Llama"), examples, loss, steps=1, lr=1e-2, max_grad_norm=1.0)
    torch.testing.assert_close(gradients(backend), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda logp, rows: (logp.sum().detach(), {}), "no gradient flows"),
        (lambda logp, rows: (logp.sum(), {"reward": logp}), "reduce it to a single number"),
    ],
    ids=["detached", "sum with a shape"],
)
def test_what_a_loss_may_not_return_is_refused_in_words(world, make_backend, loss, words):
    backend = make_backend(make_model(world, "Llama"))
    with pytest.raises((TypeError, ValueError), match=words):
        backend.forward_backward(world.make_examples(), loss)
    assert all((gradient == 0).all() for gradient in gradients(backend).values())


def test_a_loss_sees_torch_as_it_is(world, make_backend):
    examples = world.make_examples()
    seen = {}

    def looks_around(logp, rows):
        seen.update(type=logp.detach().type(), device=torch.zeros(1).device.type, cuda=torch.cuda.is_available())
        with pytest.raises((AssertionError, RuntimeError)):
            torch.zeros(1, device="cuda")
        return loss_for(world, examples)(logp, rows)

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here, and nothing to pretend")
    make_backend(make_model(world, "Llama")).forward_backward(examples, looks_around)
    assert seen == {"type": "torch.FloatTensor", "device": "cpu", "cuda": False}
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_a_gradient_that_is_not_finite_changes_no_weight(world, make_backend):
    examples = world.make_examples()
    backend = make_backend(make_model(world, "Llama"))
    before = whole(backend)
    backend.forward_backward(examples, lambda logp, rows: (logp.sum() * torch.nan, {}))
    with pytest.raises(NonFiniteGradientError, match="gradient norm of step 1 is nan"):
        backend.optim_step()
    torch.testing.assert_close(whole(backend), before, rtol=0, atol=0)
    assert all((gradient == 0).all() for gradient in gradients(backend).values())
    assert backend.version == 0


def test_a_step_that_is_to_be_skipped_is_and_the_next_is_the_first(world, make_backend):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    skips = OptimizerConfig(lr=1e-2, eps=1e-4, on_nonfinite_gradient="skip")
    backend, other = (make_backend(make_model(world), optimizer=skips) for _ in range(2))
    backend.forward_backward(examples, lambda logp, rows: (logp.sum() * torch.inf, {}))
    assert not torch.isfinite(torch.tensor(backend.optim_step()))
    assert backend.version == 0
    for each in (backend, other):
        each.forward_backward(examples, loss)
        each.optim_step()
    torch.testing.assert_close(whole(backend), whole(other), rtol=0, atol=0)
    assert backend.version == 1


def test_the_learning_rate_follows_the_schedule(world, make_backend):
    examples = world.make_examples()
    schedule = OptimizerConfig(lr=1.0, warmup_steps=2, final_lr_ratio=0.5)
    backend = make_backend(make_model(world, "Llama"), optimizer=schedule, num_steps=5)
    rates = []
    for _ in range(5):
        rates.append(backend.learning_rate)
        backend.forward_backward(examples, loss_for(world, examples))
        backend.optim_step()
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5])


def test_dropout_is_off_so_that_trainer_and_engine_are_one_function(world, make_backend):
    examples = world.make_examples()
    backend = make_backend(make_model(world, "Llama", attention_dropout=0.5))
    torch.testing.assert_close(backend.logp(examples), backend.logp(examples), rtol=0, atol=0)
    with torch.no_grad():
        expected = world.plain_logp(make_model(world, "Llama").eval(), examples)
    torch.testing.assert_close(backend.logp(examples), expected, rtol=1e-5, atol=1e-5)


def test_no_tensor_as_large_as_the_logits_is_made(world, make_backend):
    examples = world.make_examples(rows=8, vocabulary=4001)
    backend = make_backend(make_model(world, "Llama", vocab_size=4001))
    largest = Largest()
    with largest:
        backend.forward_backward(examples, loss_for(world, examples))
    assert largest.numel < examples.tokens.numel() * 4001
    assert largest.numel >= 4001 * 32  # it did see the embedding's gradient


class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    """Remembers the largest tensor that any operation returned, buffers of all gradients together left out."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logp_entropy_and_the_most_probable_words_are_those_of_the_other_backend(world, make_backend, temperature):
    examples = world.make_examples()
    other = DTensorBackend(make_model(world), DTensorConfig())
    other.start_training(ADAMW, num_steps=3, temperature=temperature)
    expected = other.logp(examples), other.entropy(examples), other.topk_logits(examples, 3)
    other.close()
    backend = make_backend(make_model(world), temperature=temperature)
    torch.testing.assert_close(backend.logp(examples), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(backend.entropy(examples), expected[1], rtol=1e-5, atol=1e-5)
    found = backend.topk_logits(examples, 3)
    torch.testing.assert_close(found.logp, expected[2].logp, rtol=1e-5, atol=1e-5)
    assert torch.equal(found.token_ids, expected[2].token_ids)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("output", ["logp_and_entropy", "logp_of_token_ids"])
def test_the_gradients_through_entropies_and_given_words_are_those_of_the_other_backend(
    world, make_backend, output, packed
):
    examples = world.asking(world.make_examples())
    loss = functools.partial(world.words_loss, num_tokens=examples.trainable.sum())
    other = DTensorBackend(make_model(world), DTensorConfig())
    expected_sums = other.forward_backward(examples, loss, output=output)
    expected = {name: parameter.grad for name, parameter in other.model.named_parameters()}
    other.close()
    backend = make_backend(make_model(world), micro_batch_size=4, sequence_packing=packed)
    sums = backend.forward_backward(examples, loss, output=output)
    torch.testing.assert_close(gradients(backend), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums, expected_sums, rtol=1e-5, atol=1e-5)


def test_words_that_the_model_does_not_know_are_refused(world, make_backend):
    examples = world.asking(world.make_examples(), vocabulary=90)
    with pytest.raises(BatchError, match=r"have the id \d+, and the model's ids are from 0 to 66"):
        make_backend(make_model(world)).forward_backward(
            examples, loss_for(world, examples), output="logp_of_token_ids"
        )


def test_the_reference_stays_what_the_policy_was(world, make_backend):
    examples = world.make_examples()
    backend = make_backend(make_model(world))
    reference, first = backend.freeze_reference(), backend.logp(examples)
    backend.forward_backward(examples, loss_for(world, examples))
    backend.optim_step()
    torch.testing.assert_close(reference.logp(examples), first, rtol=0, atol=0)
    assert (backend.logp(examples) - first).abs().max() > 1e-3


def test_bfloat16_computes_in_bfloat16_and_steps_in_float32(world, make_backend):
    """A step too small for bfloat16 is not lost: many of them together move the weights."""
    examples = world.make_examples()
    tiny = OptimizerConfig(lr=1e-5, eps=1e-8, schedule="constant")
    backend = make_backend(make_model(world, "Llama"), optimizer=tiny, num_steps=20, precision="bfloat16")
    with torch.no_grad():
        expected = world.plain_logp(make_model(world, "Llama"), examples)
    assert 0 < (backend.logp(examples) - expected).abs().max() < 0.1
    assert {tensor.dtype for tensor in (held.local for held in backend.shards())} == {torch.bfloat16}
    before = {held.name: held.local.clone() for held in backend.shards()}
    name = "model.layers.0.mlp.gate_proj.weight"
    changed = []
    for _ in range(20):
        backend.forward_backward(examples, loss_for(world, examples))
        backend.optim_step()
        now = next(held.local for held in backend.shards() if held.name == name)
        changed.append((now != before[name]).float().mean().item())
    assert changed[0] < 0.2
    assert changed[-1] > 2 * changed[0] + 0.2


def test_what_is_saved_is_loaded_by_transformers_bit_for_bit(world, make_backend, tmp_path):
    import transformers

    backend = make_backend(make_model(world, "Llama"))
    backend.save_pretrained(tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = dict(make_model(world, "Llama").named_parameters())
    torch.testing.assert_close(dict(loaded.named_parameters()), expected, rtol=0, atol=0)
    with pytest.raises(FileExistsError):
        backend.save_pretrained(tmp_path / "model")


def test_from_pretrained_is_the_model_of_the_folder(world, imported, tmp_path):
    from rl_backends.megatron.backend import MegatronBackend

    examples = world.make_examples()
    model = make_model(world)
    model.save_pretrained(tmp_path / "model")
    backend = MegatronBackend.from_pretrained(str(tmp_path / "model"), MegatronConfig())
    found, logp = whole(backend), backend.logp(examples)
    assert f"weights from the safetensors files of {tmp_path / 'model'}" in backend.explain()
    backend.close()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]  # nothing was converted
    torch.testing.assert_close(found, dict(model.state_dict()), rtol=0, atol=0)
    with torch.no_grad():
        expected = world.plain_logp(model.eval(), examples)
    torch.testing.assert_close(logp, expected, rtol=1e-5, atol=1e-5)


def test_a_process_has_one_layout_at_a_time_and_the_next_when_all_are_closed(world, make_backend):
    backend = make_backend(make_model(world, "Llama"))
    reference = backend.freeze_reference()
    assert torch.distributed.is_initialized()
    with pytest.raises(ValueError, match="ranks"):
        make_backend(make_model(world, "Llama"), tensor_model_parallel_size=2)
    reference.logp(world.make_examples())


def test_a_process_that_had_no_group_has_none_afterwards(world, imported):
    from rl_backends.megatron.backend import MegatronBackend

    for _ in range(2):
        backend = MegatronBackend(make_model(world, "Llama"), MegatronConfig())
        backend.freeze_reference()
        backend.close()
        assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("family", ["Gemma2", "Phi3"])
def test_an_architecture_that_is_not_mapped_is_refused_by_name(world, make_backend, family):
    with pytest.raises(ModelError, match=family.lower()):
        make_backend(world.make_model(family))
    assert not torch.distributed.is_initialized()


def test_a_model_without_weights_is_refused(world, make_backend):
    with torch.device("meta"), pytest.raises(ModelError, match="without weights: load it by from_pretrained"):
        make_backend(make_model(world, "Llama"))


def test_the_metrics_of_a_step_count_its_tokens(world, make_backend):
    examples = world.make_examples()
    backend = make_backend(make_model(world, "Llama"), sequence_packing=True)
    assert backend.metrics() is None
    backend.forward_backward(examples, loss_for(world, examples))
    norm = backend.optim_step()
    metrics = backend.metrics()
    assert metrics.tokens == metrics.tokens_read == examples.lengths.sum()
    assert metrics.asked_tokens == examples.trainable.sum()
    assert metrics.grad_norm == norm
    assert metrics.model_flops > 0


def test_a_step_without_an_optimizer_says_what_to_call(world, imported):
    from rl_backends.megatron.backend import MegatronBackend

    backend = MegatronBackend(make_model(world, "Llama"), MegatronConfig())
    try:
        with pytest.raises(RuntimeError, match="start_training"):
            backend.optim_step()
    finally:
        backend.close()


def test_a_step_without_a_gradient_says_what_to_call(world, make_backend):
    with pytest.raises(RuntimeError, match="forward_backward"):
        make_backend(make_model(world, "Llama")).optim_step()


@pytest.mark.parametrize("output", ["value", "score"])
def test_a_language_model_has_no_value_or_reward_head(world, make_backend, output):
    examples = world.make_examples()
    with pytest.raises(ModelError, match="has no head `score`"):
        make_backend(make_model(world, "Llama")).forward_backward(examples, loss_for(world, examples), output=output)


def test_a_gpu_that_is_not_there_is_refused(world, make_backend):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(ValueError, match="device='cuda' was asked for"):
        make_backend(make_model(world, "Llama"), device="cuda")


def test_explain_names_the_layout(world, make_backend):
    text = make_backend(make_model(world)).explain()
    for words in ("megatron", "float32"):
        assert words in text.lower()


def test_overlapped_reduction_takes_one_call_a_step(world, make_backend):
    examples = world.make_examples()
    loss = loss_for(world, examples)
    backend = make_backend(make_model(world), overlap_grad_reduce=True)
    for _ in range(2):
        backend.forward_backward(examples, loss)
        with pytest.raises(RuntimeError, match="overlap_grad_reduce=True sums gradients over ranks during backward"):
            backend.forward_backward(examples, loss)
        with pytest.raises(RuntimeError, match="there is no gradient"):
            backend.optim_step()
        backend.forward_backward(examples, loss)
        backend.optim_step()
    plain = make_backend(make_model(world))
    for _ in range(2):
        plain.forward_backward(examples, loss)
        plain.optim_step()
    torch.testing.assert_close(whole(backend), whole(plain), rtol=0, atol=0)


def test_explain_says_whose_attention_and_mlp_compute(world, make_backend):
    assert (
        "attention torch's scaled_dot_product_attention, MLP torch's SwiGLU, no fusions"
        in make_backend(make_model(world)).explain()
    )
    fused = make_backend(world.make_model("Qwen3Moe"), bias_dropout_fusion=True).explain()
    assert "MLP experts one after the other, with bias_dropout_fusion" in fused

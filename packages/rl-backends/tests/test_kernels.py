"""Claims about kernels: a choice runs and nothing else does, it equals the plain truth, or it is refused by name."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_backends import DTensorBackend, DTensorConfig, Kernel, KernelsConfig, OptimizerConfig, register_kernel
from rl_backends.kernels import table
from rl_backends.kernels.layers import replace_mlps, replace_norms, replace_rope
from rl_backends.packing import attention
from rl_backends.packing.attention import packed_attention, padded_attention


def plainly(query, key, value, *, scale, window, softcap, sinks):
    """All scores of rows [n, heads, L, features], as transformers' eager attention makes them."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if window is not None:
        seen = seen.triu(1 - window)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(len(scores), -1, length, 1)], -1)
    return scores.softmax(-1)[..., :length] @ value


def heads(*, rows=3, length=40, features=(8, 6), seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(rows, 4, length, features[0]), (rows, 2, length, features[0]), (rows, 2, length, features[1]), (4,)]
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


def causal():
    module = torch.nn.Identity()
    module.is_causal = True
    return module


@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_blocks_of_queries_are_the_plain_softmax_in_values_and_gradients(monkeypatch, window, softcap, with_sinks):
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2000)  # several blocks
    query, key, value, sinks = heads()
    inputs = [query, key, value, sinks] if with_sinks else [query, key, value]
    sinks = sinks if with_sinks else None
    weight = torch.randn(3, 4, 40, 6)
    wanted = plainly(query, key, value, scale=0.3, window=window, softcap=softcap, sinks=sinks)
    found = attention._Blockwise.apply(query, key, value, sinks, 0.3, window, softcap)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    gradients = [torch.autograd.grad((out * weight).sum(), inputs) for out in (found, wanted)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=4e-6)


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor):
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return out


def largest_of_a_packed_row(length):
    query, key, value, sinks = (
        torch.randn(shape, requires_grad=True)
        for shape in ((1, 8, length, 16), (1, 8, length, 16), (1, 8, length, 16), (8,))
    )
    starts = torch.tensor([0, length], dtype=torch.int32)
    with Largest() as largest:
        out, _ = packed_attention(
            causal(), query, key, value, None, softcap=3.0, s_aux=sinks, cu_seq_lens_q=starts, max_length_q=length
        )
        out.sum().backward()
    return largest.bytes


def test_sinks_and_capped_scores_take_memory_that_grows_with_the_row_and_not_with_its_square(monkeypatch):
    query = 8 * 2048 * 16 * 4  # 1 MiB; all scores of this row are 128
    assert largest_of_a_packed_row(2048) <= 4 * query
    monkeypatch.setattr(attention, "BLOCK_BYTES", 2**16)  # as if rows were long: a block is 16 queries
    for length in (512, 1024):
        assert largest_of_a_packed_row(length) == 16 * length * 8 * 4


UNCOMPILED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@UNCOMPILED
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("with_sinks", [True, False])
def test_flex_is_told_the_same_mask_cap_and_sinks(monkeypatch, window, softcap, with_sinks):
    """Uncompiled, forward only: torch's flex_attention has no backward on a CPU. The GPU test has both."""
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "flex", flex_attention)
    lengths = (9, 9, 3, 1, 12, 12, 5)
    query, key, value, sinks = (each.detach() for each in heads(rows=1, length=sum(lengths), features=(16, 16)))
    starts = F.pad(torch.tensor(lengths).cumsum(0), (1, 0)).to(torch.int32)
    options = {"softcap": softcap, "s_aux": sinks if with_sinks else None, "sliding_window": window}
    options |= {"cu_seq_lens_q": starts, "max_length_q": 12}
    masks = attention.block_masks(starts, num_tokens=sum(lengths), windows=(0, 5))
    by_rows, _ = packed_attention(causal(), query, key, value, None, **options)
    for given in (None, masks):
        found, _ = packed_attention(causal(), query, key, value, None, kernel="flex", block_masks=given, **options)
        torch.testing.assert_close(found, by_rows, rtol=1e-5, atol=2e-6)


@UNCOMPILED
@pytest.mark.parametrize("kernel", ["sdpa", "flex"])
def test_padded_rows_by_a_kernel_of_ours_equal_the_plain_softmax(monkeypatch, kernel):
    from torch.nn.attention.flex_attention import flex_attention

    monkeypatch.setattr(attention, "flex", flex_attention)
    query, key, value, sinks = (each.detach() for each in heads(features=(16, 16)))
    wanted = plainly(query, key, value, scale=0.25, window=5, softcap=2.0, sinks=sinks)
    found, _ = padded_attention(
        causal(), query, key, value, None, kernel=kernel, softcap=2.0, s_aux=sinks, sliding_window=5
    )
    torch.testing.assert_close(found, wanted.transpose(1, 2), rtol=1e-5, atol=2e-6)


# -- backends ----------------------------------------------------------------------------------------------


def gradients_of(world, model, config, examples):
    """Log-probabilities, gradients and what `explain` says."""
    backend = DTensorBackend(model, config)
    backend.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    logp = backend.logp(examples)
    backend.forward_backward(examples, functools.partial(world.token_loss, num_tokens=examples.trainable.sum()))
    gradients = {name: p.grad.clone() for name, p in backend.model.named_parameters()}
    said = backend.explain()
    backend.close()
    return logp, gradients, said


def plain(world, model, examples):
    import copy

    model = copy.deepcopy(model)
    logp = world.plain_logp(model, examples)
    world.token_loss(logp, examples, num_tokens=examples.trainable.sum())[0].backward()
    return logp.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-5, atol=1e-5)
    scale = max(gradient.norm() for gradient in wanted[1].values())
    for name, gradient in wanted[1].items():
        assert (found[1][name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6 * scale, name


GEMMA = {"sliding_window": 5, "attn_logit_softcapping": 2.0}
GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5, "attn_implementation": "eager"}


@pytest.mark.parametrize(("family", "options"), [("Gemma2", GEMMA), ("GptOss", GPT_OSS), ("Qwen3", {})])
@pytest.mark.parametrize("packing", [True, False])
def test_the_step_of_a_chosen_attention_is_that_of_plain_transformers(world, family, options, packing):
    model, examples = world.make_model(family, **options), world.make_examples()
    wanted = plain(world, model, examples)
    config = DTensorConfig(kernels=KernelsConfig(attention="sdpa"), sequence_packing=packing)
    found = gradients_of(world, model, config, examples)
    assert_same(found, wanted)
    assert "kernel of attention: sdpa, torch's scaled_dot_product_attention, capped scores and sinks" in found[2]


def plain_norm(hidden, weight, eps, offset):
    normed = hidden.float() * torch.rsqrt(hidden.float().square().mean(-1, keepdim=True) + eps)
    return (normed * (offset + weight.float())).to(hidden.dtype)


def plain_rope(query, key, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    halves = [each.chunk(2, dim=-1) for each in (query, key)]
    turned = [torch.cat([-second, first], dim=-1) for first, second in halves]
    return tuple(each * cos + other * sin for each, other in zip((query, key), turned, strict=True))


def plain_mlp(gate, up, activation):
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def counted(op):
    def counting(*args):
        counting.calls += 1
        return op(*args)

    return counting


fake_norm, fake_rope, fake_mlp = map(counted, (plain_norm, plain_rope, plain_mlp))


@pytest.fixture
def fake_kernels(monkeypatch):
    """Plain torch under the names of GPU kernels, in the same table: all that differs is what computes."""
    monkeypatch.setattr(table, "KERNELS", dict(table.KERNELS))
    for part, op in (("norm", fake_norm), ("rope", fake_rope), ("mlp", fake_mlp)):
        op.calls = 0
        register_kernel(Kernel(part=part, name="liger", is_what="a fake of plain torch", devices=("cpu",), op=op))
    return KernelsConfig(norm="liger", rope="liger", mlp="liger")


@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Gemma2", "Gemma3Text", "Mistral"])
def test_kernels_of_norms_rotary_embeddings_and_mlps_run_and_change_nothing(world, fake_kernels, family):
    if family == "Gemma3Text":
        import transformers

        shape = world.make_model("Qwen3").config.to_dict()
        names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")
        names = (*names, "num_attention_heads", "num_key_value_heads")
        text = transformers.Gemma3TextConfig(**{name: shape[name] for name in names}, sliding_window=5)
        model = transformers.Gemma3ForCausalLM(text)
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
    else:
        model = world.make_model(family)
    examples = world.make_examples()
    wanted = plain(world, model.eval(), examples)
    found = gradients_of(world, model, DTensorConfig(kernels=fake_kernels), examples)
    assert_same(found, wanted)
    assert fake_norm.calls
    assert fake_rope.calls
    assert fake_mlp.calls
    for line in (
        "kernel of rope: liger, a fake of plain torch, in 2 attentions",
        "kernel of mlp: liger, a fake of plain torch, in 2 MLPs",
        "kernel of norm: liger, a fake of plain torch, in ",
    ):
        assert line in found[2]


PARTLY_ROTATED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1}


@pytest.mark.parametrize(("family", "norms"), [("Llama", 5), ("Qwen3", 9), ("Mistral", 5), ("Gemma2", 0)])
def test_norms_on_a_cpu_have_the_bits_of_the_models_own_code_in_results_and_gradients(world, family, norms):
    found = before_and_after(world, family, replace_norms, replaced=norms)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def before_and_after(world, family, replace, *, replaced, **fields):
    """Logits and gradients of a model, and of the same with `replaced` modules that `replace` has replaced."""
    models = [world.make_model(family, **fields).eval() for _ in range(2)]
    state = torch.get_rng_state()
    assert replace(models[1], None) == replaced
    assert torch.equal(torch.get_rng_state(), state)
    tokens = world.make_examples().tokens
    found = []
    for model in models:
        logits = model(input_ids=tokens, use_cache=False).logits
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    return found


@pytest.mark.parametrize(("family", "mlps"), [("Llama", 2), ("Qwen3", 2), ("Gemma2", 2), ("Phi3", 0)])
def test_mlps_on_a_cpu_have_the_bits_of_the_models_own_code_in_results_and_gradients(world, family, mlps):
    found = before_and_after(world, family, replace_mlps, replaced=mlps)
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("family", "fields"), [("Llama", {}), ("Qwen3", {}), ("Gemma2", {}), ("Phi3", {}), ("Glm4Moe", PARTLY_ROTATED)]
)
def test_rotary_embeddings_on_a_cpu_are_the_models_own_but_for_a_rounding(world, family, fields):
    found = before_and_after(world, family, replace_rope, replaced=2, **fields)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5 * float(one.abs().max()))


def test_a_frozen_norm_gets_no_gradient_and_hands_on_the_same_one(world):
    own, replaced = (world.make_model("Qwen3").eval() for _ in range(2))
    replace_norms(replaced, None)
    for model in (own, replaced):
        for name, parameter in model.named_parameters():
            parameter.requires_grad = "norm" not in name
        model(input_ids=world.make_examples().tokens, use_cache=False).logits.square().sum().backward()
    for one, other in zip(own.parameters(), replaced.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        assert one.grad is None or torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(7, 7, 7, 3, 1, 1, 20, 5), (40,), (1, 1), (129, 16, 128, 17, 200), (150,)])
def test_packed_rows_on_a_cpu_are_scaled_dot_product_attention_row_by_row(lengths, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, sum(lengths), heads, 8) for heads in (4, 2, 2)]  # as projections give them, heads after tokens
    inputs = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    where = {"cu_seq_lens_q": starts, "max_length_q": max(lengths)}
    packed = packed_attention(causal(), *(each.transpose(1, 2) for each in inputs), None, scaling=0.3, **where)[0]
    alone = []
    for rows in zip(*(each.split(lengths, dim=1) for each in inputs), strict=True):
        heads_first = [each.transpose(1, 2) for each in rows]
        row = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.3, enable_gqa=True)
        alone.append(row.transpose(1, 2))
    alone = torch.cat(alone, dim=1)
    weight = torch.randn(alone.shape, generator=generator).to(dtype)
    found, wanted = ([each, *torch.autograd.grad((each * weight).sum(), inputs)] for each in (packed, alone))
    largest = max(float(other.detach().abs().max()) for other in wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == dtype
        apart = float((one - other).detach().abs().max()) / largest
        assert apart <= {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 0.02}[dtype]


def test_another_model_of_the_process_keeps_its_own_code(world, fake_kernels):
    DTensorBackend(world.make_model("Llama"), DTensorConfig(kernels=fake_kernels)).close()
    fake_norm.calls = fake_rope.calls = fake_mlp.calls = 0
    other = world.make_model("Llama")
    other(input_ids=torch.ones(1, 4, dtype=torch.int64))
    assert [op.calls for op in (fake_norm, fake_rope, fake_mlp)] == [0, 0, 0]


def test_the_chunk_size_of_the_loss_changes_memory_and_no_number(world):
    model, examples = world.make_model("Llama", vocab_size=4096), world.make_examples(rows=64)
    wanted = plain(world, model, examples)
    found = gradients_of(world, model, DTensorConfig(kernels=KernelsConfig(loss_chunk_size=7)), examples)
    assert_same(found, wanted)
    assert "kernel of the loss: torch, logits in chunks: 7 tokens" in found[2]


def test_an_odd_module_that_calls_itself_a_norm_is_refused_and_nothing_has_changed(world, fake_kernels):
    class OddRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.variance_epsilon = torch.nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + self.variance_epsilon) * self.weight

    model = world.make_model("Llama")
    model.model.norm = OddRMSNorm()
    with pytest.raises(ValueError, match=r"model.norm \(OddRMSNorm\) is not x / rms\(x\) \* weight"):
        DTensorBackend(model, DTensorConfig(kernels=fake_kernels))


# -- refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernels", "others", "words"),
    [
        ({"attention": "flex"}, {}, r"kernels.attention='flex' cannot be used: it runs on cuda, not on a CPU.*'auto'"),
        (
            {"attention": "varlen"},
            {},
            "it runs on cuda, not on a CPU; it computes in bfloat16, not in float32; it reads",
        ),
        ({"attention": "flash"}, {"device": "cuda", "precision": "bfloat16"}, "it reads packed rows"),
        ({"attention": "flex"}, {"context_parallel_size": 2}, "context parallelism gathers keys"),
        ({"loss": "liger"}, {}, "kernels.loss='liger' cannot be used: it runs on cuda, not on a CPU; choose 'torch'"),
        ({"norm": "liger"}, {}, "kernels.norm='liger' cannot be used: it runs on cuda"),
        ({"mlp": "hub"}, {}, "kernels.mlp='hub': there is no such kernel; choose 'torch' or 'liger', or add one"),
        ({"float8": "rowwise"}, {}, r"it runs on cuda, not on a CPU; choose None, or float8_emulate=True"),
        (
            {"float8": "rowwise", "float8_emulate": True},
            {"tensor_parallel_size": 2},
            "do not know the shards of tensor_parallel_size",
        ),
    ],
)
def test_what_the_configuration_rules_out_is_refused_when_it_is_made(kernels, others, words):
    with pytest.raises(ValueError, match=words):
        DTensorConfig(kernels=KernelsConfig(**kernels), **others)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss_chunk_size": 0}, "kernels.loss_chunk_size=0 must be >= 1"),
        ({"loss": "liger", "loss_chunk_size": 5}, "has no effect on kernels.loss='liger'"),
        ({"float8_emulate": True}, "needs kernels.float8"),
    ],
)
def test_a_choice_that_is_none_is_refused_when_it_is_made(fields, words):
    with pytest.raises(ValueError, match=words):
        KernelsConfig(**fields)


def test_a_missing_package_is_refused_with_the_command_that_installs_it(world, monkeypatch):
    monkeypatch.setattr(table, "KERNELS", dict(table.KERNELS))
    needs = dataclasses.replace(
        table.KERNELS["norm", "liger"], devices=("cpu",), packages=(("no_such_module", "pip install it"),)
    )
    register_kernel(needs)
    with pytest.raises(
        ValueError, match=r"kernels.norm='liger' cannot be used: it needs no_such_module, .*pip install"
    ):
        DTensorBackend(world.make_model("Llama"), DTensorConfig(kernels=KernelsConfig(norm="liger")))


def on_gpu(**fields):
    return DTensorConfig(device="cuda", sequence_packing=True, **fields)


@pytest.mark.parametrize(
    ("family", "options", "precision", "chosen"),
    [
        ("Qwen3", {"head_dim": 64}, "bfloat16", "varlen, torch's variable-length flash attention"),
        ("Qwen3", {"head_dim": 64}, "float32", "flex, .*; not varlen: computing in float32"),
        (
            "Qwen3",
            {"head_dim": 512},
            "bfloat16",
            "flex, .*; not varlen: heads must be of a multiple of 8 up to 256, and are 512",
        ),
        ("Gemma2", {**GEMMA, "head_dim": 64}, "bfloat16", "flex, .*; not varlen: it does not cap scores"),
        ("GptOss", {**GPT_OSS, "head_dim": 64}, "bfloat16", "flex, .*; not varlen: it has no attention sinks"),
        ("Qwen3", {"head_dim": 8}, "float32", "sdpa, .*not flex: heads must be of 16 at least"),
    ],
)
def test_auto_says_what_runs_on_a_gpu_and_why(world, monkeypatch, family, options, precision, chosen):
    """The choice itself needs no GPU; triton is made to be importable."""
    import re
    import sys

    monkeypatch.setitem(sys.modules, "triton", sys)
    model = world.make_model(family, **options)
    _, said = table._attention_of(model, on_gpu(precision=precision))
    assert re.match(chosen, said), said


# -- float8, compiled layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_emulated_float8_linears_round_as_8_bits_do_and_leave_the_head_alone(world, recipe):
    pytest.importorskip("torchao.float8")
    model, examples = world.make_model("Qwen3", intermediate_size=64), world.make_examples()
    logp, gradients = plain(world, model, examples)
    config = DTensorConfig(kernels=KernelsConfig(float8=recipe, float8_emulate=True))
    found = gradients_of(world, model, config, examples)
    assert f"torchao's float8 {recipe}, emulated in 14; torch in 1 others (head" in found[2]
    difference = (found[0] - logp).abs().max() / logp.abs().max()
    assert 1e-5 < difference < 0.2  # it is not float32, and it is near
    for name, gradient in gradients.items():
        assert (found[1][name] - gradient).norm() <= 0.35 * gradient.norm() + 1e-3, name


@pytest.fixture
def traced_only(monkeypatch):
    """Graphs and their gradients, without generated code, which takes a minute."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("traced_only")
def test_layers_compile_without_a_graph_break_also_with_replaced_kernels(world, fake_kernels):
    import torch._dynamo

    for part, op in (("norm", plain_norm), ("rope", plain_rope), ("mlp", plain_mlp)):  # that do not count their calls
        register_kernel(Kernel(part=part, name="liger", is_what="a fake", devices=("cpu",), op=op))

    examples = world.make_examples()
    wanted = plain(world, world.make_model("Llama"), examples)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = DTensorConfig(kernels=fake_kernels, compile=True)
    found = gradients_of(world, world.make_model("Llama"), config, examples)
    assert_same(found, wanted)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("traced_only")
def test_packs_of_other_rows_compile_nothing_anew(world):
    import torch._dynamo

    backend = DTensorBackend(
        world.make_model("Llama"), DTensorConfig(sequence_packing=True, micro_batch_tokens=64, compile=True)
    )
    backend.start_training(OptimizerConfig(lr=1e-4), num_steps=6)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = []
    for rows in (6, 4, 7, 5):
        examples = world.make_examples(rows=rows, seed=rows)
        backend.forward_backward(examples, lambda logp, rows: (-(logp * rows.trainable).sum(), {}))
        backend.optim_step()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    backend.close()
    assert compiled[0] > 0
    assert compiled[1:] == [compiled[1]] * 3, "sizes may become symbols once, with the second pack"


def test_packs_of_other_rows_compile_nothing_anew_on_two_ranks_of_one_row(start_program, tmp_path):
    program, logs = (
        Path(__file__).parent / "programs" / "compiled_packs.py",
        [tmp_path / f"{each}.log" for each in "01"],
    )
    ranks = [start_program(program, {"rank": rank, "folder": str(tmp_path)}, log=logs[rank]) for rank in range(2)]
    try:
        codes = [rank.wait(300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    for rank in range(2):
        compiled = json.loads((tmp_path / f"{rank}.json").read_text())
        assert compiled[0] > 0
        assert compiled[1:] == [compiled[1]] * 3


def test_the_command_holds_each_choice_against_plain_transformers_and_says_what_is_refused(monkeypatch, capsys):
    import json

    from rl_backends.__main__ import main
    from rl_backends.commands import verify

    choices = dict(verify._choices())
    assert {"compile, padded rows", "attention=flex, packed rows", "loss=verl", "float8=rowwise, emulated"} <= set(
        choices
    )
    some = ("loss_chunk_size=3", "attention=flex, packed rows")
    monkeypatch.setattr(verify, "_choices", lambda: [(name, choices[name]) for name in some])
    assert main(["verify", "qwen3", "--each-kernel", "--json"]) == 0
    held, refused = json.loads(capsys.readouterr().out.splitlines()[-1])["cells"]
    assert held["holds"]
    assert held["tokens_per_s"] > 0
    assert {check["name"] for check in held["checks"]} == {"log-probabilities", "gradients"}
    assert refused["holds"] is None
    assert "it runs on cuda, not on a CPU" in refused["refused"]
    monkeypatch.setattr(verify, "TOLERANCES", {"float32": 0.0})
    assert main(["verify", "qwen3", "--each-kernel"]) == 1

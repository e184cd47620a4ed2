"""Claims about one NVIDIA GPU: a backend there equals the plain model, leaves and comes back, and tells its memory.

    pytest -m gpu packages/rl-backends

A small model in bfloat16 and float32, a few steps each: minutes, most of which is the start of CUDA and torch.compile.
"""

import functools
import importlib.util
import inspect
import json
import time

import pytest
import torch
from safetensors.torch import load_file

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig, find_latest, predict

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU, and torch sees none"),
]

OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.01, max_grad_norm=1.0)
BIG = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "head_dim": 64, "num_attention_heads": 8}
RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
PRECISIONS = ["float32", "bfloat16"]


def on_gpu(model, **options):
    """A backend that trains: under FSDP2 in bfloat16, or offloaded; in float32 one rank has nothing to gather."""
    if RELEASE < (2, 13) and (options.get("precision") == "bfloat16" or options.get("cpu_offload")):
        pytest.skip(
            f"FSDPModule.reset_iter_state, by which a backend under FSDP2 forgets a pass, came with torch 2.13, and "
            f"this is {torch.__version__}"
        )
    backend = DTensorBackend(model, DTensorConfig(device="cuda", **options))
    backend.start_training(OPTIMIZER, num_steps=20)
    return backend


def take_steps(world, backend, steps, *, examples=None):
    examples = world.make_examples() if examples is None else examples
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    sums = []
    for _ in range(steps):
        sums.append(float(backend.forward_backward(examples, loss)["loss"]))
        backend.optim_step()
    return sums


def weights_of(backend):
    return {name: tensor.full_tensor().cpu() if hasattr(tensor, "full_tensor") else tensor.detach().cpu().clone()
            for name, tensor in backend.model.named_parameters()}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_matmuls():
    """float32 means float32: no TF32 in matrix products."""
    torch.set_float32_matmul_precision("highest")
    torch.cuda.empty_cache()


# -- Parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"sequence_packing": True}, {"cpu_offload": True}, {"compile": True}])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_logp_gradients_and_steps_are_those_of_the_plain_model(world, family, options):
    if "compile" in options and importlib.util.find_spec("triton") is None:
        pytest.skip("torch.compile for a GPU needs triton, which is not installed")
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    plain = world.make_model(family)
    expected = world.plain_logp(plain, examples)
    _, stepped = world.plain_steps(plain, examples, loss, steps=3, lr=1e-2, max_grad_norm=1.0)
    backend = on_gpu(world.make_model(family), **options)
    torch.testing.assert_close(backend.logp(examples).cpu(), expected.detach(), rtol=1e-5, atol=1e-5)
    take_steps(world, backend, 3, examples=examples)
    torch.testing.assert_close(weights_of(backend), stepped, rtol=1e-4, atol=1e-4)
    backend.close()


def test_packed_rows_in_bfloat16_go_through_the_kernel_for_ragged_rows(world):
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason="packs rows on a GPU; torch lacks it")
    if "enable_gqa" not in inspect.signature(varlen.varlen_attn).parameters:
        pytest.skip(f"varlen_attn of torch {torch.__version__} has no enable_gqa")
    shape = {**BIG, "num_key_value_heads": 4}
    examples = world.make_examples(rows=16, width=60)
    expected = world.plain_logp(world.make_model("Llama", **shape), examples).detach()
    padded = on_gpu(world.make_model("Llama", **shape), precision="bfloat16")
    error_padded = (padded.logp(examples).cpu() - expected).abs().mean()
    padded.close()
    packed = on_gpu(world.make_model("Llama", **shape), precision="bfloat16", sequence_packing=True)
    error_packed = (packed.logp(examples).cpu() - expected).abs().mean()
    packed.close()
    assert error_packed < 1.5 * error_padded + 1e-3  # packing adds no error of its own to that of bfloat16


# -- Offload --------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"precision": "bfloat16"}], ids=["plain storages", "FSDP2's storages"])
def test_offload_gives_the_memory_back_and_training_goes_on_bit_for_bit(world, options):
    shape = {**BIG, "num_key_value_heads": 4}
    whole, moved = (on_gpu(world.make_model("Llama", **shape), **options) for _ in range(2))
    assert whole.model is not moved.model
    for backend in (whole, moved):
        take_steps(world, backend, 2)
    for _ in range(2):  # the second time into the memory of the first
        before = torch.cuda.memory_allocated()
        left = moved.offload()
        assert sum(left.bytes_moved.values()) > 0
        assert torch.cuda.memory_allocated() <= before - 0.95 * sum(left.bytes_moved.values())
        with pytest.raises(RuntimeError, match="call onload"):
            moved.logp(world.make_examples())
        moved.onload()
    for backend in (whole, moved):
        take_steps(world, backend, 1)
    torch.testing.assert_close(weights_of(moved), weights_of(whole), rtol=0, atol=0)
    moved.close()
    whole.close()


def test_an_offloaded_reference_is_in_pinned_memory_and_reads_the_same(world):
    backend = on_gpu(world.make_model("Llama"), precision="bfloat16")
    examples = world.make_examples()
    near, far = backend.freeze_reference(), backend.freeze_reference(offload=True)
    expected = near.logp(examples)
    take_steps(world, backend, 1)
    torch.testing.assert_close(far.logp(examples), expected, rtol=1e-6, atol=1e-6)
    parameters = list(far._model.model.parameters())
    assert all(p.device.type == "cpu" and p.to_local().is_pinned() for p in parameters)
    backend.close()


# -- Checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_save_while_training_goes_on_has_the_weights_of_its_moment_in_pinned_memory(world, tmp_path, precision):
    from rl_backends.checkpoints import saving
    from rl_backends.checkpoints.saving import release_staging_buffers

    shape = {**BIG, "num_key_value_heads": 4}
    backend = on_gpu(world.make_model("Llama", **shape), precision=precision)
    take_steps(world, backend, 1)
    for step in (1, 2):
        moment = weights_of(backend)
        write = backend.save_checkpoint(tmp_path / f"step-{step}", asynchronous=True)
        take_steps(world, backend, 2)  # queued behind the copies, while they may still run
        write.wait()
        chunks = saving._buffers._chunks
        assert all(chunk.is_pinned() for chunk in chunks)
        addresses = [chunk.data_ptr() for chunk in chunks] if step == 1 else addresses
        assert [chunk.data_ptr() for chunk in chunks] == addresses  # kept for the next save
    again = on_gpu(world.make_model("Llama", seed=1, **shape), precision=precision)
    again.load_checkpoint(find_latest(tmp_path))
    torch.testing.assert_close(weights_of(again), moment, rtol=0, atol=0)
    first = take_steps(world, again, 2), weights_of(again)
    torch.testing.assert_close(first[1], weights_of(backend), rtol=1e-5, atol=1e-5)
    release_staging_buffers()
    assert not saving._buffers._chunks
    again.close()
    backend.close()


def test_a_checkpoint_of_the_gpu_is_loaded_on_the_cpu(world, tmp_path):
    backend = on_gpu(world.make_model("Qwen3"))
    take_steps(world, backend, 2)
    backend.save_checkpoint(tmp_path / "step-2")
    moment = weights_of(backend)
    backend.close()
    on_cpu = DTensorBackend(world.make_model("Qwen3", seed=1), DTensorConfig())
    on_cpu.start_training(OPTIMIZER, num_steps=20)
    state = on_cpu.load_checkpoint(tmp_path / "step-2")
    assert (state.version, state.rng_restored) == (2, False)
    torch.testing.assert_close(weights_of(on_cpu), moment, rtol=0, atol=0)
    on_cpu.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_exported_folder_has_the_weights(world, tmp_path, precision):
    backend = on_gpu(world.make_model("Llama"), precision=precision)
    take_steps(world, backend, 1)
    backend.save_pretrained(tmp_path / "model", dtype=None)
    found = load_file(tmp_path / "model" / "model.safetensors")
    torch.testing.assert_close(found, weights_of(backend), rtol=0, atol=0)
    backend.close()


# -- Memory and speed -----------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_peak_is_that_of_the_step_and_not_of_an_earlier_one(world, precision):
    shape = {**BIG, "num_key_value_heads": 4, "max_position_embeddings": 2048}
    backend = on_gpu(world.make_model("Llama", **shape), precision=precision, micro_batch_size=8)
    peaks = []
    for width in (32, 1024, 32):
        take_steps(world, backend, 1, examples=world.make_examples(rows=8, width=width))
        peaks.append(backend.metrics().peak_allocated_bytes)
    assert peaks[1] > 1.2 * peaks[0]
    assert peaks[2] < 1.05 * peaks[0] + 2**20
    assert backend.metrics().peak_reserved_bytes >= peaks[2]
    backend.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_predicted_peak_is_the_measured_one(world, precision):
    shape = {**BIG, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024}
    config = DTensorConfig(device="cuda", precision=precision, micro_batch_size=4)
    rows, length = 8, 512
    predicted = predict(world.make_model("Llama", **shape), config, world_size=1, optimizer=OPTIMIZER, rows=rows,
                        length=length)  # fmt: skip
    before = torch.cuda.memory_allocated()
    backend = on_gpu(world.make_model("Llama", **shape), precision=precision, micro_batch_size=4)
    tokens = torch.randint(0, 4096, (rows, length))
    full = {"tokens": tokens, "lengths": torch.full((rows,), length), "weight": torch.ones(rows)}
    examples = world.Examples(**full, trainable=(torch.arange(length) > 0).expand(rows, length))
    take_steps(world, backend, 2, examples=examples)
    measured = backend.metrics().peak_allocated_bytes - before
    print(json.dumps({"predicted": predicted.peak.num_bytes, "measured": measured}))
    assert 0.9 < measured / predicted.peak.num_bytes < 1.15  # besides kernels' workspace
    backend.close()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mfu_is_flops_over_the_seconds_of_the_device_and_its_peak(world, precision):
    shape = {**BIG, "num_key_value_heads": 4, "vocab_size": 4096, "max_position_embeddings": 1024}
    backend = on_gpu(world.make_model("Llama", **shape), precision=precision, micro_batch_size=16,
                     peak_flops_per_s=1e15)  # fmt: skip
    tokens = torch.randint(0, 4096, (32, 512))
    full = {"tokens": tokens, "lengths": torch.full((32,), 512), "weight": torch.ones(32)}
    examples = world.Examples(**full, trainable=(torch.arange(512) > 0).expand(32, 512))
    take_steps(world, backend, 2, examples=examples)
    torch.cuda.synchronize()
    start = time.perf_counter()
    take_steps(world, backend, 1, examples=examples)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    metrics = backend.metrics()
    seconds = metrics.forward_backward_s + metrics.optim_s
    assert 0 < seconds <= elapsed
    assert metrics.mfu == pytest.approx(metrics.model_flops / seconds / 1e15)
    assert 0 < metrics.mfu < 1
    print(f"{metrics.tokens_per_s:,.0f} tokens/s, MFU {metrics.mfu:.1%}")
    backend.close()


# -- Failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_loss_that_raises_leaves_the_next_step_as_if_nothing_had_happened(world, precision):
    whole, failed = (on_gpu(world.make_model("Llama"), precision=precision) for _ in range(2))

    def refuse(logp, examples):
        raise ArithmeticError("on purpose")

    with pytest.raises(ArithmeticError):
        failed.forward_backward(world.make_examples(), refuse)
    for backend in (whole, failed):
        take_steps(world, backend, 1)
    torch.testing.assert_close(weights_of(failed), weights_of(whole), rtol=0, atol=0)
    failed.close()
    whole.close()

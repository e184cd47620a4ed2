"""Claims about metrics of a step: they follow from the batch and its cut, and mean the same for every cut."""

import contextlib
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_backends.batching.dealing import RowDealing
from rl_backends.batching.microbatches import Microbatch
from rl_backends.errors import NonFiniteGradientError
from rl_backends.metrics.flops import AttentionFlops, ModelFlops, TokenFlops
from rl_backends.metrics.memory import memory_by_category
from rl_backends.metrics.step import Pass, StepMeter, work_of

CPU = torch.device("cpu")
FLOPS = ModelFlops(layers=TokenFlops(10.0, 20.0), head=TokenFlops(3.0, 6.0), attention=(AttentionFlops(None, 1.0),))


def meter(**options):
    return StepMeter(FLOPS, **{"device": CPU, "num_ranks": 1, **options})


def cut_by_hand():
    """Two ranks, two microbatches each, the last of them a repetition. Rows of 4, 2, 3 tokens."""
    return [
        [Microbatch(torch.tensor([0]), 4, True), Microbatch(torch.tensor([2]), 3, True)],
        [Microbatch(torch.tensor([1]), 2, True), Microbatch(torch.tensor([1]), 2, False)],
    ]


def test_work_is_what_one_counts_by_hand():
    lengths, asked = torch.tensor([4, 2, 3]), torch.tensor([3, 1, 2])
    one = Pass(cut_by_hand(), lengths, asked)
    work = work_of([one], flops=FLOPS, layout="padded", token_multiple=4)
    assert (work.tokens, work.tokens_read, work.asked_tokens) == (9, 16, 6)
    assert (work.microbatches, work.repeated_microbatches) == (2, 1)
    assert work.padding_share == 1 - 9 / 16
    assert work.model_flops == 9 * 30 + 6 * 9 + 3 * (10 + 3 + 6)
    read = 4 * 30 + 3 * 10  # of one row of 4 tokens, without its head
    assert work.load_balance == pytest.approx(2 * (2 * read + 45) / (3 * read + 54))
    twice = work_of([one, one], flops=FLOPS, layout="padded", token_multiple=4)
    assert twice.load_balance == work.load_balance
    assert (twice.tokens, twice.microbatches) == (18, 4)


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 9), min_size=1, max_size=12),
    rows=st.integers(1, 4),
    ranks=st.integers(1, 4),
    layout=st.sampled_from(["padded", "packed"]),
)
def test_tokens_and_model_flops_do_not_depend_on_the_cut(world, lengths, rows, ranks, layout):
    lengths = torch.tensor(lengths)
    position = torch.arange(9)
    trainable = (position >= 1) & (position < lengths[:, None])
    examples = world.Examples(
        tokens=torch.ones(len(lengths), 9, dtype=torch.int64), lengths=lengths, trainable=trainable, weight=lengths
    )
    cut = RowDealing(rank=0, micro_batch_size=rows, layout=layout, num_ranks=ranks).cut(examples)
    work = work_of([Pass(cut, lengths, lengths - 1)], flops=FLOPS, layout=layout)
    assert work.tokens == int(lengths.sum())
    assert work.asked_tokens == int((lengths - 1).sum())
    assert work.model_flops == float(FLOPS.of_rows(lengths, lengths - 1).sum())
    assert 1.0 <= work.load_balance <= ranks
    assert work.tokens_read >= work.tokens
    if layout == "packed" and work.repeated_microbatches == 0:
        assert work.padding_share == 0.0


def test_a_meter_gives_the_figures_of_a_step(world):
    examples = world.make_examples(rows=4)
    cut = RowDealing(rank=0, micro_batch_size=2, num_ranks=2).cut(examples)
    measured = meter(num_ranks=4, peak_flops_per_s=1e9)
    assert measured.metrics() is None
    with measured.forward_backward(examples, cut):
        pass
    with measured.forward_backward(examples, cut):  # gradients are accumulated
        pass
    with measured.optim_step() as outcome:
        outcome.grad_norm = 2.5
        outcome.router = {"load": 1.25}
    metrics = measured.metrics()
    seconds = metrics.forward_backward_s + metrics.optim_s
    assert metrics.tokens == 2 * int(examples.lengths.sum())
    assert metrics.asked_tokens == 2 * int(examples.trainable.sum())
    assert metrics.microbatches == 2
    assert metrics.tokens_per_s == pytest.approx(metrics.tokens / seconds)
    asked = examples.trainable.sum(1)
    assert metrics.model_flops == 2 * float(FLOPS.of_rows(examples.lengths, asked).sum())
    assert metrics.mfu == pytest.approx(metrics.model_flops / seconds / 4 / 1e9)
    assert (metrics.grad_norm, metrics.skipped, metrics.skipped_steps) == (2.5, False, 0)
    assert metrics.mfu is not None
    assert metrics.as_dict()["router/load"] == 1.25


def test_mfu_is_unknown_and_never_guessed(world):
    examples = world.make_examples(rows=2)
    cut = RowDealing(rank=0, num_ranks=1).cut(examples)
    for flops in (FLOPS, None):
        measured = StepMeter(flops, device=CPU, num_ranks=1)
        with measured.forward_backward(examples, cut), measured.optim_step():
            pass
        with measured.forward_backward(examples, cut):
            pass
        with measured.optim_step():
            pass
        metrics = measured.metrics()
        assert metrics.mfu is None
        assert "mfu" not in metrics.as_dict()
    assert metrics.model_flops is None
    assert metrics.load_balance == 1.0
    assert StepMeter(flops, device=CPU, num_ranks=1).metrics() is None


def test_a_failed_pass_is_forgotten_and_a_skipped_step_is_counted(world):
    examples = world.make_examples(rows=2)
    cut = RowDealing(rank=0, num_ranks=1).cut(examples)
    measured = meter()
    with measured.forward_backward(examples, cut):
        pass
    with contextlib.suppress(ZeroDivisionError), measured.forward_backward(examples, cut):
        raise ZeroDivisionError
    with measured.forward_backward(examples, cut):
        pass
    with contextlib.suppress(NonFiniteGradientError), measured.optim_step():
        raise NonFiniteGradientError
    metrics = measured.metrics()
    assert metrics.tokens == int(examples.lengths.sum())
    assert (metrics.skipped, metrics.skipped_steps) == (True, 1)
    with measured.forward_backward(examples, cut):
        pass
    with contextlib.suppress(KeyError), measured.optim_step():
        raise KeyError  # not a step: the gradient is still there
    assert measured.metrics() is metrics
    with measured.optim_step() as outcome:
        outcome.skipped = True
    assert measured.metrics().skipped_steps == 2


def test_asked_tokens_may_be_given(world):
    examples = world.make_examples(rows=3)
    measured = meter()
    cut = RowDealing(rank=0, num_ranks=1).cut(examples)
    with measured.forward_backward(examples, cut, asked=torch.ones(3, dtype=torch.int64)):
        pass
    with measured.optim_step():
        pass
    assert measured.metrics().asked_tokens == 3


def test_memory_counts_storages_once_and_by_category(world):
    model = world.make_model("Qwen2", tie_word_embeddings=True)
    optimizer = torch.optim.AdamW(model.parameters())
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    buffers = 4 * sum(buffer.numel() for buffer in {id(b.untyped_storage()): b for b in model.buffers()}.values())
    empty = memory_by_category(model, [optimizer])
    assert empty.by_device == {"cpu": {"parameters": weights, "buffers": empty.category("buffers")}}
    assert 0 < empty.category("buffers") <= buffers
    model(input_ids=torch.ones(1, 3, dtype=torch.int64)).logits.sum().backward()
    optimizer.step()
    full = memory_by_category(model, [optimizer])
    assert full.category("gradients") == weights
    assert full.category("optimizer state") == 2 * weights + 4 * len(list(model.parameters()))  # a count of steps each
    assert full.total() == 4 * weights + 4 * len(list(model.parameters())) + buffers
    assert full.cuda is None
    assert 0 < full.resident <= full.peak_resident


RESIDENT = """
from pathlib import Path
import torch
from rl_backends.metrics.memory import memory_by_category

def own():
    # Without pages of libraries, which the kernel takes where memory is short.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return memory_by_category(torch.nn.Linear(1, 1)).resident - int(status["RssFile"].split()[0]) * 1024

own()
before = own()
kept = torch.ones(64 * 2**20, dtype=torch.uint8)
print((own() - before) / kept.numel())
"""


def test_resident_memory_is_that_of_the_process():
    # In one of its own: what other tests have left may be given back in between.
    ran = subprocess.run([sys.executable, "-c", RESIDENT], check=True, capture_output=True, text=True)
    assert 0.9 < float(ran.stdout) < 1.2


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="seconds by events, and the allocator, need a GPU")
def test_on_a_gpu_seconds_are_those_of_its_stream(world):
    examples = world.make_examples(rows=2)
    cut = RowDealing(rank=0, num_ranks=1).cut(examples)
    device = torch.device("cuda")
    big = torch.ones(4096, 4096, device=device)
    model = torch.nn.Linear(8, 8, device=device)
    measured = meter(device=device, memory=lambda: memory_by_category(model))
    big @ big
    torch.cuda.synchronize()
    with measured.forward_backward(examples, cut):
        for _ in range(20):
            big @ big
    with measured.optim_step():
        pass
    metrics = measured.metrics()
    assert metrics.forward_backward_s > 20 * 2 * 4096**3 / 5e15  # no device is as fast as that
    assert metrics.memory.cuda["allocated"] >= big.nbytes

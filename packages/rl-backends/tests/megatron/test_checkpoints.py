"""Claims about checkpoints of Megatron in one process: what comes back, what other backends read, what is refused."""

import dataclasses
import itertools
import json
import math
import threading

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from rl_backends import DTensorBackend, DTensorConfig, MuonConfig, OptimizerConfig
from rl_backends import rank_agreement as ranks
from rl_backends.checkpoints import storage
from rl_backends.checkpoints.shards import TensorShard, flat_boxes
from rl_backends.errors import CheckpointError
from rl_backends.megatron.config import MegatronConfig
from rl_parallel_plans import Box

# megatron-core 0.16 names collectives as torch did before 2.13.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.distributed.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:megatron"),  # what it says of its own calls
]

OPTIMIZER = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, warmup_steps=3)
BFLOAT16 = {"precision": "bfloat16"}
SHARED = {"precision": "bfloat16", "use_distributed_optimizer": True}


@pytest.fixture(scope="module", autouse=True)
def no_process_group_afterwards():
    """A backend of DTensors leaves its own behind; a fork that dropped one would wait for threads that it lacks."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    ranks.forget_process_group()


@pytest.fixture
def start(imported, world):
    """A backend in training; those of one test have one layout, and are closed after it."""
    from rl_backends.megatron.backend import MegatronBackend

    started = []

    def start(seed=0, *, family="Qwen3", optimizer=OPTIMIZER, training=True, model=None, **config):
        model = world.make_model(family, seed=seed) if model is None else model
        started.append(MegatronBackend(model, MegatronConfig(**config)))
        if training:
            started[-1].start_training(optimizer, num_steps=10)
        return started[-1]

    yield start
    for backend in started:
        backend.close()


@pytest.fixture
def train(world):
    examples = world.make_examples()
    # The gradient of the padding token's embedding is left out by transformers, and not by Megatron.
    examples = dataclasses.replace(examples, tokens=examples.tokens.clamp(min=1))

    def train(backend, steps):
        for _ in range(steps):
            backend.forward_backward(examples, lambda logp, rows: world.token_loss(logp, rows, num_tokens=50))
            backend.optim_step()
        return backend

    return train


def numbers_of(backend):
    """Weights, what is stepped, and moments, under Megatron's names."""
    found = {name: parameter.detach().clone() for name, parameter in backend.model.named_parameters()}
    for part, optimizer in enumerate(backend._optimizers.each):
        tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
        for number, tensor in enumerate(tensors):
            found[f"{part}/{number}"] = tensor.detach().clone()
            found |= {f"{part}/{number}/{key}": value.clone() for key, value in optimizer.state[tensor].items()}
    return found


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


# -- A run in two parts ---------------------------------------------------------------------------


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}, BFLOAT16, SHARED], ids=str)
def test_a_run_in_two_parts_is_the_run_in_one_bit_for_bit(start, train, tmp_path, config):
    whole = train(start(**config), 2)
    whole.save_checkpoint(tmp_path / "saved", extra={"prompts": 7})
    halfway, rate = numbers_of(whole), whole.learning_rate
    train(whole, 2)
    again = train(start(seed=1, **config), 1)  # whose weights, moments and schedule are other ones
    state = again.load_checkpoint(tmp_path / "saved")
    assert (state.version, again.version, state.extra) == (2, 2, {"prompts": 7})
    assert state.rng_restored
    assert again.learning_rate == rate
    assert_same(numbers_of(again), halfway)
    assert_same(numbers_of(train(again, 2)), numbers_of(whole))


def test_a_checkpoint_from_before_the_first_step_counts_none(start, train, tmp_path):
    fresh = start()
    fresh.save_checkpoint(tmp_path / "saved")
    train(fresh, 2)
    again = train(start(seed=1), 1)
    assert again.load_checkpoint(tmp_path / "saved").version == 0
    assert_same(numbers_of(train(again, 2)), numbers_of(fresh))


def test_the_optimizer_is_left_as_it_is_where_that_was_asked_for(start, train, tmp_path):
    train(start(**BFLOAT16), 2).save_checkpoint(tmp_path / "saved")
    again = train(start(seed=1, **BFLOAT16), 1)
    before = numbers_of(again)
    again.load_checkpoint(tmp_path / "saved", optimizer=False)
    after = numbers_of(again)
    assert_same(*({key: value for key, value in each.items() if "exp_avg" in key} for each in (before, after)))
    assert all(not torch.equal(after[key], before[key]) for key in after if "/" not in key)
    masters = [value for key, value in after.items() if key.count("/") == 1]
    assert all(not torch.equal(master, master.bfloat16()) for master in masters if master.ndim == 2)  # unrounded


def test_a_model_without_an_optimizer_takes_the_weights_alone(start, train, tmp_path):
    trained = train(start(**BFLOAT16), 2)
    trained.save_checkpoint(tmp_path / "saved")
    frozen = start(seed=1, training=False, **BFLOAT16)
    with pytest.raises(CheckpointError, match="call start_training first"):
        frozen.load_checkpoint(tmp_path / "saved")
    frozen.load_checkpoint(tmp_path / "saved", optimizer=False)
    weights = dict(trained.model.named_parameters())
    assert_same(dict(frozen.model.named_parameters()), weights)
    frozen.save_checkpoint(tmp_path / "weights")
    index = json.loads((tmp_path / "weights" / "tensors.json").read_text())
    assert {entry["dtype"] for name, entry in index.items() if name.startswith("weights/")} == {"bfloat16"}
    again = start(seed=2, **BFLOAT16)
    again.load_checkpoint(tmp_path / "weights", optimizer=False)
    masters = [
        tensor for optimizer in again._optimizers.each for group in optimizer.param_groups for tensor in group["params"]
    ]
    assert all(torch.equal(master, master.bfloat16().float()) for master in masters)
    assert_same(dict(again.model.named_parameters()), weights)


def test_a_gradient_from_before_loading_is_no_part_of_the_next_step(start, train, world, tmp_path):
    whole = train(start(), 1)
    whole.save_checkpoint(tmp_path / "saved")
    again = start(seed=1)
    again.forward_backward(world.make_examples(seed=3), lambda logp, rows: world.token_loss(logp, rows, num_tokens=5))
    again.load_checkpoint(tmp_path / "saved")
    assert_same(numbers_of(train(again, 1)), numbers_of(train(whole, 1)))


# -- The other backend ----------------------------------------------------------------------------


def dtensor(world, *, seed=0, family="Qwen3", optimizer=OPTIMIZER):
    backend = DTensorBackend(world.make_model(family, seed=seed), DTensorConfig())
    backend.start_training(optimizer, num_steps=10)
    return backend


def tensors_of(folder):
    from rl_backends.checkpoints.storage import read_manifest
    from rl_backends.commands.export import _tensors

    return dict(_tensors(folder, read_manifest(folder), dtype=None))


@pytest.mark.parametrize("config", [{}, {"use_distributed_optimizer": True}, SHARED], ids=str)
def test_a_checkpoint_of_dtensors_is_gone_on_from(start, train, world, tmp_path, config):
    other = train(dtensor(world), 2)
    other.save_checkpoint(tmp_path / "saved")
    here = start(seed=1, **config)
    assert here.load_checkpoint(tmp_path / "saved").version == 2
    here.save_checkpoint(tmp_path / "again")
    index = json.loads((tmp_path / "saved" / "tensors.json").read_text()).keys()
    assert json.loads((tmp_path / "again" / "tensors.json").read_text()).keys() == index
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "saved"))
    if not config.get("precision"):
        train(here, 1).save_checkpoint(tmp_path / "after")
        train(other, 1).save_checkpoint(tmp_path / "other after")
        ours, theirs = tensors_of(tmp_path / "after"), tensors_of(tmp_path / "other after")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("config", [{}, SHARED], ids=str)
def test_dtensors_go_on_from_a_checkpoint_of_megatron(start, train, world, tmp_path, config):
    here = train(start(**config), 2)
    here.save_checkpoint(tmp_path / "saved")
    other = dtensor(world, seed=1)
    assert other.load_checkpoint(tmp_path / "saved").version == 2
    other.save_checkpoint(tmp_path / "again")
    assert_same(tensors_of(tmp_path / "again"), tensors_of(tmp_path / "saved"))
    back = start(seed=2, **config)
    back.load_checkpoint(tmp_path / "again")
    assert_same(numbers_of(back), numbers_of(here))


# -- While training goes on -----------------------------------------------------------------------


def test_training_on_while_it_is_written_does_not_tear_it(start, train, tmp_path, monkeypatch):
    gate, write = threading.Event(), storage.write_safetensors

    def write_later(path, tensors):
        assert gate.wait(60)
        return write(path, tensors)

    whole = train(start(**SHARED), 2)
    halfway = numbers_of(whole)
    monkeypatch.setattr(storage, "write_safetensors", write_later)
    saving = whole.save_checkpoint(tmp_path / "saved", asynchronous=True)
    train(whole, 1)
    assert not saving.done
    gate.set()
    saving.wait()
    again = start(seed=1, **SHARED)
    again.load_checkpoint(tmp_path / "saved")
    assert_same(numbers_of(again), halfway)


def test_of_a_fused_parameter_each_name_copies_its_own_part_to_the_host_alone():
    fused = torch.arange(24.0).view(6, 4)
    box = Box(offsets=(0, 0), sizes=(2, 4), local_offsets=(3, 0))
    [copied] = storage.StagingBuffers().stage([TensorShard(local=fused, shape=(2, 4), boxes=(box,))])
    assert copied.local.numel() == 8
    assert torch.equal(copied.boxes[0].of_local(copied.local), fused[3:5])


# -- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (OptimizerConfig(lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1), "betas of .* is .0.9, 0.95."),
        (OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.2), "weight_decay of .* 0.1 .* 0.2"),
        (OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, decay_vectors=True), "weight_decay"),
    ],
)
def test_other_hyperparameters_are_refused_by_name_and_change_nothing(start, train, tmp_path, optimizer, reason):
    train(start(), 1).save_checkpoint(tmp_path / "saved")
    other = train(start(seed=1, optimizer=optimizer), 1)
    before = numbers_of(other)
    with pytest.raises(CheckpointError, match=reason):
        other.load_checkpoint(tmp_path / "saved")
    assert_same(numbers_of(other), before)
    other.load_checkpoint(tmp_path / "saved", optimizer=False)


def test_the_state_of_another_optimizer_is_refused(start, train, world, tmp_path):
    muon = OptimizerConfig(name="muon", lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1, muon=MuonConfig())
    train(dtensor(world, optimizer=muon), 1).save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"has state of .*Muon.* and this run optimizes by .*AdamW"):
        start(seed=1).load_checkpoint(tmp_path / "saved")


def test_another_model_is_refused_and_changes_nothing(start, train, world, tmp_path):
    train(start(), 1).save_checkpoint(tmp_path / "saved")
    wider = start(model=world.make_model("Qwen3", intermediate_size=64))
    before = numbers_of(wider)
    with pytest.raises(CheckpointError, match=r"another model: .*mlp\.\w+_proj\.weight is float32 \["):
        wider.load_checkpoint(tmp_path / "saved")
    assert_same(numbers_of(wider), before)


def test_a_model_in_float32_takes_nothing_that_was_rounded(start, tmp_path):
    start(training=False, **BFLOAT16).save_checkpoint(tmp_path / "saved")
    with pytest.raises(CheckpointError, match=r"is bfloat16 .* in the checkpoint and float32 .* here"):
        start(seed=1).load_checkpoint(tmp_path / "saved", optimizer=False)


def test_what_is_damaged_or_unfinished_is_refused_and_changes_nothing(start, train, tmp_path):
    train(start(), 1).save_checkpoint(tmp_path / "saved")
    here = train(start(seed=1), 1)
    before = numbers_of(here)
    [data] = (tmp_path / "saved").glob("rank-*.safetensors")
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged: its SHA-256 is"):
        here.load_checkpoint(tmp_path / "saved")
    (tmp_path / "saved" / "checkpoint.json").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: it has no checkpoint\.json"):
        here.load_checkpoint(tmp_path / "saved")
    assert_same(numbers_of(here), before)


def test_tensors_that_share_a_parameter_here_must_have_taken_as_many_steps(start, train, world, tmp_path):
    other = train(dtensor(world), 2)
    [query] = [
        each for name, each in other.model.named_parameters() if name.endswith("layers.1.self_attn.q_proj.weight")
    ]
    other._optimizers.each[0].state[query]["step"] += 1
    other.save_checkpoint(tmp_path / "saved")
    here = train(start(seed=1), 1)
    before, state = numbers_of(here), here._optimizers.schedule_state()
    with pytest.raises(CheckpointError, match=r"3 of model\.layers\.1\.self_attn\.q_proj\.weight, 2 of"):
        here.load_checkpoint(tmp_path / "saved")
    other._optimizers.each[0].state[query].clear()
    other.save_checkpoint(tmp_path / "without")
    with pytest.raises(CheckpointError, match="other state of each of"):
        here.load_checkpoint(tmp_path / "without")
    assert_same(numbers_of(here), before)
    assert (here._optimizers.schedule_state(), here.version) == (state, 1)


# -- Ranges of flattened parameters ---------------------------------------------------------------


@given(st.data())
def test_what_ranges_hold_of_a_box_is_the_box(data):
    sizes = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    before, after = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    shape = (before + sizes[0] + after, *sizes[1:])
    origin = tuple(data.draw(st.integers(0, 5)) for _ in sizes)
    box = Box(offsets=origin, sizes=sizes, local_offsets=(before, *(0 for _ in sizes[1:])))
    local = torch.arange(math.prod(shape)).view(shape)
    cuts = sorted({0, local.numel(), *data.draw(st.lists(st.integers(0, local.numel()), max_size=3))})
    found = torch.full([offset + size for offset, size in zip(origin, sizes, strict=True)], -1)
    for start, end in itertools.pairwise(cuts):
        parts = flat_boxes([box], shape, start=start, end=end)
        assert len(parts) <= 2 * len(sizes) - 1
        for part in parts:
            where = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.sizes, strict=True))
            assert torch.all(found[where] == -1)  # nothing is there twice
            found[where] = part.of_local(local.view(-1)[start:end])
    assert torch.equal(box.of_whole(found), box.of_local(local))
    assert int((found >= 0).sum()) == math.prod(sizes)

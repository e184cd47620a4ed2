"""Claims about checkpoints of one process: a run in two parts is the run in one, and nothing wrong is ever loaded."""

import functools
import hashlib
import importlib.util
import json
import re
import sys
import threading

import pytest
import torch
import torch.distributed as dist

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig, load_causal_lm
from rl_backends.checkpoints import storage
from rl_backends.checkpoints.contents import TorchContents
from rl_backends.checkpoints.folders import record_of, write_json, write_safetensors
from rl_backends.checkpoints.loading import load_checkpoint
from rl_backends.checkpoints.saving import find_latest, prune, save_checkpoint
from rl_backends.errors import CheckpointError


class Optimizers:
    def __init__(self, *each):
        self.each = each
        self.steps = 0

    def schedule_state(self):
        return {"steps": self.steps}

    def load_schedule_state(self, state):
        self.steps = state["steps"]


@pytest.fixture
def process_group():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture
def start(world):
    """A model and its optimizers: AdamW over matrices, SGD with momentum over the rest."""

    def start(seed=0, *, family="Qwen3", **overrides):
        model = world.make_model(family, seed=seed, **overrides)
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        adam = torch.optim.AdamW([{"params": matrices[:3], "weight_decay": 0.0}, {"params": matrices[3:]}], lr=1e-2)
        return model, Optimizers(adam, torch.optim.SGD(others, lr=1e-2, momentum=0.9))

    return start


def train(world, model, optimizers, steps):
    examples = world.make_examples()
    for _ in range(steps):
        loss = world.token_loss(world.plain_logp(model, examples), examples, num_tokens=examples.trainable.sum())[0]
        (loss * torch.rand(())).backward()  # so that the generator of random numbers matters
        optimizers.steps += 1
        for optimizer in optimizers.each:
            optimizer.param_groups[0]["lr"] = 1e-2 / optimizers.steps
            optimizer.step()
            optimizer.zero_grad()


def numbers_of(model, optimizers):
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers.each:
        for parameter, state in optimizer.state.items():
            found |= {f"{names[id(parameter)]}/{key}": value.clone() for key, value in state.items()}
    return found


def assert_same(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def hyperparameters(optimizers):
    return [
        {key: value for key, value in group.items() if key != "params"}
        for optimizer in optimizers.each
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_a_run_in_two_parts_is_the_run_in_one_bit_for_bit(world, start, tmp_path, tied):
    torch.manual_seed(5)
    model, optimizers = start(tie_word_embeddings=tied)
    train(world, model, optimizers, 2)
    write = save_checkpoint(model, optimizers, tmp_path / "step-2", version=2, extra={"best": [0.1, None], "é": "π"})
    assert write.done
    train(world, model, optimizers, 2)
    torch.manual_seed(6)
    again, its_optimizers = start(seed=1, tie_word_embeddings=tied)
    train(world, again, its_optimizers, 1)  # what it has learned is forgotten
    state = load_checkpoint(again, its_optimizers, tmp_path / "step-2")
    assert (state.version, state.extra, state.rng_restored) == (2, {"best": [0.1, None], "é": "π"}, True)
    assert its_optimizers.steps == 2
    train(world, again, its_optimizers, 2)
    assert_same(numbers_of(again, its_optimizers), numbers_of(model, optimizers))
    assert hyperparameters(its_optimizers) == hyperparameters(optimizers)


def test_a_checkpoint_from_before_the_first_step_counts_none(world, start, tmp_path):
    torch.manual_seed(5)
    model, optimizers = start()
    save_checkpoint(model, optimizers, tmp_path / "step-0", version=0)
    assert not any(optimizer.state for optimizer in optimizers.each)
    again, its_optimizers = start(seed=1)
    train(world, again, its_optimizers, 1)
    load_checkpoint(again, its_optimizers, tmp_path / "step-0")
    train(world, again, its_optimizers, 2)
    torch.manual_seed(5)
    plain, its = start()
    train(world, plain, its, 2)
    assert_same(numbers_of(again, its_optimizers), numbers_of(plain, its))


def test_how_a_step_is_computed_is_not_taken_from_the_checkpoint(world, tmp_path):
    model = world.make_model("Llama")
    optimizers = Optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), fused=True))
    train(world, model, optimizers, 1)
    save_checkpoint(model, optimizers, tmp_path / "step-1", version=1)
    again = world.make_model("Llama", seed=1)
    its_optimizers = Optimizers(torch.optim.AdamW(again.parameters(), lr=5e-2, betas=(0.8, 0.9), foreach=True))
    load_checkpoint(again, its_optimizers, tmp_path / "step-1")
    [group] = its_optimizers.each[0].param_groups
    assert (group["foreach"], group["fused"]) == (True, None)
    assert (group["lr"], group["betas"]) == (1e-2, (0.8, 0.9))
    train(world, again, its_optimizers, 1)


def test_optimizers_may_be_left_out(world, start, tmp_path):
    model, optimizers = start()
    train(world, model, optimizers, 1)
    save_checkpoint(model, None, tmp_path / "there" / "weights", version=1)
    again, its_optimizers = start(seed=1)
    load_checkpoint(again, None, tmp_path / "there" / "weights")
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))
    with pytest.raises(CheckpointError, match=r"holds no state of optimizers.*optimizer=False"):
        load_checkpoint(again, its_optimizers, tmp_path / "there" / "weights")


def test_the_state_of_an_optimizer_is_left_behind_only_where_that_was_asked_for(start, saved):
    refused(start, saved, r"state of an optimizer.*start_training first.*optimizer=False", optimizers=False)
    model, its_optimizers = start(seed=1)
    assert load_checkpoint(model, None, saved, optimizer=False).version == 1
    load_checkpoint(model, its_optimizers, saved, optimizer=False)
    assert its_optimizers.steps == 0
    assert not any(each.state for each in its_optimizers.each)


def test_a_gradient_from_before_loading_is_no_part_of_the_next_step(world, start, saved):
    model, its_optimizers = start(seed=1)
    (2 * model(input_ids=torch.arange(5)[None]).logits.sum()).backward()
    load_checkpoint(model, its_optimizers, saved)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_other_hyperparameters_are_refused_by_name_and_change_nothing(start, saved):
    model, its_optimizers = start(seed=1)
    its_optimizers.each[0].param_groups[1]["betas"] = (0.9, 0.95)
    before = numbers_of(model, its_optimizers)
    with pytest.raises(CheckpointError, match=r"betas of \S+ is \[0.9, 0.999\] in the checkpoint and \[0.9, 0.95\]"):
        load_checkpoint(model, its_optimizers, saved)
    assert its_optimizers.steps == 0
    assert_same(numbers_of(model, its_optimizers), before)


# -- Of a backend ---------------------------------------------------------------------------------

SCHEDULED = OptimizerConfig(lr=1e-2, betas=(0.9, 0.95), weight_decay=0.01, warmup_steps=3, final_lr_ratio=0.1)


def backend_of(model):
    backend = DTensorBackend(model, DTensorConfig())
    backend.start_training(SCHEDULED, num_steps=8)
    return backend


def steps_of(world, backend, steps):
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    norms = []
    for _ in range(steps):
        backend.forward_backward(examples, loss)
        norms.append((backend.learning_rate, backend.optim_step()))
    return norms


@pytest.mark.parametrize("tied", [False, True])
def test_a_backend_of_an_exported_model_goes_on_from_a_checkpoint(world, tmp_path, tied):
    whole = backend_of(world.make_model("Qwen3", tie_word_embeddings=tied))
    expected = steps_of(world, whole, 6)
    first = backend_of(world.make_model("Qwen3", tie_word_embeddings=tied))
    norms = steps_of(world, first, 3)
    first.save_pretrained(tmp_path / "model")
    first.save_checkpoint(tmp_path / "state")
    second = backend_of(load_causal_lm(str(tmp_path / "model")))
    second.load_checkpoint(tmp_path / "state")
    assert second.version == 3
    assert norms + steps_of(world, second, 3) == expected
    assert_same(dict(second.model.named_parameters()), dict(whole.model.named_parameters()))


def test_a_backends_checkpoint_from_before_the_first_step_counts_none(world, tmp_path):
    expected = steps_of(world, backend_of(world.make_model("Qwen3")), 2)
    saved, again = (backend_of(world.make_model("Qwen3")) for _ in range(2))
    saved.save_checkpoint(tmp_path / "step-0")
    again.load_checkpoint(tmp_path / "step-0")
    assert steps_of(world, saved, 2) == expected
    assert steps_of(world, again, 2) == expected


def test_a_backend_begins_a_stage_or_goes_on_without_the_gradient_that_it_had(world, tmp_path):
    expected = steps_of(world, backend_of(world.make_model("Qwen3")), 1)
    examples = world.make_examples()
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    backend = backend_of(world.make_model("Qwen3"))
    backend.save_checkpoint(tmp_path / "step-0")
    backend.forward_backward(examples, loss)
    backend.start_training(SCHEDULED, num_steps=8)
    assert steps_of(world, backend, 1) == expected
    backend.forward_backward(examples, loss)
    backend.load_checkpoint(tmp_path / "step-0")
    assert steps_of(world, backend, 1) == expected


def test_a_backend_that_has_no_optimizer_yet_refuses_to_lose_that_of_the_checkpoint(world, tmp_path):
    first = backend_of(world.make_model("Qwen3"))
    steps_of(world, first, 1)
    first.save_checkpoint(tmp_path / "step-1")
    second = DTensorBackend(world.make_model("Qwen3", seed=1), DTensorConfig())
    with pytest.raises(CheckpointError, match=r"call start_training first, or leave it behind with optimizer=False"):
        second.load_checkpoint(tmp_path / "step-1")
    assert second.version == 0
    second.load_checkpoint(tmp_path / "step-1", optimizer=False)
    assert second.version == 1
    assert_same(dict(second.model.named_parameters()), dict(first.model.named_parameters()))


# -- Asynchronous ---------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch):
    """Holds back the writing of every file of tensors until it is set."""
    gate = threading.Event()

    def write_later(path, tensors):
        assert gate.wait(timeout=60)
        return write_safetensors(path, tensors)

    monkeypatch.setattr(storage, "write_safetensors", write_later)
    yield gate
    gate.set()


def test_training_on_while_it_is_written_does_not_tear_it(world, start, tmp_path, process_group, gate):
    model, optimizers = start()
    train(world, model, optimizers, 1)
    expected = numbers_of(model, optimizers)
    extra = {"rewards": [0.5]}
    write = save_checkpoint(model, optimizers, tmp_path / "step-1", version=1, asynchronous=True, extra=extra)
    assert not write.done
    train(world, model, optimizers, 2)
    extra["rewards"].append(1.0)
    assert find_latest(tmp_path) is None
    gate.set()
    write.wait()
    assert write.done
    write.wait()
    again, its_optimizers = start(seed=1)
    state = load_checkpoint(again, its_optimizers, find_latest(tmp_path))
    assert state.extra == {"rewards": [0.5]}
    assert its_optimizers.steps == 1
    assert_same(numbers_of(again, its_optimizers), expected)


def test_a_second_save_waits_for_the_first(world, start, tmp_path, process_group, gate):
    model, optimizers = start()
    first = save_checkpoint(model, optimizers, tmp_path / "step-1", version=1, asynchronous=True)
    main = threading.main_thread().ident

    def open_when_it_waits():
        while all(frame != "idle_group" for frame in names_of_frames(main)):  # it has seen that the first still runs
            pass
        gate.set()

    opener = threading.Thread(target=open_when_it_waits)
    opener.start()
    second = save_checkpoint(model, optimizers, tmp_path / "step-2", version=2, asynchronous=True)
    opener.join()
    assert first.done
    second.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-2"]


def names_of_frames(thread):
    frame = sys._current_frames()[thread]
    while frame is not None:
        yield frame.f_code.co_name
        frame = frame.f_back


def test_a_background_failure_is_told_by_wait_or_by_the_next_save(start, tmp_path, process_group, monkeypatch):
    model, optimizers = start()

    def refuse(path, tensors):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_safetensors", refuse)
        save_checkpoint(model, optimizers, tmp_path / "step-1", version=1, asynchronous=True)
        with pytest.raises(CheckpointError, match=r"step-1 was not written.*No space left"):
            save_checkpoint(model, optimizers, tmp_path / "step-2", version=2, asynchronous=True)
        write = save_checkpoint(model, optimizers, tmp_path / "step-3", version=3, asynchronous=True)
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"step-3 was not written.*No space left"):
                write.wait()
    assert list(tmp_path.iterdir()) == []
    save_checkpoint(model, optimizers, tmp_path / "step-4", version=4)
    assert find_latest(tmp_path) == tmp_path / "step-4"


@pytest.mark.parametrize("handled", [True, False])
def test_closing_a_backend_raises_a_save_that_failed_unless_its_wait_has(world, tmp_path, monkeypatch, handled):
    def refuse(path, entries):
        raise OSError(28, "No space left on device")

    backend = DTensorBackend(world.make_model("Qwen3"), DTensorConfig())
    monkeypatch.setattr(storage, "write_safetensors", refuse)
    write = backend.save_checkpoint(tmp_path / "step-1", asynchronous=True)
    if handled:
        with pytest.raises(CheckpointError, match="No space left"):
            write.wait()
        backend.close()
    else:
        with pytest.raises(CheckpointError, match="No space left"):
            backend.close()
    backend.close()  # a second time does nothing


# -- What is refused ------------------------------------------------------------------------------


@pytest.fixture
def saved(world, start, tmp_path):
    model, optimizers = start()
    train(world, model, optimizers, 1)
    save_checkpoint(model, optimizers, tmp_path / "step-1", version=1)
    return tmp_path / "step-1"


def refused(start, folder, match, *, optimizers=True, **options):
    """The message, after showing that nothing was changed."""
    model, its_optimizers = start(seed=1)
    before = numbers_of(model, its_optimizers)
    with pytest.raises(CheckpointError, match=match) as caught:
        load_checkpoint(model, its_optimizers if optimizers else None, folder, **options)
    assert_same(numbers_of(model, its_optimizers), before)
    assert str(folder) in str(caught.value)


def test_an_absent_checkpoint_is_refused(start, tmp_path):
    refused(start, tmp_path / "none", "no such checkpoint")


def test_an_unfinished_checkpoint_is_refused_and_not_found(start, saved):
    (saved / "checkpoint.json").unlink()
    refused(start, saved, "is incomplete: it has no checkpoint.json")
    assert find_latest(saved.parent) is None


@pytest.mark.parametrize("name", ["rank-00000-of-00001.safetensors", "state.json", "tensors.json"])
def test_a_truncated_longer_or_missing_file_is_refused(start, saved, name):
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[:-1])
    refused(start, saved, rf"{name}: {len(data) - 1} bytes, and {len(data)} were written: truncated", verify=False)
    (saved / name).write_bytes(data + b" ")
    refused(start, saved, rf"{name}: {len(data) + 1} bytes, and {len(data)} were written: longer than", verify=False)
    (saved / name).unlink()
    refused(start, saved, f"{name}: missing")


@pytest.mark.parametrize("name", ["rank-00000-of-00001.safetensors", "state.json", "tensors.json"])
def test_a_flipped_bit_is_refused_unless_nobody_looks(start, saved, name):
    flip(saved / name, at=-100)
    refused(start, saved, f"{name}: damaged: its SHA-256")
    if name.endswith("safetensors"):
        load_checkpoint(*start(seed=1), saved, verify=False)


def test_a_damaged_marker_is_refused(start, saved):
    flip(saved / "checkpoint.json", at=60)
    refused(start, saved, "checkpoint.json is damaged")


def flip(path, *, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_an_unknown_format_is_refused(start, saved):
    marker = saved / "checkpoint.json"
    body = json.loads(marker.read_text())
    marker.write_text(json.dumps({**body, "format_version": 3}))
    refused(start, saved, "format rl-backends checkpoint 3, and this release reads rl-backends checkpoint 2")
    marker.write_text(json.dumps({**body, "format": "other"}))
    refused(start, saved, "format other 2, and this release reads rl-backends checkpoint 2")


def test_another_models_checkpoint_is_refused_with_the_first_differences(start, saved):
    with pytest.raises(
        CheckpointError,
        match=r"another model: model.embed_tokens.weight is float32 \[67, 32\] in the "
        r"checkpoint and float32 \[68, 32\] here; lm_head.weight is",
    ):
        load_checkpoint(*start(vocab_size=68), saved)
    with pytest.raises(CheckpointError, match=r"another model: model.layers.1.\S+ is only in the checkpoint.* more"):
        load_checkpoint(*start(num_hidden_layers=1), saved)
    with pytest.raises(CheckpointError, match=r"float32.* in the checkpoint and bfloat16"):
        load_checkpoint(start()[0].bfloat16(), None, saved, optimizer=False)


def test_other_optimizers_are_refused(world, saved):
    model = world.make_model("Qwen3")
    with pytest.raises(
        CheckpointError, match=r"AdamW', 'torch.optim.sgd.SGD'\], and this run optimizes by \['torch.op"
    ):
        load_checkpoint(model, Optimizers(torch.optim.AdamW(model.parameters())), saved)
    halves = list(model.parameters())[:3], list(model.parameters())[3:]
    others = Optimizers(torch.optim.AdamW(halves[0]), torch.optim.SGD(halves[1], lr=1e-2, momentum=0.9))
    with pytest.raises(
        CheckpointError, match=r"of torch.optim.adamw.AdamW cannot be restored: \d+ parameters are optimized in one"
    ):
        load_checkpoint(model, others, saved)


def test_groups_may_be_cut_otherwise_but_not_mix_what_differed(world, saved, start):
    model, optimizers = start(seed=1)
    adam, sgd = optimizers.each
    first, *rest = [p for group in adam.param_groups[1:] for p in group["params"]]
    no_decay = {"params": adam.param_groups[0]["params"], "weight_decay": 0.0}
    thirds = [no_decay, {"params": [first]}, {"params": rest}]
    load_checkpoint(model, Optimizers(torch.optim.AdamW(thirds), sgd), saved)
    mixed = Optimizers(torch.optim.AdamW([*no_decay["params"], first, *rest]), sgd)
    with pytest.raises(CheckpointError, match=r"weight_decay of \S+weight is 0.0 in the checkpoint and 0.01 here"):
        load_checkpoint(model, mixed, saved)
    save_checkpoint(model, Optimizers(torch.optim.AdamW(rates(thirds)), sgd), saved.parent / "two rates", version=1)
    halves = [no_decay, {"params": [first, *rest]}]
    with pytest.raises(CheckpointError, match=r"one group here, that of \S+weight, had not one learning rate"):
        load_checkpoint(model, Optimizers(torch.optim.AdamW(halves), sgd), saved.parent / "two rates")


def rates(groups):
    return [{**group, "lr": 10.0**-at} for at, group in enumerate(groups)]


def test_a_schedule_that_refuses_its_state_leaves_the_model_as_it_was(start, saved):
    model, optimizers = start(seed=1)

    def refuse(state):
        raise CheckpointError("the stage is over by then")

    optimizers.load_schedule_state = refuse
    before = numbers_of(model, optimizers)
    with pytest.raises(CheckpointError, match=r"the stage is over"):
        load_checkpoint(model, optimizers, saved)
    assert_same(numbers_of(model, optimizers), before)


def test_a_schedule_that_moved_before_it_was_refused_is_moved_back(start, saved):
    model, optimizers = start(seed=1)
    edit_index(saved, lambda index: index.pop("weights/model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"step-1: the checkpoint has no weights/model.norm.weight"):
        load_checkpoint(model, optimizers, saved)
    assert optimizers.steps == 0
    assert not any(each.state for each in optimizers.each)


@pytest.mark.parametrize("rename", ["cuda", None])
def test_random_numbers_of_another_kind_of_device_are_left_alone(start, saved, rename):
    """A checkpoint of a GPU has the state of one generator more, and one without any is loaded all the same."""

    def change(index):
        if rename is None:
            del index["rng/rank-0/cpu"]
        else:
            index[f"rng/rank-0/{rename}"] = index["rng/rank-0/cpu"]

    edit_index(saved, change)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    model, optimizers = start(seed=1)
    torch.set_rng_state(before)
    state = load_checkpoint(model, optimizers, saved)
    assert (state.rng_restored, optimizers.steps) == (False, 1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "", "..", 7])
def test_files_outside_of_the_folder_are_never_read(start, saved, name):
    edit_index(saved, lambda index: index["weights/lm_head.weight"]["boxes"][0].update(file=name))
    refused(start, saved, rf"tensors.json: names {re.escape(repr(name))}, which checkpoint.json does not list")
    edit_marker(saved, lambda body: body["files"].update({str(name): [1, "ff"]}))
    refused(start, saved, rf"checkpoint.json names {name!r}, which does not lie in its folder|{name}: missing")


def test_a_file_that_the_marker_does_not_list_is_never_read(start, saved):
    edit_index(saved, lambda index: index["weights/lm_head.weight"]["boxes"][0].update(file="other.safetensors"))
    refused(start, saved, r"names 'other.safetensors', which checkpoint.json does not list")


def edit_index(folder, change):
    """Change the index, and the marker such that all digests are right."""
    index = json.loads((folder / "tensors.json").read_text())
    change(index)
    (folder / "tensors.json").unlink()
    write_json(folder / "tensors.json", index)
    edit_marker(folder, lambda body: body["files"].update({"tensors.json": record_of(folder / "tensors.json")}))


def edit_marker(folder, change):
    body = json.loads((folder / "checkpoint.json").read_text())
    del body["sha256"]
    change(body)
    digest = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
    (folder / "checkpoint.json").write_text(json.dumps({**body, "sha256": digest}))


def test_a_marker_that_cannot_be_read_is_never_skipped(start, saved):
    model, _ = start()
    save_checkpoint(model, None, saved.parent / "step-2", version=2)
    flip(saved / "checkpoint.json", at=60)
    for ask in (find_latest, lambda parent: prune(parent, keep=1)):
        with pytest.raises(CheckpointError, match=r"step-1/checkpoint.json is damaged.*move step-1 elsewhere"):
            ask(saved.parent)


def test_a_relative_folder_is_the_one_that_it_was_when_asked_for(start, tmp_path, process_group, gate, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / "elsewhere").mkdir()
    model, optimizers = start()
    monkeypatch.chdir(tmp_path / "there")
    write = save_checkpoint(model, optimizers, "step-1", version=1, asynchronous=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    gate.set()
    write.wait()
    assert find_latest(tmp_path / "there") == write.folder == tmp_path / "there" / "step-1"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_symbolic_link_is_refused_before_anything_is_written(start, tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(CheckpointError, match=rf"{name} is a symbolic link"):
            save_checkpoint(*start(), tmp_path / name, version=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "real"]


def test_what_is_complete_is_never_overwritten(start, saved):
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CheckpointError, match=r"is there already, a complete checkpoint"):
        save_checkpoint(*start(seed=2), saved, version=2)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    other = saved.parent / "notes"
    other.mkdir()
    (other / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"is there already, something else"):
        save_checkpoint(*start(seed=2), other, version=2)


@pytest.mark.parametrize("extra", [{"pair": (1, 2)}, {"ids": {1: "one"}}, {"tensor": torch.ones(2)}])
def test_extra_that_json_would_change_is_refused(start, tmp_path, extra):
    with pytest.raises(CheckpointError, match=r"extra .* JSON"):
        save_checkpoint(*start(), tmp_path / "step-1", version=1, extra=extra)
    assert list(tmp_path.iterdir()) == []


def test_state_that_cannot_be_cut_is_refused_by_name(world, tmp_path):
    model = world.make_model("Llama")
    factored = torch.optim.Adafactor(model.parameters())
    train(world, model, Optimizers(factored), 1)
    with pytest.raises(CheckpointError, match=r"row_var of model.embed_tokens.weight has the shape \[67, 1\]"):
        save_checkpoint(model, Optimizers(factored), tmp_path / "step-1", version=1)


def test_a_parameter_that_is_not_the_models_is_refused(start, tmp_path):
    model, _ = start()
    strange = Optimizers(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))]))
    with pytest.raises(CheckpointError, match=r"1 parameters that are not the model's .* \[3\]"):
        save_checkpoint(model, strange, tmp_path / "step-1", version=1)


def test_a_folder_that_cannot_be_written_to_is_an_error(start, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to"):
        save_checkpoint(*start(), tmp_path / "file" / "step-1", version=1)


# -- 8 bits ---------------------------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao, of the extra 8bit, is not installed")
def test_state_of_8_bits_comes_back_bit_for_bit(world, tmp_path):
    from torchao.optim import AdamW8bit

    def start(seed):
        model = world.make_model("Llama", seed=seed, vocab_size=256)
        return model, Optimizers(AdamW8bit(model.parameters(), lr=1e-2))

    def train(model, optimizers):
        model(input_ids=torch.arange(12)[None]).logits.square().mean().backward()
        optimizers.each[0].step()
        optimizers.each[0].zero_grad()

    with torch.compiler.set_stance("force_eager"):  # torchao compiles its step, a minute for every shape
        model, optimizers = start(0)
        train(model, optimizers)
        save_checkpoint(model, optimizers, tmp_path / "step-1", version=1)
        again, its_optimizers = start(1)
        load_checkpoint(again, its_optimizers, tmp_path / "step-1")
        for each in (model, optimizers), (again, its_optimizers):
            train(*each)
    assert_same(dict(again.named_parameters()), dict(model.named_parameters()))


# -- Folders --------------------------------------------------------------------------------------


def test_the_newest_is_the_one_written_last_and_the_oldest_are_pruned(start, tmp_path):
    model, _ = start()
    assert find_latest(tmp_path) is None
    for step in (1, 9, 5):
        save_checkpoint(model, None, tmp_path / f"step-{step}", version=step)
    (tmp_path / "other").mkdir()
    assert find_latest(str(tmp_path)) == tmp_path / "step-5"
    assert prune(tmp_path, keep=2) == [tmp_path / "step-1"]
    assert prune(tmp_path, keep=2) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "step-5", "step-9"]
    with pytest.raises(ValueError, match=r"keep=0"):
        prune(tmp_path, keep=0)


def test_tensors_of_one_memory_are_saved_each_by_itself(tmp_path, start):
    model, optimizers = start()
    for parameter in optimizers.each[0].param_groups[0]["params"]:
        optimizers.each[0].state[parameter] = {"step": torch.tensor(3.0)}
    first, second, _ = optimizers.each[0].param_groups[0]["params"]
    optimizers.each[0].state[second]["step"] = optimizers.each[0].state[first]["step"]
    save_checkpoint(model, optimizers, tmp_path / "step-3", version=3)
    again, its_optimizers = start(seed=1)
    load_checkpoint(again, its_optimizers, tmp_path / "step-3")
    assert_same(numbers_of(again, its_optimizers), numbers_of(model, optimizers))


def test_a_save_copies_into_the_memory_of_the_one_before_it(start):
    model, _ = start()
    buffers = storage.StagingBuffers()
    shards = TorchContents(model, None).weights()
    first = {staged.weight: staged.local.data_ptr() for staged in buffers.stage(shards)}
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    second = buffers.stage(shards)
    assert {staged.weight: staged.local.data_ptr() for staged in second} == first
    assert len(set(first.values())) == len(first)
    for staged in second:
        assert torch.equal(staged.boxes[0].of_local(staged.local), model.get_parameter(staged.weight))


def test_the_file_of_tensors_is_one_that_safetensors_reads(tmp_path):
    from safetensors.torch import load_file

    dtypes = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool, torch.float8_e4m3fn]
    tensors = {str(dtype): torch.randn(5, 3).to(dtype) for dtype in dtypes}
    fused = torch.randn(6, 4)  # boxes of one storage
    tensors |= {"q": fused[:4], "k": fused[4:], "number": torch.tensor(7), "nothing": torch.zeros(0, 4)}
    write_safetensors(tmp_path / "file.safetensors", tensors)
    content = (tmp_path / "file.safetensors").read_bytes()
    assert record_of(tmp_path / "file.safetensors") == (len(content), hashlib.sha256(content).hexdigest())
    read = load_file(tmp_path / "file.safetensors")
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert read[key].dtype == tensor.dtype
        assert torch.equal(read[key].to(torch.float64), tensor.to(torch.float64))

from __future__ import annotations

import threading
import time

import pytest
import torch
from torch import nn

from rl_refit import ModuleSink, ModuleSource, PoisonedError, Refit, RefitError, Region, WeightSink
from rl_refit import sink as sink_module


def linear(value):
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, value)
    return model


def stage_all(sink, source_model):
    source = ModuleSource(source_model)
    manifest = source.manifest()
    coverage = sink.prepare(manifest)
    for region, tensor in source.shards([meta.name for meta in manifest.tensors]):
        sink.stage(region, tensor)
    return coverage


def values(model):
    return {tensor.flatten()[0].item() for tensor in model.parameters()}


def test_old_weights_serve_until_commit():
    model = linear(1.0)
    sink = ModuleSink(model)
    stage_all(sink, linear(2.0))
    assert values(model) == {1.0}
    sink.commit(5)
    assert values(model) == {2.0}
    assert sink.version == 5


def test_commit_keeps_the_identity_of_parameters():
    model = linear(1.0)
    weight, address = model.weight, model.weight.data_ptr()
    sink = ModuleSink(model)
    stage_all(sink, linear(2.0))
    sink.commit(0)
    assert model.weight is weight
    assert weight.data_ptr() == address
    assert weight.requires_grad


def test_prepare_answers_with_what_the_sink_needs():
    sink, source = ModuleSink(linear(1.0)), ModuleSource(linear(2.0))
    coverage = sink.prepare(source.manifest())
    assert coverage.manifest_hash == source.manifest().hash()
    assert coverage.sink == sink.manifest()
    assert coverage.version is None


def test_digest_is_of_the_stage_in_a_transaction_and_of_the_weights_outside():
    old, new = linear(1.0), linear(2.0)
    sink = ModuleSink(old)
    of_old, of_new = ModuleSink(linear(1.0)).digest(), ModuleSink(linear(2.0)).digest()
    assert of_old.differing(of_new) == ("weight", "bias")
    assert sink.digest() == of_old
    stage_all(sink, new)
    assert sink.digest() == of_new
    sink.abort()
    assert sink.digest() == of_old


def test_the_bank_is_allocated_once():
    sink = ModuleSink(linear(1.0))
    stage_all(sink, linear(2.0))
    addresses = {name: bank[0][1].data_ptr() for name, bank in sink._bank.items()}
    sink.commit(1)
    stage_all(sink, linear(3.0))
    assert {name: bank[0][1].data_ptr() for name, bank in sink._bank.items()} == addresses


def test_on_commit_hears_the_version_when_the_weights_are_there():
    model, heard = linear(1.0), []
    sink = ModuleSink(model, on_commit=lambda version: heard.append((version, values(model))))
    stage_all(sink, linear(2.0))
    sink.commit(3)
    assert heard == [(3, {2.0})]


def fail_at_the_second_tensor(monkeypatch):
    original, calls = sink_module.overwrite, []

    def overwrite(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError("the second tensor does not answer")
        original(*arguments)

    monkeypatch.setattr(sink_module, "overwrite", overwrite)


def test_a_torn_commit_poisons_until_another_succeeds(monkeypatch):
    model = linear(1.0)
    sink = ModuleSink(model)
    stage_all(sink, linear(2.0))
    with monkeypatch.context() as patch:
        fail_at_the_second_tensor(patch)
        with pytest.raises(OSError, match="second tensor"):
            sink.commit(4)
    sink.abort()
    assert values(model) == {1.0, 2.0}  # torn indeed
    assert sink.poisoned
    assert sink.version is None
    complaint = "the commit of version 4 failed with OSError: the second tensor does not answer"
    for use in (sink.check, sink.digest):
        with pytest.raises(PoisonedError, match=complaint):
            use()
    stage_all(sink, linear(3.0))
    sink.commit(4)
    sink.check()
    assert not sink.poisoned
    assert values(model) == {3.0}
    assert sink.version == 4


def test_an_engine_that_does_not_take_the_version_poisons():
    def refuse(version):
        raise ValueError(f"no {version}")

    sink = ModuleSink(linear(1.0), on_commit=refuse)
    stage_all(sink, linear(2.0))
    with pytest.raises(ValueError, match="no 1"):
        sink.commit(1)
    with pytest.raises(PoisonedError, match="version 1 failed with ValueError: no 1"):
        sink.check()


@pytest.mark.parametrize("version", [6, 7])
def test_a_version_that_is_not_newer_is_refused_with_nothing_touched(version):
    model = linear(1.0)
    sink = ModuleSink(model)
    stage_all(sink, linear(2.0))
    sink.commit(7)
    stage_all(sink, linear(3.0))
    with pytest.raises(RefitError, match=f"version {version} is not newer than the committed 7"):
        sink.commit(version)
    assert values(model) == {2.0}
    assert not sink.poisoned


def test_what_was_not_staged_exactly_once_is_not_committed():
    model = linear(1.0)
    sink = ModuleSink(model)
    sink.prepare(ModuleSource(linear(2.0)).manifest())
    row = Region("weight", (0, 0), (1, 3))
    sink.stage(row, torch.zeros(1, 3))
    sink.stage(Region("bias", (0,), (2,)), torch.zeros(2))
    with pytest.raises(RefitError, match=r"still missing: weight \(\+3 elements\)"):
        sink.commit(1)
    with pytest.raises(RefitError, match=r"offsets=\(0, 0\), shape=\(1, 3\)\) is staged a second time"):
        sink.stage(row, torch.zeros(1, 3))
    assert values(model) == {1.0}
    assert not sink.poisoned


@pytest.mark.parametrize(
    ("region", "tensor", "complaint"),
    [
        (Region("norm", (0,), (2,)), torch.zeros(2), "the sink has no such tensor"),
        (
            Region("bias", (0,), (2,)),
            torch.zeros(2).half(),
            r"\[2\] in torch.float16 .* \[2\] at \[0\] in torch.float32",
        ),
        (Region("bias", (0,), (2,)), torch.zeros(1), r"cannot stage \[1\]"),
        (Region("bias", (2,), (1,)), torch.zeros(1), r"offsets=\(2,\)"),
        (Region("bias", (1,), (2,)), torch.zeros(2), r"offsets=\(1,\)"),
        (Region("bias", (0, 0), (1, 2)), torch.zeros(1, 2), r"cannot stage \[1, 2\]"),
    ],
)
def test_a_piece_that_does_not_fit_is_refused(region, tensor, complaint):
    sink = ModuleSink(linear(1.0))
    sink.prepare(ModuleSource(linear(2.0)).manifest())
    with pytest.raises(RefitError, match=complaint):
        sink.stage(region, tensor)


def test_nothing_happens_outside_of_a_transaction():
    sink = ModuleSink(linear(1.0))
    sink.abort()
    with pytest.raises(RefitError, match="cannot stage: no transaction is open"):
        sink.stage(Region("bias", (0,), (2,)), torch.zeros(2))
    with pytest.raises(RefitError, match="cannot commit: no transaction is open"):
        sink.commit(1)


def test_one_transaction_at_a_time():
    sink, manifest = ModuleSink(linear(1.0)), ModuleSource(linear(2.0)).manifest()
    sink.prepare(manifest)
    with pytest.raises(RefitError, match="in a transaction already"):
        sink.prepare(manifest)


def holding(**buffers):
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


def test_tensors_that_a_commit_could_not_write_are_refused_before():
    base = torch.zeros(4, 3)
    with torch.inference_mode():
        frozen = torch.zeros(2)
    for module, complaint in [
        (holding(mask=torch.zeros(1).expand(3)), "'mask' is expanded"),
        (holding(frozen=frozen), "'frozen' was made under torch.inference_mode"),
        (holding(whole=base, part=base[1:3]), "'whole' and 'part' overlap"),
        (holding(square=base[:3], turned=base[:3].t()), "'square' and 'turned' overlap"),
    ]:
        sink = ModuleSink(module)
        with pytest.raises(RefitError, match=complaint):
            sink.prepare(sink.manifest())


def test_neighbours_in_one_storage_are_not_mistaken_for_overlap():
    base = torch.zeros(4, 3)
    module = holding(first=base[:2], second=base[2:], empty=base[:0])
    sink = ModuleSink(module)
    stage_all(sink, holding(first=torch.ones(2, 3), second=torch.full((2, 3), 2.0), empty=torch.zeros(0, 3)))
    sink.commit(1)
    assert base.sum(1).tolist() == [3, 3, 6, 6]


def test_check_refuses_while_a_commit_writes_and_serving_keeps_it_waiting():
    sink, said = ModuleSink(linear(1.0), before_commit=lambda version: said.append(("before", version))), []
    stage_all(sink, linear(2.0))
    looked = threading.Event()

    def look():
        with sink.serving() as version:
            said.append((version, values(sink._reader._module)))
            looked.set()
            while not sink._writing:  # the commit has begun, and waits for this thread
                time.sleep(0.001)
            with pytest.raises(PoisonedError, match="being written"):
                sink.check()
            said.append((version, values(sink._reader._module)))

    thread = threading.Thread(target=look)
    thread.start()
    assert looked.wait(60)
    sink.commit(3)
    thread.join()
    sink.check()
    assert said == [(None, {1.0}), ("before", 3), (None, {1.0})]
    with sink.serving() as version:
        assert (version, values(sink._reader._module)) == (3, {2.0})


def test_a_commit_does_not_wait_for_its_own_thread_nor_for_ever():
    sink = ModuleSink(linear(1.0), wait_s=0.01)
    stage_all(sink, linear(2.0))
    with sink.serving(), pytest.raises(RefitError, match="this thread is in `serving`"):
        sink.commit(1)
    entered, leave = threading.Event(), threading.Event()

    def serve():
        with sink.serving():
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=serve)
    thread.start()
    assert entered.wait(60)
    with pytest.raises(RefitError, match=r"1 threads still serve after wait_s=0\.01; nothing was written"):
        sink.commit(1)
    assert values(sink._reader._module) == {1.0}
    leave.set()
    thread.join()
    sink.commit(1)
    assert values(sink._reader._module) == {2.0}


def test_an_engine_that_cannot_stop_keeps_its_weights():
    def refuse(version):
        raise OSError("requests are under way")

    sink = ModuleSink(linear(1.0), before_commit=refuse)
    stage_all(sink, linear(2.0))
    with pytest.raises(OSError, match="under way"):
        sink.commit(1)
    sink.abort()
    sink.check()
    assert values(sink._reader._module) == {1.0}


def test_a_module_sink_is_a_weight_sink():
    assert isinstance(ModuleSink(linear(1.0)), WeightSink)


def test_a_sink_whose_trainer_went_back_takes_an_older_version_and_no_older_one():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)
    sink = ModuleSink(engine)
    refit = Refit(ModuleSource(policy), sink)
    for version in (3, 9):
        refit(version=version)
    with pytest.raises(RefitError, match=r"where a trainer went back, each engine says so with sink\.rewind\(5\)"):
        refit(version=5)
    sink.rewind(5)
    assert sink.version == 9
    with pytest.raises(RefitError, match="version 4 is not newer than the sink's 4"):
        refit(version=4)
    refit(version=5)
    assert sink.version == 5
    sink.rewind(8)  # it may come later than it must
    refit(version=6)
    sink.rewind(0)
    refit(version=0)
    assert sink.version == 0


def test_what_a_sink_holds_is_a_source_of_another_sink():
    policy, first, second = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)
    sink = ModuleSink(first)
    Refit(ModuleSource(policy), sink)(version=1)
    Refit(sink.weights(), ModuleSink(second))(version=1)
    assert torch.equal(second.weight, policy.weight)

"""vLLM's own weight transfer, with real classes of vLLM's: what goes wrong on that way is found, and named."""

import contextlib
from importlib.util import find_spec

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import faulty_worker
import file_transfer
import tiny
import torch
from torch import nn
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import ModuleSource as TheirModuleSource
from vllm.distributed.weight_transfer import ParamMeta, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer import WeightSource as TheirSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

from rl_refit import ModuleSink, ModuleSource, Refit
from rl_refit.digest import digest_regions
from rl_refit.errors import CoverageError, DigestError, PoisonedError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.vllm import WORKER_EXTENSION
from rl_refit.vllm.transfer_sink import TransferSink
from rl_refit.vllm.weight_transfer import SourceForVllm, SourceFromVllm, UpdateCheck

OLD, NEW = 0, 1


@pytest.fixture(scope="module")
def llm(checkpoints, served):
    served("qwen3", NEW)  # one engine at a time
    config = WeightTransferConfig(backend=file_transfer.BACKEND)
    options = {"worker_extension_cls": WORKER_EXTENSION, "weight_transfer_config": config}
    with tiny.engine(checkpoints("qwen3", OLD), **options) as llm:
        yield llm


def trainer_of(llm, source, folder):
    """The trainer's end, as vLLM's factory makes it."""
    info = file_transfer.Folder(folder=folder, rank=0)
    return WeightTransferTrainerFactory.trainer_init(info, client=file_transfer.Client(llm), source=source)


def our_source(seed, **options):
    return SourceForVllm(tiny.source(tiny.policy("qwen3", seed)), **options)


def test_an_update_by_vllms_own_way_is_compared_with_what_the_engine_holds(llm, served, tmp_path):
    source = our_source(NEW)
    check = UpdateCheck(llm, source)
    with pytest.raises(RefitError, match="vLLM has not taken all of the weights"):
        check()
    trainer = trainer_of(llm, source, tmp_path)
    trainer.send_weights("1")
    compared = set(source.digest().tensors) - set(check.unreadable)
    assert {"model.norm.weight", "model.layers.1.self_attn.q_norm.weight"} <= compared
    assert check() == source.digest()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))
    UpdateCheck(llm, our_source(NEW))
    with pytest.raises(RefitError, match="another UpdateCheck was made of this engine"):
        check()


def test_a_wrong_weight_and_a_lost_one_are_found_in_the_engine_and_named(llm, tmp_path):
    source = our_source(NEW)
    check, trainer = UpdateCheck(llm, source), trainer_of(llm, source, tmp_path)
    trainer.send_weights()
    check()

    trainer.wire = lambda tensors: tensors["model.norm.weight"].view(torch.int32)[5].bitwise_xor_(1)
    trainer.send_weights()
    with pytest.raises(DigestError, match="1 tensors of the engine are not what") as caught:
        check()
    assert caught.value.tensors == ("model.norm.weight",)

    # vLLM takes an update that lacks a tensor without a word, and serves the old one.
    stale = "model.layers.0.input_layernorm.weight"
    with torch.no_grad():
        dict(source.source._module.named_parameters())[stale].add_(1)
    trainer.wire = lambda tensors: tensors.pop(stale)
    trainer.send_weights()
    with pytest.raises(DigestError) as caught:
        check()
    assert caught.value.tensors == (stale,)

    trainer.wire = lambda tensors: None
    trainer.send_weights()
    check()


def test_a_source_that_does_not_feed_the_engine_is_refused_before_the_first_byte(llm):
    partial = SourceForVllm(ModuleSource(tiny.policy("qwen3", NEW), exclude="model.norm.weight"))
    with pytest.raises(CoverageError, match=r"are not fed:\n  model\.norm\.weight: never written"):
        UpdateCheck(llm, partial)


class Transfer:
    """A `TransferSink` of the engine, and what its test wants to see and to break."""

    def __init__(self, llm, like, folder, *, compare=True):
        self.events, self.wire, self.client = [], lambda tensors: None, file_transfer.Client(llm)

        def trainer(client, source):
            self.events.append("met")
            info = file_transfer.Folder(folder=folder, rank=0)
            made = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
            made.wire = lambda tensors: (self.events.append("sent"), self.wire(tensors))
            return made

        @contextlib.contextmanager
        def paused():
            self.events.append("paused")
            yield
            self.events.append("goes on")

        self.sink = TransferSink(self.client, trainer, like=like, paused=paused, engine=llm if compare else None)


def files_source(seed):
    """The tensors that a checkpoint's files hold."""
    return ModuleSource(tiny.policy("qwen3", seed), exclude=["*inv_freq", "lm_head.weight"])


def test_a_refit_stages_verifies_and_only_then_hands_over(llm, checkpoints, served, tmp_path):
    transfer = Transfer(llm, checkpoints("qwen3", OLD), tmp_path)
    report = Refit(files_source(NEW), transfer.sink)(version=7)
    assert transfer.events == ["met", "paused", "sent", "goes on"]
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))
    assert llm.get_weight_version() == "7"
    assert "model.norm.weight" not in report.unreadable
    unread = Refit(files_source(OLD), Transfer(llm, checkpoints("qwen3", OLD), tmp_path, compare=False).sink)(version=8)
    assert set(unread.unreadable) == files_source(OLD).manifest().by_name.keys()


def test_a_refit_that_is_given_up_before_the_decision_does_not_reach_the_engine(llm, checkpoints, tmp_path):
    class BreakingOff(type(files_source(NEW))):
        def shards(self, names):
            yield from list(super().shards(names))[:3]
            raise OSError("the trainer's disk is full")

    transfer = Transfer(llm, checkpoints("qwen3", OLD), tmp_path)
    with pytest.raises(OSError, match="disk is full"):
        Refit(BreakingOff(tiny.policy("qwen3", NEW), exclude=["*inv_freq", "lm_head.weight"]), transfer.sink)(version=1)
    transfer.sink.check()
    with pytest.raises(CoverageError):
        Refit(ModuleSource(tiny.policy("qwen3", NEW), exclude=["model.norm.weight"]), transfer.sink)(version=1)
    assert transfer.events == []


def test_wrong_weights_poison_until_a_refit_succeeds(llm, checkpoints, served, tmp_path):
    transfer = Transfer(llm, checkpoints("qwen3", OLD), tmp_path)
    refit = Refit(files_source(NEW), transfer.sink)
    transfer.wire = lambda tensors: tensors["model.norm.weight"].view(torch.int32)[5].bitwise_xor_(1)
    with pytest.raises(DigestError, match=r"model\.norm\.weight"):
        refit(version=1)
    with pytest.raises(PoisonedError, match="could not be confirmed after the commit"):
        transfer.sink.check()
    transfer.wire = lambda tensors: None
    refit(version=2)
    transfer.sink.check()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_an_update_that_breaks_off_poisons_for_good(llm, checkpoints, tmp_path):
    from rl_refit.vllm.reload import _put_back

    transfer = Transfer(llm, checkpoints("qwen3", OLD), tmp_path)
    refit = Refit(files_source(NEW), transfer.sink)
    [model] = llm.apply_model(lambda model: model)
    faulty_worker.break_loader(model, 4)
    with pytest.raises(OSError, match="a fault after 4 tensors"):
        refit(version=1)
    with pytest.raises(PoisonedError, match="the commit of version 1 failed with OSError"):
        transfer.sink.check()
    with pytest.raises(PoisonedError, match="start the engine anew, and make a new TransferSink"):
        refit(version=2)
    _put_back(model)  # in place of an engine that is started anew
    Refit(files_source(NEW), Transfer(llm, checkpoints("qwen3", OLD), tmp_path).sink)(version=3)


def test_vllm_brings_what_it_had_received_of_an_update_that_broke_off_into_the_next_one(llm, served, tmp_path):
    """Why that poisons for good; fails once vLLM can give an update up."""
    from rl_refit.vllm.reload import _put_back

    [model] = llm.apply_model(lambda model: model)
    broken, whole = trainer_of(llm, our_source(2), tmp_path), trainer_of(llm, our_source(NEW), tmp_path)

    def only_a_part_of_a_layer(tensors):
        query = "model.layers.0.self_attn.q_proj.weight"
        part = {query: tensors[query], "no such tensor": torch.zeros(1)}
        tensors.clear()
        tensors.update(part)

    broken.wire = only_a_part_of_a_layer
    with pytest.raises(ValueError, match="no such tensor"):
        broken.send_weights()
    with pytest.raises(AttributeError, match="weight_loader"):  # the layer is full with one part of each update
        whole.send_weights()
    _put_back(model)
    whole.send_weights()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


@pytest.mark.slow  # an engine of two processes
def test_each_of_two_workers_is_compared_in_its_own_boxes(checkpoints, tmp_path):
    config = WeightTransferConfig(backend=file_transfer.BACKEND)
    two = {"tensor_parallel_size": 2, "worker_extension_cls": "file_transfer.FileWorker"}
    with tiny.engine(checkpoints("qwen3_moe", OLD), weight_transfer_config=config, **two) as llm:
        source = SourceForVllm(tiny.source(tiny.policy("qwen3_moe", NEW)))
        check, trainer = UpdateCheck(llm, source), trainer_of(llm, source, tmp_path)
        sharded = "model.embed_tokens.weight"
        assert sharded not in check.unreadable
        assert {box.shape[0] for box in source.boxes if box.name == sharded} == {160, 100}  # vLLM pads the vocabulary
        trainer.send_weights()
        check()
        trainer.wire = lambda tensors: tensors[sharded][200].neg_()  # a row of the second worker's
        trainer.send_weights()
        with pytest.raises(DigestError) as caught:
            check()
        assert caught.value.tensors == (sharded,)


class Policy(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.norm, self.layers = nn.LayerNorm(4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("inv_freq", torch.ones(2))


def test_metadata_and_iteration_are_as_vllms_engines_want_them():
    source = SourceForVllm(ModuleSource(Policy(0), cast=torch.bfloat16))
    pairs = list(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata()))
    kept = dict(Policy(0).named_parameters())
    assert {name for name, _ in pairs} == kept.keys()  # what is tied once, and nothing that the engine computes
    assert all(torch.equal(tensor, kept[name].bfloat16()) for name, tensor in pairs)
    assert [name for group in source.groups() for name in group] == [name for name, _ in pairs]
    assert [names for names, _ in source.iter_groups()] == source.groups()
    assert source.held_names() is None
    tied = SourceForVllm(ModuleSource(Policy(0)), ties=True)
    assert {name for name, _ in tied} == {*kept, "head.weight"}


def test_the_digest_is_of_a_whole_pass_and_of_the_boxes_that_were_asked_for():
    policy = Policy(0)
    source, box = SourceForVllm(ModuleSource(policy)), Region("embed.weight", (2, 0), (3, 4))
    source.boxes.add(box)
    list(source)
    assert source.digest([box]) == digest_regions([box], lambda _: policy.embed.weight[2:5])
    next(iter(source))
    with pytest.raises(RefitError, match="vLLM has not taken all"):
        source.digest()


def test_a_source_that_is_sharded_is_refused_by_name():
    class Sharded:
        device = torch.device("cpu")

        def manifest(self):
            layout = Layout(mesh_shape=(2,), sharded_dims=(0,), ranks=(0, 1))
            return Manifest((TensorMeta(name="weight", shape=(4, 2), dtype="float32", layout=layout),))

    with pytest.raises(RefitError, match="'weight' is sharded"):
        SourceForVllm(Sharded())


def sink_of(module):
    return ModuleSink(module, derived="inv_freq")


def test_a_vllm_source_is_refitted_with_every_check():
    for theirs in (TheirModuleSource(Policy(NEW)), SourceForVllm(ModuleSource(Policy(NEW)))):
        engine = Policy(OLD)
        report = Refit(SourceFromVllm(theirs), sink_of(engine))(version=1)
        assert report.verified == "every byte"
        kept = dict(Policy(NEW).named_parameters())
        assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.named_parameters())


class Wrong(TheirSource):
    """A source of somebody's that does not keep to vLLM's contract."""

    def __init__(self, change):
        self.change, self.passes = change, 0

    def metadata(self):
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in Policy(NEW).named_parameters()]

    def __iter__(self):
        self.passes += 1
        return iter(self.change([*Policy(NEW).named_parameters()], self.passes))


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        (lambda pairs, _: pairs[1:], RefitError, "both must list the same parameters in one order"),
        (lambda pairs, _: pairs[:-1], RefitError, r"yields None, and its metadata\(\) says \('embed.weight'"),
        (lambda pairs, _: [pairs[1], pairs[0], *pairs[2:]], RefitError, "yields \\('norm.bias'"),
        (lambda pairs, _: [(name, t.double()) for name, t in pairs], RefitError, "torch.float64"),
        (lambda pairs, number: [(name, t.detach() + number) for name, t in pairs], DigestError, "norm.weight"),
    ],
    ids=["one is missing", "the last is missing", "two changed places", "another dtype", "another value each pass"],
)
def test_a_vllm_source_that_errs_is_refused_and_the_engine_keeps_its_weights(change, error, told):
    engine = Policy(OLD)
    with pytest.raises(error, match=told):
        Refit(SourceFromVllm(Wrong(change)), sink_of(engine))(version=1)
    kept = dict(Policy(OLD).named_parameters())
    assert all(torch.equal(tensor, kept[name]) for name, tensor in engine.named_parameters())


def test_a_vllm_source_that_holds_a_part_is_refused(monkeypatch):
    source = TheirModuleSource(Policy(0))
    monkeypatch.setattr(source, "held_names", lambda: {"norm.weight"})
    with pytest.raises(RefitError, match="of several ranks"):
        SourceFromVllm(source)

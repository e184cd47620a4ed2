from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_refit import (
    CountedRefit,
    CoverageError,
    Layout,
    ModuleSink,
    ModuleSource,
    Refit,
    RefitError,
    Region,
    StateDictSource,
    WeightSource,
)


class Model(nn.Module):
    """A tied head, a persistent and a non-persistent buffer, a scalar, and a tensor without elements."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.empty = nn.Parameter(torch.empty(0, 4, dtype=torch.bfloat16))
        self.register_buffer("inv_freq", torch.arange(2.0), persistent=False)


def test_every_parameter_and_every_buffer_is_in_the_manifest():
    metas = ModuleSource(Model()).manifest().tensors
    assert [(m.name, m.shape, m.dtype, m.tied_to) for m in metas] == [
        ("empty", (0, 4), "bfloat16", None),
        ("embed.weight", (6, 4), "float32", None),
        ("norm.weight", (4,), "float32", None),
        ("norm.bias", (4,), "float32", None),
        ("head.weight", (6, 4), "float32", "embed.weight"),
        ("inv_freq", (2,), "float32", None),
        ("norm.running_mean", (4,), "float32", None),
        ("norm.running_var", (4,), "float32", None),
        ("norm.num_batches_tracked", (), "int64", None),
    ]
    assert {meta.layout for meta in metas} == {Layout.whole(0)}


def test_shards_are_the_modules_own_memory_in_the_order_asked_for():
    model = Model()
    shards = list(ModuleSource(model).shards(["head.weight", "inv_freq"]))
    assert [region for region, _ in shards] == [Region("head.weight", (0, 0), (6, 4)), Region("inv_freq", (0,), (2,))]
    assert shards[0][1].data_ptr() == model.embed.weight.data_ptr()
    assert not shards[0][1].requires_grad


def test_ties_are_seen_in_memory_even_between_different_objects():
    model = Model()
    model.head.weight = nn.Parameter(model.embed.weight.detach())
    assert ModuleSource(model).manifest().by_name["head.weight"].tied_to == "embed.weight"


def test_the_same_memory_seen_in_another_shape_is_no_tie():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(2, 3))
    model.register_buffer("transposed", model.weight.detach().t())
    assert ModuleSource(model).manifest().by_name["transposed"].tied_to is None


def test_tensors_without_elements_are_not_tied():
    model = nn.Module()
    model.one, model.other = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(0))
    assert [meta.tied_to for meta in ModuleSource(model).manifest().tensors] == [None, None]


def test_names_are_renamed_on_request_and_stripped_of_nothing_without():
    model = nn.ModuleDict({"_orig_mod": nn.Linear(2, 2, bias=False)})
    assert list(ModuleSource(model).manifest().by_name) == ["_orig_mod.weight"]
    source = ModuleSource(model, rename=lambda name: name.removeprefix("_orig_mod."))
    assert list(source.manifest().by_name) == ["weight"]
    assert [region.name for region, _ in source.shards(["weight"])] == ["weight"]


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(RefitError, match=r"two tensors are named 'w', one of them 'bias' in the module"):
        ModuleSource(nn.Linear(2, 2), rename=lambda _: "w").manifest()


def test_tensors_without_memory_are_refused():
    with pytest.raises(RefitError, match="'weight' is on the meta device"):
        ModuleSource(nn.Linear(2, 2, device="meta")).manifest()


def test_a_module_source_is_a_weight_source():
    assert isinstance(ModuleSource(Model()), WeightSource)


def test_the_manifest_follows_the_module():
    model = Model()
    source = ModuleSource(model)
    before = source.manifest()
    assert source.manifest() is before
    model.double()
    assert source.manifest().hash() != before.hash()


def test_a_master_in_float32_feeds_an_engine_in_bfloat16_where_that_was_asked_for():
    policy, engine = (nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.BatchNorm1d(3)) for _ in range(2))
    engine.bfloat16()
    engine[1].float()  # a router, say
    source = ModuleSource(policy, cast={"1.*": torch.float32, "*": torch.bfloat16})
    assert not source.tensors_stay
    report = Refit(source, ModuleSink(engine))(version=1)
    assert report.verified == "every byte"
    assert torch.equal(engine[0].weight, policy[0].weight.bfloat16())
    assert torch.equal(engine[1].weight, policy[1].weight)
    assert policy[0].weight.dtype == torch.float32
    with pytest.raises(CoverageError, match=r"0.weight: dtype float32 in the source, bfloat16 in the sink"):
        Refit(ModuleSource(policy), ModuleSink(engine))(version=2)


def test_a_tied_tensor_is_cast_with_its_root_and_an_idle_pattern_is_refused():
    policy = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False))
    policy[1].weight = policy[0].weight
    manifest = ModuleSource(policy, cast={"0.*": torch.bfloat16}).manifest()
    assert [meta.dtype for meta in manifest.tensors] == ["bfloat16", "bfloat16"]
    with pytest.raises(RefitError, match=r"the patterns \['head.\*'\] of cast fit no floating-point tensor"):
        ModuleSource(policy, cast={"head.*": torch.bfloat16}).manifest()


class Box:
    def __init__(self, start, stop, local_start, width):
        self.offsets, self.sizes = (start, 0), (stop - start, width)
        self._local = slice(local_start, local_start + stop - start)

    def of_local(self, local):
        return local[self._local]


class Shard:
    """As trainers list them: with a tensor and an order of rows, or with memory and boxes alone."""

    def __init__(self, name, local, *, shape=None, boxes=None, **layout):
        self.name, self.local, self.shape = name, local, tuple(local.shape if shape is None else shape)
        self._boxes = [Box(0, len(local), 0, local.shape[1])] if boxes is None else boxes
        self.__dict__ |= layout

    def boxes(self):
        return self._boxes


def refitted(source, *names):
    held = {name: meta.shape for name, meta in source.manifest().by_name.items() if name in names}
    engine = nn.Module()
    for name, shape in held.items():
        engine.register_buffer(name, torch.zeros(shape))
    Refit(source, ModuleSink(engine))(version=1)
    return [dict(engine.named_buffers())[name] for name in names]


def test_shards_are_sent_from_their_tensors_or_box_by_box_where_their_rows_are_reordered():
    plain, fused = torch.arange(6.0).view(3, 2), torch.arange(8.0).view(4, 2)
    order = torch.tensor([2, 3, 0, 1])
    boxes = [Box(2, 4, 0, 2), Box(0, 2, 2, 2)]
    source = StateDictSource.from_shards(
        [
            Shard("plain", plain, tensor=plain, row_order=None),
            Shard("fused", fused, tensor=fused, row_order=order, boxes=boxes),
        ]
    )
    received = refitted(source, "plain", "fused")
    assert torch.equal(received[0], plain)
    assert torch.equal(received[1], fused[[2, 3, 0, 1]])


def test_one_parameter_may_hold_parts_of_several_tensors_and_padding_is_not_sent():
    parameter = torch.arange(10.0).view(5, 2)
    source = StateDictSource.from_shards(
        [
            Shard("q", parameter, shape=(3, 2), boxes=[Box(0, 3, 0, 2)]),
            Shard("k", parameter, shape=(2, 2), boxes=[Box(0, 2, 3, 2)]),
            Shard("padding", parameter, shape=(2, 2), boxes=[]),
        ]
    )
    assert set(source.manifest().by_name) == {"q", "k"}
    received = refitted(source, "q", "k")
    assert torch.equal(torch.cat(received), parameter)
    parameter.add_(1.0)  # the memory is read anew at each refit
    assert torch.equal(torch.cat(refitted(source, "q", "k")), parameter)


def test_buffers_that_no_shard_holds_are_sent_beside_the_shards():
    weight = torch.ones(2, 2)
    source = StateDictSource.from_shards(
        [Shard("w", weight, tensor=weight, row_order=None)], buffers={"inv_freq": torch.arange(3.0)}
    )
    received = refitted(source, "w", "inv_freq")
    assert torch.equal(received[1], torch.arange(3.0))


def test_a_counted_refit_counts_what_was_committed_and_refreshes_its_source_first():
    policy, engine = nn.Linear(2, 2), nn.Linear(2, 2)

    def refresh():
        policy.weight.data.fill_(7.0)

    sync = CountedRefit(Refit(ModuleSource(policy), ModuleSink(engine)), refresh=refresh)
    assert (sync.count, sync.last, sync.metrics()) == (0, None, {})
    report = sync(version=3)
    assert (sync.count, sync.last, report.version) == (1, report, 3)
    assert (engine.weight == 7.0).all()
    assert sync.metrics() == {"refit_bytes": report.bytes, "refit_s": report.total_seconds, "refit_verified": 1.0}
    assert sync.explain() == Refit(ModuleSource(policy), ModuleSink(engine)).explain()
    broken = CountedRefit(Refit(ModuleSource(policy), ModuleSink(nn.Linear(3, 3))))
    with pytest.raises(CoverageError):
        broken(version=4)
    assert (broken.count, broken.last) == (0, None)

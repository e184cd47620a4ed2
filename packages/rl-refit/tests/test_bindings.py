"""Names that lie in storage of other names: fused, padded and permuted, on either side of a refit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rl_refit import Binding, CoverageError, ModuleSink, ModuleSource, Refit, RefitError, Region, StateDictSource


class Fused(nn.Module):
    """Rows 0-1 are `q`, rows 2-4 are `k`, rows 5-7 are padding; and a norm of its own name."""

    def __init__(self):
        super().__init__()
        self.qk = nn.Parameter(torch.zeros(8, 3))
        self.norm = nn.Parameter(torch.zeros(3))


def bind(module):
    yield Binding(Region("q", (0, 0), (2, 3)), (2, 3), module.qk[0:2])
    yield Binding(Region("k", (0, 0), (3, 3)), (3, 3), module.qk[2:5])


def checkpoint():
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (2, 3), "k": (3, 3), "norm": (3,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_names_arrive_in_the_storage_they_are_bound_to():
    engine, tensors = Fused(), checkpoint()
    report = Refit(StateDictSource(tensors), ModuleSink(engine, bindings=bind, constant=["qk"]))(version=1)
    assert torch.equal(engine.qk[:2], tensors["q"])
    assert torch.equal(engine.qk[2:5], tensors["k"])
    assert torch.equal(engine.qk[5:], torch.zeros(3, 3))
    assert torch.equal(engine.norm, tensors["norm"])
    assert report.tensors == 3


def test_elements_that_no_binding_reaches_must_be_declared():
    with pytest.raises(CoverageError, match="qk: 9 of 24 elements") as caught:
        Refit(StateDictSource(checkpoint()), ModuleSink(Fused(), bindings=bind))(version=1)
    assert caught.value.unfed == ("qk",)


def test_bindings_that_reach_an_element_twice_are_refused():
    def twice(module):
        yield from bind(module)
        yield Binding(Region("norm2", (0, 0), (1, 3)), (1, 3), module.qk[4:5])

    with pytest.raises(RefitError, match="two bindings reach the same elements of qk"):
        ModuleSink(Fused(), bindings=twice, constant=["qk"]).manifest()


def test_one_box_in_two_places_fills_both():
    def replicated(module):
        yield Binding(Region("q", (0, 0), (2, 3)), (2, 3), module.qk[0:2])
        yield Binding(Region("q", (0, 0), (2, 3)), (2, 3), module.qk[2:4])

    engine, tensors = Fused(), checkpoint()
    del tensors["k"]
    Refit(StateDictSource(tensors), ModuleSink(engine, bindings=replicated, constant=["qk"]))(version=1)
    assert torch.equal(engine.qk[:2], tensors["q"])
    assert torch.equal(engine.qk[2:4], tensors["q"])


def test_a_source_may_be_fused_and_permuted():
    """A rank of a trainer that keeps rows 2 and 0, in this order, of a tensor of three rows, and row 1 elsewhere."""
    policy, engine = nn.Module(), nn.Module()
    policy.stored = nn.Parameter(torch.randn(3, 4))
    engine.w = nn.Parameter(torch.zeros(3, 4))

    def rows(module):
        for place, row in enumerate((2, 0, 1)):
            yield Binding(Region("w", (row, 0), (1, 4)), (3, 4), module.stored[place : place + 1])

    Refit(ModuleSource(policy, bindings=rows), ModuleSink(engine))(version=1)
    assert torch.equal(engine.w, policy.stored[[1, 2, 0]])


def test_transposed_and_strided_storage_is_written_through():
    engine, tensors = nn.Module(), {"up": torch.randn(4, 3), "down": torch.randn(3, 4)}
    engine.both = nn.Parameter(torch.zeros(3, 8))

    def columns(module):
        yield Binding(Region("up", (0, 0), (4, 3)), (4, 3), module.both[:, ::2].t())
        yield Binding(Region("down", (0, 0), (3, 4)), (3, 4), module.both[:, 1::2])

    Refit(StateDictSource(tensors), ModuleSink(engine, bindings=columns))(version=1)
    assert torch.equal(engine.both[:, ::2], tensors["up"].t())
    assert torch.equal(engine.both[:, 1::2], tensors["down"])


def test_ties_between_bound_names_are_seen():
    engine, table = nn.Module(), torch.randn(4, 3)
    engine.table = nn.Parameter(torch.zeros(4, 3))

    def tied(module):
        yield Binding(Region("embed", (0, 0), (4, 3)), (4, 3), module.table)
        yield Binding(Region("head", (0, 0), (4, 3)), (4, 3), module.table)

    sink = ModuleSink(engine, bindings=tied)
    assert sink.manifest().by_name["head"].tied_to == "embed"
    Refit(StateDictSource({"embed": table, "head": table}), sink)(version=1)
    assert torch.equal(engine.table, table)


def test_derived_and_constant_tensors_need_no_source_and_a_pattern_must_fit():
    engine = Fused()
    engine.register_buffer("inv_freq", torch.ones(2))
    engine.register_buffer("absorbed", torch.ones(2))
    sink = ModuleSink(engine, bindings=bind, constant=["qk", "inv_*"], derived=["absorbed"])
    Refit(StateDictSource(checkpoint()), sink)(version=1)
    assert torch.equal(engine.inv_freq, torch.ones(2))
    with pytest.raises(RefitError, match="the pattern 'inv_frq' fits no tensor of the module"):
        ModuleSink(engine, constant=["inv_frq"]).manifest()


def test_what_a_source_leaves_out_is_left_out_by_name():
    policy = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    engine = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(CoverageError, match=r"1\.weight"):
        Refit(ModuleSource(policy), ModuleSink(engine))(version=1)
    Refit(ModuleSource(policy, exclude=["1.*"]), ModuleSink(engine))(version=1)
    assert torch.equal(engine[0].weight, policy[0].weight)


def test_a_binding_must_be_of_the_regions_shape():
    with pytest.raises(ValueError, match=r"is bound to a tensor of shape \[3\]"):
        Binding(Region("q", (0,), (2,)), (2,), torch.zeros(3))


def test_padding_under_the_tensors_own_name_is_declared_and_the_name_is_fed():
    """vLLM pads `embed` to eight rows, and the head is tied to it."""
    engine, table = nn.Module(), torch.randn(5, 3)
    engine.embed = nn.Parameter(torch.zeros(8, 3))
    engine.head = engine.embed

    def unpadded(module):
        yield Binding(Region("embed", (0, 0), (5, 3)), (5, 3), module.embed[:5])

    sink = ModuleSink(engine, bindings=unpadded, constant=["embed"])
    assert sink.manifest().by_name["embed"].feeding == "fed"
    Refit(StateDictSource({"embed": table}), sink)(version=1)
    assert torch.equal(engine.embed[:5], table)
    with pytest.raises(CoverageError, match="embed"):
        ModuleSink(engine, bindings=unpadded).manifest()


def test_a_name_that_the_module_has_elsewhere_is_not_given_to_others():
    def stolen(module):
        yield Binding(Region("norm", (0,), (3,)), (3,), module.qk[0])

    with pytest.raises(RefitError, match="'norm' is a tensor of the module, and bindings give the name to others"):
        ModuleSink(Fused(), bindings=stolen, constant=["qk"]).manifest()

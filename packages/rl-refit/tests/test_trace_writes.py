"""Which engine memory an unmodified loader writes, found out without data."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from rl_refit import Layout, Manifest, RefitError, TensorMeta
from rl_refit.tracing import trace_writes

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from toy_engine import Shape, ToyEngine, manifest


def on_meta(shape, **given):
    with torch.device("meta"):
        return ToyEngine(shape, **given)


def metas(**shapes):
    return Manifest(
        tuple(
            TensorMeta(name=name, shape=shape, dtype="float32", layout=Layout.whole()) for name, shape in shapes.items()
        )
    )


def holding(**buffers):
    module = nn.Module()
    for name, tensor in buffers.items():
        module.register_buffer(name, tensor)
    return module


def written(store, *, shape=(6, 5), **sources):
    """The coverage of one buffer `w` of `shape` after `store(w, sources)`."""
    engine = holding(w=torch.empty(shape, device="meta"))
    return trace_writes(lambda weights: store(engine.w, dict(weights)), engine, metas(**(sources or {"a": shape})))


def test_a_complete_loader_is_proved_complete_and_the_rest_is_named():
    engine = on_meta(Shape(layers=2))
    found = trace_writes(engine.load_weights, engine, manifest(engine.shape))
    assert found.never == ("normalizer",)
    assert found.partial == {"embed.weight": 8, "lm_head.weight": 8}
    assert found.unused == ()
    names = {name for name, _ in engine.named_parameters(remove_duplicate=False)}
    assert set(found.complete) == names - {"embed.weight", "lm_head.weight"}


def assign_rows(w, sources):
    w[torch.tensor([0, 2, 5])] = sources["a"][:3]


def assign_diagonal(w, sources):
    w[torch.eye(6, 5, dtype=torch.bool)] = sources["a"][0]


def assign_list(w, sources):
    w[[0, 2]] = sources["a"][:2]  # torch makes the list a tensor on the meta device


def replace_all(w, sources):
    w.set_(sources["a"])


def assemble(w, sources):
    parts = torch.empty_like(w)
    parts[:2] = sources["a"][:2]
    parts[2:] = sources["a"][2:]
    w.copy_(parts)


def concatenate(w, sources):
    w.copy_(torch.cat([sources["b"], sources["c"].t()], dim=1).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("store", "missing"),
    [
        (lambda w, s: w.copy_(s["a"]), 0),
        (lambda w, s: w.data.copy_(s["a"].clone()), 0),
        (lambda w, s: w.t().copy_(s["a"].t()), 0),
        (lambda w, s: w.view(-1).copy_(s["a"].flatten()), 0),
        (lambda w, s: w.view(-1)[3:17].copy_(s["a"].flatten()[:14]), 16),
        (lambda w, s: w[:, 1:3].copy_(s["a"][:, :2]), 18),
        (lambda w, s: w[::2].copy_(s["a"][:3]), 15),
        (lambda w, s: w[1].fill_(0), 25),
        (lambda w, s: w.zero_(), 0),
        (lambda w, s: torch.add(s["a"], 1, out=w), 0),
        (lambda w, s: torch._foreach_copy_([w[0], w[1]], [s["a"][0], s["a"][1]]), 20),
        (lambda w, s: w.add_(s["a"]), 30),
        (lambda w, s: w.mul_(2), 30),
        (lambda w, s: w.view(torch.int32).copy_(s["a"].view(torch.int32)), 0),
        (lambda w, s: w.view(torch.uint8)[:, :8].copy_(s["a"].view(torch.uint8)[:, :8]), 18),
        (assemble, 0),
        (replace_all, 0),
        (lambda w, s: None, 30),
    ],
)
def test_every_way_to_write_is_seen_for_what_it_reaches(store, missing):
    found = written(store)
    assert found.partial == ({"w": missing} if 0 < missing < 30 else {})
    assert (found.never == ("w",)) == (missing == 30)


def test_names_are_followed_through_what_a_loader_makes_of_them():
    found = written(concatenate, b=(6, 2), c=(3, 6), d=(6, 5))
    assert found.complete == ("w",)
    assert found.unused == ("d",)


def test_what_is_read_and_thrown_away_is_unused():
    def load(w, sources):
        sources["b"].clone().add_(1)
        w.copy_(sources["a"])

    assert written(load, a=(6, 5), b=(6, 5)).unused == ("b",)


def test_a_part_of_a_larger_storage_is_followed():
    base = torch.empty(8, 8, device="meta")
    engine = holding(left=base[:, :4], turned=base[:, 4:].t(), far=torch.empty(2, device="meta"))

    def load(weights):
        base[:3].copy_(dict(weights)["a"])

    found = trace_writes(load, engine, metas(a=(3, 8)))
    assert found.partial == {"left": 20, "turned": 20}
    assert found.never == ("far",)


def test_parameters_that_are_replaced_count_as_what_replaced_them():
    with torch.device("meta"):
        engine = nn.Linear(3, 2)

    def load(weights):
        weight = dict(weights)["weight"]
        engine.weight = nn.Parameter(weight.clone())
        engine.bias.data = torch.empty(2, device="meta")

    found = trace_writes(load, engine, metas(weight=(2, 3)))
    assert (found.complete, found.never, found.unused) == (("weight",), ("bias",), ())


def test_memory_that_has_values_keeps_them():
    engine = holding(real=torch.ones(3), meta=torch.empty(3, device="meta"))

    def load(weights):
        for weight in dict(weights).values():
            engine.real.copy_(weight)
            engine.meta.copy_(weight)
        engine.real.zero_()

    found = trace_writes(load, engine, metas(a=(3,)))
    assert found.complete == ("real", "meta")
    assert engine.real.tolist() == [1, 1, 1]


def test_temporaries_with_values_are_no_obstacle():
    def load(w, sources):
        part = torch.zeros(6, 5)
        part.copy_(sources["a"])
        w.copy_(part)

    found = written(load)
    assert found.complete == ("w",)
    assert found.unused == ()


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        (lambda w, s: w.fill_(s["a"].sum().item()), r"asks for values of a, with aten._local_scalar_dense"),
        (lambda w, s: w.copy_(s["a"]) if s["a"].any() else None, "values of a"),
        (lambda w, s: w.copy_(s["a"]) if torch.equal(s["a"], w) else None, "values of a, with aten.equal"),
        (lambda w, s: w.view(-1)[: s["a"].nonzero().shape[0]].zero_(), "values of a, with aten.nonzero"),
        (lambda w, s: w.data[0, 0].item(), "values of a tensor"),
        (lambda w, s: w.index_copy_(0, s["a"][:, 0].long(), s["a"]), "writes at indices, with aten.index_copy_"),
        (lambda w, s: w.masked_fill_(s["a"] > 0, 1), "writes at indices, with aten.masked_fill_"),
        (lambda w, s: w.scatter_(0, torch.zeros(1, 5).long(), s["a"]), "writes at indices, with aten.scatter_"),
        (assign_rows, "writes at indices, with aten.index_put_"),
        (assign_diagonal, "writes at indices, with aten.index_put_"),
        (assign_list, "writes at indices, with aten.index_put_"),
    ],
)
def test_a_loader_that_asks_for_values_is_told_so(store, complaint):
    with pytest.raises(RefitError, match=complaint):
        written(store)


def test_a_large_engine_costs_no_memory():
    engine = holding(stack=torch.empty(256, 4096, 7168, device="meta"))

    def load(weights):
        for name, weight in weights:
            half = 2048 * name.endswith("up")
            engine.stack[int(name.split("_")[0])][half : half + 2048].copy_(weight)

    shapes = {f"{expert}_{part}": (2048, 7168) for part in ("gate", "up") for expert in range(255)}
    found = trace_writes(load, engine, metas(**shapes))
    assert found.partial == {"stack": 4096 * 7168}

"""The sink for vLLM, as far as it needs no vLLM: what a loader copies, and where, and what surveys come to."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_refit.errors import CoverageError, RefitError
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta, merge_manifests
from rl_refit.plan import plan_refit
from rl_refit.tracing.layouts import Landings, find_landings
from rl_refit.tracing.memory import Place
from rl_refit.tracing.writes import record_writes
from rl_refit.vllm import WORKER_EXTENSION, VllmSink
from rl_refit.vllm.survey import NeedsConfig, Survey, offered, prove_needs, sink_manifest


def meta(name, shape=(4, 3), dtype="float32", tied_to=None):
    return TensorMeta(name=name, shape=shape, dtype=dtype, layout=Layout.whole(), tied_to=tied_to)


# -- What a loader copies ----------------------------------------------------------------------------------------


@given(st.data())
def test_the_box_of_a_view_is_where_its_elements_are(data):
    shape = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True)]
    view = whole[tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))]
    view = view.permute(data.draw(st.permutations(range(len(shape)))))
    box = Place.of(view).box_in(Place.of(whole))
    assert box is not None
    found = whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.shape, strict=True))]
    assert sorted(found.flatten().tolist()) == sorted(view.flatten().tolist())


def test_a_view_that_is_no_box_is_not_taken_for_one():
    whole = torch.empty(4, 6)
    assert Place.of(whole[:, ::2]).box_in(Place.of(whole)) is None
    assert Place.of(whole.flatten()[3:9]).box_in(Place.of(whole)) is None
    assert Place.of(torch.empty(9).as_strided((3,), (1,), 6)).box_in(Place.of(torch.empty(4))) is None
    assert Place.of(whole[0]).box_in(Place.of(whole[0, :1].expand(6))) is None


def recorded(tensors, *sources):
    """What a loader that `tensors` and its weights are given writes."""
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return lambda load: record_writes(lambda weights: load(dict(weights)), module, Manifest(sources))


def test_copies_know_their_source_and_padding_knows_none():
    target = torch.empty(4, 2, device="meta")

    def load(loaded):
        target[:2].copy_(loaded["plain"].t())
        target[2:3].copy_(loaded["cast"].half().float())
        target[3:].fill_(0)

    recorder = recorded({"target": target}, meta("plain", (2, 2)), meta("cast", (1, 2)))(load)
    plain, made, padding = recorder.writes_to(target)
    assert (plain.source, plain.origin) == ("plain", Place(0, (2, 2), (1, 2), torch.float32))
    assert (set(made.names), made.origin, made.target.offset) == ({"cast"}, None, 4)
    assert (set(padding.names), padding.origin) == (set(), None)


def test_a_landing_says_where_each_box_of_a_source_goes_in_the_order_of_its_dims():
    sources = [meta("w", (4, 3)), meta("b", (4,)), meta("norm", (2,)), meta("half", (2,))]
    tensors = {name: torch.empty(size, device="meta") for name, size in SHAPES.items()}

    def load(loaded):
        tensors["fused"][:, 1:3].copy_(loaded["w"].narrow(0, 2, 2).t())  # this rank's rows, transposed
        tensors["fused"][:, :1].fill_(0)  # padding
        tensors["bias"].copy_(loaded["b"][2:])
        tensors["scale"].copy_(loaded["norm"] + 1)
        tensors["late"].copy_(loaded["half"])
        tensors["late"].mul_(2)

    found = find_landings(recorded(tensors, *sources)(load), tensors)
    values = torch.arange(12.0).view(4, 3)
    (landing,) = found.by_source["w"]
    assert (landing.box, landing.name) == (Region("w", (2, 0), (2, 3)), "fused")
    live = torch.zeros(SHAPES["fused"])
    live.as_strided(landing.box.shape, landing.strides, landing.offset).copy_(values[2:])
    assert torch.equal(live[:, 1:3], values[2:].t())
    assert found.by_source["b"][0].box == Region("b", (2,), (2,))
    assert "norm" not in found.by_source  # computed
    assert found.users == {"w": ("fused",), "b": ("bias",), "norm": ("scale",), "half": ("late",)}
    assert found.changed == {"scale", "late"}  # these go through the loader


def test_what_is_written_to_one_place_or_cast_is_told():
    tensors = {"both": torch.empty(2, 2, device="meta"), "narrow": torch.empty(2, dtype=torch.bfloat16, device="meta")}

    def load(loaded):
        tensors["both"].copy_(loaded["one"])
        tensors["both"][1:].copy_(loaded["two"])
        tensors["narrow"].copy_(loaded["wide"])

    sources = [meta("one", (2, 2)), meta("two", (1, 2)), meta("wide", (2,))]
    found = find_landings(recorded(tensors, *sources)(load), tensors)
    assert found.clashes == ["one and two are both written to both"]
    assert found.casts == {"wide": "bfloat16"}


SHAPES = {"fused": (3, 3), "bias": (2,), "scale": (2,), "late": (2,)}

# -- What surveys come to ----------------------------------------------------------------------------------------

SOURCE = Manifest(
    (meta("embed.weight"), meta("up.weight"), meta("rotary.inv_freq"), meta("head.weight", tied_to="embed.weight"))
)
NOTHING = Landings(by_source={}, users={}, changed=frozenset(), clashes=[], casts={})


def prove(landings=NOTHING, *, live_ties=(), has_all=True, options=(), **found):
    """Whether an engine that does this with `SOURCE` can be fed."""
    survey = Survey(architecture="Toy", landings=landings, **found)
    prove_needs(SOURCE, survey, NeedsConfig(**dict(options)), live_ties=dict(live_ties), has_all=has_all)


def manifest_of(*, ties=False, boxes=None, rank=0):
    """As a worker makes it that holds `boxes` of what its loader is offered, or all."""
    given = offered(SOURCE, NeedsConfig(), ties=ties).by_name
    boxes = boxes or {m.name: [Region(m.name, (0,) * len(m.shape), m.shape)] for m in SOURCE.tensors if m.name in given}
    return sink_manifest(SOURCE, NeedsConfig(), boxes, ties=() if ties else ("head.weight",), rank=rank)


def test_what_is_fed_tied_and_derived_is_in_the_manifest():
    assert [(each.name, each.travels, each.tied_to, each.feeding) for each in manifest_of().tensors] == [
        ("embed.weight", True, None, "fed"),
        ("up.weight", True, None, "fed"),
        ("rotary.inv_freq", False, None, "derived"),
        ("head.weight", False, "embed.weight", "fed"),
    ]


def test_a_tied_tensor_that_the_engine_has_apart_travels_on_its_own():
    by_name = manifest_of(ties=True).by_name
    assert (by_name["head.weight"].tied_to, by_name["head.weight"].travels) == (None, True)


def test_workers_hold_the_boxes_of_their_own_shards_and_together_all():
    halves = [
        {name: [Region(name, (2 * rank, 0), (2, 3))] for name in ("embed.weight", "up.weight")} for rank in (0, 1)
    ]
    merged = merge_manifests([manifest_of(boxes=halves[rank], rank=rank) for rank in (0, 1)])
    plan = plan_refit(SOURCE, merged)
    assert [plan.bytes_received(rank) for rank in (0, 1)] == [48, 48]
    assert [plan.lower_bound(rank) for rank in (0, 1)] == [48, 48]


def test_a_tensor_that_one_worker_of_two_uses_has_a_place_and_one_that_none_uses_is_named():
    prove(unused=("up.weight",), has_all=False)  # a stage of a pipeline does not know of others
    with pytest.raises(CoverageError, match=r"1 have no place in the engine:\n  up\.weight"):
        prove(unused=("up.weight",))
    embed, up = ({name: [Region(name, (0, 0), (4, 3))]} for name in ("embed.weight", "up.weight"))
    plan_refit(SOURCE, merge_manifests([manifest_of(boxes=embed), manifest_of(boxes=up, rank=1)]))
    with pytest.raises(CoverageError, match=r"source tensors that have no place in the sink:\n  up\.weight"):
        plan_refit(SOURCE, merge_manifests([manifest_of(boxes=embed, rank=rank) for rank in (0, 1)]))


def test_a_tensor_that_the_engine_lacks_is_named_unless_it_is_constant():
    lacks = {"never": ("scale",), "partial": {"fused.weight": (3, 9)}}
    with pytest.raises(CoverageError) as caught:
        prove(**lacks)
    assert caught.value.unfed == ("scale: never written", "fused.weight: 3 of 9 elements are never written")
    prove(**lacks, options={"constant": ("scale", "fused.*")})


def test_two_sources_for_one_place_a_cast_and_a_tie_of_the_engines_own_are_refused():
    clash = "a and b are both written to c"
    with pytest.raises(CoverageError) as caught:
        prove(replace(NOTHING, clashes=[clash], casts={"up.weight": "bfloat16"}))
    assert caught.value.mismatched == (
        clash,
        "up.weight: float32 in the source, bfloat16 in the engine; cast=True allows it",
    )
    prove(replace(NOTHING, casts={"up.weight": "bfloat16"}), options={"cast": True})
    with pytest.raises(
        CoverageError, match=r"the engine tied it to embed\.weight when it loaded equal values for both"
    ):
        prove(live_ties={"up.weight": "embed.weight"})
    prove(live_ties={"head.weight": "embed.weight"})  # as the source has it


def test_importing_the_sink_imports_no_vllm_and_the_worker_has_the_name_that_is_told():
    code = f"import pkgutil, sys; pkgutil.resolve_name({WORKER_EXTENSION!r}); assert 'vllm' not in sys.modules"
    source = Path(__file__).parents[1] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(source)}, timeout=240)


def test_replicas_that_this_process_does_not_reach_are_refused():
    parallel = SimpleNamespace(world_size=1, data_parallel_size=2, worker_extension_cls=WORKER_EXTENSION)
    config = SimpleNamespace(parallel_config=parallel)
    one = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace(core_engines=[b"0"]))
    with pytest.raises(RefitError, match="data_parallel_size=2, and this process reaches 1 of its replicas"):
        VllmSink(one)
    with pytest.raises(RefitError, match="reaches 1 of its replicas"):  # an LLM
        VllmSink(SimpleNamespace(llm_engine=one))

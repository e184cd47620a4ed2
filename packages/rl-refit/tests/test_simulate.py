"""The simulator: exact models, stacks that plan like single tensors, bounds that hold, terms that move rightly."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refit_simulator import CALIBRATED, HARDWARE, MODELS, SCHEMES, Costs, Options, Parallelism, Workload, simulate
from refit_simulator.crossovers import crossovers_of
from refit_simulator.floor import floor_of
from refit_simulator.models import SimulatedModel
from refit_simulator.traffic import traffic_of

from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import plan_refit

TINY = SimulatedModel(
    name="tiny",
    published_parameters=1.0,
    source="nobody",
    hidden=24,
    num_layers=3,
    vocabulary=50,
    heads=4,
    kv_heads=2,
    head_dim=6,
    intermediate=40,
    experts=4,
    expert_intermediate=12,
    dense_layers=1,
    shared_experts=1,
)
LAYOUTS = ["replicated", "tp=2", "tp=4", "pp=2", "ep=2", "ep=4,pp=2", "fsdp=2", "fsdp=8", "fsdp=2,tp=2", "ep=2,fsdp=4"]


def tiny(train="ep=2", engine="tp=2", **changes):
    arguments = {"train_gpus": 8, "engine_gpus": 8, "train_layout": train, "engine_layout": engine, **changes}
    return simulate(TINY, **arguments)


def workload_of(train, engine, *, model=TINY, **changes):
    sides = (Parallelism.parse(text, gpus=8) for text in (train, engine))
    return Workload(model=model, train=next(sides), engine=next(sides), gpus_per_node=4, **changes)


# -- Models ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b", "qwen3-30b-a3b", "qwen3-235b-a22b", "deepseek-v3", "kimi-k2"])
def test_a_models_tensors_add_up_to_the_published_total(name):
    model = MODELS[name]
    assert model.parameters == pytest.approx(model.published_parameters, rel=0.01)
    assert len({tensor.name for tensor in model.tensors}) == len(model.tensors)


def test_tensors_are_counted_as_publications_count_them():
    assert len(MODELS["qwen3-235b-a22b"].tensors) == 36_945  # vLLM PR 43375
    assert len(MODELS["deepseek-v3"].tensors_as("float8")) == pytest.approx(90_000, rel=0.01)  # NeMo-RL's blog


def test_names_are_those_of_the_checkpoints():
    shapes = {tensor.name: tensor.shape for tensor in MODELS["deepseek-v3"].tensors}
    assert shapes["model.layers.0.self_attn.q_b_proj.weight"] == (24_576, 1536)
    assert shapes["model.layers.0.self_attn.kv_b_proj.weight"] == (32_768, 512)
    assert shapes["model.layers.3.mlp.experts.255.down_proj.weight"] == (7168, 2048)
    assert shapes["model.layers.3.mlp.gate.e_score_correction_bias"] == (256,)
    assert "model.layers.2.mlp.gate.weight" not in shapes
    assert "lm_head.weight" not in {tensor.name for tensor in MODELS["qwen3-4b"].tensors}


def test_fp8_halves_the_projections_and_adds_their_scales():
    half, whole = MODELS["deepseek-v3"].tensors_as("float8"), MODELS["deepseek-v3"].tensors
    scales = [tensor for tensor in half if tensor.name.endswith("_scale_inv")]
    assert len(half) - len(whole) == len(scales)
    assert {tensor.dtype for tensor in scales} == {"float32"}
    by_name = {tensor.name: tensor for tensor in scales}
    assert by_name["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 56)


# -- Layouts and stacks ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("tp", "'tp' in layout 'tp': expected each of tp, pp, ep, fsdp"),
        ("tp=2,tp=4", "'tp=4' in layout"),
        ("dp=2", "'dp=2' in layout"),
        ("tp=0", "at least 1"),
        ("tp=3", "pp·tp·fsdp=3 must divide the 8 GPUs"),
        ("ep=16", "pp·ep=16 must divide the 8 GPUs"),
        ("ep=8,fsdp=2", "ep=8 must divide tp·fsdp=2"),
    ],
)
def test_a_wrong_layout_is_refused_by_its_part(text, said):
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        Parallelism.parse(text, gpus=8)


def test_a_layout_is_read_as_it_is_written():
    assert Parallelism.parse("tp=2,pp=2", gpus=8).describe() == "tp=2,pp=2"
    assert Parallelism.parse("replicated", gpus=8).describe() == "replicated"
    assert Parallelism.parse("ep=4,tp=2,pp=2", gpus=16).replica_size == 8


@pytest.mark.parametrize(
    ("model", "layout", "said"),
    [
        ("qwen3-8b", "ep=8", "ep=8 must divide the experts of qwen3-8b; it has none"),
        ("kimi-k2", "ep=256", "ep=256 must divide the experts of kimi-k2; it has 384"),
        ("qwen3-8b", "tp=64", "tp=64 must divide the 32 attention heads of qwen3-8b"),
        ("qwen3-8b", "pp=64", "pp=64 is more than the 36 layers of qwen3-8b"),
    ],
)
def test_a_layout_that_the_model_does_not_allow_is_refused(model, layout, said):
    with pytest.raises(ValueError, match=said):
        simulate(model, train_gpus=256, engine_gpus=8, train_layout=layout, engine_layout="tp=8")


def single_tensors(workload):
    """What the stacks stand for, tensor by tensor: the manifests of both sides without any grouping."""
    sides = ([], [])
    for number, stack in enumerate(workload.stacks):
        for metas, meta in zip(sides, (stack.held, stack.wanted), strict=True):
            for place in range(stack.tensors):
                metas.append(single(meta, f"{number}.{place}", place, stack.names_per_layer))
    return [Manifest(tuple(metas)) for metas in sides]


def single(meta, name, place, names_per_layer):
    layer, expert = divmod(place, names_per_layer)
    whole = (layer, expert) if names_per_layer > 1 else (layer,)
    inside = Region("", (*whole, *[0] * (len(meta.shape) - len(whole))), (*[1] * len(whole), *meta.shape[len(whole) :]))
    boxes = {}
    for rank, held in meta.regions().items():
        parts = [part for part in map(inside.intersect, held) if part is not None]
        boxes[rank] = [Region("", part.offsets[len(whole) :], part.shape[len(whole) :]) for part in parts]
    shape = meta.shape[len(whole) :]
    return TensorMeta(name=name, shape=shape, dtype=meta.dtype, layout=Layout.from_boxes(boxes))


@pytest.mark.parametrize("stacked_experts", [False, True])
@pytest.mark.parametrize("train", LAYOUTS)
@pytest.mark.parametrize("engine", ["tp=4", "ep=4", "ep=2,tp=2"])
def test_stacks_ask_what_the_single_tensors_ask(train, engine, stacked_experts):
    workload = workload_of(train, engine, stacked_experts=stacked_experts)
    plan = plan_refit(*single_tensors(workload), workload.topology)
    stacked = plan_refit(*workload.manifests, workload.topology)
    assert [plan.bytes_received(rank) for rank in range(8)] == [stacked.bytes_received(rank) for rank in range(8)]
    assert [plan.lower_bound(rank) for rank in range(8)] == [stacked.bytes_received(rank) for rank in range(8)]
    pieces = Counter(rank for route in plan.routes for rank in route.sink_ranks)
    assert traffic_of(workload).pieces_received == max(pieces.values())
    assert workload.total_bytes == plan.source.total_bytes == sum(2 * t.numel for t in TINY.tensors)
    assert workload.num_tensors == len(plan.source.tensors)


def test_tensors_of_one_shape_and_place_are_planned_once():
    workload = Workload(
        model=MODELS["kimi-k2"],
        train=Parallelism.parse("fsdp=256", gpus=256),
        engine=Parallelism.parse("ep=128", gpus=128),
        gpus_per_node=8,
    )
    assert workload.num_tensors == 69_975
    assert len(workload.stacks) < 30
    floor = floor_of(workload)
    dense = sum(2 * tensor.numel for tensor in MODELS["kimi-k2"].tensors if tensor.expert is None)
    experts = workload.total_bytes - dense
    routers = 60 * 384 * 2  # the bias of the router is float32
    assert floor.rank_bytes == dense + routers + (experts - routers) // 128
    assert floor.nodes[0].needed == dense + routers + (experts - routers) // 16


def test_stacked_experts_are_dealt_whole():
    apart, stacked = (workload_of("fsdp=4", "ep=4", stacked_experts=given) for given in (False, True))
    assert traffic_of(apart).pieces_received > traffic_of(stacked).pieces_received
    assert stacked.num_tensors < apart.num_tensors
    assert stacked.total_bytes == apart.total_bytes


# -- Bounds ----------------------------------------------------------------------------------------


def missing_elements(workload, ranks):
    """Elements that some GPUs need as an engine and do not have as a trainer, one by one."""
    needed, held = set(), set()
    for found, metas in ((held, 0), (needed, 1)):
        for meta in workload.manifests[metas].tensors:
            for rank, boxes in meta.regions().items():
                if rank in ranks:
                    found.update((meta.name, element) for box in boxes for element in elements(box))
    return needed - held if workload.colocated else needed


def elements(box):
    points = [()]
    for start, size in zip(box.offsets, box.shape, strict=True):
        points = [(*point, start + step) for point in points for step in range(size)]
    return points


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize(("train", "engine"), [("ep=2,pp=2", "tp=4"), ("fsdp=8", "tp=2"), ("tp=2", "ep=2,tp=2")])
def test_the_floor_counts_exactly_what_is_not_there(train, engine, colocated):
    sizes = {"hidden": 8, "vocabulary": 6, "head_dim": 2, "intermediate": 8, "expert_intermediate": 4, "num_layers": 2}
    workload = workload_of(train, engine, model=dataclasses.replace(TINY, **sizes), colocated=colocated)
    floor = floor_of(workload)
    assert floor.nodes[1].missing == 2 * len(missing_elements(workload, {4, 5, 6, 7}))
    assert floor.rank_missing == max(2 * len(missing_elements(workload, {rank})) for rank in range(8))


@settings(max_examples=60, deadline=None)
@given(
    train=st.sampled_from(LAYOUTS),
    engine=st.sampled_from(["replicated", "tp=2", "tp=4", "ep=4", "pp=2"]),
    scheme=st.sampled_from(sorted(SCHEMES)),
    hardware=st.sampled_from(sorted(HARDWARE)),
    colocated=st.booleans(),
    free=st.booleans(),
    changed=st.sampled_from([None, 0.01, 1.0]),
)
def test_no_prediction_beats_its_bound(train, engine, scheme, hardware, colocated, free, changed):
    if SCHEMES[scheme].routing == "ipc":
        colocated = True
    if SCHEMES[scheme].routing != "slices":
        changed = None
    machine = dataclasses.replace(HARDWARE[hardware], gpus_per_node=4)
    simulation = tiny(
        train,
        engine,
        scheme=scheme,
        hardware=machine,
        colocated=colocated,
        options=Options(changed=changed),
        costs=FREE if free else CALIBRATED,
    )
    assert 0 <= simulation.bound_seconds <= simulation.total_seconds * (1 + 1e-9)
    assert 0 <= simulation.percent_of_bound <= 100 + 1e-6


FREE = Costs(
    **{
        field.name: 1.0 if field.name.endswith("_share") else 1e30 if field.name == "delta_bytes_s" else 0
        for field in dataclasses.fields(Costs)
    }
)
BARE = dataclasses.replace(HARDWARE["h100"], hbm_gb_s=1e9)


def test_slices_with_relays_and_without_software_reach_the_bound():
    simulation = simulate(
        "qwen3-8b",
        train_gpus=16,
        engine_gpus=16,
        train_layout="fsdp=16",
        engine_layout="tp=8",
        costs=FREE,
        hardware=BARE,
    )
    assert simulation.total_seconds == pytest.approx(simulation.bound_seconds, rel=0.01)


# -- Terms -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
@pytest.mark.parametrize("figure", ["nic_gb_s", "nvlink_gb_s", "hbm_gb_s", "pcie_gb_s"])
def test_faster_hardware_is_never_slower(scheme, figure):
    slow = HARDWARE["h100"]
    fast = dataclasses.replace(slow, **{figure: 10 * getattr(slow, figure)})
    colocated = SCHEMES[scheme].routing == "ipc"
    first, second = (tiny(scheme=scheme, hardware=machine, colocated=colocated) for machine in (slow, fast))
    assert second.total_seconds <= first.total_seconds
    assert second.bound_seconds <= first.bound_seconds


def test_more_bandwidth_helps_where_bandwidth_is_the_limit():
    machines = [dataclasses.replace(BARE, nic_gb_s=nic) for nic in (1, 2, 4)]
    seconds = [tiny(hardware=machine, costs=FREE).total_seconds for machine in machines]
    assert seconds == pytest.approx([seconds[0], seconds[0] / 2, seconds[0] / 4], rel=1e-3)


@pytest.mark.parametrize("scheme", [name for name, scheme in SCHEMES.items() if scheme.routing != "slices"])
def test_more_tensors_of_as_many_bytes_take_longer(scheme):
    colocated = SCHEMES[scheme].routing == "ipc"
    seconds = [
        tiny(scheme=scheme, colocated=colocated, options=Options(num_tensors=count)).total_seconds
        for count in (10, 1000)
    ]
    assert seconds[0] < seconds[1]


def test_experts_apart_take_longer_than_stacked():
    assert tiny("fsdp=8", "tp=2").total_seconds > tiny("fsdp=8", "tp=2", stacked_experts=True).total_seconds


@pytest.mark.parametrize("name", [name for name in Costs.__slots__ if not name.endswith("_share")])
def test_every_cost_has_an_effect_somewhere(name):
    dearer = dataclasses.replace(CALIBRATED, **{name: getattr(CALIBRATED, name) * 2})
    cases = [(scheme, SCHEMES[scheme].routing == "ipc", None) for scheme in SCHEMES] + [("slices", False, 0.1)]
    changes = [
        tiny(scheme=scheme, colocated=colocated, options=options, costs=dearer).total_seconds
        - tiny(scheme=scheme, colocated=colocated, options=options).total_seconds
        for scheme, colocated, options in ((s, c, Options(changed=d)) for s, c, d in cases)
    ]
    assert max(map(abs, changes)) > 0
    assert min(changes) >= 0 or name == "delta_bytes_s"


def test_relays_bring_every_byte_into_a_node_once():
    machine = dataclasses.replace(HARDWARE["h100"], gpus_per_node=4)
    with_relays, without = (
        tiny("fsdp=8", "tp=2", scheme=name, hardware=machine) for name in ("slices", "slices_direct")
    )
    assert without.traffic.entered == pytest.approx(2 * with_relays.traffic.entered, rel=0.05)
    assert crossovers_of(with_relays).pulls_over_relays == pytest.approx(2, rel=0.05)


def test_whole_tensors_bring_p_over_k_times_the_bytes_of_slices():
    ratios = {}
    for tp in (2, 4, 8, 16, 32):
        simulation = simulate("qwen3-8b", train_gpus=8, engine_gpus=32, train_layout="fsdp=8", engine_layout=f"tp={tp}")
        ratios[tp] = crossovers_of(simulation).whole_over_slices
    assert [ratios[tp] for tp in (2, 4, 8)] == pytest.approx([1, 1, 1])
    assert ratios[16] == pytest.approx(2, rel=0.01)
    assert ratios[32] == pytest.approx(4, rel=0.05)


def test_at_the_crossover_of_deltas_both_ways_take_as_long():
    def seconds(nic, changed):
        machine = dataclasses.replace(HARDWARE["h100"], nic_gb_s=nic)
        costs = dataclasses.replace(FREE, delta_bytes_s=2e9)
        simulation = tiny("fsdp=8", "tp=4", hardware=machine, costs=costs, options=Options(changed=changed))
        return simulation.overlapped["wire"] + simulation.serial["delta"]

    full = tiny("fsdp=8", "tp=4", costs=dataclasses.replace(FREE, delta_bytes_s=2e9))
    crossing = crossovers_of(full).delta_nic_gb_s
    assert seconds(crossing, 0.03) == pytest.approx(seconds(crossing, None))
    assert seconds(crossing / 2, 0.03) < seconds(crossing / 2, None)
    assert seconds(crossing * 2, 0.03) > seconds(crossing * 2, None)


def test_at_the_crossover_of_tensors_cpu_and_bytes_take_as_long():
    simulation = tiny("fsdp=8", "tp=4")
    found = crossovers_of(simulation)
    scale = found.tensors_per_rank / found.tensors_per_rank_now
    assert simulation.serial["tensors"] * scale == pytest.approx(max(simulation.overlapped.values()))


def test_a_transaction_holds_the_weights_twice_and_writing_in_place_does_not():
    staged, in_place = (tiny(scheme=name).extra_bytes["engine"] for name in ("slices", "slices_in_place"))
    assert staged - in_place == tiny().floor.rank_bytes
    assert in_place == 2 * 256 * 2**20


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"scheme": "magic"}, "no scheme 'magic'; the presets are slices, "),
        ({"hardware": "abacus"}, "no hardware 'abacus'; the presets are h100, "),
        ({"wire": "int4"}, "no wire 'int4'; it is one of bfloat16, float8"),
        ({"scheme": "ipc"}, "both sides must be colocated"),
        ({"colocated": True, "engine_gpus": 4}, "got 8 trainer and 4 engine GPUs"),
        ({"scheme": "broadcast", "options": Options(changed=0.1)}, "sends whole tensors; changed=0.1"),
    ],
)
def test_what_cannot_be_simulated_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match=said):
        tiny(**changes)


def test_an_unknown_model_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="no model 'gpt'; the presets are qwen3-4b, "):
        simulate("gpt", train_gpus=1, engine_gpus=1, train_layout="replicated", engine_layout="replicated")


def test_costs_and_hardware_must_make_sense():
    with pytest.raises(ValueError, match="piece_s"):
        Costs(piece_s=-1.0)
    with pytest.raises(ValueError, match="nic_share"):
        Costs(nic_share=1.5)
    with pytest.raises(ValueError, match="must be positive"):
        dataclasses.replace(HARDWARE["h100"], nic_gb_s=0)
    with pytest.raises(ValueError, match="changed"):
        Options(changed=0.0)

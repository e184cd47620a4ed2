"""Where ranks and engines are, and the arithmetic that refuses what cannot be."""

import functools
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_launcher.build.engines import engine_spec
from rl_launcher.checks.explain import locate
from rl_launcher.cluster_jobs.job import cluster_job
from rl_launcher.errors import Refusal
from rl_launcher.ray.build import executor_of
from rl_launcher.ray.placement import (
    NodeResources,
    PlacementError,
    match_nodes,
    needed_slots,
    needs_of_nodes,
    place_replicas,
    plan_placement,
)
from rl_launcher.recipe_files import RecipeError, load_recipe
from rl_launcher.schema import Recipe

RECIPE = """
run_dir: run
policy: {model_name: model, generation: {max_new_tokens: 8}}
data: {source: "data.jsonl"}
env: {reward: "reward.py:score"}
"""


@pytest.fixture
def recipe_of(tmp_path):
    """The recipe above with some keys changed."""

    def of(*overrides):
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        found = load_recipe(tmp_path / "recipe.yaml", schema=Recipe, overrides=["cluster.runtime=ray", *overrides])
        return found.value

    return of


@pytest.fixture
def plan(recipe_of):
    """The placement of that recipe."""

    def of(*overrides, **cluster):
        return plan_placement(recipe_of(*(f"cluster.{key}={value}" for key, value in cluster.items()), *overrides))

    return of


VLLM = "policy.generation.backend=vllm"
SEPARATE = "policy.generation.colocated.enabled=false"


CUDA = "policy.dtensor_cfg.device=cuda"


def engine_size(size, pipeline=1):
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": pipeline}
    return VLLM, *(f"policy.generation.vllm_cfg.{name}={each}" for name, each in sizes.items())


def apart(**resources):
    return SEPARATE, *(f"policy.generation.colocated.resources.{key}={value}" for key, value in resources.items())


def places(placement):
    ranks = [(place.node, place.slot) for place in placement.ranks]
    return ranks, [place.slots for place in placement.engines]


def test_in_process_has_one_of_each(plan):
    placement = plan(runtime="in_process")
    assert placement.in_process
    assert places(placement) == ([(0, 0)], [((0, 0),)])
    assert placement.explain() == "everything is in this process"


def test_colocated_engines_share_the_slots_of_the_ranks(plan):
    placement = plan(*engine_size(2), num_nodes=2, gpus_per_node=4)
    assert places(placement) == (
        [(node, slot) for node in range(2) for slot in range(4)],
        [((0, 0), (0, 1)), ((0, 2), (0, 3)), ((1, 0), (1, 1)), ((1, 2), (1, 3))],
    )


def test_separate_engines_take_the_last_slots_of_every_node(plan):
    placement = plan(*apart(gpus_per_node=1), num_nodes=2, gpus_per_node=3)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0), (1, 1)], [((0, 2),), ((1, 2),)])


def test_separate_engines_take_the_last_nodes(plan):
    placement = plan(*apart(num_nodes=1), num_nodes=3, gpus_per_node=2)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0), (1, 1)], [((2, 0),), ((2, 1),)])


def test_what_engines_leave_of_their_nodes_trains(plan):
    placement = plan(*apart(num_nodes=1, gpus_per_node=1), num_nodes=2, gpus_per_node=2)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0)], [((1, 1),)])


def test_nobody_is_in_two_places_and_no_slot_is_idle(plan):
    for placement in (plan(*apart(gpus_per_node=2), num_nodes=4, gpus_per_node=8), plan(num_nodes=2, gpus_per_node=8)):
        ranks, engines = places(placement)
        taken = [slot for slots in engines for slot in slots]
        both = ranks + taken
        assert len(set(ranks)) == len(ranks)
        assert len(set(taken)) == len(taken)
        assert len(set(both)) == sum(placement.num_slots)
        assert placement.colocated == (len(both) > len(set(both)))


def test_it_is_explained_by_node(plan):
    text = plan(*apart(gpus_per_node=1), num_nodes=2, gpus_per_node=2).explain()
    assert text.splitlines() == [
        "2 training ranks and 2 engines on 2 x 2 processes, separate",
        "  node 0  rank 0 on processes 0; engine 0 on processes 1",
        "  node 1  rank 1 on processes 0; engine 1 on processes 1",
    ]
    gpus = plan(CUDA).explain()
    assert gpus.splitlines() == [
        "1 training rank and 1 engine on 1 x 1 GPUs, colocated",
        "  node 0  rank 0 on GPUs 0; engine 0 on GPUs 0",
    ]


def test_an_engine_larger_than_a_node_has_whole_stages_on_each_of_as_few_nodes_as_can_be(plan):
    placement = plan(CUDA, *engine_size(4, 3), gpus_per_node="[8, 4]", num_nodes=2)
    assert placement.spans_nodes
    assert [engine.nodes for engine in placement.engines] == [(0, 1)]
    assert placement.explain().splitlines() == [
        "12 training ranks and 1 engine on 1 x 8 + 1 x 4 GPUs, colocated",
        "each engine has 12 ranks: 4 tensor parallel x 3 pipeline stages",
        "  node 0  ranks 0-7 on GPUs 0-7; engine 0 stages 0-1 on GPUs 0-7",
        "  node 1  ranks 8-11 on GPUs 0-3; engine 0 stage 2 on GPUs 0-3",
    ]
    figures = placement.figures()[1]
    assert figures["ranks"] == {"8": 0, "9": 1, "10": 2, "11": 3}
    assert figures["engines"][1] == {"engine": 0, "slot": 1, "stage": 2, "tensor_parallel_rank": 1}


def test_unequal_nodes_give_separate_engines_their_last_slots(plan):
    placement = plan(CUDA, *engine_size(2), *apart(gpus_per_node=2), gpus_per_node="[8, 4]", num_nodes=2)
    assert placement.explain().splitlines() == [
        "8 training ranks and 2 engines on 1 x 8 + 1 x 4 GPUs, separate",
        "each engine has 2 ranks: 2 tensor parallel x 1 pipeline stages",
        "  node 0  ranks 0-5 on GPUs 0-5; engine 0 on GPUs 6-7",
        "  node 1  ranks 6-7 on GPUs 0-1; engine 1 on GPUs 2-3",
    ]
    whole = plan(CUDA, *engine_size(4), *apart(num_nodes=1), gpus_per_node="[8, 4]", num_nodes=2)
    assert places(whole) == ([(0, slot) for slot in range(8)], [tuple((1, slot) for slot in range(4))])


def test_groups_of_tensor_parallelism_that_cross_nodes_are_noted_with_sizes_that_do_not(plan):
    engine = plan(CUDA, *engine_size(16), gpus_per_node=8, num_nodes=2)
    (note,) = engine.notes
    assert "no node has room for a tensor-parallel group of 16" in note
    assert "tensor_parallel_size=8 with pipeline_parallel_size=2" in note
    assert engine.explain().splitlines()[2].endswith("engine 0 tensor-parallel ranks 0-7 of stage 0 on GPUs 0-7")
    assert plan(CUDA, *engine_size(8, 2), gpus_per_node=8, num_nodes=2).notes == ()
    trainer = "policy.dtensor_cfg.tensor_parallel_size=2"
    (note,) = plan(CUDA, trainer, *apart(gpus_per_node=1), gpus_per_node=4, num_nodes=2).notes
    assert "ranks 2-3 are a tensor-parallel group of the trainer on several nodes" in note
    assert "the nodes have 3, 3 ranks" in note
    assert plan(CUDA, trainer, *apart(gpus_per_node=2), gpus_per_node=4, num_nodes=2).notes == ()


def test_local_ranks_of_every_node_count_from_zero(plan):
    placement = plan(CUDA, *apart(gpus_per_node=1), gpus_per_node="[4, 2, 3]", num_nodes=3)
    assert [[place.slot for place in placement.ranks_on(node)] for node in range(3)] == [[0, 1, 2], [0], [0, 1]]


# ---- The planner against all placements that there are.


def all_placements(num_slots, *, tensor, pipeline):
    """Of every way to fill the nodes with engines of whole groups: on how many nodes its engines are, counted for each.

    A group is within a node if any node has room for it; otherwise its slots may be anywhere.
    """
    unit = tensor if tensor <= max(num_slots) else 1
    per_engine = tensor * pipeline // unit
    if any(count % unit for count in num_slots) or sum(num_slots) % (tensor * pipeline):
        return set()

    @functools.cache
    def ways(left):
        if not any(left):
            return {0}
        found = set()
        for taken in itertools.product(*(range(count + 1) for count in left)):
            if sum(taken) == per_engine:
                rest = tuple(count - each for count, each in zip(left, taken, strict=True))
                found |= {sum(map(bool, taken)) + more for more in ways(rest)}
        return found

    return ways(tuple(count // unit for count in num_slots))


SMALL_NODES = st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any)
SIZES = st.integers(1, 6)


@settings(max_examples=400)
@given(num_slots=SMALL_NODES, tensor=SIZES, pipeline=st.integers(1, 4))
def test_it_is_refused_only_if_no_placement_exists_and_is_otherwise_on_the_fewest_nodes(num_slots, tensor, pipeline):
    possible = all_placements(tuple(num_slots), tensor=tensor, pipeline=pipeline)
    try:
        replicas = place_replicas(num_slots, tensor=tensor, pipeline=pipeline)
    except PlacementError:
        assert possible == set()
        return
    assert sum(len({node for node, _ in replica}) for replica in replicas) == min(possible)


@settings(max_examples=300)
@given(
    num_slots=st.lists(st.sampled_from([0, 2, 4, 6, 8]), min_size=1, max_size=10).filter(any),
    tensor=st.sampled_from([1, 2, 3, 4, 8, 12]),
    pipeline=st.sampled_from([1, 2, 3, 4, 6]),
)
def test_every_rank_has_a_slot_of_its_own_and_a_group_is_torn_only_if_no_node_has_room(num_slots, tensor, pipeline):
    num_slots = needed_slots(num_slots, tensor=tensor, pipeline=pipeline)
    replicas = place_replicas(num_slots, tensor=tensor, pipeline=pipeline)
    taken = [slot for replica in replicas for slot in replica]
    assert sorted(taken) == [(node, slot) for node, count in enumerate(num_slots) for slot in range(count)]
    assert {len(replica) for replica in replicas} == {tensor * pipeline}
    assert list(replicas) == sorted(replicas)
    if tensor <= max(num_slots):
        for replica in replicas:
            groups = [replica[start : start + tensor] for start in range(0, len(replica), tensor)]
            assert all(len({node for node, _ in group}) == 1 for group in groups)


@settings(max_examples=300)
@given(num_slots=SMALL_NODES, tensor=SIZES, pipeline=st.integers(1, 4))
def test_both_changes_that_a_refusal_names_do_fit(num_slots, tensor, pipeline):
    try:
        place_replicas(num_slots, tensor=tensor, pipeline=pipeline)
    except PlacementError as refused:
        said = str(refused)
    else:
        return
    sizes = re.search(r"set tensor_parallel_size=(\d+) and pipeline_parallel_size=(\d+) \((\d+) rank", said)
    new_tensor, new_pipeline, ranks = map(int, sizes.groups())
    assert new_tensor * new_pipeline == ranks
    assert place_replicas(num_slots, tensor=new_tensor, pipeline=new_pipeline)
    enough = list(num_slots)
    if each := re.search(r"or give engines (\d+) of each node$", said):
        enough = [int(each[1])] * len(num_slots)
    for count, node in re.findall(r"(\d+) of node (\d+)", said.partition("or give engines")[2]):
        assert int(count) > num_slots[int(node)]
        enough[int(node)] = int(count)
    assert place_replicas(enough, tensor=tensor, pipeline=pipeline)


def test_hundreds_of_nodes_of_two_kinds_are_placed_on_the_fewest():
    replicas = place_replicas([24] * 150 + [8] * 150, tensor=8, pipeline=4)
    assert sum(len({node for node, _ in replica}) for replica in replicas) == 300  # one of each kind, 150 times


# ---- The nodes that there are.


def node(name, gpus, cpus=64, memory_bytes=0.0):
    return NodeResources(name=name, gpus=gpus, cpus=cpus, memory_bytes=memory_bytes)


def test_a_large_node_is_kept_for_what_needs_it():
    needs, there = [node("node 0", 4), node("node 1", 8)], [node("a", 8), node("b", 4)]
    assert match_nodes(needs, there) == {0: 1, 1: 0}


@settings(max_examples=300)
@given(
    needs=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=4),
    there=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5),
)
def test_nodes_are_matched_if_and_only_if_some_matching_exists(needs, there):
    wanted = [node(f"node {index}", *each) for index, each in enumerate(needs)]
    has = [node(f"host{index}", *each) for index, each in enumerate(there)]
    exists = any(
        all(not has[index].lacks(each) for each, index in zip(wanted, chosen, strict=True))
        for chosen in itertools.permutations(range(len(has)), len(wanted))
    )
    if not exists:
        with pytest.raises(PlacementError):
            match_nodes(wanted, has)
        return
    found = match_nodes(wanted, has)
    assert sorted(found) == list(range(len(wanted)))
    assert len(set(found.values())) == len(wanted)
    assert all(not has[index].lacks(wanted[each]) for each, index in found.items())


def test_a_node_that_is_not_there_is_named_with_what_the_nearest_lacks(plan):
    placement = plan(CUDA, *engine_size(4), gpus_per_node="[8, 4]", num_nodes=2)
    needs = needs_of_nodes(placement, cpus_per_rank=2, memory_bytes=[2**38, 2**30])
    assert needs[0] == NodeResources(name="node 0", gpus=8, cpus=16, memory_bytes=2**38)
    with pytest.raises(
        PlacementError, match=r"node 0 of the run .* left, b \(4 GPUs, .*, is 4 GPUs short of 8 and 192 GiB"
    ):
        match_nodes(needs, [node("a", 2), node("b", 4, memory_bytes=2**36)])
    with pytest.raises(
        PlacementError, match="needs 2 nodes, and the cluster has 1: none is left for node 1 with 4 GPUs"
    ):
        match_nodes(needs, [node("a", 8, memory_bytes=2**39)])


@pytest.mark.parametrize(
    ("cluster", "overrides", "words"),
    [
        (
            {"gpus_per_node": 3},
            ["policy.dtensor_cfg.tensor_parallel_size=2"],
            ["gives 3 training ranks", "policy.dtensor_cfg.tensor_parallel_size=2", "multiple of 2", "2 or 4 ranks"],
        ),
        (
            {"gpus_per_node": 2},
            ["policy.dtensor_cfg.tensor_parallel_size=2", "policy.dtensor_cfg.context_parallel_size=2"],
            ["context_parallel_size=2 x policy.dtensor_cfg.tensor_parallel_size=2", "multiple of 4", "for 4 ranks"],
        ),
        (
            {"runtime": "in_process"},
            ["policy.dtensor_cfg.tensor_parallel_size=2"],
            ["cluster.runtime=in_process trains on 1 rank", "set cluster.runtime=ray and give it 2 ranks"],
        ),
        (
            {"gpus_per_node": 6},
            ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.pipeline_model_parallel_size=4"],
            ["policy.megatron_cfg.pipeline_model_parallel_size=4", "4 or 8 ranks"],
        ),
        (
            {"gpus_per_node": 4},
            ["policy.megatron_cfg.enabled=true", "policy.megatron_cfg.expert_model_parallel_size=3"],
            ["policy.megatron_cfg.expert_model_parallel_size=3", "a divisor of 4"],
        ),
        (
            {"gpus_per_node": 4},
            engine_size(8),
            ["gives engines 4 of node 0", "is too few: 4 short of 1 engine", "size=4 and pipe", "8 of node 0"],
        ),
        (
            {"gpus_per_node": 4},
            engine_size(3),
            ["cluster.gpus_per_node gives engines 4 of node 0", "not a multiple of 3: 2 short of 2", "6 of node 0"],
        ),
        (
            {"gpus_per_node": 4},
            [*engine_size(2), *apart(gpus_per_node=3)],
            [
                "colocated.resources gives engines 3 of node 0",
                "tensor_parallel_size=1 and",
                "(1 rank), or give",
                "4 of",
            ],
        ),
        (
            {"gpus_per_node": "[8, 4]", "num_nodes": 2},
            engine_size(8),
            ["gives engines 4 of node 1", "4 short of 1 tensor-parallel group in one node", "8 of node 1"],
        ),
        (
            {"gpus_per_node": "[8, 4]", "num_nodes": 2},
            engine_size(4, 2),
            ["12 of nodes 0-1 together", "not a multiple of 8: 4 short of 2 engines", "8 of node 1"],
        ),
        (
            {"gpus_per_node": "[8, 4]", "num_nodes": 2},
            [*engine_size(4), *apart(gpus_per_node=6)],
            ["gpus_per_node=6 is more than the 4 that cluster.gpus_per_node gives node 1", "at most 4"],
        ),
        (
            {"gpus_per_node": "[8, 4]", "num_nodes": 2},
            ["policy.dtensor_cfg.tensor_parallel_size=8"],
            ["cluster.gpus_per_node=[8, 4], gives 12 training ranks", "8 or 16 ranks"],
        ),
        (
            {"gpus_per_node": 2, "num_nodes": 2},
            engine_size(2, 2),
            ["on several nodes", "vLLM on a CPU has no executor over nodes"],
        ),
        ({"gpus_per_node": 2}, apart(gpus_per_node=2), ["leaves none to train on", "gpus_per_node=1 or less"]),
        ({"gpus_per_node": 1}, apart(gpus_per_node=1), ["cluster.gpus_per_node=2 or more"]),
        ({"gpus_per_node": 2}, apart(gpus_per_node=3), ["is more than cluster.gpus_per_node=2", "at most 2"]),
        ({"num_nodes": 2}, apart(num_nodes=3), ["is more than cluster.num_nodes=2", "at most 1"]),
    ],
)
def test_what_cannot_be_is_refused_with_its_keys_and_the_nearest_that_can(plan, cluster, overrides, words):
    with pytest.raises(PlacementError) as refused:
        plan(*overrides, **cluster)
    for word in words:
        assert word in str(refused.value)


def test_explain_says_which_nodes_of_a_running_cluster_can_be_those_of_the_run(recipe_of):
    recipe = recipe_of(CUDA, "cluster.num_nodes=2", "cluster.gpus_per_node=[8, 4]")
    placement = plan_placement(recipe)
    located = locate(recipe, placement, [node("a", 4), node("b", 8)])
    assert (located.hosts, located.refusal) == (["b", "a"], None)
    assert "node 0 can be b (8 GPUs, 64 CPUs)" in located.text
    located = locate(recipe, placement, [node("a", 4), node("b", 6)])
    assert located.hosts is None
    assert "nearest that is left, b (6 GPUs, 64 CPUs), is 2 GPUs short of 8; add nodes" in located.refusal
    assert "num_nodes=2 with gpus_per_node=[6, 4]" in located.refusal


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("gpus_per_node=[8, 4]", ["lists 2 nodes, and num_nodes=1", "set num_nodes=2"]),
        ("gpus_per_node=[8, 0]", ["must be >= 1 on each node"]),
        ("gpus_per_node=[]", ["lists 0 nodes"]),
    ],
)
def test_a_list_of_nodes_that_cannot_be_is_refused(recipe_of, keys, words):
    with pytest.raises(RecipeError) as refused:
        recipe_of(f"cluster.{keys}")
    for word in words:
        assert word in str(refused.value)


def test_a_job_of_a_scheduler_asks_for_equal_nodes_and_refuses_others(recipe_of):
    with pytest.raises(Refusal, match=r"gpus_per_node=\[8, 4\] asks for nodes of different sizes"):
        cluster_job(recipe_of(CUDA, "cluster.num_nodes=2", "cluster.gpus_per_node=[8, 4]"), "recipe.yaml")
    assert (
        cluster_job(recipe_of(CUDA, "cluster.num_nodes=2", "cluster.gpus_per_node=[8, 8]"), "r.yaml").gpus_per_node == 8
    )


# ---- How vLLM starts the ranks of an engine.


@pytest.mark.parametrize(
    ("sizes", "executor"), [((1, 1), None), ((4, 1), "mp"), ((2, 2), "mp"), ((4, 2), "ray"), ((8, 1), "ray")]
)
def test_only_engines_on_several_nodes_have_their_ranks_started_by_ray(recipe_of, sizes, executor):
    recipe = recipe_of(CUDA, *engine_size(*sizes), "cluster.num_nodes=2", "cluster.gpus_per_node=4")
    assert executor_of(plan_placement(recipe)) == executor


@pytest.mark.parametrize("executor", ["mp", "ray"])
def test_the_executor_is_an_argument_of_vllm_and_another_one_in_the_recipe_is_refused(recipe_of, executor):
    given = {"model_name": "model", "stop_token_ids": [1], "pad_token_id": 0, "dtypes": {}, "executor": executor}
    spec = engine_spec(recipe_of(CUDA, *engine_size(2)), **given)
    assert spec.vllm.vllm_kwargs == {"distributed_executor_backend": executor}
    other = "policy.generation.vllm_cfg.vllm_kwargs={distributed_executor_backend: uni}"
    with pytest.raises(Refusal, match=f"distributed_executor_backend=uni, and .* it must be {executor}; leave it out"):
        engine_spec(recipe_of(CUDA, *engine_size(2), other), **given)

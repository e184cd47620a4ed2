"""Where ranks and engines are, and the arithmetic that refuses what cannot be."""

import pytest

from rl_launcher.ray.placement import PlacementError, plan_placement
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import Recipe

RECIPE = """
run_dir: run
policy: {model_name: model, generation: {max_new_tokens: 8}}
data: {source: "data.jsonl"}
env: {reward: "reward.py:score"}
"""


@pytest.fixture
def plan(tmp_path):
    """The placement of the recipe above with some keys changed."""

    def of(*overrides, **cluster):
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        given = [f"cluster.{key}={value}" for key, value in {"runtime": "ray", **cluster}.items()]
        found = load_recipe(tmp_path / "recipe.yaml", schema=Recipe, overrides=[*given, *overrides])
        return plan_placement(found.value)

    return of


VLLM = "policy.generation.backend=vllm"
SEPARATE = "policy.generation.colocated.enabled=false"


def engine_size(size):
    return VLLM, f"policy.generation.vllm_cfg.tensor_parallel_size={size}"


def apart(**resources):
    return SEPARATE, *(f"policy.generation.colocated.resources.{key}={value}" for key, value in resources.items())


def places(placement):
    ranks = [(place.node, place.slot) for place in placement.ranks]
    return ranks, [(place.node, *place.slots) for place in placement.engines]


def test_in_process_has_one_of_each(plan):
    placement = plan(runtime="in_process")
    assert placement.in_process
    assert places(placement) == ([(0, 0)], [(0, 0)])
    assert placement.explain() == "everything is in this process"


def test_colocated_engines_share_the_slots_of_the_ranks(plan):
    placement = plan(*engine_size(2), num_nodes=2, gpus_per_node=4)
    assert places(placement) == (
        [(node, slot) for node in range(2) for slot in range(4)],
        [(0, 0, 1), (0, 2, 3), (1, 0, 1), (1, 2, 3)],
    )


def test_separate_engines_take_the_last_slots_of_every_node(plan):
    placement = plan(*apart(gpus_per_node=1), num_nodes=2, gpus_per_node=3)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2), (1, 2)])


def test_separate_engines_take_the_last_nodes(plan):
    placement = plan(*apart(num_nodes=1), num_nodes=3, gpus_per_node=2)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0), (1, 1)], [(2, 0), (2, 1)])


def test_what_engines_leave_of_their_nodes_trains(plan):
    placement = plan(*apart(num_nodes=1, gpus_per_node=1), num_nodes=2, gpus_per_node=2)
    assert places(placement) == ([(0, 0), (0, 1), (1, 0)], [(1, 1)])


def test_nobody_is_in_two_places_and_no_slot_is_idle(plan):
    for placement in (plan(*apart(gpus_per_node=2), num_nodes=4, gpus_per_node=8), plan(num_nodes=2, gpus_per_node=8)):
        ranks, engines = places(placement)
        taken = [(node, slot) for node, *slots in engines for slot in slots]
        both = ranks + taken
        assert len(set(ranks)) == len(ranks)
        assert len(set(taken)) == len(taken)
        assert len(set(both)) == placement.num_nodes * placement.slots_per_node
        assert placement.colocated == (len(both) > len(set(both)))


def test_it_is_explained_by_node(plan):
    text = plan(*apart(gpus_per_node=1), num_nodes=2, gpus_per_node=2).explain()
    assert text.splitlines() == [
        "2 training ranks and 2 engines on 2 x 2 processes, separate",
        "  node 0  rank 0   | engine 0",
        "  node 1  rank 1   | engine 1",
    ]
    gpus = plan("policy.dtensor_cfg.device=cuda").explain()
    assert gpus.splitlines() == [
        "1 training rank and 1 engine on 1 x 1 GPUs, colocated",
        "  node 0  rank 0 + engine 0",
    ]


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
        ({"gpus_per_node": 4}, engine_size(8), ["takes 8 ranks of one node", "is too few", "set 4 ranks per engine"]),
        ({"gpus_per_node": 4}, engine_size(3), ["not a multiple of 3", "set 2 ranks per engine, or give engines 6"]),
        (
            {"gpus_per_node": 4},
            [*engine_size(2), *apart(gpus_per_node=3)],
            ["colocated.resources.gpus_per_node gives engines 3", "set 1 ranks per engine, or give engines 4"],
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

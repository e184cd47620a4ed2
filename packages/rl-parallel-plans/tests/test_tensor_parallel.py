"""Two ranks against one: logits and every gradient, in real processes over gloo."""

import gc
import subprocess
import sys

import pytest
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from rl_parallel_plans.dtensor import submesh

RELEASE = tuple(map(int, transformers.__version__.split(".")[:2]))
# fp32, two layers: what reordered sums may cost, relative to the largest entry.
TOLERANCE = 1e-5


def assert_equal_to_unsharded(results):
    for result in results:
        assert result["logits_error"] < TOLERANCE
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert result["gradients_placed_otherwise"] == []


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_family_on_two_ranks_equals_one(ranks, architecture, tied):
    results = ranks("tp_parity", 2, architecture=architecture, tied=tied)
    assert_equal_to_unsharded(results)
    for result in results:
        assert result["source"] == "structure"
        assert result["logits"] == "(Shard(dim=2),)"
        assert result["tied"] == tied
        assert result["kinds"] == ["('tp',)"]  # one mesh: optimizers that fuse parameters take no mixture
        assert result["local_bytes"] == result["planned_bytes"]


def test_biases_on_two_ranks_equal_one(ranks):
    assert_equal_to_unsharded(ranks("tp_parity", 2, architecture="llama_bias"))


def test_vocabulary_and_length_that_do_not_divide(ranks):
    assert_equal_to_unsharded(ranks("tp_parity", 2, architecture="qwen3", tied=True, vocab_size=129, length=7))


def test_gradient_that_adds_up_over_microbatches_is_summed_once(ranks):
    assert_equal_to_unsharded(ranks("tp_parity", 2, architecture="qwen3", accumulate=3))


def test_recomputed_activations_give_the_same_gradient(ranks):
    assert_equal_to_unsharded(ranks("tp_parity", 2, architecture="qwen3", checkpointing=True))


@pytest.mark.parametrize(("asked", "number"), [({}, 4), ({"sequence_parallel": True}, 8)])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "qwen3_moe"])
def test_layer_costs_two_collectives_each_way_and_four_with_sequence_parallelism(ranks, architecture, asked, number):
    assert ranks("collectives", 2, architecture=architecture, **asked) == [number, number]


def test_column_wise_output_projections_give_the_very_logits_of_one_rank(ranks):
    results = ranks("tp_parity", 2, architecture="qwen3", output_projections="colwise")
    assert_equal_to_unsharded(results)
    assert all(result["logits_error"] == 0 for result in results)


def test_all_ranks_take_the_weights_of_the_source_rank(ranks):
    assert ranks("src_data_rank_takes_the_weights_of_that_rank", 2) == [0, 0]


def test_model_without_numbers_is_sharded_too(ranks):
    assert ranks("model_without_numbers", 2) == [[True, [48, 64]]] * 2


def test_frozen_parameters_stay_frozen(ranks):
    assert ranks("frozen_parameters_stay_frozen", 2) == [[], []]


def test_module_that_raises_keeps_its_parameters(ranks):
    assert ranks("exception_in_a_norm_leaves_it_whole", 2) == [True, True]


def test_mesh_that_does_not_fit_is_refused_before_anything_changes(ranks):
    for messages, unchanged in ranks("mesh_refusals", 2):
        assert "the plan is for tp=4 and axis 'tp' of the mesh has 2 ranks" in messages[0]
        assert "the mesh has no axis 'tensor': its axes are ['tp']" in messages[1]
        assert "the mesh has no axis 'dp'" in messages[2]
        assert unchanged


def test_sharding_twice_is_refused(ranks):
    assert all("parameters are DTensors already" in message for message in ranks("applied_twice", 2))


MESH_THEN_FORK = """
import multiprocessing
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from rl_parallel_plans.dtensor import submesh


def meet_and_part():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    assert submesh(mesh, "tp") is submesh(mesh, "tp")
    dist.destroy_process_group()


meet_and_part()
child = multiprocessing.get_context("fork").Process(target=meet_and_part, daemon=True)
child.start()
child.join(300)
print("the child ended with", child.exitcode)
"""


def test_a_mesh_of_an_earlier_process_group_does_not_hang_a_process_that_is_forked_after_it():
    ended = subprocess.run([sys.executable, "-c", MESH_THEN_FORK], capture_output=True, text=True, check=False)
    assert ended.stdout == "the child ended with 0\n", ended.stderr


def test_equal_meshes_have_one_group_whether_or_not_the_first_is_gone():
    """When Python frees a mesh differs from rank to rank, and each rank must send over the same group."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        first = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        name = submesh(first, "pp").get_group().group_name
        assert first["pp"].get_group().group_name == name
        second = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        assert second["pp"].get_group().group_name != name
        assert submesh(second, "pp").get_group().group_name == name
        del first
        gc.collect()
        assert submesh(second, "pp").get_group().group_name == name
    finally:
        dist.destroy_process_group()

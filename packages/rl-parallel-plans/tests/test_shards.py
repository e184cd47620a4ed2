"""The boxes of all ranks are the unsharded model: every element, its bits, in its own coordinates."""

import pytest
import torch
from parallel_plans_cases.models import tiny

from rl_parallel_plans.checkpoints import local_boxes, named_shards


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("phi3", False), ("qwen3_moe", False), ("gemma3", True)]
)
def test_boxes_of_four_ranks_cover_every_tensor_with_its_own_numbers(ranks, architecture, tied):
    results = ranks("shards:boxes", 4, architecture=architecture, tied=tied)
    assert [result["wrong"] for result in results] == [[]] * 4
    assert [result["shapes"] for result in results] == [[]] * 4
    names = set(tiny(architecture, tied=tied).state_dict()) - ({"lm_head.weight"} if tied else set())
    assert results[0]["held"].keys() == names
    for name in names:
        copies = torch.tensor([result["held"][name] for result in results]).sum(0)
        assert int(copies.min()) >= 1, f"no rank holds the whole of {name}"


def test_plain_tensor_is_one_box():
    tensor = torch.arange(12.0).view(6, 2)
    [whole] = local_boxes(tensor)
    assert (whole.offsets, whole.sizes, whole.local_offsets) == ((0, 0), (6, 2), (0, 0))


def test_dealt_rows_are_one_box_for_each_run_of_a_rank(ranks):
    boxes = ranks("shards:boxes_of_dealt_rows", 2)
    assert boxes[0] == [[[0, 0], [2, 2], [0, 0]], [[4, 0], [1, 2], [2, 0]]]
    assert boxes[1] == [[[2, 0], [2, 2], [0, 0]], [[5, 0], [1, 2], [2, 0]]]


def test_plain_model_needs_no_process_group_and_gives_a_tied_weight_once():
    model = tiny("llama", tied=True)
    shards = list(named_shards(model))
    assert [shard.name for shard in shards] == [name for name in model.state_dict() if name != "lm_head.weight"]
    assert all(shard.local.data_ptr() == shard.tensor.data_ptr() for shard in shards)

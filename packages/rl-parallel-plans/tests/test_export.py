"""A sharded model leaves as what came in: the same names, shapes and bits."""

import pytest
import torch
from parallel_plans_cases.models import tiny
from torch import nn

from rl_parallel_plans.checkpoints import RowOrder, export_state_dict, set_row_order

pytest.importorskip("safetensors")


@pytest.mark.parametrize(
    ("architecture", "tied"), [("llama", True), ("phi3", False), ("qwen3_moe", False), ("gemma3", True)]
)
def test_exported_checkpoint_loads_as_the_unsharded_model(ranks, tmp_path, architecture, tied):
    first, *others = ranks("export:round_trip", 4, architecture=architecture, folder=str(tmp_path), tied=tied)
    assert first == {"differences": [], "missing": [], "equal": True}
    assert all(other["found"] == [] for other in others)


def test_offloaded_model_is_exported(ranks, tmp_path):
    first, *_ = ranks("export:round_trip", 4, architecture="qwen3", folder=str(tmp_path), offload=True)
    assert first == {"differences": [], "missing": [], "equal": True}


def test_transformers_saves_the_export_under_the_names_of_its_files(ranks, tmp_path):
    equal, *_ = ranks("export:saved_by_transformers", 4, architecture="qwen3_moe", folder=str(tmp_path))
    assert equal


def test_ties_dtype_and_ranks_are_the_callers_choice(ranks):
    first, *others = ranks("export:options", 4)
    for result in (first, *others):
        assert result["ties"] == [False, True]
        assert result["all_names"] == []
        assert result["half"]
    assert first["yielded"] == 2 + 2 * 9
    assert all(other["yielded"] == 0 for other in others)


def test_weights_are_those_of_the_optimizer_and_not_those_of_the_last_forward(ranks):
    assert ranks("export:after_a_forward_in_half_precision", 4) == [[]] * 4


def test_one_whole_tensor_is_alive_at_a_time(ranks):
    assert ranks("export:one_at_a_time", 4) == [0] * 4


def test_names_of_wrappers_and_transient_buffers_are_left_out(ranks):
    assert ranks("export:wrapped", 2) == [{"names": True, "equal": True}] * 2


def test_plain_model_is_exported_without_any_process_group():
    model = tiny("llama", tied=True)
    found = dict(export_state_dict(model, tied_names=True))
    truth = model.state_dict()
    assert list(found) == list(truth)
    assert all(torch.equal(found[name], truth[name]) for name in truth)


def test_rows_go_back_to_their_order():
    linear = nn.Linear(3, 6)
    truth = linear.weight.detach().clone()
    order = RowOrder(dim=0, rows=torch.tensor([[0, 1, 4], [2, 3, 5]]))
    linear.weight = nn.Parameter(order.dealt(truth))
    assert linear.weight.shape == (3, 2, 3)
    assert torch.equal(linear.weight[:, 1], truth[[2, 3, 5]])
    set_row_order(linear, "weight", order)
    found = dict(export_state_dict(linear))
    assert torch.equal(found["weight"], truth)
    assert torch.equal(found["bias"], linear.bias)

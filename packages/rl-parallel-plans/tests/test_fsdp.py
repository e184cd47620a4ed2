"""FSDP2, alone and around tensor parallelism, against one process: gradients are sums, whatever the mesh."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOLERANCE = 1e-5


def assert_equal_to_one_process(results):
    for result in results:
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        for found, truth in result["norms"]:
            assert found == pytest.approx(truth, rel=1e-5)


def assert_summed(results):
    for result in results:
        assert max(result["gradient_errors"].values()) < TOLERANCE, result["gradient_errors"]
        assert result["norms"][0] == pytest.approx(result["norms"][1], rel=1e-5)


# -- Sums, whatever the mesh -----------------------------------------------------------------------


def test_gradients_are_sums_over_data_parallel_ranks(ranks):
    results = ranks("parallel_parity", 2, architecture="llama", shape=[2, 1], tied=True)
    assert_equal_to_one_process(results)
    assert all(result["tied"] and result["class"] == "FSDPLlamaForCausalLM" for result in results)


def test_optimizer_steps_on_two_by_two_ranks_equal_one_process(ranks):
    results = ranks(
        "parallel_parity", 4, architecture="qwen3", shape=[2, 2], tied=True, accumulate=2, optimizer_steps=2
    )
    assert_equal_to_one_process(results)
    for result in results:
        # AdamW divides by the root of what is nearly zero, so that rounding shows.
        assert max(result["weight_errors"].values()) < 1e-4
        assert result["tied"]
        assert result["kinds"] == ["('dp', 'tp')"]


def test_deferred_reduction_adds_up(ranks):
    results = ranks("parallel_parity", 4, architecture="qwen3", shape=[2, 2], accumulate=3, sync_last_only=True)
    assert_equal_to_one_process(results)


def test_one_rank_is_the_plain_model(ranks):
    (result,) = ranks("one_rank", 1)
    assert max(result["gradient_errors"].values()) == 0
    assert result["norms"][0] == result["norms"][1]


def test_shards_that_are_copied_sum_over_shards_and_copies(ranks):
    names = ["dp_replicate", "dp_shard"]
    results = ranks(
        "fsdp:summed_parity", 4, names=names, shape=[2, 2], dp_axis="dp_shard", dp_replicate_axis="dp_replicate"
    )
    assert_summed(results)
    for result in results:
        assert result["mesh"] == names
        assert result["placements"][0].startswith("R")
        assert result["local_rows"] == 64 // 2


def test_shards_are_copied_around_tensor_parallelism_too(ranks):
    results = ranks(
        "fsdp:summed_parity",
        4,
        architecture="qwen3",
        names=["dp_replicate", "dp_shard", "tp"],
        shape=[2, 1, 2],
        dp_axis="dp_shard",
        dp_replicate_axis="dp_replicate",
        accumulate=2,
    )
    assert_summed(results)
    assert results[0]["mesh"] == ["dp_replicate", "dp_shard", "tp"]


def test_several_axes_are_sharded_over_as_one(ranks):
    results = ranks("fsdp:summed_parity", 4, names=["dp", "ep"], shape=[2, 2], dp_axis=["dp", "ep"])
    assert_summed(results)
    assert all(result["mesh"] == ["dp_ep"] and result["local_rows"] == 64 // 4 for result in results)


def test_what_lies_on_a_data_parallel_axis_already_is_sharded_over_the_others(ranks):
    for placed in ranks("fsdp:sharded_over_a_data_parallel_axis", 4):
        assert placed["1.0.experts.weight"] == [["dp", "ep"], [1, 6, 6]]
        assert placed["1.1.linear.weight"][0] == placed["0.weight"][0] == ["dp_ep"]


def test_parameters_may_stay_sharded_over_fewer_ranks(ranks):
    assert_summed(ranks("fsdp:summed_parity", 4, names=["dp"], shape=[4], reshard_after_forward=2, accumulate=2))


def test_gathered_layers_are_not_gathered_again_in_backward(ranks):
    for freed, kept in ranks("fsdp:gathered_once", 2):
        gathers = [sum(n for name, n in counts.items() if "gather" in name) for counts in (freed, kept)]
        assert gathers == [5, 3]  # two layers and the rest forward; two layers backward


# -- Memory ----------------------------------------------------------------------------------------


def test_offloaded_model_has_the_same_gradients_and_a_class_in_place_of_a_policy_is_refused(ranks):
    for result in ranks("fsdp:offloaded", 2):
        assert max(result["gradient_errors"].values()) < TOLERANCE
        assert result["policies"] == ["CPUOffloadPolicy"]
        of_class, of_base, of_text = result["refusals"]
        assert "CPUOffloadPolicy'> (this is the class: call it)" in of_class
        assert "OffloadPolicy'> (this is the class: call it)" in of_base
        assert "offload_policy is 'cpu': it is None or an instance" in of_text
        assert result["untouched"]


# -- Precision -------------------------------------------------------------------------------------

LLAMA = {"model_class": "LlamaForCausalLM", "config_class": "LlamaConfig", "changes": {}}


def test_half_precision_is_that_of_a_model_in_half_precision(ranks):
    (result,) = ranks("fsdp:half_precision", 1, **LLAMA)
    assert result["equal"]
    assert result["logits"] == "torch.bfloat16"
    assert result["gradients"] == ["torch.float32"]
    assert result["kept"] == []


def test_residual_stream_stays_in_half_precision_where_the_output_is_not(ranks):
    (result,) = ranks("fsdp:half_precision", 1, output_dtype="float32", **LLAMA)
    assert result["entering_layers"] == ["torch.bfloat16"]
    assert result["logits"] == "torch.float32"
    assert result["equal"]


def test_decay_of_a_state_space_layer_stays_in_fp32(ranks):
    (result,) = ranks(
        "fsdp:half_precision",
        1,
        model_class="Mamba2ForCausalLM",
        config_class="Mamba2Config",
        changes={"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 8},
    )
    assert result["kept"] == ["A_log"]
    assert result["equal"]
    assert result["without_gradient"] == []


def test_parameters_that_the_model_keeps_in_fp32_stay_so(ranks):
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32, "moe_layer_start_index": 1}
    (result,) = ranks(
        "fsdp:half_precision",
        1,
        model_class="Ernie4_5_MoeForCausalLM",
        config_class="Ernie4_5_MoeConfig",
        changes=experts,
    )
    assert {"e_score_correction_bias", "weight"} <= set(result["kept"])  # its router's weight too
    assert result["equal"]


def test_gathered_parameters_take_the_asked_dtype_and_sharded_ones_keep_theirs(ranks):
    (result,) = ranks("one_rank", 1, param_dtype="bfloat16")
    assert 1e-4 < max(result["gradient_errors"].values()) < 0.1
    assert result["dtypes"] == ["torch.float32"]


# -- What trains -----------------------------------------------------------------------------------


@pytest.mark.parametrize("weight_dtype", ["float32", "bfloat16"])
def test_frozen_weights_and_trainable_adapters_share_a_layer(ranks, weight_dtype):
    tolerance = TOLERANCE if weight_dtype == "float32" else 0.1
    for result in ranks("fsdp:adapters", 2, weight_dtype=weight_dtype):
        assert max(result["errors"].values()) < tolerance
        assert result["moved"] == result["trainable"] == ["down", "up"]


def test_fused_optimizer_takes_all_parameters_at_once(ranks):
    for result in ranks("fsdp:fused_optimizer", 4, architecture="qwen3"):
        assert max(result["errors"].values()) < 1e-4
        assert len(result["kinds"]) == 1


# -- Units -----------------------------------------------------------------------------------------

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}


def test_layers_of_every_stack_are_units(ranks):
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}
    (paths,) = ranks(
        "fsdp:units",
        1,
        model_class="Qwen2_5_VLForConditionalGeneration",
        config_class="Qwen2_5_VLConfig",
        changes={"text_config": {**TEXT, "num_key_value_heads": 2}, "vision_config": vision},
    )
    assert {path.rpartition(".")[0] for path in paths} == {"", "model.visual.blocks", "model.language_model.layers"}
    assert len(paths) == 1 + 2 + 2


def test_encoder_and_decoder_layers_are_units(ranks):
    shape = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    (paths,) = ranks("fsdp:units", 1, model_class="T5ForConditionalGeneration", config_class="T5Config", changes=shape)
    assert paths == ["", "encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"]


def test_model_of_nothing_but_layers_is_one_model(ranks):
    for result in ranks("fsdp:only_layers", 2):
        assert result["units"] == ["", "layers.0", "layers.1"]
        assert max(result["gradient_errors"].values()) < TOLERANCE


# -- Refusals --------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_before_anything_changes(ranks):
    for messages in ranks("fsdp:refusals", 2):
        assert messages["axis"].startswith("the mesh has no axis 'ep': its axes are ['dp']")
        assert messages["copies"].startswith("dp_axis=('dp',) and dp_replicate_axis='dp': name at least one axis")
        assert "experts is sharded over ['ep'] already, and dp_axis=('ep',) names no other axis" in messages["taken"]
        assert messages["group"].startswith("reshard_after_forward is 3: it is True, False or a number of ranks")
        assert messages["no layers"].startswith("Linear holds no nn.ModuleList of layers")
        assert messages["scalar"].startswith("parameter model.layers.0.temperature has no dims and FSDP shards dim 0")
        assert messages["tied"].endswith("leave it out of fp32_parameters")
        assert "since it is tied to another" in messages["tied"]
        assert messages["twice"] == "FSDPLlamaForCausalLM is under FSDP already: apply it once"


def test_plan_of_a_class_that_fsdp_renamed_is_found_and_says_that_it_comes_too_late(ranks):
    for result in ranks("fsdp:registered_under_fsdp", 2):
        assert result["class"] == "FSDPLlamaForCausalLM"
        assert result["source"] == "registered: transformers.models.llama.modeling_llama.LlamaForCausalLM"
        (problem,) = [p for p in result["problems"] if "DTensors already" in p]
        assert problem.endswith("shard over tp once, and before FSDP")


# -- In a trainer ----------------------------------------------------------------------------------


def test_readme_trainer_learns_on_two_ranks_as_written(tmp_path):
    fences = (Path(__file__).parents[1] / "README.md").read_text().split("```")
    (trainer,) = [fence.removeprefix("python\n") for fence in fences if "init_device_mesh" in fence]
    (tmp_path / "train.py").write_text(trainer)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    completed = subprocess.run(
        torchrun,
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    losses = [float(line.split()[1].rstrip(",")) for line in completed.stdout.splitlines() if line.startswith("loss ")]
    assert len(losses) >= 5
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(("accumulate", "sync_last_only"), [(1, False), (2, False), (2, True)])
def test_ranks_that_run_different_experts_of_a_list_stay_in_step(ranks, accumulate, sync_last_only):
    options = {"accumulate": accumulate, "sync_last_only": sync_last_only}
    for found in ranks("fsdp:ranks_that_run_different_experts", 2, **options):
        assert found["unused"] == [
            f"layers.{layer}.experts.3.{name}" for layer in (0, 1) for name in ("bias", "weight")
        ]
        assert found["zero"]
        assert max(found["errors"]) < 1e-5

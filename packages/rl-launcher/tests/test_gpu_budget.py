"""`explain --gpu`: what fits on GPUs that are not here; the figures follow from the stated arithmetic."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl_generation import estimate_memory
from rl_launcher.checks.gpu_budget import CONTEXT_BYTES, GIB, PROCESS_HOST_BYTES, Gpu, budget, gpu_named, host_needs
from rl_launcher.errors import Refusal
from rl_launcher.ray.placement import plan_placement
from rl_launcher.recipe_files import load_recipe
from rl_launcher.recipe_files.shipped import find_recipe
from rl_launcher.schema import Recipe

H100 = gpu_named("h100-80gb")
CONFIG = Qwen3Config(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)


@pytest.fixture(scope="module")
def eight_billion():
    with torch.device("meta"):
        return Qwen3ForCausalLM(CONFIG)


@pytest.fixture
def asked(eight_billion):
    """The budget of the shipped recipe of 8 GPUs, with some keys changed."""

    def ask(*overrides, gpu=H100, peak=40 * GIB):
        recipe = load_recipe(find_recipe("grpo-8gpu-colocated"), schema=Recipe, overrides=overrides).value
        cfg = recipe.policy.generation.vllm_cfg
        engine = estimate_memory(
            CONFIG,
            dtype="bfloat16",
            max_model_len=4096,
            tensor_parallel_size=cfg.tensor_parallel_size,
            pipeline_parallel_size=cfg.pipeline_parallel_size,
        )
        placement = plan_placement(recipe)
        return recipe, budget(recipe, eight_billion, placement, gpu=gpu, rank_peak_bytes=peak, engine=engine)

    return ask


def test_what_fits_is_told_by_phase_with_host_memory_and_times(asked):
    recipe, found = asked()
    assert found.refusal is None
    weights = 2 * 8_190_735_360
    phases = found.figures["phase_bytes"]
    assert phases["training"] == 40 * GIB + weights + 2 * CONTEXT_BYTES, "the memory of refits stays allocated"
    assert phases["refitting"] == 2 * weights + 4 * 8_190_735_360 // 8 + 2 * CONTEXT_BYTES
    slots = recipe.policy.refit.buckets * recipe.policy.refit.bucket_bytes * 16
    assert found.figures["shm_bytes_per_node"] == GIB + slots, "refits are staged on the engines' own GPUs"
    rows = recipe.grpo.num_prompts * recipe.grpo.num_generations_per_prompt
    assert f"a batch of {rows:,} rows" in found.text, "the recipe's batch, and not what fills the ranks once"
    times = found.figures["step_s"]
    assert times["total"] == pytest.approx(times["generate"] + times["train"] + times.get("logp", 0) + times["refit"])
    assert 0 < times["mfu"] < 0.45


def test_what_does_not_fit_is_refused_with_a_change_that_does(asked):
    _, found = asked(peak=200 * GIB)
    assert "while training, a GPU needs 218.3 GiB and has 79.1 GiB" in found.refusal
    assert "tensor_parallel_size" in found.refusal
    _, found = asked(gpu=Gpu("", 20 * GIB, 0.0), peak=GIB)
    assert "tensor_parallel_size=" in found.refusal
    size = found.refusal.rpartition("tensor_parallel_size=")[2].split()[0]
    _, larger = asked(
        f"policy.generation.vllm_cfg.tensor_parallel_size={size}",
        "policy.generation.vllm_cfg.gpu_memory_utilization=0.4",
        gpu=Gpu("", 20 * GIB, 0.0),
        peak=GIB,
    )
    assert larger.refusal is None


def test_an_engine_too_large_for_a_node_is_divided_into_stages(asked):
    small, nodes = Gpu("", 22 * GIB, 0.0), ["cluster.num_nodes=2", "cluster.gpus_per_node=2"]
    section = "policy.generation.vllm_cfg"
    share = f"{section}.gpu_memory_utilization=0.4"
    _, found = asked(*nodes, share, f"{section}.tensor_parallel_size=2", gpu=small, peak=GIB)
    assert f"{section}.pipeline_parallel_size=2 (it is 1)" in found.refusal
    assert "tensor_parallel_size=" not in found.refusal
    sizes = [f"{section}.tensor_parallel_size=2", f"{section}.pipeline_parallel_size=2"]
    _, larger = asked(*nodes, share, *sizes, gpu=small, peak=GIB)
    assert larger.refusal is None


def test_each_of_unequal_nodes_needs_host_memory_for_its_ranks_and_its_part_of_engines(eight_billion):
    section = "policy.generation.vllm_cfg"
    overrides = ["cluster.num_nodes=2", "cluster.gpus_per_node=[8, 4]", f"{section}.tensor_parallel_size=4"]
    recipe = load_recipe(
        find_recipe("grpo-8gpu-colocated"),
        schema=Recipe,
        overrides=[*overrides, f"{section}.pipeline_parallel_size=3"],
    ).value
    engine = estimate_memory(
        CONFIG, dtype="bfloat16", max_model_len=4096, tensor_parallel_size=4, pipeline_parallel_size=3
    )
    sizes = {"parameters": 12 * 10**9, "trainer_bytes": 12 * GIB, "engine": engine}
    first, second = host_needs(recipe, plan_placement(recipe), **sizes)
    assert [shm - GIB for _, shm in (first, second)] == [16 * 2**23, 8 * 2**23]  # two slots of 4 MiB for each process
    actor_and_scheduler = 2 * PROCESS_HOST_BYTES  # where the engine's first rank is
    assert first[0] - GIB - actor_and_scheduler == 2 * (second[0] - GIB)


def test_a_change_is_proposed_only_after_a_step_was_traced_with_it(eight_billion):
    """Fewer rows change nothing where the tokens of a microbatch allow one row anyway."""
    plain = ["policy.dtensor_cfg.activation_checkpointing=null"]
    recipe = load_recipe(find_recipe("grpo-8gpu-colocated"), schema=Recipe, overrides=plain).value
    tried = []

    def peak_with(**changes):
        tried.append(changes)
        return (60 if changes.get("activation_checkpointing") == "full" and "micro_batch_size" in changes else 90) * GIB

    engine = estimate_memory(CONFIG, dtype="bfloat16", max_model_len=4096)
    found = budget(
        recipe,
        eight_billion,
        plan_placement(recipe),
        gpu=H100,
        rank_peak_bytes=120 * GIB,
        engine=engine,
        peak_with=peak_with,
        microbatch_rows=8,
    )
    assert [sorted(each) for each in tried] == [
        ["micro_batch_size"],
        ["activation_checkpointing"],
        ["activation_checkpointing", "micro_batch_size"],
    ]
    assert "activation_checkpointing=full (it is null) and" in found.refusal
    assert "policy.dtensor_cfg.micro_batch_size=1" in found.refusal


def test_without_a_share_of_its_own_an_engine_leaves_room_for_refits(asked):
    _, found = asked("policy.generation.vllm_cfg.gpu_memory_utilization=null")
    assert found.refusal is None
    assert found.figures["phase_bytes"]["generating"] <= 0.92 * H100.memory_bytes + CONTEXT_BYTES


def test_names_and_bytes_name_a_gpu_and_others_are_refused():
    assert gpu_named("H100-80GB") is H100
    assert gpu_named("42").memory_bytes == 42
    with pytest.raises(Refusal, match=r"did you mean h100-80gb\?"):
        gpu_named("h100-80g")

"""What others build on: the public names, what importing them costs, and the README."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import rl_parallel_plans

README = Path(__file__).parents[1] / "README.md"
SIGNATURES = {
    "verify": "(model, *, tp, dp, pp, sequence_parallel, options)",
    "assert_plan_is_exact": "(model, *, tp, dp, pp, sequence_parallel, options)",
    "memory": (
        "(model, *, batch_size, sequence_length, tp, dp, sequence_parallel, lm_head, loss, "
        "activation_checkpointing, weight_dtype, param_dtype, reduce_dtype, optimizer, attention, custom, "
        "pp, pp_rank, microbatches, schedule, gpu, revision, trust_remote_code)"
    ),
    "memory_table": ("(reports)"),
    "apply_activation_checkpointing": "(model, mode)",
    "apply_context_parallel": "(model, mesh, *, cp_axis, plan)",
    "apply_expert_parallel": "(model, mesh, plan, *, ep_axis, tp_axis, src_data_rank)",
    "apply_fsdp": (
        "(model, mesh, *, dp_axis, dp_replicate_axis, param_dtype, reduce_dtype, output_dtype, "
        "fp32_parameters, offload_policy, reshard_after_forward)"
    ),
    "apply_tensor_parallel": "(model, mesh, plan, *, tp_axis, src_data_rank)",
    "as_html": "(plan, *, dp, stages)",
    "as_json": "(plan, *, dp, stages)",
    "check_context_parallel": "(model, *, plan)",
    "clip_grad_by_total_norm_": "(parameters, max_norm, total_norm)",
    "export_state_dict": "(model, *, every_rank, tied_names, dtype, device)",
    "get_grad_norm": "(parameters, norm_type, *, pp_mesh)",
    "get_hf_tp_plan": "(model)",
    "get_logprobs_from_vocab_parallel_logits": (
        "(logits, target, *, temperature, chunk_size, entropy, ignore_index, tp_axis)"
    ),
    "linear_logp": (
        "(hidden, lm_head, targets, *, temperature, chunk_size, entropy, softcap, logit_scale, ignore_index, "
        "kernel, tp_axis)"
    ),
    "parallelize": (
        "(model, mesh, plan, *, tp_axis, ep_axis, cp_axis, dp_axis, dp_replicate_axis, src_data_rank, "
        "activation_checkpointing, param_dtype, reduce_dtype, output_dtype, fp32_parameters, offload_policy, "
        "reshard_after_forward)"
    ),
    "pipeline_stages": (
        "(model, mesh, plan, *, schedule, stages_per_rank, layers, pp_axis, tp_axis, stream_dtype, "
        "defer_gradient_sync, options)"
    ),
    "plan_for": "(model, *, tp, sequence_parallel, output_projections, ep, custom, allow)",
    "qualified_name": "(cls)",
    "register_plan": "(model_name)",
    "sequence_positions": "(length, mesh, *, cp_axis, device)",
    "shard_sequence": "(tensor, mesh, *, cp_axis, dim, pad_value, cu_seqlens)",
    "split_stages": "(model, num_stages, *, layers)",
    "stage_info": "(stage)",
    "to_local_if_dtensor": "(tensor)",
    "named_shards": "(model)",
    "local_boxes": "(tensor, *, row_order)",
    "logp_of_token_ids": "(hidden, lm_head, token_ids, *, temperature, chunk_size, softcap, logit_scale, tp_axis)",
    "top_k_logp": "(hidden, lm_head, k, *, temperature, chunk_size, softcap, logit_scale, tp_axis)",
    "top_k_logp_from_logits": "(logits, k, *, temperature, chunk_size, tp_axis)",
    "translate_parallel_style": "(style, *, config)",
    "unshard_sequence": "(tensor, mesh, *, cp_axis, dim, length, cu_seqlens)",
}
CLASSES = {
    "Box",
    "MemoryReport",
    "NamedShard",
    "ParallelPlan",
    "Pipeline",
    "PlanError",
    "ReplicatedParallel",
    "StageInfo",
    "TopKLogp",
    "VerifyReport",
}


def run(code, *arguments):
    """What a fresh interpreter prints."""
    completed = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_public_names_are_these():
    assert set(rl_parallel_plans.__all__) == SIGNATURES.keys() | CLASSES
    assert set(rl_parallel_plans.__all__) <= set(dir(rl_parallel_plans))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_these(name):
    parameters = inspect.signature(getattr(rl_parallel_plans, name)).parameters.values()
    names = [p.name for p in parameters]
    keyword_only = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    if keyword_only:
        names.insert(names.index(keyword_only[0]), "*")
    assert f"({', '.join(names)})" == SIGNATURES[name]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'plan_four'"):
        _ = rl_parallel_plans.plan_four


def test_import_loads_nothing_that_torch_does_not():
    code = "import sys, torch; before = set(sys.modules); import rl_parallel_plans; print(*(set(sys.modules) - before))"
    loaded = set(run(code).split())
    assert loaded == {"rl_parallel_plans"}


def test_plain_use_needs_neither_transformers_nor_dtensor():
    code = """
import sys, torch
import rl_parallel_plans as plans
head = torch.nn.Linear(4, 8, bias=False)
plans.linear_logp(torch.zeros(3, 4), head, torch.zeros(3, dtype=torch.long)).sum().backward()
plans.clip_grad_by_total_norm_(head.parameters(), 1.0, plans.get_grad_norm(head.parameters()))
plans.plan_for(torch.nn.ModuleList([head]), tp=1).explain()
print(*(name for name in ("transformers", "torch.distributed.tensor", "torch.distributed.fsdp") if name in sys.modules))
"""
    assert run(code).split() == []


def test_readme_program_prints_what_it_shows():
    fences = README.read_text().split("```")
    program = next(fence.removeprefix("python\n") for fence in fences if fence.startswith("python\n"))
    shown = next(fence.removeprefix("text\n") for fence in fences if fence.startswith("text\n"))
    assert run(program).strip() == shown.strip()

"""Tiny models whose layers differ: linear attention, state spaces, latent attention, experts, inputs of each layer.

What one rank does with them, and the unsharded truth. fp64 where fp32 rounds to more than the tolerance by itself.
"""

from collections import Counter

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

import rl_parallel_plans as plans
from parallel_plans_cases import models
from parallel_plans_cases.cases import error, gradient_errors, total_loss, whole
from parallel_plans_cases.models import VOCABULARY, token_ids
from rl_parallel_plans.plan.rows import collective_rows
from rl_parallel_plans.styles import WholeParallel

SHAPE = models.SHAPE | {"tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
BAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}
FALCON_H1 = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128, "mamba_d_state": 8, "mamba_chunk_size": 8}
NEMOTRON_H = {
    "layers_block_type": ["mamba", "moe", "attention"],
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "expand": 2,
    "chunk_size": 8,
}
GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 8,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 0,
}
# Name to (stem of the configuration's and of the model's class, configuration).
ARCHITECTURES = {
    "qwen3_next": ("Qwen3Next", {**DELTA, **EXPERTS, "decoder_sparse_step": 1, "shared_expert_intermediate_size": 32}),
    "qwen3_5": ("Qwen3_5", DELTA),
    "qwen3_5_moe": ("Qwen3_5Moe", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32}),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "kimi_linear": (
        "KimiLinear",
        {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "num_experts": 4, "num_local_experts": 4},
    ),
    "minimax": (
        "MiniMax",
        {"layer_types": DELTA["layer_types"], "block_size": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "nemotron_h": ("NemotronH", {**NEMOTRON_H, "n_groups": 2}),
    "nemotron_h_one_group": ("NemotronH", {**NEMOTRON_H, "n_groups": 1}),
    "bamba": ("Bamba", {**BAMBA, "attn_layer_indices": [1], "mamba_n_groups": 1}),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **BAMBA,
            "layer_types": ["mamba", "attention"],
            "mamba_n_groups": 1,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        },
    ),
    "falcon_h1": ("FalconH1", {**FALCON_H1, "mamba_n_groups": 1}),
    "falcon_h1_normed": ("FalconH1", {**FALCON_H1, "mamba_n_groups": 2, "mamba_rms_norm": True}),
    "jamba": (
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
            "mamba_d_state": 8,
        },
    ),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4_shared": (
        "Gemma4",
        {**GEMMA4, "num_hidden_layers": 4, "layer_types": GEMMA4["layer_types"] * 2, "num_kv_shared_layers": 2},
    ),
    "gemma4_moe": (
        "Gemma4",
        {**GEMMA4, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ),
    "gemma3n": (
        "Gemma3n",
        {
            "layer_types": GEMMA4["layer_types"],
            "sliding_window": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
            "intermediate_size": [96, 96],
            "activation_sparsity_pattern": [0.9, 0.0],
            "laurel_rank": 8,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 8,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            **LATENT,
            "num_layers": 2,
            "num_hidden_layers": 4,
            "zero_expert_num": 2,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
        },
    ),
    "glm_moe_dsa": ("GlmMoeDsa", {**LATENT, "index_n_heads": 4, "index_head_dim": 16, "index_topk": 4}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {
            **EXPERTS,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 8,
            "v_head_dim": 8,
            "n_routed_experts": 4,
        },
    ),
    "granitemoe": ("GraniteMoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo": ("Olmo", {}),
    "gpt_neox": ("GPTNeoX", {}),
    "nanochat": ("NanoChat", {}),
    "opt": ("OPT", {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}),
}
DOUBLE = {"qwen3_5", "gemma4", "gemma4_shared", "olmo_hybrid"}


def classes(architecture):
    """Class of the configuration and of the model; None in a transformers that has none."""
    stem = ARCHITECTURES[architecture][0]
    names = ((f"{stem}TextConfig", f"{stem}ForCausalLM"), (f"{stem}Config", f"{stem}ForCausalLM"))
    found = (tuple(getattr(transformers, name, None) for name in pair) for pair in names)
    return next((pair for pair in found if None not in pair), None)


def tiny(architecture, *, device="cpu", **changes):
    """A model of few layers; the same numbers at every call."""
    config_class, model_class = classes(architecture)
    known = set(config_class().to_dict()) | set(getattr(config_class, "attribute_map", {}))
    shape = {name: value for name, value in SHAPE.items() if name in known}
    config = config_class(**{**shape, **ARCHITECTURES[architecture][1], **changes})
    torch.manual_seed(0)
    with torch.device(device):
        model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.double() if architecture in DOUBLE else model


def parity(architecture, *, streams=(False, True), accumulate=1, checkpointing=False, **changes):
    """Errors on the ranks of a tp mesh against one, with the residual stream whole and cut."""
    ids = token_ids(2 * accumulate, 9)
    reference = tiny(architecture, **changes).train()
    total_loss(reference, ids).backward()
    logits = reference(input_ids=ids).logits
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for sequence_parallel in streams:
        model = tiny(architecture, **changes).train()
        plan = plans.plan_for(model, tp=mesh.size(), sequence_parallel=sequence_parallel)
        plans.apply_tensor_parallel(model, mesh, plan)
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for microbatch in ids.chunk(accumulate):
            total_loss(model, microbatch).backward()
        errors = significant(gradient_errors(model, reference), reference)
        worst = max(errors, key=errors.get)
        results.append(
            {
                "source": plan.source,
                "logits_error": error(model(input_ids=ids).logits, logits),
                "worst_gradient": [worst, errors[worst]],
                "gradients_placed_otherwise": [
                    name
                    for name, p in model.named_parameters()
                    if isinstance(p.grad, DTensor) and p.grad.placements != p.placements
                ],
                "whole": sorted(pattern for pattern, style in plan.styles.items() if isinstance(style, WholeParallel)),
                "all_train": all(module.training for module in model.modules()),
            }
        )
    return results


def significant(errors, reference):
    """Those of gradients that are not rounding alone: a bias that softmax cancels has none."""
    sizes = {name: p.grad.abs().max().item() for name, p in reference.named_parameters() if p.grad is not None}
    return {name: e for name, e in errors.items() if sizes[name] > 1e-4 * max(sizes.values())}


def fsdp_parity(architecture, *, sequence_parallel=True):
    """The gradient on a mesh of dp and tp against the sum over the whole batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = token_ids(4, 7)
    reference = tiny(architecture)
    total_loss(reference, ids).backward()
    model = tiny(architecture)
    plans.parallelize(model, mesh, plans.plan_for(model, tp=2, sequence_parallel=sequence_parallel))
    for microbatch in ids.chunk(2)[mesh.get_local_rank("dp")].chunk(2):
        total_loss(model, microbatch).backward()
    return max(significant(gradient_errors(model, reference), reference).values())


def sizes_of_rank(architecture, paths):
    """Elements of each parameter on this rank, and of all of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tiny(architecture)
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh.size()))
    return {path: [model.get_parameter(path).to_local().numel(), model.get_parameter(path).numel()] for path in paths}


def mixer_is_itself_again_after_an_error():
    """Inside the forward the mixer takes its code path for evaluation; afterwards nothing of that is left."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny("bamba").train()
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2))
    mixer = model.model.layers[0].mamba
    seen = []
    mixer.in_proj.register_forward_hook(lambda *_: seen.append(mixer.training))
    model(input_ids=token_ids(1, 5))
    try:
        mixer("no tensor")
    except (AttributeError, TypeError, RuntimeError):
        seen.append(mixer.training)
    return [seen, all(isinstance(p, DTensor) for p in (mixer.A_log, mixer.conv1d.weight, mixer.norm.weight))]


def shape_of_logits(architecture):
    """How the logits of the sharded model are placed, and the shape of all of them."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny(architecture)
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2))
    logits = model(input_ids=token_ids(1, 5)).logits
    return [str(logits.placements), list(whole(logits).shape)]


def what_a_mixture_hands_on():
    """The placement, shape and local shape of the output of Llama 4's mixture under sequence parallelism."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny("llama4")
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2, sequence_parallel=True))
    seen = []
    model.model.layers[1].feed_forward.register_forward_hook(lambda _module, _args, output: seen.append(output[0]))
    model(input_ids=token_ids(1, 6))
    return [str(seen[0].placements), list(seen[0].shape), list(seen[0].to_local().shape)]


def collectives(architecture, sequence_parallel):
    """How often each collective ran, forward and backward, and what the plan says."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = tiny(architecture)
    plan = plans.plan_for(model, tp=2, sequence_parallel=sequence_parallel)
    rows = collective_rows(model, plan.styles, tp=2)
    plans.apply_tensor_parallel(model, mesh, plan)
    with CommDebugMode() as forward:
        logits = model(input_ids=token_ids(1, 6)).logits
    with CommDebugMode() as backward:
        logits.to_local().sum().backward()
    ran = [names(mode.get_comm_counts()) for mode in (forward, backward)]
    if any(row.partial_gradient for row in plan.parameters):  # summed once, at the end of a backward
        ran[1]["all_reduce"] -= 1
    return ran, [told(rows, way) for way in ("forward", "backward")]


def names(counts):
    """By name, whether torch's functional collectives were called or those that work in place."""
    found = Counter()
    for operation, count in counts.items():
        name = str(operation).rpartition(".")[2].replace("_into_tensor", "").replace("_tensor", "").rstrip("_")
        found[{"allreduce": "all_reduce"}.get(name, name)] += count
    return found


def told(rows, way):
    found = Counter()
    for row in rows:
        for name, count in getattr(row, way).items():
            found[name] += count * row.count
    return found

"""Models sharded by their own plans, translated, on real ranks, against the same models unsharded."""

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import rl_parallel_plans as plans
from parallel_plans_cases import models
from parallel_plans_cases.cases import error, gradient_errors, is_tied, total_loss, whole

LATENT = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1}
ARCHITECTURES = {
    "apertus": ("Apertus", {}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, **EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}),
    "gemma4": (
        "Gemma4",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 128,
            "num_kv_shared_layers": 0,
            "pad_token_id": 0,
        },
    ),
    "llama4": (
        "Llama4",
        {
            "intermediate_size_mlp": 96,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
    ),
    "longcat_flash": (
        "LongcatFlash",
        {
            **LATENT,
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
}


def built(architecture, *, device="cpu", dtype=torch.float32, tied=False, **changes):
    """A tiny model of an architecture of `models`, or of one here; the same numbers at every call."""
    if architecture in models.ARCHITECTURES:
        config_class, model_class, extra = models.ARCHITECTURES[architecture]
    else:
        name, extra = ARCHITECTURES[architecture]
        model_class = getattr(transformers, f"{name}ForCausalLM")
        config_class = model_class.config_class
    config = config_class(**{**models.SHAPE, **extra, "tie_word_embeddings": tied, **changes})
    with torch.device(device):
        torch.manual_seed(0)
        model = model_class(config).to(dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters() if device == "cpu" else ():
            random = torch.randn(parameter.shape, generator=generator, dtype=dtype)
            parameter.nan_to_num_(0.0).copy_(parameter + 0.1 * random if parameter.ndim == 1 else 0.1 * random)
    return model.eval()


def own_plan_parity(architecture, *, accumulate=1, dtype="float32", tied=False, **changes):
    """Logits and every gradient under the model's own plan, whatever other rule would have one."""
    build = {"dtype": getattr(torch, dtype), "tied": tied, **changes}
    ids = models.token_ids(accumulate, 9)
    reference = built(architecture, **build)
    logits = reference(input_ids=ids).logits
    total_loss(reference, ids).backward()
    model = built(architecture, **build)
    plan = plans.plan_for(model, tp=2, custom=plans.get_hf_tp_plan)
    plans.apply_tensor_parallel(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
    found = model(input_ids=ids).logits
    for microbatch in ids.chunk(accumulate):
        total_loss(model, microbatch).backward()
    return {
        "logits": str(found.placements),
        "logits_error": error(found, logits),
        "gradient_errors": gradient_errors(model, reference),
        "ranks_differ": ranks_differ(model),
        "tied": is_tied(model),
        "local_parameters": sum(plans.to_local_if_dtensor(p).numel() for p in model.parameters()),
        "parameters": sum(p.numel() for p in reference.parameters()),
    }


def own_plan_under_fsdp(architecture, *, accumulate=2, sync_last_only=False):
    """Every gradient under the model's own plan and FSDP, each dp rank with its rows of the batch."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    ids = models.token_ids(2 * accumulate, 9)
    reference = built(architecture)
    total_loss(reference, ids).backward()
    model = built(architecture)
    plans.parallelize(model, mesh, plans.plan_for(model, tp=2, custom=plans.get_hf_tp_plan))
    microbatches = ids.chunk(2)[mesh.get_local_rank("dp")].chunk(accumulate)
    for number, microbatch in enumerate(microbatches, 1):
        model.set_requires_gradient_sync(not sync_last_only or number == accumulate)
        total_loss(model, microbatch).backward()
    return {
        "gradient_errors": gradient_errors(model, reference),
        "norms": [plans.get_grad_norm(m.parameters()).item() for m in (model, reference)],
    }


def ranks_differ(model):
    """Names of parameters whose whole gradient is not the same on both ranks."""
    names = []
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        gradient = whole(parameter.grad).contiguous()
        other = gradient.clone()
        dist.broadcast(other, src=0)
        if not torch.equal(gradient, other):
            names.append(name)
    return names


def string_parity(style, *, module="linear"):
    """One module under one style string: output, and gradients of its input and parameters, against the whole module.

    The input is what the style expects, and its output is made whole, as its neighbours in a plan would.
    """
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank()
    truth, found = (make(module) for _ in range(2))
    found.load_state_dict(truth.state_dict())
    hidden = torch.randn(5, 8)
    expected = truth(hidden.requires_grad_())
    upstream = torch.randn_like(expected)
    expected.backward(upstream)
    plans.translate_parallel_style(style)._apply(found, mesh)
    mine = hidden.detach().chunk(2, dim=-1)[rank] if style == "rowwise" else hidden.detach()
    output = found(mine.requires_grad_())
    cut = output.shape != expected.shape
    order = torch.arange(expected.shape[-1])
    if style == "packed_colwise":
        order = order.view(2, 2, -1).transpose(0, 1).flatten()  # gate_0 up_0 gate_1 up_1
    part = order.chunk(2)[rank] if cut else order
    output.backward(upstream[:, part])
    input_gradient = hidden.grad.chunk(2, dim=-1)[rank] if style == "rowwise" else hidden.grad
    return {
        "output": error(output, expected[:, part]),
        "input_gradient": error(mine.grad, input_gradient),
        "gradients": gradient_errors(found, truth),
        "cut": cut,
        "dtensors": all(isinstance(p, DTensor) for p in found.parameters()),
    }


def make(module):
    """A module with fixed random weights."""
    torch.manual_seed(1)
    return {"linear": lambda: torch.nn.Linear(8, 12), "bare": lambda: torch.nn.Linear(8, 12, bias=False)}[module]()

"""What one rank does in the tests of FSDP: which units, which dtypes, which meshes; each beside the unsharded truth."""

import copy

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import rl_parallel_plans as plans
from parallel_plans_cases.cases import gradient_errors, kinds, total_loss
from parallel_plans_cases.models import SHAPE, tiny, token_ids
from rl_parallel_plans.sharding.activation_checkpointing import apply_activation_checkpointing
from rl_parallel_plans.sharding.fsdp import apply_fsdp
from rl_parallel_plans.sharding.parallelize import parallelize

ROWS = 8


def summed_parity(names, shape, *, architecture="llama", accumulate=1, **options):
    """Gradients of ROWS rows shared out over all axes but tp, against one process with all of them."""
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=tuple(names))
    tp = mesh["tp"].size() if "tp" in names else 1
    ids = token_ids(ROWS, 7)
    reference, model = tiny(architecture, tied=True), tiny(architecture, tied=True)
    total_loss(reference, ids).backward()
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    parallelize(model, mesh, plans.plan_for(model, tp=tp), **options)
    for microbatch in ids.chunk(dist.get_world_size() // tp)[dist.get_rank() // tp].chunk(accumulate):
        total_loss(model, microbatch).backward()
    weight = model.model.layers[0].self_attn.q_proj.weight
    return {
        "gradient_errors": gradient_errors(model, reference),
        "norms": [plans.get_grad_norm(m.parameters()).item() for m in (model, reference)],
        "mesh": list(weight.device_mesh.mesh_dim_names),
        "placements": [str(placement) for placement in weight.placements],
        "local_rows": weight.to_local().shape[0],
    }


def offloaded():
    """Shards, gradients and optimizer state in CPU memory; refused where the policy is its class."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    reference, model = tiny("llama"), tiny("llama")
    refusals = []
    for policy in (CPUOffloadPolicy, OffloadPolicy, "cpu"):
        try:
            apply_fsdp(model, mesh, offload_policy=policy)
        except plans.PlanError as refusal:
            refusals.append(str(refusal))
    untouched = not any(isinstance(module, FSDPModule) for module in model.modules())
    apply_fsdp(model, mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    ids = token_ids(4, 7)
    total_loss(reference, ids).backward()
    total_loss(model, ids.chunk(2)[dist.get_rank()]).backward()
    policies = {
        type(g.offload_policy).__name__ for m in model.modules() if isinstance(m, FSDPModule) for g in _groups(m)
    }
    return {
        "refusals": refusals,
        "untouched": untouched,
        "policies": sorted(policies),
        "gradient_errors": gradient_errors(model, reference),
    }


def _groups(module):
    return module._get_fsdp_state()._fsdp_param_groups


def gathered_once():
    """All-gathers and reduce-scatters of one step by `reshard_after_forward`."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    counts = []
    for reshard in (True, False):
        model = apply_fsdp(tiny("llama"), mesh, reshard_after_forward=reshard)
        total_loss(model, token_ids(2, 5)).backward()
        with CommDebugMode() as mode:
            total_loss(model, token_ids(2, 5)).backward()
        counts.append({str(operation): count for operation, count in mode.get_comm_counts().items()})
    return counts


def half_precision(model_class, config_class, changes, *, output_dtype=None):
    """FSDP's bfloat16 against the same model in bfloat16, which keeps in fp32 what FSDP is to keep."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    config = getattr(transformers, config_class)(**{**SHAPE, "tie_word_embeddings": False, **changes})
    torch.manual_seed(0)
    reference = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model = copy.deepcopy(reference)
    apply_fsdp(model, mesh, param_dtype=torch.bfloat16, output_dtype=output_dtype and getattr(torch, output_dtype))
    seen, kept = {}, set()
    for path, module in model.named_modules():
        module.register_forward_pre_hook(_note(path, seen, kept), with_kwargs=True)
    ids = token_ids(2, 9)
    logits = model(input_ids=ids, use_cache=False).logits
    for name, parameter in reference.named_parameters():
        if name not in kept:
            parameter.data = parameter.data.bfloat16()
    truth = reference(input_ids=ids, use_cache=False).logits
    logits.float().square().sum().backward()
    return {
        "equal": torch.equal(logits.float(), truth.float()),
        "logits": str(logits.dtype),
        "entering_layers": sorted({seen[path] for path in seen if path.rpartition(".")[0].endswith("layers")}),
        "kept": sorted({name.rpartition(".")[2] for name in kept}),
        "gradients": sorted({str(p.grad.dtype) for p in model.parameters() if p.grad is not None}),
        "without_gradient": [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None],
    }


def _note(path, seen, kept):
    def hook(module, args, kwargs):
        hidden = next((value for value in (*args, *kwargs.values()) if torch.is_tensor(value)), None)
        seen[path] = str(getattr(hidden, "dtype", None))
        for name, parameter in module.named_parameters(recurse=False):
            if not isinstance(parameter, DTensor) and parameter.dtype == torch.float32:
                kept.add(f"{path}.{name}")

    return hook


def adapters(weight_dtype, param_dtype=None):
    """Frozen weights and trainable adapters in the same layers, as in LoRA, of one dtype or of two."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    ids = token_ids(4, 7)
    models = []
    for _ in range(2):
        model = tiny("llama")
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(getattr(torch, weight_dtype))
        torch.manual_seed(1)
        for layer in model.model.layers:
            layer.self_attn.q_proj = LowRank(layer.self_attn.q_proj)
        models.append(model)
    reference, model = models
    parallelize(model, mesh, plans.plan_for(model, tp=1), param_dtype=param_dtype and getattr(torch, param_dtype))
    before = {name: p.full_tensor().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.1)
    total_loss(reference, ids).backward()
    total_loss(model, ids.chunk(2)[dist.get_rank()]).backward()
    truth = dict(reference.named_parameters())
    errors = {
        name: (p.grad.full_tensor() - truth[name].grad).abs().max().item() / truth[name].grad.abs().max().item()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    optimizer.step()
    moved = {name for name, p in model.named_parameters() if not torch.equal(p.full_tensor(), before[name])}
    return {
        "errors": errors,
        "moved": sorted({name.rpartition(".")[2] for name in moved}),
        "trainable": sorted({name.rpartition(".")[2] for name, p in model.named_parameters() if p.requires_grad}),
    }


class LowRank(nn.Module):
    """A frozen linear layer plus a trainable product of two thin fp32 ones."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(3, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.randn(base.out_features, 3) * 0.1)

    def forward(self, hidden):
        low = hidden.to(self.down.dtype) @ self.down.T @ self.up.T
        return self.base(hidden) + low.to(hidden.dtype)


def units(model_class, config_class, changes):
    """Paths of the FSDP units of a model."""
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = getattr(transformers, model_class)(getattr(transformers, config_class)(**changes))
    apply_fsdp(model, mesh)
    return [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]


def fused_optimizer(architecture):
    """Two steps of fused AdamW over all parameters of a model that is under TP and FSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    reference, model = tiny(architecture, tied=True), tiny(architecture, tied=True)
    parallelize(model, mesh, plans.plan_for(model, tp=2), activation_checkpointing="selective")
    ids = token_ids(4, 7)
    for each, rows in ((reference, ids), (model, ids.chunk(2)[mesh.get_local_rank("dp")])):
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2, fused=True)
        for _ in range(2):
            optimizer.zero_grad()
            total_loss(each, rows).backward()
            optimizer.step()
    truth = dict(reference.named_parameters())
    return {
        "kinds": kinds(model),
        "errors": {
            n: ((p.full_tensor() - truth[n]).abs().max() / truth[n].abs().max()).item() for n, p in _named(model)
        },
    }


def _named(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


class Experts(nn.Module):
    """[experts, out, in], each rank of ep with its own ones; the sum over all experts."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6, 6) * 0.1)

    def forward(self, hidden):
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        return hidden + (hidden @ weight.sum(0).T) ** 3


class Layer(nn.Module):
    """A layer with a linear part and experts."""

    def __init__(self):
        super().__init__()
        self.linear, self.experts = nn.Linear(6, 6), Experts()

    def forward(self, hidden):
        return self.experts(self.linear(hidden))


def _with_experts(mesh):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ModuleList([Layer(), Layer()]))
    for layer in model[1]:
        weight = distribute_tensor(layer.experts.weight.detach(), mesh["ep"], [Shard(0)])
        layer.experts.weight = nn.Parameter(weight)
    return model


def sharded_over_a_data_parallel_axis():
    """Experts that lie on ep already are sharded over dp alone, everything else over dp and ep as one."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model = _with_experts(mesh)
    apply_fsdp(model, mesh, dp_axis=("dp", "ep"))
    return {
        name: [list(parameter.device_mesh.mesh_dim_names), list(parameter.to_local().shape)]
        for name, parameter in model.named_parameters()
    }


class OnlyLayers(nn.Module):
    """A model whose parameters are all in layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def only_layers():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    reference, model = OnlyLayers(), apply_fsdp(OnlyLayers(), mesh)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    reference(rows).square().sum().backward()
    model(rows.chunk(2)[dist.get_rank()]).square().sum().backward()
    paths = [path for path, module in model.named_modules() if isinstance(module, FSDPModule)]
    return {"gradient_errors": gradient_errors(model, reference), "units": paths}


def refusals():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    llama = tiny("llama")
    wrong = {
        "axis": (llama, {"dp_axis": ("dp", "ep")}),
        "copies": (llama, {"dp_replicate_axis": "dp"}),
        "group": (llama, {"reshard_after_forward": 3}),
        "no layers": (nn.Linear(2, 2), {}),
        "scalar": (_with_scalar(), {}),
    }
    messages = {}
    for name, (model, options) in wrong.items():
        try:
            apply_fsdp(model, mesh, **options)
        except plans.PlanError as refusal:
            messages[name] = str(refusal)
        assert not any(isinstance(module, FSDPModule) for module in model.modules())
    mesh_of_experts = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    try:
        apply_fsdp(_with_experts(mesh_of_experts), mesh_of_experts, dp_axis="ep")
    except plans.PlanError as refusal:
        messages["taken"] = str(refusal)
    tied = tiny("llama", tied=True)
    try:
        apply_fsdp(tied, mesh, param_dtype=torch.bfloat16, fp32_parameters=["lm_head"])
    except plans.PlanError as refusal:
        messages["tied"] = str(refusal)
    apply_fsdp(llama, mesh)
    try:
        apply_fsdp(llama, mesh)
    except plans.PlanError as refusal:
        messages["twice"] = str(refusal)
    return messages


def _with_scalar():
    model = tiny("llama")
    model.model.layers[0].temperature = nn.Parameter(torch.tensor(1.0))
    return model


def registered_under_fsdp():
    """A registered plan is found for the class that FSDP made, and refused since the model is sharded already."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = apply_fsdp(tiny("llama"), mesh)
    name = plans.qualified_name(transformers.LlamaForCausalLM)
    plans.register_plan(name)(lambda _model: {"model.norm": plans.ReplicatedParallel()})
    plan = plans.plan_for(model, tp=2)
    return {
        "class": type(model).__name__,
        "source": plan.source,
        "problems": [str(problem) for problem in plan.problems],
    }


class Collectives(TorchDispatchMode):
    """Counts collectives; torch's CommDebugMode cannot, where forwards run inside of backward."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        self.count += namespace in {"c10d", "_c10d_functional"} and name not in {"wait_tensor", "_wrap_tensor_autograd"}
        return func(*args, **(kwargs or {}))


def recomputed(mode, *, sequence_parallel=False):
    """Collectives of one step of TP by `mode`, and the gradients."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    reference, model = tiny("qwen3"), tiny("qwen3")
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2, sequence_parallel=sequence_parallel))
    if mode is not None:
        apply_activation_checkpointing(model, mode)
    ids = token_ids(2, 7)
    total_loss(reference, ids).backward()
    with Collectives() as collectives:
        for microbatch in ids.chunk(2):
            total_loss(model, microbatch).backward()
    return {"gradient_errors": gradient_errors(model, reference), "collectives": collectives.count}


class ListedExperts(nn.Module):
    """A mixture as transformers 4 has them: experts in a list, of which those run that a token has chosen."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, hidden, chosen):
        output = torch.zeros_like(hidden)
        for expert in chosen.unique().tolist():
            output[chosen == expert] = self.experts[expert](hidden[chosen == expert])
        return hidden + output


class ListedModel(nn.Module):
    """Two layers; a token's id chooses its expert."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(ListedExperts() for _ in range(2))
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        hidden = self.embed_tokens(ids)
        for layer in self.layers:
            hidden = layer(hidden, ids % 4)
        return self.lm_head(hidden)


def ranks_that_run_different_experts(accumulate, sync_last_only):
    """Rank 0 runs experts 0 and 1, rank 1 experts 1 and 2, and none the last: gradients against one process."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    reference = ListedModel()
    model = apply_fsdp(copy.deepcopy(reference), mesh)
    parts = [torch.tensor([[0, 4, 1], [8, 5, 1]]), torch.tensor([[1, 2, 6], [2, 10, 9]])]
    for ids in parts:
        reference(ids).pow(2).sum().backward()
    rows = parts[dist.get_rank()].chunk(accumulate)
    for number, ids in enumerate(rows):
        model.set_requires_gradient_sync(not sync_last_only or number == len(rows) - 1)
        model(ids).pow(2).sum().backward()
    unused = {name for name, p in reference.named_parameters() if p.grad is None}
    found = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return {
        "unused": sorted(unused),
        "zero": all(not found[name].any() for name in unused),
        "errors": [
            ((found[name] - p.grad).abs().max() / p.grad.abs().max()).item()
            for name, p in reference.named_parameters()
            if name not in unused
        ],
    }

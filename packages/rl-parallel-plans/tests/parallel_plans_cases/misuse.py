"""What people do to a sharded model beside training it, and what must come of it."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import rl_parallel_plans as plans
from parallel_plans_cases.cases import error, gradient_errors, total_loss, whole
from parallel_plans_cases.models import tiny, tiny_on_meta, token_ids


class Collectives(TorchDispatchMode):
    """Counts collectives, those of nested autograd functions included."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = str(func)
        self.number += name.startswith(("c10d.", "_c10d_functional.")) and "wait" not in name and "wrap" not in name
        return func(*args, **(kwargs or {}))


def sharded(architecture, *, checkpointing=None, plan=None, **changes):
    """A model on both ranks, and its mesh."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = tiny(architecture, **changes)
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=mesh.size(), **(plan or {})))
    if checkpointing is not None:
        plans.apply_activation_checkpointing(model, checkpointing)
    return model


def refused(call, *arguments, **options):
    """The message of the error, by its kind."""
    try:
        call(*arguments, **options)
    except (plans.PlanError, IndexError, RuntimeError) as refusal:
        return f"{type(refusal).__name__}: {refusal}"
    return None


def collectives_of_each_backward(**plan):
    """Of three backwards that accumulate."""
    model, counts = sharded("qwen3", plan=plan), []
    for _ in range(3):
        loss = total_loss(model, token_ids(2, 5))
        with Collectives() as counted:
            loss.backward()
        counts.append(counted.number)
    return counts


def collectives_with_checkpointing(mode):
    """Of a backward that recomputes activations."""
    model = sharded("llama", checkpointing=mode)
    loss = total_loss(model, token_ids(2, 5))
    with Collectives() as counted:
        loss.backward()
    return counted.number


def gradients_after(how):
    """Gradients are whole after what makes other tensors of the parameters."""
    ids, reference = token_ids(2, 7), tiny("qwen3")
    total_loss(reference, ids).backward()
    if how == "to_empty":
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = tiny_on_meta("qwen3")
        plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2), src_data_rank=None)
        model.to_empty(device="cpu")
        truth = dict(reference.named_parameters())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(torch.distributed.tensor.distribute_tensor(truth[name], mesh, parameter.placements))
        for name, buffer in model.named_buffers():
            buffer.copy_(dict(reference.named_buffers())[name])
    else:
        model = sharded("qwen3", plan={"sequence_parallel": True})
        model.train().gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        model.enable_input_require_grads()
    total_loss(model, ids).backward()
    partial = [name for name, p in model.named_parameters() if any(q.is_partial() for q in p.grad.placements)]
    return [partial, max(gradient_errors(model, reference).values())]


def hooks_of_others():
    """What runs of the hooks that others put on a parameter before `to_empty`, one of which they remove after it."""
    mesh, ran = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), []
    model = tiny_on_meta("qwen3")
    plans.apply_tensor_parallel(model, mesh, plans.plan_for(model, tp=2), src_data_rank=None)
    weight = model.model.layers[0].self_attn.q_norm.weight
    weight.register_post_accumulate_grad_hook(lambda _: ran.append("kept"))
    removed = weight.register_post_accumulate_grad_hook(lambda _: ran.append("removed"))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    removed.remove()
    total_loss(model, token_ids(2, 7)).backward()
    gradient = model.model.layers[0].self_attn.q_norm.weight.grad
    return [ran, gradient.placements[0].is_partial()]


def backward_that_raises():
    """The next step is right, whatever the failed one left."""
    model, reference, ids = sharded("qwen3"), tiny("qwen3"), token_ids(2, 7)

    def fail(_gradient):
        raise RuntimeError("no")

    hidden = model.model(input_ids=ids).last_hidden_state
    model.model.layers[0].register_full_backward_hook(lambda *_: fail(None))
    message = refused(total_loss(model, ids).backward)
    model.model.layers[0]._backward_hooks.clear()
    model.zero_grad()
    total_loss(model, ids).backward()
    total_loss(reference, ids).backward()
    return [hidden.shape[0], message.split(":")[0], max(gradient_errors(model, reference).values())]


def tokens_outside():
    """A token id that no rank has."""
    model, ids = sharded("llama"), token_ids(2, 5)
    ids[0, 0] = 999
    return refused(model, input_ids=ids)


def router_loss():
    """Asked for at call time."""
    return refused(sharded("qwen3_moe"), input_ids=token_ids(2, 5), output_router_logits=True)


def padding_word():
    """Its gradient is zero on the rank that has it, and no other word's is."""
    model, reference, ids = sharded("llama", pad_token_id=70), tiny("llama", pad_token_id=70), token_ids(4, 9)
    ids[:, 2] = 70
    for each in (model, reference):
        total_loss(each, ids).backward()
    gradient = whole(model.model.embed_tokens.weight.grad)
    return [error(gradient, reference.model.embed_tokens.weight.grad), gradient[70].abs().max().item()]


def rows_over_ranks_that_nothing_sums():
    """FSDP over dp alone, of a model whose rows are cut over cp."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    model = tiny("llama")
    plans.apply_context_parallel(model, mesh)
    return refused(plans.apply_fsdp, model, mesh)

"""One rank of test_router_loss: a loss and the routers' balance loss under each way to share the work, on gloo."""

import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


def load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def whole(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def sharded(model, case):
    """The model under `case`, its plan, and the rank's share of rows and tokens."""
    from rl_parallel_plans import (
        apply_activation_checkpointing,
        apply_context_parallel,
        apply_fsdp,
        apply_tensor_parallel,
        plan_for,
    )

    if case.startswith("fsdp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        if "recomputed" in case:
            apply_activation_checkpointing(model, "full")
        apply_fsdp(model, mesh)
        return None, mesh
    if case.startswith("cp"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
        apply_context_parallel(model, mesh)
        return None, mesh
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = plan_for(model, tp=2, sequence_parallel="sequence parallel" in case)
    apply_tensor_parallel(model, mesh, plan)
    if "recomputed" in case:
        apply_activation_checkpointing(model, "selective")
    return plan, mesh


def run(world, case, rank):
    from rl_backends.batching.dealing import RowDealing
    from rl_backends.batching.microbatches import SequenceShard, make_inputs
    from rl_backends.moe import RouterWatch
    from rl_backends.packing.enable import enable_packing
    from rl_parallel_plans import named_shards

    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    model, examples = world.make_model("Qwen3Moe", **mixture).eval(), world.make_examples()
    layout = "packed" if "packed" in case else "padded"
    if layout == "packed" and not case.startswith("cp"):
        enable_packing(model)
    plan, mesh = sharded(model, case)
    watch = RouterWatch(model, plan=plan)
    by_rows = 2 if case.startswith("fsdp") else 1
    limits = {"micro_batch_size": 3, "layout": layout}
    parts = RowDealing(rank=0, **limits, num_ranks=by_rows, token_multiple=4).cut(examples)
    shard = SequenceShard(rank, 2) if case.startswith("cp") else None
    total = torch.zeros(())
    for microbatch in parts[rank % by_rows]:
        rows = microbatch.of(examples, device="cpu")
        inputs = make_inputs(rows.tokens, rows.lengths, rows.trainable, layout=layout, shard=shard)
        given = {} if inputs.position_ids is None else {"position_ids": inputs.position_ids}
        if (starts := inputs.cu_seq_lens) is not None:
            given |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
            given |= {"max_length_q": inputs.longest, "max_length_k": inputs.longest}
        with watch.recording():
            logits = model(input_ids=inputs.tokens, use_cache=False, **given).logits
        logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
        found = logits.flatten(0, 1)[inputs.at].log_softmax(-1).gather(1, inputs.targets[:, None])[:, 0]
        logp = found.new_zeros(rows.tokens.numel()).index_copy(0, inputs.into, found).view(rows.tokens.shape)
        loss, _ = world.token_loss(logp, rows, num_tokens=examples.trainable.sum())
        balance = watch.loss(inputs, rows.lengths, context_group=mesh.get_group() if case.startswith("cp") else None)
        ((loss + 0.5 / len(examples.lengths) * balance) * microbatch.counted).backward()
        total += balance.detach() * microbatch.counted
    orders = {shard.name: shard.row_order for shard in named_shards(model)}  # fused experts lie as the ranks have them
    gradients = {name: whole(p.grad) for name, p in model.named_parameters()}
    gradients = {name: g if orders[name] is None else orders[name].undealt(g) for name, g in gradients.items()}
    if not case.startswith("tp"):
        dist.all_reduce(total)
    if case.startswith("cp"):
        for gradient in gradients.values():
            dist.all_reduce(gradient)
    return {"balance": total.item(), "gradients": gradients}


def main(task):
    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=task["ranks"])
    world = load("conftest")
    found = {case: run(world, case, task["rank"]) for case in task["cases"]}
    torch.save(found, Path(task["folder"]) / f"rank{task['rank']}.pt")
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

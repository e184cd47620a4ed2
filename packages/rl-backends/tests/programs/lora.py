"""One rank of a distributed test of adapters: build on meta, shard, fill, train, merge, save. Writes what came out.

Started by test_lora_ranks.py, which also uses its functions for the truth.
"""

import importlib.util
import json
import sys
import zlib
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

TOKENS = torch.randint(67, (4, 9), generator=torch.Generator().manual_seed(5))
WEIGHTS = torch.tensor([1.0, -0.5, 0.7, 0.2])
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.01}
STEPS = 3


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def make_model(world, case):
    """As the world makes it; Gemma 3's text model has its configuration under another name."""
    if case["family"] != "Gemma3":
        return world.make_model(case["family"], **case["model"]).eval()
    import transformers

    sizes = {"vocab_size": 67, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "query_pre_attn_scalar": 8, "sliding_window": 4}
    torch.manual_seed(0)
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**sizes, **heads, pad_token_id=0))
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval()


def adapter_value(name, shape):
    """A value for A or B by the layer's name, so that B is not zero and A has a gradient."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.replace(".default", "").encode()))
    return 0.1 * torch.randn(shape, generator=generator)


def token_logp(model, tokens):
    logits = model(input_ids=tokens).logits
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return logits[:, :-1].float().log_softmax(-1).gather(-1, tokens[:, 1:, None])[..., 0]


def loss_of(model, rows):
    """Divided by the count of all rows, so that the sum over ranks is the loss of one process."""
    return -(token_logp(model, TOKENS[rows]) * WEIGHTS[rows, None]).sum() / TOKENS.numel()


def whole_tensors(model):
    from rl_parallel_plans import export_state_dict

    return {name: tensor.clone() for name, tensor in export_state_dict(model, every_rank=True)}


def gradients(model):
    return {s.name: gather(s.tensor.grad, s.row_order) for s in shards_of(model) if s.tensor.grad is not None}


def lora_config(case):
    from rl_backends.config import LoraConfig

    return LoraConfig(**{name: tuple(value) if isinstance(value, list) else value for name, value in case.items()})


def fill(model, source):
    """Each rank its part of the base weights, by Hugging Face names."""
    from rl_backends.lora.layers import base_name
    from rl_parallel_plans import named_shards

    weights = source.state_dict()
    for shard in named_shards(model):
        if ".lora_" not in shard.name:
            for box in shard.boxes():
                box.of_local(shard.local).copy_(box.of_whole(weights[base_name(shard.name)]))


def set_adapters(model):
    from rl_parallel_plans import named_shards

    for shard in named_shards(model):
        if ".lora_" in shard.name:
            value = adapter_value(shard.name, shard.shape)
            for box in shard.boxes():
                box.of_local(shard.local).copy_(box.of_whole(value))


def build(world, case, mesh):
    """Meta skeleton, adapters, plan, shards, values: as the backend does it."""
    from rl_backends.lora.inject import add_lora, initialise_adapters
    from rl_parallel_plans import parallelize, plan_for

    source = make_model(world, case)
    with torch.device("meta"):
        model = type(source)(source.config)
    add_lora(model, lora_config(case["lora"]))
    model.eval()
    tp = mesh["tp"].size()
    plan = plan_for(model, tp=tp, sequence_parallel=case["sequence_parallel"])
    dtypes = {name: getattr(torch, dtype) for name, dtype in case["dtypes"].items()}
    parallelize(
        model,
        mesh,
        plan,
        src_data_rank=None,
        dp_replicate_axis="dp_replicate" if mesh["dp_replicate"].size() > 1 else None,
        activation_checkpointing=case["checkpointing"],
        **dtypes,
    )
    with torch.no_grad():
        materialise(model, source, tied=case["tied"])
        fill(model, source)
        initialise_adapters(model, seed=7)
    return model


def materialise(model, source, *, tied):
    """Memory for the shards, and the buffers that no checkpoint holds; `to_empty` parts ties and empties buffers."""
    held = {**dict(source.named_buffers()), **{name: b for name, b in model.named_buffers() if not b.is_meta}}
    model.to_empty(device="cpu")
    if tied:
        model.tie_weights()
    for name, buffer in model.named_buffers():
        buffer.copy_(held[name])


def run(world, case, folder):
    from rl_backends.lora.files import save_adapter
    from rl_backends.lora.layers import adapters_disabled, peft_names
    from rl_backends.lora.merged import MergedWeights, export_merged

    replicate, tp = case["replicate"], case["tp"]
    shape = (replicate, dist.get_world_size() // replicate // tp, tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp", "tp"))
    model = build(world, case, mesh)
    first = whole_tensors(model)
    with torch.no_grad():
        set_adapters(model)
    before = whole_tensors(model)
    groups = dist.get_world_size() // tp
    rows = torch.arange(len(TOKENS)).chunk(groups)[dist.get_rank() // tp]
    with torch.no_grad():
        logp = token_logp(model, TOKENS)
        with adapters_disabled(model):
            reference = token_logp(model, TOKENS)
    merged = MergedWeights(model)
    objects = {shard.name: id(shard.tensor) for shard in merged.shards()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], **ADAMW)
    first_gradients = None
    for _ in range(STEPS):
        loss_of(model, rows).backward()
        first_gradients = first_gradients or gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    after = whole_tensors(model)
    merged.refresh()
    same = {shard.name: id(shard.tensor) for shard in merged.shards()} == objects
    tensors = {shard.name: shard.tensor for shard in merged.shards()}
    layout = {
        name: shard.tensor.placements == tensors[name].placements
        for name, shard in {s.name.replace(".base_layer", ""): s for s in shards_of(model)}.items()
        if isinstance(tensors.get(name), DTensor)
    }
    gathered = {shard.name: gather(shard.tensor, shard.row_order) for shard in merged.shards()}
    exported = dict(export_merged(model, every_rank=True))
    save_adapter(model, Path(folder) / "adapter", base_model_name="base")
    saved = load_file(Path(folder) / "adapter" / "adapter_model.safetensors")
    in_file = peft_names(model)
    return {
        "first": {name: t for name, t in first.items() if ".lora_" in name},
        "before": before,
        "after": after,
        "saved": saved,
        "trained": {in_file(name): tensor for name, tensor in after.items() if ".lora_" in name},
        "logp": logp,
        "reference": reference,
        "gradients": first_gradients,
        "merged": gathered,
        "exported": exported,
        "same": same,
        "layout": layout,
        "extra_bytes": merged.extra_bytes,
    }


def shards_of(model):
    from rl_parallel_plans import named_shards

    return list(named_shards(model))


def gather(tensor, row_order):
    whole = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
    return whole.clone() if row_order is None else row_order.undealt(whole)


def main(task):
    torch.set_num_threads(1)
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=task["rank"], world_size=task["ranks"])
    world = load_world()
    for name, case in task["cases"].items():
        folder = Path(task["folder"]) / name
        folder.mkdir(exist_ok=True)
        torch.save(run(world, case, folder), folder / f"rank{task['rank']}.pt")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

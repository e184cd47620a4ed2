"""One rank of two, as torchrun starts it: several backends one after the other, each closed before the next."""

import functools
import importlib.util
import json
import os
import sys
from pathlib import Path

import torch


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ADAPTERS = {
    "dora": ("Qwen3", {}, {"use_dora": True}, "q_proj"),
    "ends": ("Qwen3", {}, {"target_modules": ("embed_tokens", "lm_head")}, ("embed_tokens", "lm_head")),
    "experts": ("Qwen3Moe", MIXTURE, {"target_modules": (), "target_parameters": EXPERTS}, EXPERTS),
}
"""Family, changes to it, adapters, and how the names of the adapted weights end."""


def adapter_steps(world, examples, kind, **sizes):
    """Log-probabilities after two steps of adapters, and the sum of squares of this rank's merged weights."""
    from rl_backends import DTensorBackend, DTensorConfig, LoraConfig, OptimizerConfig

    family, changes, adapters, adapted = ADAPTERS[kind]
    config = DTensorConfig(**sizes, lora_cfg=LoraConfig(rank=2, **adapters))
    backend = DTensorBackend(world.make_model(family, **changes), config)
    backend.start_training(OptimizerConfig(lr=1e-2, eps=1e-4), num_steps=2)
    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    for _ in range(2):
        backend.forward_backward(examples, loss)
        backend.optim_step()
    logp, local = backend.logp(examples), 0.0
    for shard in backend.shards():
        if shard.name.removesuffix(".weight").endswith(adapted):
            local += float(shard.local.double().square().sum())
    backend.close()
    return logp, local


def main(task):
    torch.set_num_threads(1)
    os.environ |= task["environment"]
    world = load_world()
    from rl_backends import DTensorBackend, DTensorConfig, LoraConfig
    from rl_backends.checkpoints.shards import tensor_digests
    from rl_backends.process_group import require_gpu_of_its_own

    examples, results = world.make_examples(), {"logp": []}
    to = torch.nn.Module.to

    def only_buffers(module, *arguments, **options):
        assert not any(each.numel() and not each.is_meta for each in module.parameters()), "a whole model was moved"
        return to(module, *arguments, **options)

    torch.nn.Module.to = only_buffers
    for sizes in ({}, {"tensor_parallel_size": 2}, {}, {"tensor_parallel_size": 2, "sequence_parallel": True}):
        # Qwen2 is tied, Phi3 has fused weights whose rows tensor parallelism reorders.
        for family, options in (("Qwen2", {"tie_word_embeddings": True}), ("Phi3", {})):
            backend = DTensorBackend(world.make_model(family, **options), DTensorConfig(**sizes))
            results["logp"].append(backend.logp(examples))
            backend.close()
    for sizes in ({}, {"tensor_parallel_size": 2}, {"data_parallel_replicate_size": 2}):
        lora = LoraConfig(rank=2, base_dtype="bfloat16")
        backend = DTensorBackend(world.make_model("Phi3"), DTensorConfig(**sizes, lora_cfg=lora))
        results.setdefault("frozen", []).append(tensor_digests(backend._contents().held(frozen=True), group=None))
        backend.close()
    for sizes in ({}, {"data_parallel_replicate_size": 2}, {"context_parallel_size": 2}):
        for kind in ("dora", "ends"):
            results.setdefault(kind, []).append(adapter_steps(world, examples, kind, **sizes))
    if task["stacked_experts"]:
        for sizes in ({}, {"data_parallel_replicate_size": 2}, {"context_parallel_size": 2}):
            results.setdefault("experts", []).append(adapter_steps(world, examples, "experts", **sizes))
    torch.nn.Module.to = to
    try:
        require_gpu_of_its_own("GPU 0 of here")
    except ValueError as error:
        results["shared"] = str(error)
    require_gpu_of_its_own(f"GPU {task['environment']['RANK']} of here")
    torch.save(results, task["result"])


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

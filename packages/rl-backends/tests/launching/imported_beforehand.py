"""What programs of one rank need, imported once; `forkserver.py` forks them from the process that has this module."""

import os
import pkgutil
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads that a fork would miss; before torch is there

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel
import transformers

torch.set_num_threads(1)
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gemma3", "mistral", "phi3", "glm4_moe")
for family in FAMILIES:
    import_module(f"transformers.models.{family}.modeling_{family}")
import_module("transformers.generation")
for name in ("safetensors.torch", "jaxtyping", "beartype", *(["peft"] if find_spec("peft") else [])):
    import_module(name)

parameter = torch.nn.Parameter(torch.ones(2))  # what the first step imports
parameter.sum().backward()
torch.optim.AdamW([parameter]).step()

with tempfile.TemporaryDirectory() as folder:  # to write and read one compiles hundreds of patterns
    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**size, num_key_value_heads=1)).save_pretrained(folder)
    transformers.AutoModelForCausalLM.from_pretrained(folder)

if os.environ.get("CHECK_SHAPES") != "1":
    import rl_backends
    import rl_parallel_plans

    for package in (rl_parallel_plans, rl_backends):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__") and (find_spec("megatron") or ".megatron" not in module.name):
                import_module(module.name)

"""What programs of one rank need, imported once; `forkserver.py` forks them from the process that has this module."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # no pool of threads that a fork would miss; before torch is there

from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed.fsdp
import torch.distributed.tensor.parallel

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

"""Trace the loaders of real vLLM models with their own checkpoints; prints a line of JSON for each architecture."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.update(
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
)
sys.path.insert(0, str(Path(__file__).parents[1] / "vllm" / "programs"))

import tiny
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.utils.torch_utils import set_default_torch_dtype

from rl_refit import Layout, Manifest, Region, TensorMeta
from rl_refit.tracing import trace, trace_writes


def check(model, tensors):
    """Whether the bindings give what the loader gives, and what is never written."""
    metas = (
        TensorMeta(name=name, shape=tuple(tensor.shape), dtype="float32", layout=Layout.whole())
        for name, tensor in tensors.items()
    )
    manifest = Manifest(tuple(metas))
    for parameter in model.parameters():
        parameter.data.zero_()  # as vLLM fills its padding
    found = trace(model.load_weights, model, manifest)
    for binding in found.bindings():
        whole = Region(binding.region.name, (0,) * len(binding.shape), binding.shape)
        binding.tensor.copy_(tensors[whole.name][binding.region.index_within(whole)])
    bound = [parameter.detach().clone() for parameter in model.parameters()]
    model.load_weights(iter(tensors.items()))
    writes = trace_writes(model.load_weights, model, manifest)
    return {
        "equal": all(map(torch.equal, bound, model.parameters())),
        "never": writes.never,
        "partial": writes.partial,
        "unused": writes.unused,
        "unbound": sorted(tensors.keys() - {binding.region.name for binding in found.bindings()}),
    }


def main(folder, architectures):
    for number, architecture in enumerate(architectures):
        path = Path(folder) / architecture
        tiny.policy(architecture, 0).save_pretrained(path)
        config = EngineArgs(
            model=str(path), dtype="float32", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True
        ).create_engine_config()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
            if not number:
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                initialize_model_parallel(1, 1)
            model_class, _ = get_model_architecture(config.model_config)
            with torch.no_grad():
                found = check(model_class(vllm_config=config, prefix=""), load_file(path / "model.safetensors"))
        print(json.dumps({"architecture": architecture, **found}), flush=True)


main(sys.argv[1], sys.argv[2:])

"""A sharded trainer refits an engine with another layout: each rank sends its own shards, nothing is gathered."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

PROGRAM = Path(__file__).parent / "programs" / "refit_from_backend.py"
CASES = {
    "fused weights, tensor parallel": {"family": "Phi3", "config": {"tensor_parallel_size": 2}},
    "tied weights, FSDP": {"family": "Qwen2", "config": {}},
    "adapters merged, FSDP": {"family": "Llama", "config": {}, "lora": True},
    "adapters alone, FSDP": {"family": "Llama", "config": {}, "lora": True, "alone": True},
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, id=name, marks=pytest.mark.slow if name in {"tied weights, FSDP", "adapters merged, FSDP"} else ()
        )
        for name, case in CASES.items()
    ],
)
def test_an_engine_has_the_weights_that_two_ranks_trained(tmp_path, case):
    task = {"lora": False, "alone": False, "folder": str(tmp_path), **case}
    processes = [
        subprocess.Popen([sys.executable, str(PROGRAM), json.dumps({**task, "rank": rank})]) for rank in (0, 1, None)
    ]
    try:
        assert [process.wait(timeout=240) for process in processes] == [0, 0, 0]
    finally:
        for process in processes:
            process.kill()
    received = torch.load(tmp_path / "received.pt", weights_only=True)
    if task["alone"]:
        saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        saved = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(received, saved, rtol=0, atol=0)

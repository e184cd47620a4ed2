"""Tracing against the loaders of real vLLM models, which nobody wrote for it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ARCHITECTURES = [
    "qwen3_moe",
    "llama",
    "qwen2",
    "qwen3",
    "gemma3",
]  # vLLM makes the group of experts for a first one only


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_the_loaders_of_vllm_are_mapped_bit_for_bit(tmp_path):
    program = Path(__file__).parent / "programs" / "trace_vllm.py"
    result = subprocess.run(
        [sys.executable, program, tmp_path, *ARCHITECTURES], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    found = {row.pop("architecture"): row for row in map(json.loads, result.stdout.splitlines())}
    assert list(found) == ARCHITECTURES
    for row in found.values():
        assert row["equal"]
        assert row["unused"] == row["unbound"] == []
        assert row["partial"] == {}
    assert "model.normalizer" in found["gemma3"]["never"]

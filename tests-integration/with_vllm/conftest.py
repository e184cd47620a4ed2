"""Real vLLM on a CPU: the environment that it needs, set before anything imports torch."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
os.environ.update(
    {
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else the first request for logprobs compiles
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
)


def pytest_configure(config):
    if find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")  # sockets of vLLM's, at the end


def pytest_collection_modifyitems(items):
    """What vLLM and its friends warn of while they are imported and start is not ours to repair."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))

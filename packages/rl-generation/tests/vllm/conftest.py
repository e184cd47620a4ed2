"""Real vLLM on a CPU: the environment that it needs, before anything imports torch; checkpoints of tiny models."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # else the first request for logprobs compiles
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two workers need two NUMA nodes
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
os.environ.update(ENVIRONMENT)
sys.path.insert(0, str(HERE / "programs"))  # the engine's processes find their worker there: they inherit sys.path


def pytest_configure(config):
    if find_spec("vllm") is not None:
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")  # sockets of vLLM's, at the end


def pytest_collection_modifyitems(items):
    """What vLLM and its friends warn of while they are imported, start and end is not ours to repair."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """Of an architecture and a seed, the folder of its checkpoint, with a tokenizer; made at the first call."""
    import tiny

    made = {}

    def checkpoint(architecture, seed=0, *, tokenizer=True):
        key = (architecture, seed, tokenizer)
        if key not in made:
            path = tmp_path_factory.mktemp(f"{architecture}-{seed}")
            tiny.policy(architecture, seed).save_pretrained(path)
            if tokenizer:
                tiny.save_tokenizer(path)
            made[key] = path
        return str(made[key])

    return checkpoint

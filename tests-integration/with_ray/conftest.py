"""Real Ray on a CPU: the environment of its processes, and one cluster for all tests of this process."""

import os
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for the modules that these tests share
os.environ.update(
    {
        # The same for Ray's processes.
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # otherwise the first request for logprobs compiles
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # on loopback, like the clusters that a run starts itself
    }
)


def pytest_configure(config):
    if find_spec("ray") is not None:
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")  # Ray's sockets, at the end


def pytest_collection_modifyitems(items):
    """Do not fail on warnings of Ray, vLLM and their dependencies, which we cannot fix."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def ray_cluster():
    """A cluster of eight CPUs that a `RayRuntime` of this process finds and does not stop."""
    import ray

    with tempfile.TemporaryDirectory(prefix="rl-ray-") as folder:  # short, for the names of sockets
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        while not ray.is_initialized():
            try:
                ray.init("local", num_cpus=8, **quiet, _temp_dir=folder)  # even if another Ray runs on this machine
            except Exception as error:
                ray.shutdown()
                if "timed out during startup" not in str(error):  # after 30 seconds, which cannot be configured
                    raise
        yield
        ray.shutdown()

"""Makes the modules that these tests share importable: `from tiny_setup import TinySetup`."""

import functools
import importlib
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session", autouse=True)
def versions_are_collected_once():
    """Reading what is installed takes as long as all else of a small run, and between two runs nothing is installed."""
    run = importlib.import_module("rl_launcher.run.run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "collect_versions", functools.cache(run.collect_versions))
        yield


@pytest.fixture(scope="session", autouse=True)
def runs_are_not_predicted():
    """A run of a test takes less time than its prediction, which rl-launcher's tests have; runs in processes of their
    own are predicted here, too."""
    run = importlib.import_module("rl_launcher.run.run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "predict_in_background", lambda *_, **__: None)
        yield

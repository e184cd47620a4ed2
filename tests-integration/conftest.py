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

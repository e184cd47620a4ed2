"""Real processes for the tests that need more than one."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # parallel_plans_cases, here and in the processes that it starts

from parallel_plans_cases.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Run a function of `parallel_plans_cases.cases` on real ranks: `ranks("tp_parity", 2, architecture="llama")`."""
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started

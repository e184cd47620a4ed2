"""What every test session does: it looks for garbage among what tests have made, not among what was imported.

A full collection visits every object, and torch, transformers and their like are a million: half a second each time, of
which runs, engines and process groups ask for one when they begin or end. It was a third of rl-launcher's tests.
"""

import gc
from pathlib import Path

import pytest

MODULE = pytest.StashKey[Path]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the first test of each module: what lives by now is nobody's garbage."""
    if item.session.stash.get(MODULE, None) != item.path:
        item.session.stash[MODULE] = item.path
        gc.collect()
        gc.freeze()

"""What every test session does: it looks for garbage among what tests have made, not among what was imported.

A full collection visits every object, and torch, transformers and their like are a million: half a second each time, of
which runs, engines and process groups ask for one when they begin or end. It was a third of rl-launcher's tests.
"""

import gc

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Before the first test of each module: what lives by now is nobody's garbage."""
    global _module
    if item.path != _module:
        _module = item.path
        gc.collect()
        gc.freeze()


_module = None

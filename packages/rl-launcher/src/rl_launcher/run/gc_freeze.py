"""Exclude long-lived objects from garbage collection.

A full collection visits every object. torch, transformers and a model are half a million of them, a tenth of a second
for each collection, and the allocations of a few hundred rollouts cause one every few steps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def long_lived() -> Iterator[None]:
    """Exclude everything that exists now while the block runs.

    If somebody had frozen objects before, as vLLM does, those stay frozen, and these with them.
    """
    # Python 3.12 itself counts a few hundred immortal objects among the frozen; whoever freezes, freezes nearly all.
    mine = gc.get_freeze_count() < 0.1 * len(gc.get_objects())
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()

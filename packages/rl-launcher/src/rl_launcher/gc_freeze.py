"""Keeps the garbage collector from looking, in every run anew, at what lives until its end. Knows nothing of runs.

A full collection goes through every object there is. torch, transformers and a model are half a million of them, a
tenth of a second for each collection, and allocations of a few hundred rollouts cause one every few steps.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["freeze", "long_lived"]


def freeze() -> None:
    """What is there now is not looked at until this process ends: for one that has nothing else to do."""
    gc.collect()
    gc.freeze()


@contextmanager
def long_lived() -> Iterator[None]:
    """What is there now is not looked at inside the block; what comes to be in it is, and all of it afterwards.

    Unless somebody had frozen objects before, as vLLM does: those stay so, and these with them.
    """
    mine = not gc.get_freeze_count()
    freeze()
    try:
        yield
    finally:
        if mine:
            gc.unfreeze()

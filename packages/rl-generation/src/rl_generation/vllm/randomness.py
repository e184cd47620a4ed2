"""The random generators of this process where vLLM lives in it: vLLM's course of them, apart from the host's.

In process, vLLM seeds torch's generators and draws from them for each request without a seed of its own; a trainer's
dropout draws from the same ones.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch

__all__ = ["Randomness"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """Of torch's generators: the host's, and that of the current device once CUDA is initialised."""

    host: torch.Tensor
    device: torch.Tensor | None


@final
class Randomness:
    """vLLM's states of torch's generators, which are in place only while it works."""

    def __init__(self) -> None:
        self._kept: _State | None = None

    @contextlib.contextmanager
    def while_started(self) -> Iterator[None]:
        """Let vLLM seed what it likes; what it has seeded is its own afterwards."""
        import numpy as np

        state, arrays = random.getstate(), np.random.get_state()  # noqa: NPY002  (the global one is what vLLM seeds)
        try:
            with self.in_place():
                yield
        finally:
            random.setstate(state)
            np.random.set_state(arrays)  # noqa: NPY002

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Let vLLM draw from where it stopped; afterwards, the host goes on where it stopped."""
        before = _now()
        if self._kept is not None:
            _set(self._kept)
        try:
            yield
        finally:
            self._kept = _now()
            _set(before)


def _now() -> _State:
    cuda: Any = torch.cuda
    return _State(host=torch.get_rng_state(), device=cuda.get_rng_state() if cuda.is_initialized() else None)


def _set(state: _State) -> None:
    cuda: Any = torch.cuda
    torch.set_rng_state(state.host)
    if state.device is not None:
        cuda.set_rng_state(state.device)
    elif cuda.is_initialized():  # since then, by vLLM: as it would be had the host initialised it
        cuda.manual_seed(torch.initial_seed())

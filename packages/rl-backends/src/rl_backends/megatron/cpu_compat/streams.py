"""A CUDA stream, and an event, on which there is never anything to wait for."""

import contextlib
from typing import Any

import torch

from rl_backends.megatron.cpu_compat.state import is_pretending

__all__ = ["NullStream", "null_stream", "use_stream"]


class NullStream:
    """Stands in for `torch.cuda.Stream`, and for the events that it records: the CPU's work is done when asked for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A null stream inside `cpu_compat`, what torch says elsewhere."""
        honest: Any = torch.cuda.streams.Stream
        return super().__new__(cls) if is_pretending() else honest(*args, **kwargs)

    def __init__(self, *_: Any, **__: Any) -> None:
        """Device and priority mean nothing."""

    def record_event(self, *_: Any) -> "NullStream":
        """An event that has already happened."""
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""

    def wait_event(self, *_: Any) -> None:
        """It has happened."""

    def wait_stream(self, *_: Any) -> None:
        """It is empty."""


def null_stream(*_: Any) -> NullStream:
    """What `torch.cuda.current_stream()` answers: all null streams are alike."""
    stream: NullStream = NullStream()
    return stream


def use_stream(_stream: Any) -> contextlib.AbstractContextManager[None]:
    """What `torch.cuda.stream(stream)` answers."""
    return contextlib.nullcontext()

"""Applies the workarounds on entry and takes them back on exit.

Attributes of modules are shared by all threads: they are replaced when the first thread enters and restored when the
last one leaves, under a lock. In between a replaced function answers only threads that are inside `cpu_compat` and
outside of `user_code`; to any other it is the original. Torch calls are answered per thread.
"""

import contextlib
import functools
import pkgutil
import threading
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch

from rl_backends.megatron.cpu_compat.attributes import ATTRIBUTE_WORKAROUNDS
from rl_backends.megatron.cpu_compat.calls import CALL_WORKAROUNDS, CpuCalls
from rl_backends.megatron.cpu_compat.state import come_in, is_inside, is_pretending, pretend
from rl_backends.megatron.cpu_compat.workaround import CallRule, Workaround
from rl_backends.megatron.installed import require_megatron

__all__ = ["cpu_compat", "entries", "user_code"]

_ENTRIES = (*ATTRIBUTE_WORKAROUNDS, *CALL_WORKAROUNDS)
_RULES: dict[Callable[..., Any], CallRule] = {
    function: rule for entry in _ENTRIES for function, rule in entry.calls.items()
}
_ABSENT = object()

_lock = threading.Lock()
_threads_inside = 0
_replaced: list[tuple[Any, str, object]] = []


def entries() -> tuple[Workaround, ...]:
    """All that is worked around where CUDA is absent, whether it is at this moment or not."""
    return _ENTRIES


@contextlib.contextmanager
def cpu_compat() -> Iterator[None]:
    """Let Megatron run on the CPU inside; where CUDA is available, do nothing.

    It may be nested, in itself and in `user_code`, and holds for the thread that entered it, in which torch runs
    backward passes on the CPU too. A tensor's `type()` lies inside, on purpose: keep it around Megatron.

    Raises:
        MissingDependencyError: see `require_megatron`.
    """
    if torch.cuda.is_available():
        yield
        return
    require_megatron()
    with contextlib.nullcontext() if is_inside() else _applied(), pretend(True):
        yield


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Inside `cpu_compat`: show an honest torch to code that is not Megatron's. Elsewhere: nothing."""
    with pretend(False):
        yield


@contextlib.contextmanager
def _applied() -> Iterator[None]:
    with _attributes_replaced(), CpuCalls(_RULES), come_in():
        yield


@contextlib.contextmanager
def _attributes_replaced() -> Iterator[None]:
    global _threads_inside  # noqa: PLW0603 - the attributes are global too
    with _lock:
        if _threads_inside == 0:
            _replace_all()
        _threads_inside += 1
    try:
        yield
    finally:
        with _lock:
            _threads_inside -= 1
            if _threads_inside == 0:
                _restore_all()


def _replace_all() -> None:
    try:
        for entry in _ENTRIES:
            for name, value in entry.attributes.items():
                _replace(name, value, only_absent=False)
            for name, value in entry.absent_attributes.items():
                _replace(name, value, only_absent=True)
    except BaseException:
        _restore_all()
        raise


def _replace(name: str, value: object, *, only_absent: bool) -> None:
    module_name, _, attribute = name.rpartition(".")
    module = pkgutil.resolve_name(module_name)
    original = getattr(module, attribute, _ABSENT)
    if only_absent and original is not _ABSENT:
        return
    if original is _ABSENT and not only_absent:
        raise AttributeError(f"{name} is to be replaced on a machine without CUDA, and does not exist")
    _replaced.append((module, attribute, original))
    setattr(module, attribute, _only_inside(value, original) if isinstance(value, FunctionType) else value)


def _only_inside(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if is_pretending() else original(*args, **kwargs)

    return answer


def _restore_all() -> None:
    while _replaced:
        module, attribute, original = _replaced.pop()
        if original is _ABSENT:
            delattr(module, attribute)
        else:
            setattr(module, attribute, original)

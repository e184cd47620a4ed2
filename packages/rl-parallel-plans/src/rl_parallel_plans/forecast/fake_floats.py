"""Run a program on fake floating-point tensors, while integer tensors keep their values.

What a trainer does on the host (cut a batch, find places, check ids) depends on numbers, all of them integers; what its
model computes does not, and is all floating point. So the program runs as it is: floats are fake tensors, which cost
nothing, and tensors of whole numbers and booleans are real as long as they were made of such and are small.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.forecast import torch_internals

WHOLE = frozenset({torch.int64, torch.int32, torch.bool})
PLAIN = WHOLE | {torch.uint8}
"""Also bytes, as which storages are copied; those that a program makes itself stand for floats."""
LARGEST_REAL_ELEMENTS = 2**23
"""Beyond, as masks of [S, S] are, whole numbers are fake too."""


@contextmanager
def fake_floats() -> Iterator[None]:
    """While active, floats are fake and whole numbers real, on the CPU.

    A number that is asked of a fake tensor outside of modules and of backward is 0, or True: what a program looks at
    there is whether all went well. Anywhere else torch raises DataDependentOutputException.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _RealIntegers():
        yield


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what needs no fake tensor outside of the fake mode that was active when this one was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = torch_internals.ShapePropagation()
        self._depth = 0

    def __enter__(self) -> Any:
        self._mode = torch_internals.fake_mode()
        self._watched = self._shapes.watched()
        self._watched.__enter__()
        self._hooks = (
            register_module_forward_pre_hook(lambda *_: self._moved(1)),
            register_module_forward_hook(lambda *_: self._moved(-1), always_call=True),
        )
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._watched.__exit__(None, None, None)

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch_internals.fake_mode() is not self._mode or self._shapes.active:
            return function(*args, **kwargs)
        tensors = list(_tensors_in((*args, *kwargs.values())))
        if any(map(torch_internals.is_fake, tensors)):
            if function is torch_internals.NUMBER_IN_TENSOR and self._is_outside():
                return _answer(args[0].dtype)
            if function is torch_internals.GROUPED_MM:
                return torch_internals.grouped_mm(*args, **kwargs)
            return function(*args, **kwargs)
        if _is_real(function, args, kwargs, tensors=tensors):
            with torch_internals.no_fake_mode():
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _moved(self, by: int) -> None:
        self._depth += by

    def _is_outside(self) -> bool:
        return self._depth == 0 and not torch_internals.in_backward()


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


def _is_real(function: Any, args: Any, kwargs: Any, *, tensors: list[Tensor]) -> bool:
    """Whether an operator on no fake tensor makes few whole numbers of whole numbers, or is of the meta device."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return True
    if not tensors:
        return _dtype_made(function, args, kwargs) in WHOLE and _elements_made(args) <= LARGEST_REAL_ELEMENTS
    if all(tensor.is_meta for tensor in tensors):
        return device is None
    if (asked := kwargs.get("dtype")) is not None and asked not in WHOLE:
        return False
    plain = all(type(tensor) is Tensor and not tensor.is_meta and tensor.dtype in PLAIN for tensor in tensors)
    return plain and _elements_of(tensors) <= LARGEST_REAL_ELEMENTS


def _dtype_made(function: Any, args: Any, kwargs: Any) -> torch.dtype:
    if (asked := kwargs.get("dtype")) is not None:
        return asked  # type: ignore[no-any-return]
    name = function.name().partition(".")[0]
    numbers = [each for each in args if isinstance(each, bool | int | float)]
    if name in {"aten::arange", "aten::full", "aten::scalar_tensor"} and numbers:
        if any(isinstance(each, float) for each in numbers):
            return torch.get_default_dtype()
        return torch.bool if all(isinstance(each, bool) for each in numbers) else torch.int64
    return torch.int64 if name in {"aten::randint", "aten::randperm"} else torch.get_default_dtype()


def _elements_made(args: Any) -> int:
    sizes = next((each for each in args if isinstance(each, list | tuple)), ())
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0


def _elements_of(tensors: list[Tensor]) -> int:
    """As many as the result has where shapes are broadcast; the most of one tensor where they are not."""
    try:
        return math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return max(tensor.numel() for tensor in tensors)


def _answer(dtype: torch.dtype) -> bool | int | float:
    if dtype is torch.bool:
        return True
    return 0.0 if dtype.is_floating_point else 0

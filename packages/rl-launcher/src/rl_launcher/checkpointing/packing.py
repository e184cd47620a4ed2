"""Nested state as one JSON value and one flat dict of tensors, and back. Knows nothing of what the state is of.

{"groups": [{"ticket": 3, "tokens": Tensor}]}  ->  {"groups": [{"ticket": 3, "tokens": {"$tensor": "state/0"}}]}
                                                   {"state/0": Tensor}
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["pack", "unpack"]

TENSOR, TUPLE, SEVERAL = "$tensor", "$tuple", "$mapping"


def pack(value: Any, *, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Split `value` into what JSON holds and what safetensors holds; tensors are copied to the CPU.

    Raises:
        TypeError: it holds something that is neither a tensor nor text, a number, a boolean, None, a list, a tuple or
            a mapping by text: no object is pickled.
    """
    tensors: dict[str, Tensor] = {}
    return _packed(value, tensors, prefix), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given; mappings come back as dicts.

    Raises:
        KeyError: a tensor is missing.
    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    if value.keys() == {TUPLE}:
        return tuple(unpack(item, tensors) for item in value[TUPLE])
    inner = value[SEVERAL] if value.keys() == {SEVERAL} else value
    return {name: unpack(item, tensors) for name, item in inner.items()}


def _packed(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    if torch.is_tensor(value):
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [_packed(item, tensors, prefix) for item in value]}
    if isinstance(value, list):
        return [_packed(item, tensors, prefix) for item in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        inner = {name: _packed(item, tensors, prefix) for name, item in value.items()}
        # A mapping that looks like one of the marks is wrapped, so that it comes back as it was.
        return {SEVERAL: inner} if len(inner) == 1 and next(iter(inner)) in {TENSOR, TUPLE, SEVERAL} else inner
    raise TypeError(
        f"state of type {type(value).__name__} cannot be saved: give tensors, text, numbers, booleans, None, lists, "
        f"tuples and mappings by text"
    )

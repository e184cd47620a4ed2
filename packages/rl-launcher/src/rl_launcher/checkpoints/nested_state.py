"""Split nested state into JSON and tensors, so that nothing is pickled.

{"groups": [{"ticket": 3, "tokens": Tensor}]}  ->  {"groups": [{"ticket": 3, "tokens": {"$tensor": "state/0"}}]}
{"state/0": Tensor}
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR, TUPLE, MAPPING = "$tensor", "$tuple", "$mapping"


def pack(value: Any, *, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Split `value` into a part for JSON and tensors for safetensors, which are copied to the CPU.

    Raises:
        TypeError: it contains something other than tensors, strings, numbers, booleans, None, lists, tuples and
            mappings with string keys. No object is pickled.
    """
    tensors: dict[str, Tensor] = {}
    return _pack(value, tensors, prefix), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was packed; mappings come back as dicts.

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
    inner = value[MAPPING] if value.keys() == {MAPPING} else value
    return {name: unpack(item, tensors) for name, item in inner.items()}


def _pack(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    if torch.is_tensor(value):
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [_pack(item, tensors, prefix) for item in value]}
    if isinstance(value, list):
        return [_pack(item, tensors, prefix) for item in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        inner = {name: _pack(item, tensors, prefix) for name, item in value.items()}
        # A mapping that looks like one of these marks is wrapped, so that it comes back unchanged.
        return {MAPPING: inner} if len(inner) == 1 and next(iter(inner)) in {TENSOR, TUPLE, MAPPING} else inner
    raise TypeError(
        f"state of type {type(value).__name__} cannot be saved: use tensors, strings, numbers, booleans, None, "
        f"lists, tuples and mappings with string keys"
    )

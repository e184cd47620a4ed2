"""Which tensors of the files make which tensor of the model, by the rules of the transformers that is installed.

transformers 5 keeps some weights otherwise than files do: experts stacked, projections joined or cut, other names. Its
own conversions run here on tensors that are not read yet. transformers 4 only has other names. Reads no numbers.
"""

import copy
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.loading.lazy_tensors import LazyTensor, UnknownConversionError

__all__ = ["Converted", "as_in_model", "has_conversions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """Tensors of files under the names and in the layouts of a model."""

    tensors: dict[str, LazyTensor]
    """By name in the model; a tied tensor under as many names as files have it."""
    unexpected: dict[str, str]
    """Name in the files to the name that it would have in the model, which has none of that name."""
    transforms: list[Any]
    """Conversions of transformers that were used, by which a folder is written as this one was."""


def has_conversions() -> bool:
    """Whether this release of transformers keeps weights otherwise than files do."""
    return importlib.util.find_spec("transformers.core_model_loading") is not None


def as_in_model(skeleton: nn.Module, found: Mapping[str, LazyTensor]) -> Converted:
    """The tensors of files as `skeleton` has them; nothing is read.

    Raises:
        ModelError: a conversion cannot be done on slices, or the files do not fit it.
    """
    return _converted(skeleton, found) if has_conversions() else _renamed(skeleton, found)


def _renamed(skeleton: Any, found: Mapping[str, LazyTensor]) -> Converted:
    """The names of transformers 4: the first pattern of the class that matches, and the prefix of the base model."""
    expected = skeleton.state_dict()
    tensors: dict[str, LazyTensor] = {}
    unexpected: dict[str, str] = {}
    for name, tensor in found.items():
        renamed = name
        for pattern, replacement in skeleton._checkpoint_conversion_mapping.items():  # noqa: SLF001 - no public one
            renamed, matches = re.subn(pattern, replacement, name)
            if matches:
                break
        if renamed not in expected and f"{skeleton.base_model_prefix}.{renamed}" in expected:
            renamed = f"{skeleton.base_model_prefix}.{renamed}"
        _add({renamed: tensor}, tensors) if renamed in expected else unexpected.update({name: renamed})
    return Converted(tensors=tensors, unexpected=unexpected, transforms=[])


def _converted(skeleton: Any, found: Mapping[str, LazyTensor]) -> Converted:
    """As transformers 5 does it in `convert_and_load_state_dict_in_model`, with tensors that are not read."""
    from transformers import core_model_loading as core
    from transformers.conversion_mapping import get_model_conversion_mapping

    expected = skeleton.state_dict()
    prefix = skeleton.base_model_prefix
    transforms = get_model_conversion_mapping(skeleton)
    renamings = [each for each in transforms if isinstance(each, core.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core.WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    tensors: dict[str, LazyTensor] = {}
    unexpected: dict[str, str] = {}
    collected: dict[str, Any] = {}
    for name in sorted(found, key=core.dot_natural_key):
        renamed, pattern = core.rename_source_key(name, renamings, converters, prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = core.rename_source_key(name, [], [], prefix, expected)
        if renamed not in expected:
            unexpected[name] = renamed
        elif pattern is None:
            _add({renamed: found[name]}, tensors)
        else:
            converter = collected.setdefault(renamed, copy.deepcopy(by_pattern[pattern]))
            converter.add_tensor(renamed, name, pattern, found[name])
    for renamed, converter in collected.items():
        _add(_run(converter, renamed, skeleton), tensors)
    used = [each for each in transforms if each.was_used()]
    return Converted(tensors=tensors, unexpected=unexpected, transforms=used)


def _run(converter: Any, name: str, skeleton: Any) -> dict[str, LazyTensor]:
    try:
        converted = converter.convert(name, model=skeleton, config=skeleton.config)
    except UnknownConversionError as error:
        raise ModelError(
            f"transformers makes {name} from the files by {converter.operations}, and {error} cannot be done shard by "
            f"shard; load the model whole with load_causal_lm"
        ) from error
    except (ValueError, RuntimeError, IndexError) as error:
        raise ModelError(f"the files do not hold what {name} is made of: {error}") from error
    return {name: each[0] if isinstance(each, list) else each for name, each in converted.items()}


def _add(new: Mapping[str, LazyTensor], tensors: dict[str, LazyTensor]) -> None:
    if twice := sorted(tensors.keys() & new.keys()):
        raise ModelError(f"the files hold {', '.join(twice[:3])} twice, under different names")
    tensors.update(new)

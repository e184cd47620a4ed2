"""How a model in memory becomes tensors in files: names, shapes and dtypes, planned before the first number is read.

transformers 5 keeps some weights otherwise than files do; its own reverse conversions run here on meta tensors, once
for all tensors together and once for each group that can be converted by itself. Where the two differ, nothing is
written. transformers 4 only has other names. Reads and writes no numbers.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from rl_backends.errors import ModelError
from rl_backends.loading.conversions import has_conversions

__all__ = ["Group", "as_in_files", "plan_groups"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors of the model that are written together, since one conversion needs all of them."""

    names: tuple[str, ...]
    """In the model, in its order; mostly one."""
    outputs: dict[str, Tensor]
    """What files hold instead, by name: meta tensors."""


def plan_groups(skeleton: Any, tensors: Mapping[str, Tensor]) -> list[Group]:
    """The groups of `tensors`, in the order in which the last of each comes.

    skeleton: the unsharded model on the meta device, with `_weight_conversions` where it was loaded from files.
    tensors: meta tensors of what is to be written, by name in the model, in its order.

    Raises:
        ModelError: a conversion of transformers cannot be done group by group, or not at all.
    """
    expected = as_in_files(skeleton, tensors)
    made_by: dict[str, list[str]] = {}
    made: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        made[name] = as_in_files(skeleton, {name: tensor})
        for output in made[name]:
            made_by.setdefault(output, []).append(name)
    groups = []
    for names in _joined(tensors, made_by):
        outputs = made[names[0]] if len(names) == 1 else as_in_files(skeleton, {name: tensors[name] for name in names})
        groups.append(Group(names=names, outputs=outputs))
    planned = {name: tensor.shape for group in groups for name, tensor in group.outputs.items()}
    wanted = {name: tensor.shape for name, tensor in expected.items()}
    if different := sorted(name for name in planned.keys() | wanted.keys() if planned.get(name) != wanted.get(name)):
        raise ModelError(
            f"transformers makes {', '.join(different[:3])} of the files from all tensors of the model together, which "
            f"cannot be done one by one; gather the weights and use transformers' save_pretrained"
        )
    return groups


def as_in_files(skeleton: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the model as files have them, by the conversions of the transformers that is installed.

    Raises:
        ModelError: transformers fails to convert them.
    """
    if not has_conversions():
        return {_name_in_files(skeleton, name): tensor for name, tensor in tensors.items()}
    from transformers.core_model_loading import revert_weight_conversion

    try:
        converted: dict[str, Tensor] = revert_weight_conversion(skeleton, dict(tensors))
    except (ValueError, RuntimeError, IndexError, KeyError) as error:
        raise ModelError(
            f"transformers cannot write {', '.join(list(tensors)[:3])} as files have it: {error}"
        ) from error
    return converted


def _name_in_files(skeleton: Any, name: str) -> str:
    """The first renaming of transformers 4 that matches, backwards."""
    for pattern, replacement in skeleton._checkpoint_conversion_mapping.items():  # noqa: SLF001 - no public one
        bare = re.sub(r"\(.*\)", "", pattern.lstrip("^"))
        renamed, matches = re.subn(replacement, bare, name)
        if matches:
            return renamed
    return name


def _joined(tensors: Mapping[str, Tensor], made_by: Mapping[str, list[str]]) -> Iterator[tuple[str, ...]]:
    """Names that have an output in common, transitively; in the order of the last name of each."""
    group_of = {name: {name} for name in tensors}
    for names in made_by.values():
        merged = set().union(*(group_of[name] for name in names))
        for name in merged:
            group_of[name] = merged
    order = {name: at for at, name in enumerate(tensors)}
    for name in tensors:
        ordered = sorted(group_of[name], key=order.__getitem__)
        if name == ordered[-1]:
            yield tuple(ordered)

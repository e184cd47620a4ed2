"""Many names of tensors as few patterns: `model.layers.{0..35}.mlp.up_proj.weight`.

Only numbers between dots are folded, and only names that a caller puts into one group.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

__all__ = ["Pattern", "fold_names"]

_MAX_RUNS = 3

Pattern = tuple[str, tuple[str, ...]]
"""A pattern, and the names that it stands for."""


def fold_names(names: Iterable[tuple[str, Hashable]]) -> list[tuple[str, Hashable, tuple[str, ...]]]:
    """Fold names that differ in numbers alone and come with equal keys.

    Returns:
        The pattern, the key and the names, in the order of the first name of each.
    """
    groups: dict[tuple[tuple[str, ...], Hashable], list[str]] = {}
    for name, key in names:
        template = tuple("#" if part.isdecimal() else part for part in name.split("."))
        groups.setdefault((template, key), []).append(name)
    return [(_pattern(template, members), key, tuple(members)) for (template, key), members in groups.items()]


def _pattern(template: tuple[str, ...], names: list[str]) -> str:
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(
        _span(sorted({int(part) for part in column})) if part == "#" else part
        for part, column in zip(template, columns, strict=True)
    )


def _span(numbers: list[int]) -> str:
    """Sorted numbers as runs: `7`, `{0..35}`, `{0..2,5,7..9,…}`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    if len(numbers) == 1:
        return str(numbers[0])
    shown = ["..".join(map(str, run)) for run in runs[:_MAX_RUNS]]
    return "{" + ",".join(shown + ["…"] * (len(runs) > _MAX_RUNS)) + "}"

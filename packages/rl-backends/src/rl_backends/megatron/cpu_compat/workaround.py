"""One thing that is worked around: what, why, where it was seen, and by which replacements. Applies nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CallRule", "Workaround"]

CallRule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Answers a call of a torch function: rule(function, args, kwargs) -> result."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workaround:
    """One assumption of megatron-core that does not hold without CUDA."""

    name: str
    """What megatron-core does."""

    reason: str
    """Where it does it, what comes of it without CUDA, and what happens instead."""

    seen_in: str = "megatron-core 0.16.1"
    """The release in which it was seen."""

    attributes: Mapping[str, object] = field(default_factory=dict)
    """Replacements by dotted name. A function answers only where a thread is inside `cpu_compat`, else the original
    does; anything else is put there as it is."""

    absent_attributes: Mapping[str, object] = field(default_factory=dict)
    """What is put under a dotted name that does not exist, and left alone where it does."""

    calls: Mapping[Callable[..., Any], CallRule] = field(default_factory=dict)
    """Torch functions and methods whose calls are answered by a rule, in a thread inside `cpu_compat`."""

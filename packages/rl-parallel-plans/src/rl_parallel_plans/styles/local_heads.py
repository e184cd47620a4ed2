"""Attention code that reads how many heads there are, told how many this rank has.

Most Hugging Face attention infers heads from shapes. Some reads an attribute of the module (`num_heads`), some the
config that the whole model shares: the first are set, the second is put behind a view that answers for one rank.
"""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

ATTRIBUTES = ("num_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "num_v_heads", "num_k_heads")
CONFIG_ATTRIBUTES = ("num_attention_heads", "num_key_value_heads")
KEY_HEADS = ("num_key_value_heads", "num_kv_heads")
GROUPS = ("num_key_value_groups", "num_kv_groups", "n_rep")
"""Attributes that count the query heads of one key/value head."""


class LocalHeads:
    """Divide the head counts that an attention module reads by the size of the tp axis."""

    def __init__(self, attributes: Sequence[str] = ATTRIBUTES, *, key_heads: int | None = None) -> None:
        """key_heads: how many key/value heads there are, where ranks may be more; None where the module says it."""
        self.attributes, self.key_heads = tuple(attributes), key_heads

    def problems(self, module: nn.Module, tp: int) -> list[str]:
        """A sentence for each count that tp does not divide."""
        return [
            f"has {name}={count}, which tp={tp} does not divide: choose one that does"
            for name in self.attributes
            if isinstance(count := module.__dict__.get(name), int)
            and count % tp
            and not (name in KEY_HEADS and tp % count == 0)  # one head for several ranks
        ]

    def apply(self, module: nn.Module, tp: int) -> None:
        """Set the attributes, and put the config behind a view for one rank."""
        for name in self.attributes:
            if isinstance(count := module.__dict__.get(name), int):
                setattr(module, name, max(count // tp, 1))
        for name in GROUPS:
            if self.key_heads is not None and isinstance(count := module.__dict__.get(name), int):
                setattr(module, name, count * self.key_heads // max(tp, self.key_heads))
        config = module.__dict__.get("config")
        if config is not None and not isinstance(config, LocalHeadsConfig):
            module.__dict__["config"] = LocalHeadsConfig(config, tp)


class LocalHeadsConfig:
    """A model's config as one rank's attention must read it: fewer heads, all else as it is at that moment."""

    def __init__(self, config: Any, tp: int) -> None:
        self.__dict__["_whole"], self.__dict__["_tp"] = config, tp

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.__dict__["_whole"], name)
        is_count = name in CONFIG_ATTRIBUTES and isinstance(value, int)
        return max(value // self.__dict__["_tp"], 1) if is_count else value

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.__dict__["_whole"], name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "LocalHeadsConfig":
        return LocalHeadsConfig(copy.deepcopy(self.__dict__["_whole"], memo), self.__dict__["_tp"])

    def __reduce__(self) -> tuple[type["LocalHeadsConfig"], tuple[Any, int]]:
        return LocalHeadsConfig, (self.__dict__["_whole"], self.__dict__["_tp"])

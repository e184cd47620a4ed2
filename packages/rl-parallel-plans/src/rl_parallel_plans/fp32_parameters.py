"""Which parameters stay in fp32 when the others are gathered in half precision.

Those that the model's own code says must (`_keep_in_fp32_modules_strict`; under float16 `_keep_in_fp32_modules` too:
what `from_pretrained` reads), and a few that decide more than their size: the decay of a state-space layer is the
exponential of an exponential, and a router's correction bias ranks experts by differences that bfloat16 rounds away.
"""

import re
from collections.abc import Iterable

import torch
from torch import nn

from rl_parallel_plans.structure import joined

FP32_PARAMETERS = ("A_log", "e_score_correction_bias")
"""Names that stay in fp32 in every model."""


def kept_in_fp32(model: nn.Module, param_dtype: torch.dtype | None, names: Iterable[str]) -> set[str]:
    """Names of the parameters that are not cast to `param_dtype`: none where it is not a half precision.

    names: parameters or modules, as one or more whole tokens of a dotted name (`A_log`, `gate.weight`).
    """
    if param_dtype not in (torch.bfloat16, torch.float16):
        return set()
    attributes = ["_keep_in_fp32_modules_strict"]
    attributes += ["_keep_in_fp32_modules"] if param_dtype == torch.float16 else []
    kept: set[str] = set()
    for path, module in model.named_modules():
        wanted = {name for attribute in attributes for name in getattr(module, attribute, None) or ()}
        wanted |= set(names) if not path else set()
        kept |= {joined(path, name) for name in _matching(module, wanted)}
    return kept


def _matching(module: nn.Module, wanted: set[str]) -> Iterable[str]:
    if not wanted:
        return ()
    tokens = "|".join(map(re.escape, sorted(wanted)))
    pattern = re.compile(rf"(?:^|\.)(?:{tokens})(?:\.|$)")
    return (name for name, _ in module.named_parameters(remove_duplicate=False) if pattern.search(name))

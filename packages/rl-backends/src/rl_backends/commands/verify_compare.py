"""What ranks have written, put together again and compared with the truth. Knows files and tensors, no model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_backends.commands.verify_plain import STEPS, Plain

__all__ = ["Check", "check", "compare"]

NOT_A_NUMBER = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    """What is compared."""
    difference: float
    """The largest one, relative to the largest number of its tensor; 1e300 where numbers are missing or not finite."""
    where: str
    """The tensor that has it."""
    holds: bool
    """Whether it is within the tolerance."""


def compare(
    folder: Path, truth: Plain, *, ranks: int, tolerance: float, untrained: torch.dtype | None = None
) -> list[Check]:
    """Every check, over what all ranks have written into `folder`.

    untrained: of the weights that ranks have saved before they trained, as they came; None where they have not.
    """
    files = [load_file(folder / f"{rank}.safetensors") for rank in range(ranks)]
    logps = {f"rank {rank}": each["logp"] for rank, each in enumerate(files)}
    norm, plain_norm = files[0]["grad_norm"], torch.tensor([truth.grad_norm])
    weights = _whole(files, "weights", truth.weights)
    checks = [
        check("log-probabilities", logps, dict.fromkeys(logps, truth.logp), tolerance=tolerance),
        check("gradients", _whole(files, "gradients", truth.gradients), truth.gradients, tolerance=tolerance),
        check("gradient norm", {"": norm}, {"": plain_norm}, tolerance=tolerance),
        check(f"weights after {STEPS} steps", weights, truth.weights, tolerance=tolerance),
    ]
    checks.append(_saved(folder / "saved", weights, name="saved and loaded again"))
    if untrained is not None:
        given = {name: tensor.to(untrained).float() for name, tensor in _loaded(folder / "model").items()}
        checks.append(_saved(folder / "untrained", given, name="there and back"))
    return checks


def _whole(files: list[dict[str, Tensor]], kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors from the boxes of all ranks; NaN where no rank has any."""
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    for each in files:
        for key, box in each.items():
            if key.startswith(f"{kind}|"):
                _, name, offsets = key.split("|")
                starts = [int(offset) for offset in offsets.split(",") if offset]
                if name in whole:
                    place = tuple(slice(start, start + size) for start, size in zip(starts, box.shape, strict=True))
                    whole[name][place] = box.to(whole[name].dtype)
    return whole


def check(name: str, found: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, tolerance: float) -> Check:
    """Tensors by name against the truth, each relative to its largest entry."""
    floor = max(float(tensor.abs().max()) for tensor in truth.values()) * 1e-3
    worst, where = -1.0, ""
    for key, expected in truth.items():
        scale = max(float(expected.abs().max()), floor)
        apart = _apart(found[key], expected) / scale if scale else 0.0
        if apart > worst:
            worst, where = apart, key
    return Check(name=name, difference=worst, where=where, holds=worst <= tolerance)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference; a number, since JSON has no NaN."""
    apart = float((found - expected).abs().max())
    return apart if math.isfinite(apart) else NOT_A_NUMBER


def _saved(folder: Path, weights: Mapping[str, Tensor], *, name: str) -> Check:
    """What from_pretrained makes of the folder has these weights, bit for bit."""
    loaded = _loaded(folder)
    if loaded.keys() != weights.keys():
        missing = sorted(loaded.keys() ^ weights.keys())
        return Check(name=name, difference=NOT_A_NUMBER, where=", ".join(missing[:3]), holds=False)
    differing = [key for key, tensor in weights.items() if not _same_bits(tensor, loaded[key])]
    apart = max((_apart(loaded[key], weights[key]) for key in differing), default=0.0)
    return Check(name=name, difference=apart, where=", ".join(differing[:3]), holds=not differing)


def _loaded(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return torch.equal(left, right) and torch.equal(left.signbit(), right.signbit())  # 0.0 equals -0.0

"""`rl-backends verify --each-kernel`: every choice of kernels against plain transformers, with its speed beside it.

A cell is one backend on one rank whose configuration differs from the plain one in one choice. It computes
log-probabilities and gradients of the rows of `verify`, which are compared with those of plain transformers in float32,
and then takes a few steps over longer rows, for tokens a second and MFU. What cannot run here is refused, in words.
"""

import argparse
import functools
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_backends.commands.comparison import (
    Check,
    Plain,
    check,
    gradients,
    loss_of,
    make_rows,
    plain_result,
    save_small_model,
)
from rl_backends.commands.flags import chosen_config
from rl_backends.commands.verify import TOLERANCES
from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import MissingDependencyError
from rl_backends.kernels import KERNELS, KernelsConfig
from rl_backends.optimizers import OptimizerConfig

FLOAT8_TOLERANCE = 0.5
"""Of 3 or 2 bits of mantissa, over the largest entry of each tensor."""
TIMED_STEPS = 3
TIMED_ROWS = {"rows": 16, "shortest": 64, "longest": 256}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one choice came to."""

    choice: str
    holds: bool | None
    """None where it was refused."""
    refused: str | None
    checks: tuple[Check, ...]
    tokens_per_s: float | None
    mfu: float | None
    """None where the peak of the device is not known."""


def verify_each_kernel(arguments: argparse.Namespace) -> int:
    """Run every cell, print them, and return the exit code: 1 if one runs and is beyond its tolerance."""
    base = chosen_config(arguments, micro_batch_size=2, device=arguments.device)
    started, cells = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        folder = Path(name)
        small = save_small_model(arguments, folder / "model", tp=1, keep_heads=True)
        words = {"vocabulary": small.vocabulary, "padding": small.padding, "seed": arguments.seed}
        truth = plain_result(folder / "model", make_rows(rows=5, **words))
        print(f"{small.described} on {arguments.device} against plain transformers in float32", flush=True)
        for choice, changes in _choices():
            print(choice, file=sys.stderr)
            cells.append(_cell(choice, base, changes, folder / "model", truth, words, arguments.tolerance))
            print(_line(cells[-1]), flush=True)
    holds = all(cell.holds is not False for cell in cells)
    ran = sum(cell.holds is not None for cell in cells)
    within = "all are within their tolerance" if holds else "NOT all are within their tolerance"
    print(f"{ran} choices ran, {len(cells) - ran} were refused; {within}")
    if arguments.json:
        figures = {"model": arguments.model, "small_model": small.described, "device": arguments.device}
        figures |= {"cells": [asdict(cell) for cell in cells], "seconds": round(time.monotonic() - started, 3)}
        print(json.dumps({**figures, "holds": holds}, allow_nan=False))
    return 0 if holds else 1


def _choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a cell, and the fields of the configuration that it changes."""
    yield "plain torch, padded rows", {}
    yield "plain torch, packed rows", {"sequence_packing": True}
    yield "compile, padded rows", {"compile": True}
    yield "loss_chunk_size=3", {"kernels": {"loss_chunk_size": 3}}
    for part, name in KERNELS:
        if part == "attention":
            for packed, rows in ((False, "padded"), (True, "packed")):
                yield f"attention={name}, {rows} rows", {"kernels": {part: name}, "sequence_packing": packed}
        else:
            yield f"{part}={name}", {"kernels": {part: name}}
            if part == "float8":
                yield f"float8={name}, emulated", {"kernels": {"float8": name, "float8_emulate": True}}


def _cell(  # noqa: PLR0917 - the parts of a comparison
    choice: str,
    base: DTensorConfig,
    changes: dict[str, Any],
    model: Path,
    truth: Plain,
    words: dict[str, Any],
    tolerance: float | None,
) -> Cell:
    own = {field.name: getattr(base, field.name) for field in fields(base)}
    kernels = {**asdict(base.kernels), **changes.get("kernels", {})}
    try:
        config = DTensorConfig(**{**own, **changes, "kernels": KernelsConfig(**kernels)})
        backend = DTensorBackend.from_pretrained(str(model), config)
    except (ValueError, MissingDependencyError) as refusal:
        return Cell(choice=choice, holds=None, refused=str(refusal), checks=(), tokens_per_s=None, mfu=None)
    if tolerance is None:
        tolerance = FLOAT8_TOLERANCE if kernels["float8"] else TOLERANCES[config.precision]
    try:
        rows = make_rows(rows=5, **words)
        backend.start_training(OptimizerConfig(lr=1e-6), num_steps=TIMED_STEPS + 2)
        logp = {"": backend.logp(rows).cpu()}
        backend.forward_backward(rows, functools.partial(loss_of, num_tokens=int(rows.trainable.sum())))
        found: dict[str, Tensor] = {name: part.detach().float().cpu().clone() for name, _, part in gradients(backend)}
        checks = (
            check("log-probabilities", logp, {"": truth.logp}, tolerance=tolerance),
            check("gradients", found, truth.gradients, tolerance=tolerance),
        )
        backend.optim_step()
        tokens_per_s, mfu = _speed(backend, make_rows(**TIMED_ROWS, **words))
    finally:
        backend.close()
    holds = all(each.holds for each in checks)
    return Cell(choice=choice, holds=holds, refused=None, checks=checks, tokens_per_s=tokens_per_s, mfu=mfu)


def _speed(backend: DTensorBackend, rows: Any) -> tuple[float, float | None]:
    """Tokens a second and MFU of the fastest of a few steps; the first, which may compile, is not counted."""
    best: tuple[float, float | None] = (0.0, None)
    for step in range(TIMED_STEPS + 1):
        backend.forward_backward(rows, functools.partial(loss_of, num_tokens=int(rows.trainable.sum())))
        backend.optim_step()
        metrics = backend.metrics()
        assert metrics is not None
        if step and metrics.tokens_per_s > best[0]:
            best = (float(metrics.tokens_per_s), metrics.mfu)
    return best


def _line(cell: Cell) -> str:
    if cell.refused is not None:
        return f"  {cell.choice:<38}refused: {cell.refused}"
    verdict = "holds" if cell.holds else "DOES NOT HOLD"
    apart = "  ".join(f"{each.name} {each.difference:.1e}" for each in cell.checks)
    mfu = "MFU unknown" if cell.mfu is None else f"MFU {cell.mfu:.1%}"
    return f"  {cell.choice:<38}{verdict:<14}{apart}  {cell.tokens_per_s:,.0f} tokens/s  {mfu}"

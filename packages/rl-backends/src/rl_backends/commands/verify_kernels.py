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
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rl_backends.commands.comparison import (
    Check,
    Plain,
    VerifyRows,
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
from rl_backends.errors import MissingDependencyError
from rl_backends.kernels import KERNELS
from rl_backends.optimizers import OptimizerConfig

FLOAT8_TOLERANCE = 0.5
"""Of 3 or 2 bits of mantissa, over the largest entry of each tensor."""
TIMED_STEPS = 3
TIMED_ROWS = {"rows": 16, "shortest": 64, "longest": 256}


def verify_each_kernel(arguments: argparse.Namespace) -> int:
    """Run every cell, print them, and return the exit code: 1 if one runs and is beyond its tolerance."""
    base = chosen_config(arguments, micro_batch_size=2, device=arguments.device)
    started, cells = time.monotonic(), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        model = Path(name) / "model"
        small = save_small_model(arguments, model, tp=1, keep_heads=True)
        words: dict[str, Any] = {"vocabulary": small.vocabulary, "padding": small.padding, "seed": arguments.seed}
        rows, timed_rows = make_rows(rows=5, **words), make_rows(**TIMED_ROWS, **words)
        truth = plain_result(model, rows)
        print(f"{small.described} on {arguments.device} against plain transformers in float32", flush=True)
        for choice, changes in _choices():
            print(choice, file=sys.stderr)
            cell: dict[str, Any] = dict.fromkeys(("holds", "refused", "tokens_per_s", "mfu"))
            cell |= {"choice": choice, "checks": []}
            cells.append(cell)
            try:
                kernels = replace(base.kernels, **changes.get("kernels", {}))
                config = replace(base, **{**changes, "kernels": kernels})
                backend = DTensorBackend.from_pretrained(str(model), config)
            except (ValueError, MissingDependencyError) as refusal:
                cell["refused"] = str(refusal)
                print(f"  {choice:<38}refused: {refusal}", flush=True)
                continue
            tolerance = arguments.tolerance
            if tolerance is None:
                tolerance = FLOAT8_TOLERANCE if kernels.float8 else TOLERANCES[config.precision]
            with closing(backend):
                checks = _checks(backend, rows, truth, tolerance=tolerance)
                speed, mfu = _speed(backend, timed_rows)
            cell |= {"holds": all(each.holds for each in checks), "checks": [asdict(each) for each in checks]}
            cell |= {"tokens_per_s": speed, "mfu": mfu}
            verdict = "holds" if cell["holds"] else "DOES NOT HOLD"
            apart = "  ".join(f"{each.name} {each.difference:.1e}" for each in checks)
            used = "MFU unknown" if mfu is None else f"MFU {mfu:.1%}"
            print(f"  {choice:<38}{verdict:<14}{apart}  {speed:,.0f} tokens/s  {used}", flush=True)
    holds = all(cell["holds"] is not False for cell in cells)
    ran = sum(cell["holds"] is not None for cell in cells)
    within = "all are within their tolerance" if holds else "NOT all are within their tolerance"
    print(f"{ran} choices ran, {len(cells) - ran} were refused; {within}")
    if arguments.json:
        figures = {"model": arguments.model, "small_model": small.described, "device": arguments.device}
        figures |= {"cells": cells, "seconds": round(time.monotonic() - started, 3)}
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


def _checks(backend: DTensorBackend, rows: VerifyRows, truth: Plain, *, tolerance: float) -> list[Check]:
    backend.start_training(OptimizerConfig(lr=1e-6), num_steps=TIMED_STEPS + 2)
    logp = {"": backend.logp(rows).cpu()}
    backend.forward_backward(rows, functools.partial(loss_of, num_tokens=int(rows.trainable.sum())))
    found = {name: part.detach().float().cpu().clone() for name, _, part in gradients(backend)}
    backend.optim_step()
    return [
        check("log-probabilities", logp, {"": truth.logp}, tolerance=tolerance),
        check("gradients", found, truth.gradients, tolerance=tolerance),
    ]


def _speed(backend: DTensorBackend, rows: VerifyRows) -> tuple[float, float | None]:
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

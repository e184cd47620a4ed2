"""`rl-backends verify`: is the backend, sharded and cut as asked, the same as plain transformers and AdamW in float32?

On a small model of the same kind as MODEL, with random weights: real ranks over gloo take the steps that this process
takes without the backend. Compared are log-probabilities, gradients, weights after three steps, and the saved folder
with those weights, bit for bit.
Exit codes: 0 it is; 1 it is not, or a rank failed; 2 refused.
"""

import argparse
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_backends.commands.config_flags import add_config_flags, config_of
from rl_backends.commands.console import CommandError, say, show, show_json
from rl_backends.commands.explain import SHORT, add_model_arguments
from rl_backends.dtensor.config import DTensorConfig

__all__ = ["add_arguments", "run"]

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}
"""Of the largest relative difference where nobody said another; bfloat16 has 8 bits."""

LEFT_OUT = ("enabled", "device", "router_aux_loss_coef", "peak_flops_per_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_model_arguments(parser)
    group = parser.add_argument_group("comparison")
    group.add_argument("--tolerance", type=float, metavar="X", help=f"default: {TOLERANCES} by --precision")
    group.add_argument("--no-shrink", action="store_true", help="the configuration is small already")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and rows (default %(default)s)")
    group.add_argument(
        "--deadline-s", type=float, default=300.0, metavar="X", help="for all ranks (default %(default)s)"
    )
    group.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    add_config_flags(parser, DTensorConfig, leave_out=LEFT_OUT, short=SHORT, title="backend")


def run(arguments: argparse.Namespace) -> int:
    """Compare, and return the exit code."""
    from rl_backends.commands.verify_compare import compare
    from rl_backends.commands.verify_plain import plain_result, save_small_model
    from rl_backends.commands.verify_start import run_ranks

    if arguments.ranks < 1:
        raise CommandError(f"--ranks must be at least 1; got {arguments.ranks}")
    config = config_of(DTensorConfig, arguments, micro_batch_size=2)
    tolerance = TOLERANCES[config.precision] if arguments.tolerance is None else arguments.tolerance
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        folder = Path(name)
        described = save_small_model(
            arguments.model,
            folder / "model",
            tp=config.tensor_parallel_size,
            shrink=not arguments.no_shrink,
            seed=arguments.seed,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
        say(f"{described}: {arguments.ranks} ranks start")
        rows = {"rows": 2 * arguments.ranks + 1, "seed": arguments.seed}
        run_ranks(
            {"folder": str(folder), "config": asdict(config), "ranks": arguments.ranks, **rows},
            deadline_s=arguments.deadline_s,
        )
        checks = compare(folder, plain_result(folder / "model", **rows), ranks=arguments.ranks, tolerance=tolerance)
    holds = all(check.holds for check in checks)
    _show(checks, described=described, holds=holds, tolerance=tolerance)
    if arguments.json:
        figures: dict[str, Any] = {"model": arguments.model, "small_model": described, "ranks": arguments.ranks}
        figures |= {"config": asdict(config), "tolerance": tolerance, "checks": [asdict(check) for check in checks]}
        show_json({**figures, "seconds": round(time.monotonic() - started, 3), "holds": holds})
    return 0 if holds else 1


def _show(checks: Any, *, described: str, holds: bool, tolerance: float) -> None:
    show(f"{described} against plain transformers and AdamW in float32; tolerance {tolerance:g}")
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = "holds" if check.holds else "DOES NOT HOLD"
        show(f"  {check.name:<{width}}  {check.difference:>9.2e}  {verdict:<14}{check.where}")
    show("the backend is exact" if holds else "the backend is NOT exact here")

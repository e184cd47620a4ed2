"""`rl-backends verify`: is the backend, sharded and cut as asked, the same as plain transformers and AdamW in float32?

On a small model of the same kind as MODEL, with random weights: real ranks over gloo take the steps that this process
takes without the backend. Compared are log-probabilities, gradients, weights after three steps, and the saved folder
with those weights, bit for bit. Of the Megatron backend also what it saves before it trains with what it was given; and
rows are long, since a wrong rotary base shows in no others.

With `--each-kernel` every choice of kernels is a cell instead, on one rank of `--device`: values and gradients against
the same truth, tokens a second and MFU of a few steps, or the words in which it is refused.
Exit codes: 0 it is; 1 it is not, or a rank failed; 2 refused.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_backends.commands.flags import add_backend_flags, add_model_arguments, chosen_config

LEFT_OUT = ("device", "router_aux_loss_coef", "peak_flops_per_s", "checkpoint_dir", "timeout_s")
PREFERRED = {"micro_batch_size": 2}
LENGTHS = {"dtensor": (5, 13), "megatron": (512, 560)}
"""Tokens of the shortest row, and of the longest."""


def add_arguments(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Declare what the command takes, with the flags of the backend that is asked for."""
    backend = add_model_arguments(parser, given)
    group = parser.add_argument_group("comparison")
    group.add_argument("--tolerance", type=float, metavar="X", help="default: 1e-5 in float32, 0.1 in bfloat16")
    group.add_argument("--no-shrink", action="store_true", help="the configuration is small already")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and rows (default %(default)s)")
    group.add_argument(
        "--deadline-s", type=float, default=300.0, metavar="X", help="for all ranks (default %(default)s)"
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (default %(default)s)"
    )
    group.add_argument(
        "--each-kernel", action="store_true", help="every choice of kernels, a cell each, on one rank of DTensor"
    )

    add_backend_flags(parser, backend, leave_out=LEFT_OUT)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare; it holds what is exact."""
    if arguments.ranks < 1:
        raise ValueError(f"--ranks must be at least 1; got {arguments.ranks}")
    if arguments.each_kernel:
        if arguments.ranks != 1 or arguments.backend != "dtensor":
            raise ValueError("--each-kernel compares kernels of the DTensor backend on one rank: leave out the others")
        from rl_backends.commands.comparison import verify_each_kernel

        return verify_each_kernel(arguments)
    if arguments.device == "cuda":
        raise ValueError("--device cuda is for --each-kernel: the comparison of several ranks runs on CPUs over gloo")
    import torch

    from rl_backends.commands.comparison import (
        TOLERANCES,
        compare,
        make_rows,
        plain_result,
        run_ranks,
        save_small_model,
    )

    megatron = arguments.backend == "megatron"
    if megatron:
        # What could not be done with the model itself is refused here, and not done with a small one.
        from rl_backends.commands.megatron_layout import readable_layout
        from rl_backends.megatron.installed import check_installed
        from rl_parallel_plans.model_source import read_config

        trust = arguments.trust_remote_code
        hf_config = read_config(arguments.model, revision=arguments.revision, trust_remote_code=trust)
        _, config = readable_layout(hf_config, lambda: chosen_config(arguments, **PREFERRED), ranks=arguments.ranks)
        check_installed()  # else every rank would say so, half a minute later
        stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
        sizes: dict[str, Any] = {"tp": config.tensor_model_parallel_size, "pp": stages}
    else:
        config = chosen_config(arguments, **PREFERRED)
        sizes = {"tp": config.tensor_parallel_size}
    tolerance = TOLERANCES[config.precision] if arguments.tolerance is None else arguments.tolerance
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        folder = Path(name)
        small = save_small_model(arguments, folder / "model", **sizes)
        print(f"{small.described}: {arguments.ranks} ranks start", file=sys.stderr)
        shortest, longest = LENGTHS[arguments.backend]
        rows = {
            "rows": 2 * arguments.ranks + 1,
            "seed": arguments.seed,
            "vocabulary": small.vocabulary,
            "padding": small.padding,
            "shortest": shortest,
            "longest": longest,
        }
        task = {"folder": name, "backend": arguments.backend, "config": config, "ranks": arguments.ranks, "rows": rows}
        found = run_ranks(task, deadline_s=arguments.deadline_s)
        truth = plain_result(folder / "model", make_rows(**rows))
        untrained = getattr(torch, config.precision) if megatron else None
        checks = compare(folder, truth, found, tolerance=tolerance, untrained=untrained)
    holds = all(check.holds for check in checks)

    print(f"{small.described} against plain transformers and AdamW in float32; tolerance {tolerance:g}")
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = "holds" if check.holds else "DOES NOT HOLD"
        print(f"  {check.name:<{width}}  {check.difference:>9.2e}  {verdict:<14}{check.where}")
    print("the backend is exact" if holds else "the backend is NOT exact here")
    figures: dict[str, Any] = {"model": arguments.model, "small_model": small.described, "ranks": arguments.ranks}
    figures |= {"backend": arguments.backend, "config": asdict(config), "tolerance": tolerance}
    return {**figures, "checks": [asdict(check) for check in checks], "holds": holds}

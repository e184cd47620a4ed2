"""`python docs/tools/refit_tools.py simulate`: a refit on machines that you do not have, and how much to believe it.

Exit codes: 0, or 1 where `--within` is given and the prediction is slower; 2 for a value that is refused.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import get_args

from refit_simulator import CALIBRATED, HARDWARE, MODELS, SCHEMES, Costs, Options, Simulation, simulate
from refit_simulator.workload import Wire

__all__ = ["add_arguments", "run"]

_REQUIRED = ("model", "train_gpus", "engine_gpus", "train_layout", "engine_layout")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    layout = "sizes of tp, pp, ep, fsdp, as in 'ep=64,pp=8', or 'replicated'; what they leave of the GPUs are replicas"
    parser.add_argument("--model", choices=tuple(MODELS), help="whose tensors to send")
    parser.add_argument("--hardware", choices=tuple(HARDWARE), default="h100", help="what GPUs (default h100)")
    parser.add_argument("--train-gpus", type=_count, metavar="N", help="GPUs of the trainer")
    parser.add_argument("--engine-gpus", type=_count, metavar="N", help="GPUs of the engine, all replicas")
    parser.add_argument("--train-layout", metavar="LAYOUT", help=layout)
    parser.add_argument("--engine-layout", metavar="LAYOUT", help="the same of the engine")
    parser.add_argument("--scheme", choices=tuple(SCHEMES), default="slices", help="how (default slices, rl-refit's)")
    parser.add_argument("--colocated", action="store_true", help="both sides on the same GPUs")
    parser.add_argument("--wire", choices=get_args(Wire), default="bfloat16", help="what is sent (default bfloat16)")
    parser.add_argument("--stacked-experts", action="store_true", help="the experts of a layer are one tensor")
    parser.add_argument("--changed", type=float, metavar="SHARE", help="send only this share of the elements, a delta")
    parser.add_argument("--no-verify", action="store_true", help="compare no digests")
    parser.add_argument("--bucket-mib", type=_count, default=256, metavar="N", help="MiB of a bucket (default 256)")
    parser.add_argument("--slots", type=_count, default=2, metavar="N", help="buckets in memory (default 2)")
    for flag, figure in _FIGURES.items():
        parser.add_argument(flag, type=float, metavar="GB/S", help=f"{figure} instead of the preset's")
    parser.add_argument("--gpus-per-node", type=_count, metavar="N", help="instead of the preset's")
    costs = ", ".join(Costs.__slots__)
    parser.add_argument(
        "--cost",
        type=_cost,
        metavar="NAME=NUMBER",
        action="append",
        default=[],
        help=f"one of the constants instead of the calibrated; may be given again: {costs}",
    )
    parser.add_argument("--within", type=float, metavar="SECONDS", help="exit with 1 where the prediction is slower")
    parser.add_argument("--calibration", action="store_true", help="published refits beside their predictions instead")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")


_FIGURES = {"--nic": "nic_gb_s", "--nvlink": "nvlink_gb_s", "--hbm": "hbm_gb_s", "--pcie": "pcie_gb_s"}


def run(arguments: argparse.Namespace) -> int:
    """Print a prediction, or the calibration.

    Raises:
        ValueError: A value is refused; names it, and what is allowed.
    """
    if arguments.calibration:
        return _print_calibration(as_json=arguments.json)
    missing = [f"--{name.replace('_', '-')}" for name in _REQUIRED if getattr(arguments, name) is None]
    if missing:
        raise ValueError(f"a prediction needs {', '.join(missing)}; or ask for --calibration")
    simulation = _simulate(arguments)
    print(simulation.explain())
    too_slow = arguments.within is not None and simulation.total_seconds > arguments.within
    if too_slow:
        print(f"\n{simulation.total_seconds:.3f} s is more than the {arguments.within:g} s allowed")
    if arguments.json:
        print(json.dumps({**simulation.as_dict(), "holds": not too_slow}))
    return int(too_slow)


def _simulate(arguments: argparse.Namespace) -> Simulation:
    given = {figure: getattr(arguments, flag.removeprefix("--")) for flag, figure in _FIGURES.items()}
    given["gpus_per_node"] = arguments.gpus_per_node
    replaced = {figure: value for figure, value in given.items() if value is not None}
    return simulate(
        arguments.model,
        train_gpus=arguments.train_gpus,
        engine_gpus=arguments.engine_gpus,
        train_layout=arguments.train_layout,
        engine_layout=arguments.engine_layout,
        hardware=dataclasses.replace(HARDWARE[arguments.hardware], **replaced),
        scheme=arguments.scheme,
        colocated=arguments.colocated,
        wire=arguments.wire,
        stacked_experts=arguments.stacked_experts,
        options=Options(
            bucket_bytes=arguments.bucket_mib * 2**20,
            slots=arguments.slots,
            changed=arguments.changed,
            verify=not arguments.no_verify,
        ),
        costs=dataclasses.replace(CALIBRATED, **dict(arguments.cost)),
    )


def _print_calibration(*, as_json: bool) -> int:
    from refit_simulator.calibration import compare
    from refit_simulator.report import calibration_as_dict, calibration_as_text

    comparisons = compare()
    print(calibration_as_text(comparisons))
    if as_json:
        print(json.dumps(calibration_as_dict(comparisons)))
    return 0


def _cost(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    if name not in Costs.__slots__:
        raise argparse.ArgumentTypeError(f"no cost {name!r}; choose from {', '.join(Costs.__slots__)}")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{number!r} is no number, in {text!r}") from None


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 1")
    return int(text)

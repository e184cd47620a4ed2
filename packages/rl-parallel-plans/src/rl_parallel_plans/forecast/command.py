"""`rl-parallel-plans memory`: predict the memory of a training step from a model's configuration alone."""

import argparse
import json
from dataclasses import fields, replace
from typing import get_args

import torch

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast.options import Attention, LmHead, MemoryOptions, OptimizerName
from rl_parallel_plans.pipeline.schedule import Schedule
from rl_parallel_plans.sharding.activation_checkpointing import ActivationCheckpointing

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument("model", help="folder, config.json, Hub name, or a type of model such as qwen3")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that a layer is split over (default 1)")
    parser.add_argument("--dp", type=int, default=1, metavar="N", help="ranks that FSDP shards over (default 1)")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="pipeline ranks: the memory of each (default 1)")
    parser.add_argument("--microbatches", type=int, metavar="N", help="of a pipeline step (default 2 x pp)")
    parser.add_argument("--schedule", choices=get_args(Schedule), default="1f1b", help="of the pipeline (default 1f1b)")
    parser.add_argument("--batch-size", type=int, required=True, metavar="N", help="rows of a microbatch on a dp rank")
    parser.add_argument("--sequence-length", type=int, required=True, metavar="N", help="tokens of a row")
    parser.add_argument("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    parser.add_argument("--lm-head", choices=get_args(LmHead), default="linear_logp", help="how the loss reads it")
    parser.add_argument(
        "--activation-checkpointing", choices=get_args(ActivationCheckpointing), help="what to recompute"
    )
    parser.add_argument(
        "--weight-dtype", choices=DTYPES, default="float32", help="of shards, gradients, optimizer state"
    )
    parser.add_argument("--param-dtype", choices=DTYPES, default="bfloat16", help="of the forward (default bfloat16)")
    parser.add_argument("--reduce-dtype", choices=DTYPES, default="float32", help="of the gradients' reduction")
    parser.add_argument("--optimizer", choices=get_args(OptimizerName), default="adamw", help="default adamw (foreach)")
    parser.add_argument("--attention", choices=get_args(Attention), default="flash", help="cost of attention")
    parser.add_argument("--plan", metavar="MODULE:NAME", help="a plan of your own: a mapping or a function")
    parser.add_argument(
        "--gpu", metavar="NAME|BYTES", help="whether it fits one (h100-80gb, 75GiB), and else the smallest change"
    )
    parser.add_argument("--compare", action="store_true", help="every way to read the lm_head, side by side")
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead of text")
    parser.add_argument("--revision", help="branch, tag or commit of a model on the Hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run the code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """0 where there is a prediction, and it fits the GPU if one was asked about; 1 where it does not; 2 refused."""
    from rl_parallel_plans.forecast.memory import forecast
    from rl_parallel_plans.forecast.report import memory_table

    try:
        options = _options(arguments)
        reports = forecast(
            arguments.model,
            options,
            gpu=arguments.gpu,
            revision=arguments.revision,
            trust_remote_code=arguments.trust_remote_code,
        )
    except PlanError as refusal:
        if arguments.json:
            print(json.dumps({"refused": str(refusal)}))
        raise
    answers = [report.fit.fits for report in reports if report.fit is not None]
    fits = all(answers) if arguments.pp > 1 else any(answers)  # every rank of a pipeline; one way to read the lm_head
    exit_code = int(bool(answers) and not fits)
    if arguments.json:
        several = arguments.compare or arguments.pp > 1
        print(json.dumps([report.as_dict() for report in reports]) if several else reports[0].json())
        return exit_code
    shown = reports[-1]
    if arguments.pp > 1:
        print(memory_table({f"pipeline rank {option.pp_rank}": r for option, r in zip(options, reports, strict=True)}))
        print()
        shown = max(reports, key=lambda report: report.peak.num_bytes)
    elif arguments.compare:
        print(memory_table({option.lm_head: report for option, report in zip(options, reports, strict=True)}))
        print()
    print(shown.text())
    return exit_code


def _options(arguments: argparse.Namespace) -> list[MemoryOptions]:
    given = vars(arguments) | {"custom": arguments.plan}
    given |= {name: getattr(torch, given[name]) for name in ("weight_dtype", "param_dtype", "reduce_dtype")}
    asked = MemoryOptions(**{each.name: given[each.name] for each in fields(MemoryOptions) if each.name in given})
    if arguments.compare and arguments.pp > 1:
        raise PlanError("--compare and --pp each show several predictions side by side: pass one of --compare and --pp")
    if arguments.compare:
        return [replace(asked, lm_head=way) for way in get_args(LmHead)]
    return [replace(asked, pp_rank=rank) for rank in range(arguments.pp)]

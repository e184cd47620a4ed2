"""`memory`: the peak memory of a training step on each rank, before anything is loaded or started.

A model in hand is predicted in this process, which must have no process group. A configuration (a folder, a
config.json, a name on the Hub) is predicted in another interpreter: one JSON request on its stdin, one line of JSON
from it. That keeps the caller's process free of a process group, of transformers and of everything that DTensor
remembers.
"""

import copy
import dataclasses
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast.fake import fake_process_group
from rl_parallel_plans.forecast.fit import fit, gpu_bytes
from rl_parallel_plans.forecast.options import (
    Attention,
    LmHead,
    Loss,
    MakeOptimizer,
    MemoryOptions,
    OptimizerName,
    options_from_dict,
)
from rl_parallel_plans.forecast.report import MemoryReport, phase_peaks, report_from_dict
from rl_parallel_plans.pipeline.schedule import Schedule
from rl_parallel_plans.pipeline.stages import boundary_of, split_stages
from rl_parallel_plans.plan.registry import CustomPlan
from rl_parallel_plans.sharding.activation_checkpointing import ActivationCheckpointing


def memory(
    model: nn.Module | str | Path,
    *,
    batch_size: int,
    sequence_length: int,
    tp: int = 1,
    dp: int = 1,
    sequence_parallel: bool = False,
    lm_head: LmHead = "linear_logp",
    loss: Loss | None = None,
    activation_checkpointing: ActivationCheckpointing | None = None,
    weight_dtype: torch.dtype = torch.float32,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = torch.float32,
    optimizer: OptimizerName | MakeOptimizer = "adamw",
    attention: Attention = "flash",
    custom: CustomPlan | None = None,
    pp: int = 1,
    pp_rank: int = 0,
    microbatches: int | None = None,
    schedule: Schedule = "1f1b",
    gpu: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> MemoryReport:
    """Predict the bytes alive on one rank in each phase of a training step: `plan_for`, `parallelize`, one step.

    model: an nn.Module, best on the meta device; it is copied without its weights and not changed. Or what a model is
        made from, as for `rl_parallel_plans.model_source.read_config`: needs transformers.
    The options from batch_size to schedule: the fields of `rl_parallel_plans.forecast.options.MemoryOptions`.
    gpu: each rank's GPU by name ("h100-80gb") or by its bytes ("75GiB"): `report.fit` says whether the step fits, and
        if not, the smallest change that does, in search of which up to some twenty further steps are predicted.
    revision, trust_remote_code: for a model that is no nn.Module.

    Counted are the storages of rank 0, whose shards are the largest; in a pipeline those of the first of the ranks at
    `pp_rank`. Not counted: the CUDA context, NCCL's buffers, workspace inside kernels (but for attention's), what the
    allocator rounds up and fragments.

    Raises PlanError for an option that does not exist or does not fit, every problem of the plan with the model,
    a model under DTensor already, a forward that depends on the numbers in a tensor, and, with an nn.Module, in a
    process that has a process group.
    """
    values = dict(locals())
    options = MemoryOptions(**{field.name: values[field.name] for field in dataclasses.fields(MemoryOptions)})
    return forecast(model, [options], gpu=gpu, revision=revision, trust_remote_code=trust_remote_code)[0]


def forecast(
    model: nn.Module | str | Path,
    options: Sequence[MemoryOptions],
    *,
    gpu: str | int | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> list[MemoryReport]:
    """A report for each of `options`; if there is one of them, also what to change so that it fits the GPU."""
    if gpu is not None:
        gpu_bytes(gpu)  # an unknown name is refused before the work
    if not isinstance(model, nn.Module):
        return _in_another_process(model, options, gpu=gpu, revision=revision, trust_remote_code=trust_remote_code)
    reports = []
    for each in options:
        report = _predict(model, each)
        if gpu is not None:
            lasting = report.phase("between steps").num_bytes
            search = (lambda changed: _predict(model, changed).peak.num_bytes) if len(options) == 1 else None
            found = fit(each, gpu, peak=report.peak.num_bytes, lasting=lasting, predict=search)
            report = dataclasses.replace(report, fit=found)
        reports.append(report)
    return reports


def _predict(model: nn.Module, options: MemoryOptions) -> MemoryReport:
    from rl_parallel_plans.forecast.step import run_step

    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise PlanError(f"{type(model).__name__} is sharded already: pass the model as it was before")
    if torch.distributed.is_initialized():
        raise PlanError(
            "this process has a process group, and a prediction needs one of its own that sends nothing: call memory "
            "before init_process_group, or pass the model's configuration (a folder, a config.json or a Hub name), "
            "which is predicted in another process"
        )
    # A copy on the meta device, ties and hooks kept; no number is copied.
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("meta")
    without_weights = copy.deepcopy(model, memo)
    # A thread of its own: DTensor remembers per thread what it did over which mesh, and a mesh of real ranks would meet
    # what it did over fake ones: every gradient wrong, without a word.
    each = options.tp * options.dp
    with (
        fake_process_group(options.pp * each, rank=options.pp_rank * each),
        ThreadPoolExecutor(1) as thread,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views changed in place: there are none
        plan, ledger, calls = thread.submit(run_step, without_weights, options).result()
    return MemoryReport(
        model_name=type(model).__name__,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        plan_source=plan.source,
        options=options.as_dict(),
        phases=phase_peaks(ledger),
        assumptions=tuple(_assumptions(model, options, num_attention_calls=len(calls))),
    )


def _assumptions(model: nn.Module, options: MemoryOptions, *, num_attention_calls: int) -> Iterable[str]:
    yield "storages of rank 0 in a step that is not the first; without context, NCCL, kernel workspace, fragmentation"
    yield "gradients are set to None between steps, and the model's output is held until backward has ended"
    if options.attention == "flash" and num_attention_calls:
        yield f"attention costs what fused kernels cost: {num_attention_calls} calls of scaled_dot_product_attention"
    elif options.attention == "flash":
        yield "attention costs what the model's own code costs: it never calls scaled_dot_product_attention"
    else:
        yield "attention costs what it costs on a CPU, with scores [B, heads, S, S] where there is a mask"
    if options.pp == 1:
        return
    per_rank = 2 if options.schedule == "interleaved_1f1b" else 1
    for stage in split_stages(model, options.pp * per_rank)[options.pp_rank :: options.pp]:
        info = boundary_of(stage).info
        yield f"pipeline rank {options.pp_rank} holds stage {info.index} of {info.num_stages}: {info}"
    count = options.microbatches or 2 * options.pp
    yield f"{options.schedule} with {count} microbatches: forwards and backwards take turns, so that they are one phase"


def _in_another_process(source: str | Path, options: Sequence[MemoryOptions], **request: Any) -> list[MemoryReport]:
    for each in options:
        for name in ("loss", "optimizer", "custom"):
            value = getattr(each, name)
            if value is not None and not isinstance(value, str):
                raise PlanError(
                    f"{name} is a {type(value).__name__}, which another process cannot be given: pass the model itself "
                    "(rl_parallel_plans.model_source.build), or a plan by its import path"
                )
    request |= {"source": str(source), "options": [each.as_dict() for each in options]}
    paths = [os.environ.get("PYTHONPATH", ""), *sys.path]
    child = subprocess.run(  # noqa: S603 - this interpreter, this package
        [sys.executable, "-c", f"from {__name__} import answer_request; answer_request()"],
        input=json.dumps(request),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
        check=False,
    )
    if child.returncode or not child.stdout:
        raise RuntimeError(f"the process that predicts ended with status {child.returncode}:\n{child.stderr[-4000:]}")
    answer = json.loads(child.stdout.splitlines()[-1])
    if "refused" in answer:
        raise PlanError(answer["refused"])
    return [report_from_dict(report) for report in answer["reports"]]


def answer_request() -> None:
    """Answer the request on stdin; nothing else reaches stdout."""
    from rl_parallel_plans.model_source import build, read_config

    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    request = json.load(sys.stdin)
    trust = request["trust_remote_code"]
    try:
        config = read_config(request["source"], revision=request["revision"], trust_remote_code=trust)
        model = build(config, trust_remote_code=trust)
        options = [options_from_dict(each) for each in request["options"]]
        answer: dict[str, Any] = {"reports": [each.as_dict() for each in forecast(model, options, gpu=request["gpu"])]}
    except PlanError as refusal:
        answer = {"refused": str(refusal)}
    stdout.write(f"{json.dumps(answer)}\n")
    stdout.flush()

"""Verify a plan: make the model small, shard it on real processes, and compare every number with the unsharded one.

Needs transformers for the model, no GPU, and no `if __name__ == "__main__"`: the processes are a command of this
package. A model takes a few seconds; the first call also starts a server that later calls share.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.model_source import read_config
from rl_parallel_plans.plan.registry import CustomPlan
from rl_parallel_plans.verification.processes import Processes, shared
from rl_parallel_plans.verification.report import (
    Check,
    VerifyReport,
    judge,
    judge_collectives,
    judge_plan,
    where,
)
from rl_parallel_plans.verification.shrink import shrunk
from rl_parallel_plans.verification.tasks import FIRST_WRONG_OUTPUT, Hook, Request, Task, tasks_for

COMPILE_DEADLINE_S = 600.0
"""A compiler takes longer than a step of a small model."""


class Options(TypedDict, total=False):
    """What `verify` takes beside the model and the layout."""

    output_projections: Literal["rowwise", "colwise"]
    """As `plan_for` takes it; "rowwise" by default."""
    custom: CustomPlan | None
    """A plan of your own as `plan_for` takes it; None for the one that `plan_for` makes."""
    apply: Hook | None
    """Function (model, mesh) that shards by itself, or its import path: any other library's way."""
    check_first: bool
    """Refuse a plan that has problems, as `parallelize` does; False runs it as `parallelize_module` would."""
    shrink: bool
    """Make the configuration small first; True by default."""
    full_size: bool
    """Also check, on the meta device, whether the plan fits the model before it was made small; True by default."""
    logp: Hook | None
    """Function (logits, targets) in the place of `get_logprobs_from_vocab_parallel_logits`."""
    grad_norm: Hook | None
    """Function (parameters) in the place of `get_grad_norm`."""
    clip: Hook | None
    """Function (parameters, max_norm, total_norm) in the place of `clip_grad_by_total_norm_`."""
    compile: str | None
    """Also compile each layer with this backend of torch.compile ("aot_eager", "inductor"); None does not."""
    only: Sequence[str]
    """Names of tasks, of `tasks_for`; all by default."""
    deadline_s: float
    """Seconds that a task may take before its ranks are taken to wait for one another; 60 by default."""
    revision: str | None
    """Branch, tag or commit of a model on the Hub."""
    trust_remote_code: bool
    """Run the code that comes with the model; False by default."""
    processes: Processes | None
    """The server to use; None for the one that this process shares."""


def verify(
    model: Any, *, tp: int = 2, dp: int = 1, pp: int = 1, sequence_parallel: bool = False, **options: Unpack[Options]
) -> VerifyReport:
    """Whether a plan is exact for a model: logits, every gradient, ties, norm, clipping, steps, on pp * tp * dp ranks.

    model: what `explain` takes (a folder, a config.json, a Hub name, a type of model), a `PretrainedConfig`, or a
        model that has one; its weights are not used.
    tp, dp: ranks that a layer is split over, and that FSDP shards over; tp=1 looks at FSDP alone.
    pp: ranks that the layers are split over; above 1 the checks are those of pipeline stages, by every schedule.
    options: see `Options`.

    Never raises for a wrong plan or a refused one: the report says so. Raises PlanError for a model that cannot be read
    and for functions that other processes cannot import.
    """
    started = time.monotonic()
    if unknown := options.keys() - Options.__annotations__.keys():
        raise PlanError(f"verify has no option {sorted(unknown)}: there are {sorted(Options.__annotations__)}")
    config = _config(model, options)
    ranks = (f"pp={pp} x " if pp > 1 else "") + (f"dp={dp} x tp={tp}" if dp > 1 else f"tp={tp}")
    report = VerifyReport(
        model=f"{type(config).__name__.removesuffix('Config')} ({getattr(config, 'model_type', None)})",
        layout=ranks + (", sequence parallel" if sequence_parallel else ""),
        source="",
        checks=(),
        versions=f"torch {_release('torch')}, transformers {_release('transformers')}",
    )
    try:
        request = _request(config, options, tp=tp, dp=dp, pp=pp, sequence_parallel=sequence_parallel)
    except PlanError as refusal:
        return replace(report, refused=str(refusal), seconds=time.monotonic() - started)
    server = options.get("processes") or shared()
    report = _with_answer(report, request, server.answer(request))
    if pp == 1 and any(check.name.endswith("logits") and check.verdict == "WRONG" for check in report.checks):
        again = replace(request, tasks=(FIRST_WRONG_OUTPUT,), full=None)
        checks = _with_answer(report, again, server.answer(again)).checks
        further = [check for check in checks if check.name == FIRST_WRONG_OUTPUT.name]
        report = replace(report, checks=(*report.checks, *further))
    return replace(report, seconds=time.monotonic() - started)


def assert_plan_is_exact(
    model: Any, *, tp: int = 2, dp: int = 1, pp: int = 1, sequence_parallel: bool = False, **options: Unpack[Options]
) -> VerifyReport:
    """`verify` as an assertion, for tests of a plan: AssertionError with the whole report if it is not exact."""
    report = verify(model, tp=tp, dp=dp, pp=pp, sequence_parallel=sequence_parallel, **options)
    if not report.ok:
        raise AssertionError(f"the plan is not exact\n{report.text()}")
    return report


def _config(model: Any, options: Options) -> Any:
    if isinstance(model, nn.Module):
        if (config := getattr(model, "config", None)) is None:
            raise PlanError(f"{type(model).__name__} has no config to build a small one from: pass a configuration")
        return config
    if isinstance(model, str | Path):
        trust = options.get("trust_remote_code", False)
        return read_config(model, revision=options.get("revision"), trust_remote_code=trust)
    if not hasattr(model, "to_dict"):
        raise PlanError(f"{model!r} is a {type(model).__name__}: pass a name, a path, a configuration or a model")
    return model


def _release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _request(config: Any, options: Options, *, tp: int, dp: int, pp: int, sequence_parallel: bool) -> Request:
    if pp > 1 and (wrong := [name for name in ("apply", "grad_norm", "clip") if options.get(name) is not None]):
        raise PlanError(f"{', '.join(wrong)} has no meaning with pp={pp}: a pipeline shards, sums and clips by itself")
    tasks = tasks_for(tp=tp, dp=dp, pp=pp, images=getattr(config, "vision_config", None) is not None)
    names = [task.name for task in tasks]
    only = options.get("only") or names
    if unknown := [name for name in only if name not in names]:
        raise PlanError(f"{unknown} are no tasks at tp={tp}, dp={dp}: there are {names}")
    tasks = tuple(task for task in tasks if task.name in only)
    if (backend := options.get("compile")) is not None:
        tasks = (*tasks, Task(name=f"layers compiled with {backend}", backend=backend))
        options = {"deadline_s": COMPILE_DEADLINE_S, **options}
    shrink = options.get("shrink", True)
    variants = dict.fromkeys(task.variant for task in tasks)
    passed_on: dict[str, Any] = {name: value for name, value in options.items() if name in Request.__annotations__}
    return Request(
        configs={name: _variant(config, name, tp=tp, pp=pp) if shrink else (config,) for name in variants},
        full=config if shrink and options.get("full_size", True) else None,
        tp=tp,
        dp=dp,
        pp=pp,
        tasks=tasks,
        sequence_parallel=sequence_parallel,
        **passed_on,
    )


def _variant(config: Any, name: str, *, tp: int, pp: int) -> tuple[Any, ...]:
    """The small configurations of a variant, the preferred first. PlanError if their class accepts none."""
    # Each rank of a pipeline has two stages in turn, and each stage has a layer.
    extra_layers = 2 * pp if pp > 1 else int(name == "deeper")
    changes: list[dict[str, Any]] = [{}, {"of_each": 2}]
    vocabulary: dict[str, Any] = {}
    if name == "uneven":
        vocabulary = {"vocabulary": 129}
        changes.insert(0, {"tied": not getattr(config, "tie_word_embeddings", False)})  # not every class can tie
    accepted = []
    for change in changes:
        try:
            accepted.append(shrunk(config, tp=tp, extra_layers=extra_layers, **vocabulary, **change))
        except PlanError as error:
            refusal = error
    if not accepted:
        raise refusal
    return tuple(accepted)


def _with_answer(report: VerifyReport, request: Request, answer: dict[str, Any]) -> VerifyReport:
    if "failed" in answer:
        if answer.get("refused"):
            reason = answer["failed"].partition(": ")[2]
            return replace(report, refused=reason, unusable=answer.get("unusable", False))
        line = f"{answer['failed']} {where(answer.get('traceback', ''))}".strip()
        failed = Check(name="before sharding", verdict="WRONG", detail="nothing ran", culprits=(line[:1500],))
        return replace(report, checks=(failed,))
    return replace(
        report,
        model=f"{answer['model']} ({report.model.split('(')[-1][:-1]}), small: {answer['parameters']:,} parameters",
        source=answer["source"],
        checks=(*judge_plan(answer), *judge(request, answer["facts"]), *judge_collectives(answer)),
    )


# -- The command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `rl-parallel-plans verify`, whose names are those of `verify`."""
    add = parser.add_argument
    add("model", help="folder, config.json, Hub name, or a type of model such as qwen3; no weights are read")
    add("--tp", type=_ranks, default=2, metavar="N", help="ranks that a layer is split over (default 2)")
    add("--dp", type=_ranks, default=1, metavar="N", help="ranks that FSDP shards over (default 1)")
    add("--pp", type=_ranks, default=1, metavar="N", help="ranks that layers are split over (default 1)")
    add("--sequence-parallel", action="store_true", help="cut the residual stream along the sequence")
    add("--output-projections", choices=("rowwise", "colwise"), default="rowwise", help="see explain")
    add("--plan", dest="custom", metavar="MODULE:NAME", help="a plan of your own: a mapping or a function")
    add("--apply", metavar="MODULE:NAME", help="a function (model, mesh) that shards by itself")
    force = "run a plan that is refused, as parallelize_module would"
    add("--force", dest="check_first", action="store_false", help=force)
    add("--no-shrink", dest="shrink", action="store_false", help="the configuration is small already")
    compiled = "also compile each layer with torch.compile, by this backend (default inductor; aot_eager is faster)"
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help=compiled)
    add("--only", metavar="TASK", action="append", default=[], help="one task; may be given again")
    add("--json", action="store_true", help="end with one line of JSON instead of a table")
    add("--revision", help="branch, tag or commit of a model on the Hub")
    add("--trust-remote-code", action="store_true", help="run the code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; returns 0 for an exact plan, 1 for one that is not, 2 for a refused one."""
    options = dict(vars(arguments))
    as_json = options.pop("json")
    try:
        report = verify(**options)
    except PlanError as refusal:
        print(f"verify: {refusal}", file=sys.stderr)
        return 2
    print(report.json() if as_json else report.text())
    return report.exit_code


def _ranks(text: str) -> int:
    ranks = int(text)
    if ranks < 1:
        raise argparse.ArgumentTypeError(f"{ranks} is no number of ranks: it must be at least 1")
    return ranks

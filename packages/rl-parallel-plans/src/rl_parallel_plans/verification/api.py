"""Verify a plan: make the model small, shard it on real processes, and compare every number with the unsharded one.

Needs transformers for the model, no GPU, and no `if __name__ == "__main__"`: the processes are a command of this
package. A few seconds a model; the first call also starts a server that later calls share.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

from torch import nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.plan.registry import CustomPlan
from rl_parallel_plans.verification.judge import judged, judged_collectives, judged_plan, where
from rl_parallel_plans.verification.pipeline import tasks_for_pipeline
from rl_parallel_plans.verification.processes import Processes, shared
from rl_parallel_plans.verification.question import COLLECTIVES, COLLECTIVES_DEEPER, Question, Task
from rl_parallel_plans.verification.report import Check, VerifyReport
from rl_parallel_plans.verification.shrink import shrunk

Hook = Callable[..., Any] | str


def tasks_for(*, tp: int, dp: int, images: bool = False) -> tuple[Task, ...]:
    """What is measured at a layout."""
    odd = 15 if tp <= 2 else 4 * tp + 1
    tasks = [
        Task(name="forward and backward", optimize=True),
        Task(name="odd length", length=odd),
        Task(name="left padding", length=17, left_padding=True),
        Task(name="accumulation x3", microbatches=3, rows=1),
        Task(name="frozen parameters", freeze=True),
        Task(name="uneven vocabulary, other tie", variant="uneven", length=17, loss="logp", optimize=False),
        Task(name="linear_logp", length=16, loss="hidden"),
        Task(name="bf16 clipping", only="clip"),
        Task(name="checkpoint round trip", only="checkpoint"),
    ]
    if images:
        tasks.append(Task(name="with an image", image=True))
    if dp == 1 and tp > 1:  # FSDP's collectives would count too
        tasks.append(Task(name=COLLECTIVES, only="count"))
        tasks.append(Task(name=COLLECTIVES_DEEPER, variant="deeper", only="count"))
    if dp > 1:
        deferred = Task(name="accumulation x3, deferred sync", microbatches=3, rows=1, defer=True)
        tasks.insert(4, deferred)
    return tuple(tasks)


class Options(TypedDict, total=False):
    """What `verify` takes beside the model and the layout."""

    output_projections: Literal["rowwise", "colwise"]
    """As `plan_for` takes it; "rowwise" by default."""
    custom: CustomPlan | None
    """A plan of your own as `plan_for` takes it; None for the one that `plan_for` finds."""
    apply: Hook | None
    """Function (model, mesh) that shards by itself, or its import path: any other library's way."""
    check_first: bool
    """Refuse a plan that has problems, as `parallelize` does; False runs it as `parallelize_module` would."""
    shrink: bool
    """Make the configuration small first; True by default."""
    full_size: bool
    """Also look, on the meta device, whether the plan fits the model before it was made small; True by default."""
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
    """Seconds that a task may take before its ranks are said to wait for one another; 60 by default."""
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
    report = VerifyReport(
        model=f"{type(config).__name__.removesuffix('Config')} ({getattr(config, 'model_type', None)})",
        layout=(f"pp={pp} x " if pp > 1 else "")
        + (f"dp={dp} x tp={tp}" if dp > 1 else f"tp={tp}")
        + (", sequence parallel" if sequence_parallel else ""),
        source="",
        checks=(),
        versions=f"torch {_release('torch')}, transformers {_release('transformers')}",
    )
    try:
        question = _question(config, options, tp=tp, dp=dp, pp=pp, sequence_parallel=sequence_parallel)
    except PlanError as refusal:
        return replace(report, refused=str(refusal), seconds=time.monotonic() - started)
    server = options.get("processes") or shared()
    report = _reported(report, question, server.answer(question))
    if pp == 1 and any(check.name.endswith("logits") and check.verdict == "WRONG" for check in report.checks):
        again = replace(question, tasks=(Task(name="where it begins", only="outputs"),), full=None)
        checks = _reported(report, again, server.answer(again)).checks
        report = replace(report, checks=(*report.checks, *(c for c in checks if c.name == "where it begins")))
    return replace(report, seconds=time.monotonic() - started)


def assert_plan_is_exact(
    model: Any, *, tp: int = 2, dp: int = 1, pp: int = 1, sequence_parallel: bool = False, **options: Unpack[Options]
) -> VerifyReport:
    """`verify` as an assertion, for the tests of a plan: AssertionError with the whole report where it is not exact."""
    report = verify(model, tp=tp, dp=dp, pp=pp, sequence_parallel=sequence_parallel, **options)
    if not report.ok:
        raise AssertionError(f"the plan is not exact\n{report.text()}")
    return report


COMPILE_DEADLINE_S = 600.0
"""A compiler takes longer than a step of a small model."""

PASSED_ON = (
    "output_projections",
    "custom",
    "apply",
    "check_first",
    "logp",
    "grad_norm",
    "clip",
    "trust_remote_code",
    "deadline_s",
)


def _question(config: Any, options: Options, *, tp: int, dp: int, pp: int, sequence_parallel: bool) -> Question:
    images = getattr(config, "vision_config", None) is not None
    tasks = tasks_for_pipeline(pp=pp, tp=tp) if pp > 1 else tasks_for(tp=tp, dp=dp, images=images)
    only = options.get("only") or ()
    if pp > 1 and (wrong := [name for name in ("apply", "grad_norm", "clip") if options.get(name) is not None]):
        raise PlanError(f"{', '.join(wrong)} has no meaning with pp={pp}: a pipeline shards, sums and clips by itself")
    if unknown := [name for name in only if name not in {task.name for task in tasks}]:
        known = [task.name for task in tasks]
        raise PlanError(f"{unknown} are no tasks at tp={tp}, dp={dp}: there are {known}")
    tasks = tuple(task for task in tasks if not only or task.name in only)
    if (backend := options.get("compile")) is not None:
        tasks = (*tasks, Task(name=f"layers compiled with {backend}", backend=backend))
        options = {"deadline_s": COMPILE_DEADLINE_S, **options}
    shrink = options.get("shrink", True)
    passed_on: dict[str, Any] = {name: options[name] for name in PASSED_ON if name in options}  # type: ignore[literal-required]
    return Question(
        configs=_variants(config, tasks, tp=tp, extra_layers=2 * pp if pp > 1 else 0, shrink=shrink),
        full=config if shrink and options.get("full_size", True) else None,
        tp=tp,
        dp=dp,
        pp=pp,
        tasks=tasks,
        sequence_parallel=sequence_parallel,
        **passed_on,
    )


def _reported(report: VerifyReport, question: Question, answer: dict[str, Any]) -> VerifyReport:
    if "failed" in answer:
        if answer.get("refused"):
            reason = answer["failed"].partition(": ")[2]
            return replace(report, refused=reason, unusable=answer.get("unusable", False))
        said = f"{answer['failed']} {where(answer.get('traceback', ''))}".strip()
        failed = Check(name="before sharding", verdict="WRONG", detail="nothing ran", culprits=(said[:1500],))
        return replace(report, checks=(failed,))
    return replace(
        report,
        model=f"{answer['model']} ({report.model.split('(')[-1][:-1]}), small: {answer['parameters']:,} parameters",
        source=answer["source"],
        checks=(*judged_plan(answer), *judged(question, answer["facts"]), *judged_collectives(answer)),
    )


def _variants(config: Any, tasks: Sequence[Task], *, tp: int, extra_layers: int, shrink: bool) -> dict[str, Any]:
    """The configurations to try for each variant that a task runs."""
    if not shrink:
        return {task.variant: (config,) for task in tasks}
    variants: dict[str, Any] = {}
    for name in dict.fromkeys(task.variant for task in tasks):
        changes: dict[str, Any] = {"vocabulary": 129} if name == "uneven" else {}
        tries: list[dict[str, Any]] = [{}, {"of_each": 2}]
        if name == "uneven":  # not every class can tie
            tries = [{"tied": not _ties(config)}, *tries]
        if name == "deeper":
            tries = [{**each, "extra_layers": 1} for each in tries]
        if extra_layers:  # each rank of a pipeline has two stages in turn, and each of them a layer
            tries = [{**each, "extra_layers": extra_layers} for each in tries]
        variants[name] = _those_accepted(config, [{"tp": tp, **changes, **each} for each in tries])
    return variants


def _those_accepted(config: Any, tries: Sequence[dict[str, Any]]) -> tuple[Any, ...]:
    """The small configurations that their class accepts; PlanError where it accepts none."""
    accepted, refusals = [], []
    for each in tries:
        try:
            accepted.append(shrunk(config, **each))
        except PlanError as refusal:
            refusals.append(refusal)
    if not accepted:
        raise refusals[-1]
    return tuple(accepted)


def _ties(config: Any) -> bool:
    return bool(getattr(config, "tie_word_embeddings", False))


def _config(model: Any, options: Options) -> Any:
    if isinstance(model, nn.Module):
        config: Any = getattr(model, "config", None)
        if config is None:
            raise PlanError(f"{type(model).__name__} has no config to build a small one from: pass a configuration")
        return config
    if isinstance(model, str | Path):
        from rl_parallel_plans.model_source import read_config

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

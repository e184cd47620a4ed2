"""One question, answered: build the models, compute the truth, fork ranks, and collect what they measured.

Runs in a process of its own. Ranks are forked from it with models and truths in memory. A rank that raises, aborts or
hangs costs its task and no other: the error of the rank that failed first is kept, and the tasks that are left run on
new ranks.
"""

import copy
import pickle
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from rl_parallel_plans.errors import PlanError, UnusableModelError
from rl_parallel_plans.verification.forked import Forked
from rl_parallel_plans.verification.pickling import unpacked
from rl_parallel_plans.verification.question import Question, Task
from rl_parallel_plans.verification.subject import Batch, Truth, build, draw, rounding_noise, run_truth

if TYPE_CHECKING:
    from rl_parallel_plans.plan.parallel_plan import ParallelPlan

Facts = dict[str, Any]

BAR = 1e-5
"""Relative error above which it is asked whether the model itself rounds so."""
SURELY_WRONG = 1e-2
"""Relative error that no rounding makes."""


class Subject:
    """The model of one variant, with the batch and the truth of each task."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.batches: dict[str, Batch] = {}
        self.truths: dict[str, Truth] = {}


def answer(data: bytes, home: Path, lifeline: int) -> dict[str, Any]:
    """Facts about every task, and about the question as a whole. Raises PlanError where the plan is refused."""
    _quiet()
    question: Question = unpacked(data)
    subjects, skipped = _built(question)
    plan = _plan(question, subjects)
    skipped |= _prepare(question, subjects)
    tasks = [task for task in question.tasks if task.name not in skipped]
    facts: dict[str, Facts] = {name: {"skipped": reason} for name, reason in skipped.items()}
    number = 0
    while tasks:
        done = _round(question, tasks, subjects=subjects, home=home / f"round{number}", lifeline=lifeline)
        facts.update(done)
        tasks = [task for task in tasks if task.name not in done]
        number += 1
    for task in question.tasks:
        if task.variant in subjects:
            _add_noise(task, facts[task.name], subjects[task.variant])
    first = subjects[next(iter(subjects))]
    return {
        **plan,
        "facts": {task.name: facts[task.name] for task in question.tasks},
        "model": type(first.model).__name__,
        "parameters": sum(p.numel() for p in first.model.parameters()),
    }


def _built(question: Question) -> tuple[dict[str, Subject], dict[str, str]]:
    """The model of each variant, and the tasks of those that transformers cannot build, with the reason.

    Raises UnusableModelError where the first variant, the model as it is, cannot be built.
    """
    subjects: dict[str, Subject] = {}
    skipped: dict[str, str] = {}
    for variant in question.configs:
        try:
            subjects[variant] = Subject(build(question, variant))
        except UnusableModelError as reason:
            if not subjects:
                raise
            skipped |= {task.name: str(reason)[:300] for task in question.tasks if task.variant == variant}
    return subjects, skipped


def _quiet() -> None:
    import logging
    import warnings

    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)


def _plan(question: Question, subjects: dict[str, Subject]) -> dict[str, Any]:
    """What the plan says of itself; its problems are raised where they are not to be overridden."""
    if question.apply is not None:
        name = (
            question.apply if isinstance(question.apply, str) else getattr(question.apply, "__qualname__", "function")
        )
        return {"source": f"applied by {name}", "problems": []}
    from rl_parallel_plans.verification.sharded import plan_of

    plans = {variant: plan_of(question, subject.model) for variant, subject in subjects.items()}
    variant, first = next(iter(plans.items()))
    if question.check_first:
        for name, plan in plans.items():
            plan.check(subjects[name].model)
    if question.pp > 1:
        from rl_parallel_plans.pipeline.stages import split_stages

        for subject in subjects.values():
            split_stages(subject.model, 2 * question.pp)
    return {
        "source": first.source,
        "problems": [str(problem) for problem in first.problems],
        "told": {name: _told(plan, subjects[name].model) for name, plan in plans.items()},
        "wrapped": _wrapped(question, subjects[variant].model, first) if first.styles else None,
        "full_size": _full_size(question),
    }


def _told(plan: "ParallelPlan", model: nn.Module) -> dict[str, Any]:
    """How often the plan's styles say that each collective runs, and which of them do not say."""
    from rl_parallel_plans.plan.rows import collective_rows

    told: dict[str, Any] = {"forward": {}, "backward": {}, "untold": []}
    for row in collective_rows(model, plan.styles, tp=plan.tp):
        for way, counts in (("forward", row.forward), ("backward", row.backward)):
            for kind, count in counts.items():
                told[way][kind] = told[way].get(kind, 0) + row.count * count
        told["untold"] += row.untold
    return told


def _wrapped(question: Question, model: nn.Module, plan: "ParallelPlan") -> list[str]:
    """Where the plan of a subclass with the same name differs: mixins and FSDP make such classes."""
    from rl_parallel_plans.verification.sharded import plan_of

    cls = type(model)
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    wrapped = copy.copy(model)
    wrapped.__class__ = type(cls.__name__, (_Mixin, cls), names)
    try:
        other = plan_of(question, wrapped)
    except PlanError as refusal:
        return [f"no plan: {refusal}"]
    if other.source != plan.source:
        return [f"the plan is then from {other.source}"]
    return [
        f"{pattern}: {other.styles.get(pattern)!r}"
        for pattern, style in plan.styles.items()
        if repr(other.styles.get(pattern)) != repr(style) and type(style).__repr__ is not object.__repr__
    ] + [f"{pattern} has no style" for pattern in plan.styles if pattern not in other.styles]


class _Mixin:
    """What a library mixes into a model class."""


def _full_size(question: Question) -> list[str] | str | None:
    """Problems of the plan with the model as it is, on the meta device.

    None where that was not asked, and the reason where transformers cannot build that model: no finding about the plan.
    """
    if question.full is None:
        return None
    from rl_parallel_plans.model_source import build as build_model
    from rl_parallel_plans.verification.sharded import plan_of

    try:
        model = build_model(question.full, trust_remote_code=question.trust_remote_code)
        plan = plan_of(question, model)
    except UnusableModelError as reason:
        return str(reason)
    except PlanError as refusal:
        return [str(refusal)]
    return [str(problem) for problem in plan.problems if problem.kind not in plan.allow]


def _prepare(question: Question, subjects: dict[str, Subject]) -> dict[str, str]:
    """Batches and truths, shared between tasks with the same inputs; tasks that the model itself cannot do."""
    from rl_parallel_plans.verification.sharded import reference_refusal

    skipped = {}
    same: dict[tuple[Any, ...], str] = {}
    for task in question.tasks:
        if task.only in {"clip", "count", "checkpoint"} or task.variant not in subjects:
            continue
        subject = subjects[task.variant]
        key = (task.variant, task.length, task.rows, task.microbatches, task.left_padding, task.image)
        try:
            if key in same:
                subject.batches[task.name] = subject.batches[same[key]]
                subject.truths[task.name] = subject.truths[same[key]]
            else:
                subject.batches[task.name] = draw(subject.model, task, dp=question.dp)
                subject.truths[task.name] = run_truth(subject.model, subject.batches[task.name])
                same[key] = task.name
        except Exception as error:  # whatever a model of somebody else raises
            if task is question.tasks[0]:
                raise UnusableModelError(
                    f"the small {type(subject.model).__name__} does not run without sharding either, so that there is "
                    f"nothing to compare with: {type(error).__name__}: {' '.join(str(error).split())[:400]}"
                ) from error
            text = " ".join(str(error).split())[:200]
            skipped[task.name] = f"the unsharded model cannot do this: {type(error).__name__}: {text}"
            continue
        if (reason := reference_refusal(subject.model, task, subject.batches[task.name])) is not None:
            skipped[task.name] = reason
    return skipped


def _add_noise(task: Task, facts: Facts, subject: Subject) -> None:
    """Where something is off by little, measure how far the unsharded model itself is from one rounding to the next."""
    errors = [facts.get("logits", 0.0), *(row["error"] for row in facts.get("rows", ()))]
    if not any(BAR < error < SURELY_WRONG for error in errors):
        return
    logits, gradients = rounding_noise(subject.model, subject.batches[task.name], subject.truths[task.name])
    facts["logits_noise"] = logits
    for row in facts["rows"]:
        row["noise"] = gradients.get(row["name"], 0.0)


def _round(
    question: Question, tasks: list[Task], *, subjects: dict[str, Subject], home: Path, lifeline: int
) -> dict[str, Facts]:
    """Fork one process a rank and let them do `tasks` in order, until all are done or one fails."""
    from rl_parallel_plans.verification.ranks import run_rank

    home.mkdir()
    processes = [
        Forked(
            lambda rank=rank: run_rank(question, tasks, subjects=subjects, rank=rank, home=home),  # type: ignore[misc]
            log=home / f"{rank}.log",
            lifeline=lifeline,
        )
        for rank in range(question.world)
    ]
    failure = _wait(processes, question.deadline_s, home)
    done = {}
    for task in tasks:
        path = home / f"{task.name}.facts"
        if not path.exists():
            break
        done[task.name] = pickle.loads(path.read_bytes())  # noqa: S301 - from a process forked here
    if failure is not None:
        unfinished = next((task for task in tasks if task.name not in done), tasks[-1])
        done[unfinished.name] = {"failed": failure}
    return done


def _wait(processes: list[Forked], deadline_s: float, home: Path) -> str | None:
    """None where all ended well; else what the first to fail said. Nothing is left running."""
    running = dict(enumerate(processes))
    deadline, progress, ended = time.monotonic() + deadline_s, -1, {}
    while running:
        for rank, process in list(running.items()):
            if (status := process.poll()) is not None:
                del running[rank]
                if status:
                    ended[rank] = status
        if ended or time.monotonic() > deadline:
            break
        if (finished := len(list(home.glob("*.facts")))) > progress:
            progress, deadline = finished, time.monotonic() + deadline_s
        time.sleep(0.004)
    if not running and not ended:
        return None
    time.sleep(0.2)  # others may be writing why they failed first
    for process in running.values():
        process.kill()
    return _first_failure(processes, ended, home=home, deadline_s=deadline_s)


def _first_failure(processes: list[Forked], ended: dict[int, str], *, home: Path, deadline_s: float) -> str:
    """The error that came first; those that follow from it (a peer that hung up) are not the cause."""
    errors = sorted(home.glob("*.error"), key=lambda path: path.stat().st_mtime_ns)
    aborted = [rank for rank, status in ended.items() if status.startswith("signal")]
    if aborted:
        rank = aborted[0]
        return f"rank {rank} was ended by {ended[rank]}: {_last_words(processes[rank].tail())}"
    if errors:
        return f"rank {errors[0].stem}: {errors[0].read_text()}"
    if ended:
        rank, status = next(iter(ended.items()))
        return f"rank {rank} ended with {status}: {_last_words(processes[rank].tail())}"
    return f"no rank made progress for {deadline_s:.0f} s: the ranks wait for one another"


def _last_words(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "what():" in line or "Enforce" in line or "Error" in line]
    return " ".join((telling or lines)[-2:])[-600:] or "it said nothing"

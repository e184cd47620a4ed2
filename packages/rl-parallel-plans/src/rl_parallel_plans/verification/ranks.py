"""What one rank does for each task: shard a copy of the model, run it, and measure it against the truth.

Every rank compares what it holds itself; rank 0 collects all whole gradients and writes what was found. Nothing is
judged here.
"""

import copy
import os
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.structure import output_head
from rl_parallel_plans.verification import optimize
from rl_parallel_plans.verification.checkpoints import round_trip
from rl_parallel_plans.verification.communication import collectives
from rl_parallel_plans.verification.compiled import compile_layers, compiler_facts
from rl_parallel_plans.verification.gradients import collected, whole
from rl_parallel_plans.verification.outputs import differing_outputs
from rl_parallel_plans.verification.pipeline import merged_pipeline, pipeline_facts
from rl_parallel_plans.verification.question import Question, Task
from rl_parallel_plans.verification.sharded import hidden_logp, logits_logp, shard
from rl_parallel_plans.verification.subject import Batch, Truth, forward, relative_error, tie_groups, token_logp

if TYPE_CHECKING:
    from rl_parallel_plans.verification.session import Subject

Facts = dict[str, Any]


def run_rank(
    question: Question, tasks: Sequence[Task], *, subjects: "Mapping[str, Subject]", rank: int, home: Path
) -> None:
    """All tasks in order; rank 0 writes the facts of each when every rank has finished it."""
    timeout = timedelta(seconds=question.deadline_s)
    store = dist.FileStore(str(home / "rendezvous"), question.world)  # type: ignore[attr-defined]
    if sys.platform == "linux":  # a host's name may resolve to nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=question.world, timeout=timeout)
    try:
        for task in tasks:
            facts = _facts(question, task, subjects[task.variant])
            everything: list[Any] = [None] * question.world
            dist.all_gather_object(everything, facts)
            if rank == 0:
                path = home / f"{task.name}.facts"
                path.with_suffix(".part").write_bytes(
                    pickle.dumps(merged_pipeline(everything) if question.pp > 1 else _merged(everything))
                )
                path.with_suffix(".part").rename(path)
            dist.barrier()
    except Exception:
        (home / f"{rank}.error").write_text(traceback.format_exc())
        raise
    dist.destroy_process_group()


def _facts(question: Question, task: Task, subject: "Subject") -> Facts:
    if question.pp > 1:
        return pipeline_facts(
            question,
            task,
            model=subject.model,
            batch=subject.batches[task.name],
            truth=subject.truths[task.name],
            frozen=_frozen(subject.model, freeze=task.freeze),
        )
    if task.only == "clip":
        return optimize.clip_in_bf16(question, subject.model)
    if task.only == "count":
        return collectives(question, subject.model)
    if task.only == "checkpoint":
        return round_trip(question, subject.model)
    if task.only == "outputs":
        return differing_outputs(question, subject.model, subject.batches[task.name])
    return _Run(question, task, subject).facts()


def _merged(everything: Sequence[Facts]) -> Facts:
    """Rank 0's facts, with the worst of what each rank measured for itself."""
    merged = dict(everything[0])
    for name in ("logits", "logp"):
        values = [facts[name] for facts in everything if name in facts]
        if values:
            merged[name], merged[f"{name}_rank"] = max((v, r) for r, v in enumerate(values))
    return merged


class _Run:
    """Forward and backward of one task."""

    def __init__(self, question: Question, task: Task, subject: "Subject") -> None:
        self.question, self.task, self.subject = question, task, subject
        self.batch: Batch = subject.batches[task.name]
        self.truth: Truth = subject.truths[task.name]
        self.model = copy.deepcopy(subject.model)
        self.frozen = _frozen(self.model, freeze=task.freeze)
        for name in self.frozen:
            self.model.get_parameter(name).requires_grad_(False)
        self.ties = tie_groups(self.model)
        self.mesh = shard(question, self.model)
        if task.backend:
            compile_layers(self.model, task.backend)
        self.dp_rank = self.mesh.get_local_rank("dp") if question.dp > 1 else 0
        self.found: Facts = {"logits": 0.0}
        self.extra: dict[str, Tensor] = {}

    def facts(self) -> Facts:
        """What this rank found; collective."""
        self._backward()
        self.found |= {
            "logits_noise": 0.0,
            "margin": self.batch.margin,
            "tied": tie_groups(self.model) == self.ties,
            "ties": self.ties,
            "frozen": len(self.frozen),
            "thawed": sorted(n for n, p in self.model.named_parameters() if p.requires_grad == (n in self.frozen)),
            **collected(self.model, self.truth, question=self.question, frozen=self.frozen),
        }
        if self.task.backend:
            self.found["compiler"] = compiler_facts()
        if self.task.optimize:
            self.found |= optimize.steps(self.question, self.model, reference=self.subject.model, truth=self.truth)
        return self.found

    def _backward(self) -> None:
        batch = self.batch
        loss = 0.0
        for i in range(len(batch.ids)):
            ids, mask, counted = (self._mine(value) for value in (batch.ids[i], batch.masks[i], batch.targets_at(i)))
            assert ids is not None
            assert counted is not None
            if self.task.defer and hasattr(self.model, "set_requires_gradient_sync"):
                self.model.set_requires_gradient_sync(i == len(batch.ids) - 1)  # type: ignore[operator]
            self.extra = {name: value.chunk(self.question.dp)[self.dp_rank] for name, value in batch.extra[i].items()}
            logp = self._logp(ids, mask, truth=self._mine(self.truth.logits[i]), counted=counted)
            part = logp[counted].sum() / -batch.count
            part.backward()  # type: ignore[no-untyped-call]
            loss += part.item()
        self.found["loss"], self.found["true_loss"] = loss, self.truth.loss

    def _mine(self, value: Tensor | None) -> Tensor | None:
        """This data-parallel rank's rows."""
        return None if value is None else value.chunk(self.question.dp)[self.dp_rank]

    def _logp(self, ids: Tensor, mask: Tensor | None, *, truth: Tensor | None, counted: Tensor) -> Tensor:
        assert truth is not None
        if self.task.loss == "hidden":
            logp = _hidden_logp(self.model, ids)
        else:
            logits = forward(self.model, ids, mask, extra=self.extra)
            self.found["placed"] = _placed(logits)
            self.found["shape"] = [list(logits.shape), list(truth.shape)]
            logits = self._with_all_words(logits, truth)
            if logits.shape != truth.shape:
                raise ValueError(f"the sharded model returns logits {list(logits.shape)}, and not {list(truth.shape)}")
            error = _logits_error(whole(logits.detach()), truth, mask)
            self.found["logits"] = max(self.found["logits"], error)
            by_hand = self.task.loss == "logits"
            logp = token_logp(whole(logits), ids) if by_hand else logits_logp(self.question, logits, ids)
        difference = (logp.detach() - token_logp(truth, ids))[counted].abs()
        self.found["logp"] = max(self.found.get("logp", 0.0), difference.max().item())
        self.found["logp_wrong"] = (difference > 1e-3).float().mean().item()
        return logp

    def _with_all_words(self, logits: Tensor, truth: Tensor) -> Tensor:
        """A plain slice of the vocabulary is taken for what it is, so that what else is wrong can be told."""
        if is_dtensor(logits) or logits.shape[-1] == truth.shape[-1] or self.question.tp == 1:
            return logits
        from torch.distributed.tensor import DTensor, Shard

        stride = tuple(truth.stride())
        mesh = self.mesh["tp"]
        return DTensor.from_local(logits, mesh, [Shard(-1)], run_check=False, shape=truth.shape, stride=stride)


def _hidden_logp(model: nn.Module, ids: Tensor) -> Tensor:
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    whole_model: Any = model
    whole_model.verify_logp = hidden_logp.__get__(model)
    if isinstance(model, FSDPModule):
        register_fsdp_forward_method(model, "verify_logp")
    logp: Tensor = whole_model.verify_logp(ids)
    return logp


def _logits_error(found: Tensor, truth: Tensor, mask: Tensor | None) -> float:
    if mask is not None:  # what stands at padding is nobody's business
        found, truth = found[mask.bool()], truth[mask.bool()]
    return relative_error(found, truth)


def _placed(logits: Tensor) -> str:
    if not is_dtensor(logits):
        return "plain"
    (placement,) = logits.placements if len(logits.placements) == 1 else (logits.placements,)
    return "words" if getattr(placement, "dim", None) in {-1, logits.ndim - 1} else str(placement)


def _frozen(model: nn.Module, *, freeze: bool) -> set[str]:
    """What the model itself never trains, such as a router's bias (Afmoe), and to `freeze` every third parameter.

    Tied parameters and the lm_head are not among the latter.
    """
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    if not freeze:
        return frozen
    tied = {name for names in tie_groups(model) for name in names} | {f"{output_head(model)}.weight"}
    return frozen | {name for i, (name, _) in enumerate(model.named_parameters()) if i % 3 == 1 and name not in tied}

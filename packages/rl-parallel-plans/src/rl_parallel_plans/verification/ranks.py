"""What one rank does for each task: shard a copy of the model, run it, and measure how far it is from the truth.

A step (forward, backward, and perhaps an optimizer step) runs on the whole sharded model or on the stages of a
pipeline. Every rank compares what it holds; the rank 0 sends the facts of all. The verdicts are made in `report`.
"""

import copy
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.logp import get_logprobs_from_vocab_parallel_logits
from rl_parallel_plans.sharding.grad_norm import clip_grad_by_total_norm_, get_grad_norm
from rl_parallel_plans.verification import probes
from rl_parallel_plans.verification.gradients import gradient_facts, gradient_row, whole, whole_rows
from rl_parallel_plans.verification.plan_under_test import imported, plan_of, shard
from rl_parallel_plans.verification.reference import (
    Microbatch,
    Subject,
    Truth,
    forward,
    frozen_parameters,
    gradient_scales,
    hidden_logp,
    relative_error,
    tie_groups,
    token_logp,
)
from rl_parallel_plans.verification.tasks import Request, Task

Facts = dict[str, Any]
LARGEST_STEP = 0.1
"""Of any weight in an optimizer step: far above the last bit of any other."""


def run_rank(
    request: Request,
    tasks: Sequence[Task],
    *,
    subjects: Mapping[str, Subject],
    rank: int,
    home: Path,
    send: Callable[[str, Facts], None],
) -> None:
    """Run all tasks in order; rank 0 sends the facts of each when every rank has finished it."""
    if sys.platform == "linux":  # a host's name may resolve to nowhere
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(home / "rendezvous"), request.world)  # type: ignore[attr-defined]
    timeout = timedelta(seconds=request.deadline_s)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=request.world, timeout=timeout)
    for task in tasks:
        subject = subjects[task.variant]
        if task.measure == "clip":
            facts = bf16_clip_facts(request, subject.model)
        elif task.measure == "count":
            facts = probes.collective_facts(request, subject.model)
        elif task.measure == "checkpoint":
            facts = probes.checkpoint_facts(request, subject.model)
        elif task.measure == "outputs":
            facts = probes.output_facts(request, subject.model, subject.truths[task.name].batch)
        else:
            facts = (pipeline_facts if request.pp > 1 else step_facts)(request, task, subject)
        of_all: list[Any] = [None] * request.world
        dist.all_gather_object(of_all, facts)
        if rank == 0:
            send(task.name, merged(of_all))
        dist.barrier()  # no rank fails in the next task before this one's facts are sent
    dist.destroy_process_group()


def merged(of_ranks: Sequence[Facts]) -> Facts:
    """Rank 0's facts, with the worst of what each rank measured for itself, and all parameters of all stages."""
    result = dict(of_ranks[0])
    for name in ("logits", "logp"):
        if values := [(facts[name], rank) for rank, facts in enumerate(of_ranks) if name in facts]:
            result[name], result[f"{name}_rank"] = max(values)
    if "held" not in result:
        return result
    rows: dict[str, dict[str, Any]] = {}
    for row in (row for facts in of_ranks for row in facts["rows"]):
        if not row["error"] <= rows.setdefault(row["name"], row)["error"]:
            rows[row["name"]] = row
    held = {name for facts in of_ranks for name in facts["held"]}
    held |= {result["first_names"].get(name, name) for name in held}
    result["rows"] = list(rows.values())
    result["absent"] = [name for name in result["expected"] if name not in held]
    for name in ("thawed", "drift"):
        result |= {name: sorted({each for facts in of_ranks for each in facts[name]})} if name in result else {}
    for name in ("placed", "shape", "logp_wrong", "optimizer_error"):  # the first three are of the last stage
        result |= next(({name: facts[name]} for facts in of_ranks if name in facts), {})
    if "weights" in result:
        weights = [pair for facts in of_ranks for pair in facts.get("weights", ())]
        result["weights"] = sorted(weights, key=lambda pair: -pair[1])[:4]
    return result


# -- Forward and backward ------------------------------------------------------------------------


def step_facts(request: Request, task: Task, subject: Subject) -> Facts:
    """Forward and backward of the sharded model, and an optimizer step if the task has one. Collective."""
    from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

    truth = subject.truths[task.name]
    model: Any = copy.deepcopy(subject.model)
    frozen = _freeze(model, task)
    ties = tie_groups(model)
    mesh = shard(request, model)
    if task.backend:
        probes.compile_layers(model, task.backend)
    if task.loss == "hidden" and issubclass(type(model), FSDPModule):
        model.hidden_logp = hidden_logp.__get__(model)
        register_fsdp_forward_method(model, "hidden_logp")
    dp_rank = mesh.get_local_rank("dp") if request.dp > 1 else 0
    facts: Facts = {"logits": 0.0, "logits_noise": 0.0, "margin": truth.batch.margin}
    for i, rows in enumerate(_rows_of_rank(request, truth, dp_rank), start=1):
        if task.defer and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(i == len(truth.batch.microbatches))
        logp: Any = _compared_logp(request, task, model, rows=rows, facts=facts, mesh=mesh)
        (logp.sum() / -truth.batch.count).backward()
    facts |= {
        "tied": tie_groups(model) == ties,
        "ties": ties,
        "frozen": len(frozen),
        "thawed": sorted(n for n, p in model.named_parameters() if p.requires_grad == (n in frozen)),
        **gradient_facts(model, truth, request=request, frozen=frozen),
    }
    if task.backend:
        facts["compiler"] = probes.compiler_facts()
    if task.optimize:
        facts |= _optimizer_facts(
            list(model.named_parameters()),
            gather=whole_rows(model),
            reference=dict(subject.model.named_parameters()),
            truth=truth,
            norm=lambda: imported(request.grad_norm or get_grad_norm)(model.parameters()),
            clip=imported(request.clip or clip_grad_by_total_norm_),
        )
        if "optimizer_error" not in facts:
            facts["drift"] = _parameters_that_differ(model)
    return facts


def _freeze(model: nn.Module, task: Task) -> set[str]:
    frozen = frozen_parameters(model, freeze=task.freeze)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    return frozen


def _rows_of_rank(request: Request, truth: Truth, dp_rank: int) -> list[tuple[Microbatch, Tensor]]:
    """This data-parallel rank's rows of each microbatch, and their true logits."""
    return [
        (microbatch.rows_of(dp_rank, request.dp), logits.chunk(request.dp)[dp_rank])
        for microbatch, logits in zip(truth.batch.microbatches, truth.logits, strict=True)
    ]


def _compared_logp(
    request: Request, task: Task, model: Any, *, rows: tuple[Microbatch, Tensor], facts: Facts, mesh: Any
) -> Tensor:
    """Log-probabilities of the tokens that count, as the task computes them; adds their errors to `facts`."""
    microbatch, true = rows
    ids, mask = microbatch.ids, microbatch.mask
    if task.loss == "hidden":
        logp: Tensor = model.hidden_logp(ids) if hasattr(model, "hidden_logp") else hidden_logp(model, ids)
    else:
        logits = forward(model, microbatch)
        facts["shape"] = [list(logits.shape), list(true.shape)]
        facts["placed"] = "plain"
        if is_dtensor(logits):
            (placement,) = logits.placements if len(logits.placements) == 1 else (logits.placements,)
            by_token = getattr(placement, "dim", None) in {-1, logits.ndim - 1}
            facts["placed"] = "vocabulary" if by_token else str(placement)
        elif logits.shape[-1] != true.shape[-1] and request.tp > 1:
            # A plain slice of the vocabulary is one check's verdict; the others go on with what it stands for.
            from torch.distributed.tensor import DTensor, Shard

            stride = tuple(true.stride())
            logits = DTensor.from_local(
                logits, mesh["tp"], [Shard(-1)], run_check=False, shape=true.shape, stride=stride
            )
        if logits.shape != true.shape:
            raise ValueError(f"the sharded model returns logits {list(logits.shape)}, and not {list(true.shape)}")
        seen = slice(None) if mask is None else mask.bool()  # nobody reads logits at padding
        facts["logits"] = max(facts["logits"], relative_error(whole(logits.detach())[seen], true[seen]))
        if task.loss == "logits":
            logp = token_logp(whole(logits), ids)
        else:
            # The last position predicts a token that is not there; any stands in its place, since slicing a DTensor
            # may move it.
            logp = imported(request.logp or get_logprobs_from_vocab_parallel_logits)(logits, ids.roll(-1, dims=1))
            logp = logp[:, :-1]
    logp = logp[microbatch.counted]
    difference = (logp.detach() - token_logp(true, ids)[microbatch.counted]).abs()
    facts["logp"] = max(facts.get("logp", 0.0), difference.max().item())
    facts["logp_wrong"] = (difference > 1e-3).float().mean().item()
    return logp


def pipeline_facts(request: Request, task: Task, subject: Subject) -> Facts:
    """One step of the model as pipeline stages, over all microbatches of the task by one schedule. Collective.

    Logits are compared where they are, in the last stage, and gradients where the parameters are.
    """
    from torch.distributed.device_mesh import init_device_mesh

    from rl_parallel_plans.pipeline.schedule import pipeline_stages
    from rl_parallel_plans.pipeline.stages import boundary_of

    truth = subject.truths[task.name]
    model = copy.deepcopy(subject.model)
    reference = {name: parameter.detach() for name, parameter in subject.model.named_parameters()}
    frozen = _freeze(model, task)
    # A tied parameter has its true gradient under the first of its names.
    first_names = {name: next(n for n in reference if n in names) for names in tie_groups(model) for name in names}
    shape = (request.pp, request.dp, request.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    pipeline = pipeline_stages(model, mesh, plan_of(request, model), schedule=task.schedule, src_data_rank=None)
    facts: Facts = {"logits": 0.0, "logits_noise": 0.0, "margin": truth.batch.margin, "misplaced": {}}

    def loss_of(stage: nn.Module, rows: tuple[Microbatch, Tensor]) -> Tensor:
        return _compared_logp(request, task, stage, rows=rows, facts=facts, mesh=mesh).sum() / -truth.batch.count

    microbatches = _rows_of_rank(request, truth, mesh.get_local_rank("dp"))
    rows, length = microbatches[0][0].ids.shape
    loss = pipeline.step(microbatches, loss_of, shape=(rows, length))
    dist.all_reduce(loss)  # every rank of a pipeline and of tp has the sum of its own rows
    facts |= {"loss": loss.item() / (request.pp * request.tp), "true_loss": truth.loss}
    scales = gradient_scales(truth.gradients)
    gather = whole_rows(*pipeline.stages)
    named = [each for stage in pipeline.stages for each in stage.named_parameters()]
    tied = {name for stage in pipeline.stages for name in boundary_of(stage).info.tied}
    compared = []
    for name, parameter in named:
        first = first_names.get(name, name)
        if first in frozen or (first not in truth.gradients and parameter.grad is None):
            continue
        true = truth.gradients[first]
        if parameter.grad is None:
            row = gradient_row(name, torch.full((1, true.numel()), math.nan), true, scale=scales[first])
            row["diagnosis"] = "it has no gradient"
        else:
            gradient = gather(name, parameter.grad).detach().float().reshape(1, -1)
            row = gradient_row(name, gradient, true, scale=scales[first])
            if name in tied and relative_error(gradient, true.reshape(1, -1)) > 1e-2:
                row["diagnosis"] = "its copies in other stages have the rest of it"
        compared.append(row)
    facts |= {
        "rows": compared,
        "held": [name for name, _ in named],
        "expected": [name for name in truth.gradients if name not in frozen],
        "first_names": first_names,
        "frozen": len(frozen),
        "thawed": [name for name, p in named if p.requires_grad == (first_names.get(name, name) in frozen)],
    }
    if not task.optimize:
        return facts
    facts |= _optimizer_facts(
        named,
        gather=gather,
        reference=reference,
        truth=truth,
        norm=pipeline.grad_norm,
        clip=clip_grad_by_total_norm_,
        first_names=first_names,
    )
    facts["held_norm"] = facts["true_norm"]  # a rank holds the gradients of its stages alone
    copies = {first_names.get(name, name): gather(name, p.detach()) for name, p in named if name in tied}
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, copies)
    shared = sorted({name for each in of_all for name in each})
    same = {name: [each[name] for each in of_all if name in each] for name in shared}
    facts["drift"] = [name for name in shared if any(not torch.equal(same[name][0], each) for each in same[name])]
    facts["ties"] = [[one, *sorted(n for n, f in first_names.items() if f == one and n != one)] for one in shared]
    facts["tied"] = not facts["drift"]
    return facts


# -- What a trainer does with gradients ----------------------------------------------------------


def _norm(tensors: Iterable[Tensor]) -> float:
    norms = [whole(tensor).double().norm() for tensor in tensors]
    return torch.stack(norms).norm().item() if norms else 0.0


def _optimizer_facts(
    named: Sequence[tuple[str, nn.Parameter]],
    *,
    gather: Callable[[str, Tensor], Tensor],
    reference: Mapping[str, Tensor],
    truth: Truth,
    norm: Callable[[], Any],
    clip: Callable[..., Any],
    first_names: Mapping[str, str] | None = None,
) -> Facts:
    """Gradient norm, clipping to half of the true one, and a step of SGD beside the true step; then one of AdamW."""
    first_names = first_names or {}
    parameters = [parameter for _, parameter in named]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    facts: Facts = {"true_norm": _norm(truth.gradients.values()), "held_norm": _norm(gradients)}
    try:
        total_norm = norm()
        facts["norm"] = float(total_norm)
        clip(parameters, facts["true_norm"] / 2, total_norm)
        facts["clipped"] = _norm(gradients) / max(facts["held_norm"], 1e-30)
        largest = max(gradient.abs().max().item() for gradient in truth.gradients.values())
        learning_rate = LARGEST_STEP * 2 / max(largest, 1e-30)
        torch.optim.SGD(parameters, lr=learning_rate).step()
        weights = []
        for name, parameter in named:
            weight = gather(name, parameter.detach())
            first = first_names.get(name, name)
            if first in truth.gradients and weight.shape == truth.gradients[first].shape:
                expected = reference[first].detach() - learning_rate / 2 * truth.gradients[first]
                weights.append((name, (weight - expected).abs().max().item() / LARGEST_STEP))
        facts["weights"] = sorted(weights, key=lambda pair: -pair[1])[:4]
        torch.optim.AdamW(parameters, lr=1e-3, foreach=True).step()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        facts["optimizer_error"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return facts


@torch.no_grad()
def _parameters_that_differ(model: nn.Module) -> list[str]:
    """Names of the parameters that are no longer the same on every rank."""
    values = {name: whole(p.detach()).reshape(-1).float() for name, p in model.named_parameters()}
    low = torch.cat(list(values.values()))
    high = low.clone()
    dist.all_reduce(low, op=dist.ReduceOp.MIN)
    dist.all_reduce(high, op=dist.ReduceOp.MAX)
    sizes = [value.numel() for value in values.values()]
    pieces = zip(values, torch.split(low, sizes), torch.split(high, sizes), strict=True)
    return [name for name, least, most in pieces if relative_error(least, most) > 1e-6]


def bf16_clip_facts(request: Request, model: nn.Module) -> Facts:
    """Set gradients in bf16 by hand and clip them to half: a clip that casts first scales a copy."""
    model = copy.deepcopy(model).to(torch.bfloat16)
    shard(request, model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
    before = _norm(p.detach() for p in model.parameters())
    total_norm = imported(request.grad_norm or get_grad_norm)(model.parameters())
    imported(request.clip or clip_grad_by_total_norm_)(model.parameters(), before / 2, total_norm)
    after = _norm(p.grad for p in model.parameters() if p.grad is not None)
    return {"bf16_norm": float(total_norm) / before, "bf16_clipped": after / before}

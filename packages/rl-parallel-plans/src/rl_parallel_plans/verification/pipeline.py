"""A pipeline of the model under test on real ranks, beside the unsharded one: what one rank measures, and all together.

Each task runs one step over all its microbatches by one schedule; every rank compares what its own stages hold.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.pipeline.schedule import Pipeline, pipeline_stages
from rl_parallel_plans.pipeline.stages import boundary_of
from rl_parallel_plans.sharding.grad_norm import clip_grad_by_total_norm_
from rl_parallel_plans.verification.gradients import in_order, orders_of, whole
from rl_parallel_plans.verification.question import Question, Task
from rl_parallel_plans.verification.sharded import hidden_logp, logits_logp, plan_of
from rl_parallel_plans.verification.subject import (
    Batch,
    Truth,
    forward,
    gradient_scales,
    relative_error,
    tie_groups,
    token_logp,
)

LARGEST_STEP = 0.1
"""Of any weight in the optimizer step."""


def tasks_for_pipeline(*, pp: int, tp: int) -> tuple[Task, ...]:
    """What is measured of a pipeline."""
    odd = 15 if tp <= 2 else 4 * tp + 1
    count = 2 * pp
    return (
        Task(name="1F1B", microbatches=count, optimize=True),
        Task(name="GPipe, odd length", microbatches=3, length=odd, schedule="gpipe"),
        Task(name="interleaved 1F1B", microbatches=count, rows=1, schedule="interleaved_1f1b"),
        Task(name="left padding", microbatches=pp, length=17, left_padding=True),
        Task(name="frozen parameters", microbatches=pp, freeze=True),
        Task(name="uneven vocabulary, other tie", variant="uneven", microbatches=pp, length=17, loss="logp"),
        Task(name="linear_logp", microbatches=pp, loss="hidden"),
    )


def pipeline_facts(
    question: Question, task: Task, *, model: nn.Module, batch: Batch, truth: Truth, frozen: set[str]
) -> dict[str, Any]:
    """What this rank found of one task. Collective."""
    from torch.distributed.device_mesh import init_device_mesh

    model = copy.deepcopy(model)
    reference = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    shape = (question.pp, question.dp, question.tp)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("pp", "dp", "tp"))
    # A tied parameter has its true gradient under the first of its names.
    first_names = {name: next(n for n in reference if n in names) for names in tie_groups(model) for name in names}
    plan = plan_of(question, model)
    pipeline = pipeline_stages(model, mesh, plan, schedule=task.schedule, src_data_rank=None)
    facts: dict[str, Any] = {"logits": 0.0, "logits_noise": 0.0, "margin": batch.margin, "misplaced": {}}
    facts |= _step(question, task, pipeline, batch=batch, truth=truth, dp_rank=mesh.get_local_rank("dp"), facts=facts)
    facts["rows"], facts["held"] = [], []
    scales = gradient_scales(truth.gradients)
    thawed = []
    for stage in pipeline.stages:
        orders = orders_of(stage)
        for name, parameter in stage.named_parameters():
            first = first_names.get(name, name)
            facts["held"].append(name)
            if parameter.requires_grad == (first in frozen):
                thawed.append(name)
            if first in frozen or (first not in truth.gradients and parameter.grad is None):
                continue
            true = truth.gradients[first]
            found = torch.full_like(true, math.nan)
            if parameter.grad is not None:
                found = in_order(whole(parameter.grad), orders.get(name)).detach().float()
            diagnosis = "it has no gradient" if parameter.grad is None else ""
            if not diagnosis and name in boundary_of(stage).info.tied and relative_error(found, true) > 1e-2:
                diagnosis = "its copies in other stages have the rest of it"
            facts["rows"].append(
                {
                    "name": name,
                    "error": ((found - true).abs().max() / scales[first]).item(),
                    "noise": 0.0,
                    "spread": 0.0,
                    "ratio": (found.norm() / true.norm().clamp_min(1e-30)).item(),
                    "diagnosis": diagnosis,
                }
            )
    facts["thawed"], facts["frozen"] = thawed, len(frozen)
    facts["expected"] = [name for name in truth.gradients if name not in frozen]
    facts["first_names"] = first_names
    if task.optimize:
        facts |= _optimized(pipeline, reference=reference, truth=truth, first_names=first_names)
    return facts


def merged_pipeline(everything: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of all ranks as those of one model."""
    merged: dict[str, Any] = dict(everything[0])
    rows: dict[str, dict[str, Any]] = {}
    for facts in everything:
        for row in facts["rows"]:
            worst = rows.setdefault(row["name"], row)
            if not row["error"] <= worst["error"]:
                rows[row["name"]] = row
    held = {name for facts in everything for name in facts["held"]}
    held |= {merged["first_names"].get(name, name) for name in held}
    merged["rows"] = list(rows.values())
    merged["absent"] = [name for name in merged["expected"] if name not in held]
    merged["thawed"] = sorted({name for facts in everything for name in facts["thawed"]})
    for name in ("logits", "logp"):
        values = [facts[name] for facts in everything if name in facts]
        if values:
            merged[name], merged[f"{name}_rank"] = max((value, rank) for rank, value in enumerate(values))
    for name in ("placed", "shape", "logp_wrong"):
        if (found := next((facts[name] for facts in everything if name in facts), None)) is not None:
            merged[name] = found
    if "weights" in merged:
        weights = [pair for facts in everything for pair in facts["weights"]]
        merged["weights"] = sorted(weights, key=lambda pair: -pair[1])[:4]
        merged["drift"] = sorted({name for facts in everything for name in facts["drift"]})
    return merged


def _step(
    question: Question,
    task: Task,
    pipeline: Pipeline,
    *,
    batch: Batch,
    truth: Truth,
    dp_rank: int,
    facts: dict[str, Any],
) -> dict[str, Any]:
    """One step over all microbatches; logits are compared where they are, in the last stage."""

    def mine(value: Tensor | None) -> Tensor | None:
        return None if value is None else value.chunk(question.dp)[dp_rank]

    microbatches = [
        {"input_ids": mine(ids), "mask": mine(mask), "counted": mine(batch.targets_at(i)), "true": mine(logits)}
        for i, (ids, mask, logits) in enumerate(zip(batch.ids, batch.masks, truth.logits, strict=True))
    ]

    def loss(model: nn.Module, found: Mapping[str, Tensor]) -> Tensor:
        ids, counted, true = found["input_ids"], found["counted"], found["true"]
        if task.loss == "hidden":
            logp = hidden_logp(model, ids)
        else:
            logits = forward(model, ids, found["mask"])
            facts["placed"], facts["shape"] = "words", [list(logits.shape), list(true.shape)]
            seen, expected = whole(logits.detach()), true
            if found["mask"] is not None:  # nobody reads what stands at padding
                seen, expected = seen[found["mask"].bool()], true[found["mask"].bool()]
            facts["logits"] = max(facts["logits"], relative_error(seen, expected))
            logp = token_logp(whole(logits), ids) if task.loss == "logits" else logits_logp(question, logits, ids)
        difference = (logp.detach() - token_logp(true, ids))[counted].abs()
        facts["logp"] = max(facts.get("logp", 0.0), difference.max().item())
        facts["logp_wrong"] = (difference > 1e-3).float().mean().item()
        return logp[counted].sum() / -batch.count

    found = pipeline.step(microbatches, loss)
    dist.all_reduce(found)  # every rank of a pipeline and of tp has the sum of its own rows
    return {"loss": found.item() / (question.pp * question.tp), "true_loss": truth.loss}


def _optimized(
    pipeline: Pipeline, *, reference: Mapping[str, Tensor], truth: Truth, first_names: Mapping[str, str]
) -> dict[str, Any]:
    """Norm over all stages, clipping to half of it, a step of SGD, and whether copies of tied weights stay equal."""
    true_norm = torch.stack([gradient.double().norm() for gradient in truth.gradients.values()]).norm().item()
    norm = pipeline.grad_norm()
    parameters = list(pipeline.parameters())
    before = [whole(p.grad).double().norm() for p in parameters if p.grad is not None]
    clip_grad_by_total_norm_(parameters, true_norm / 2, norm)
    after = [whole(p.grad).double().norm() for p in parameters if p.grad is not None]
    ratio = (torch.stack(after).norm() / torch.stack(before).norm()).item()
    learning_rate = LARGEST_STEP * 2 / max(gradient.abs().max().item() for gradient in truth.gradients.values())
    torch.optim.SGD(parameters, lr=learning_rate).step()
    weights, tied = [], {}
    for stage in pipeline.stages:
        orders = orders_of(stage)
        for name, parameter in stage.named_parameters():
            first = first_names.get(name, name)
            found = in_order(whole(parameter.detach()), orders.get(name))
            if first in truth.gradients:
                expected = reference[first] - learning_rate / 2 * truth.gradients[first]
                weights.append((name, (found - expected).abs().max().item() / LARGEST_STEP))
            if name in boundary_of(stage).info.tied:
                tied[first] = found
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, tied)
    drift = [
        name
        for name in {name for each in everything for name in each}
        if len({tuple(each[name].flatten().tolist()) for each in everything if name in each}) > 1
    ]
    groups = sorted({name for each in everything for name in each})
    return {
        "true_norm": true_norm,
        "held_norm": true_norm,
        "norm": float(norm),
        "clipped": ratio,
        "weights": weights,
        "drift": drift,
        "ties": [[first, *sorted(n for n, f in first_names.items() if f == first and n != first)] for first in groups],
        "tied": not drift,
    }

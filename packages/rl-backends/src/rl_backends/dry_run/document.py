"""Everything that `explain` says, as plain values with stable keys. Bytes are bytes, of one rank unless said otherwise.

format          1; another number where a key changed its meaning or went away. Keys may be added.
model           class, parameters (elements), config (of transformers, its model_type)
versions        of torch, transformers and this package
config          every field of DTensorConfig
mesh            one object for each axis: axis, ranks, what it does
numbers         dtype of trained weights, of frozen ones (null: none are), of computation and gradient reduction, and
                the optimizer's name
batch           rows, tokens, layout, microbatches of a rank, and what bounds them
flops           of a step: model (what its mathematics needs), of all ranks; null where the model does not tell
memory          a `DryRun`: phases, categories, the largest holders, host memory, collectives, assumptions
plan            as `rl_parallel_plans.explain.document` lists it: rules, shapes, what is whole, what is sent
plan_text       the same for people
seconds         that the dry run took
"""

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from rl_backends.dry_run.fake import dry_run_here
from rl_backends.dry_run.predict import config_from_dict, step_from_dict
from rl_backends.dry_run.report import DryRun
from rl_backends.dry_run.source import skeleton_of
from rl_backends.dry_run.step import StepAsked
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import ModelError
from rl_parallel_plans import ParallelPlan, as_json

__all__ = ["answer_here", "document_of"]

FORMAT = 1
AXES = {
    "pp": "shares out the layers",
    "dp_replicate": "copies of the shards (HSDP), each with rows of its own; gradients are summed over it",
    "dp": "shards parameters, gradients and optimizer state (FSDP); rows of its own",
    "ep": "shares the experts of a mixture, to which tokens travel; rows of its own, and shards the rest as dp does",
    "cp": "shares the tokens of each row; shards parameters as dp does",
    "tp": "shares each matrix multiplication",
}


def answer_here(request: Mapping[str, Any]) -> dict[str, Any]:
    """What a request in plain values asks for, in this process, which must have no process group."""
    config, asked = config_from_dict(request["config"]), step_from_dict(request["asked"])
    skeleton = skeleton_of(
        request["source"],
        revision=request["revision"],
        trust_remote_code=request["trust_remote_code"],
        model_config=request["model_config"],
    )
    if request["what"] == "explain":
        return document_of(skeleton, config, asked, world_size=request["world_size"])
    return {"dry_run": dry_run_here(skeleton, config, asked, world_size=request["world_size"])[0].as_dict()}


def document_of(skeleton: nn.Module, config: DTensorConfig, asked: StepAsked, *, world_size: int) -> dict[str, Any]:
    """The document of a model on the meta device, which is taken over.

    Raises:
        ModelError, PlanError, ValueError: as `dry_run_here`.
    """
    started = time.monotonic()
    flops = _flops(skeleton, asked)
    model_type = getattr(getattr(skeleton, "config", None), "model_type", None)
    made, plan = dry_run_here(skeleton, config, asked, world_size=world_size)
    sharded_over = made.mesh["dp"] * made.mesh["ep"] * made.mesh["cp"]
    return {
        "format": FORMAT,
        "model": {"class": made.model, "parameters": made.num_parameters, "model_type": model_type},
        "versions": {name: _release(name) for name in ("torch", "transformers", "rl-backends")},
        "world_size": world_size,
        "config": asdict(config),
        "mesh": [{"axis": axis, "ranks": ranks, "does": AXES[axis]} for axis, ranks in made.mesh.items()],
        "numbers": _numbers(config, asked),
        "batch": _batch(config, made),
        "flops": flops,
        "memory": made.as_dict(),
        **_plan(plan, sharded_over=sharded_over),
        "seconds": round(time.monotonic() - started, 3),
    }


def _plan(plan: ParallelPlan, *, sharded_over: int) -> dict[str, Any]:
    import json

    return {"plan": json.loads(as_json(plan, dp=sharded_over)), "plan_text": plan.explain(dp=sharded_over)}


def _numbers(config: DTensorConfig, asked: StepAsked) -> dict[str, Any]:
    return {
        "weights": "float32",
        "frozen_weights": None if config.lora_cfg is None else config.lora_cfg.base_dtype,
        "computation": config.precision,
        "reduction": "float32",
        "optimizer": None if asked.optimizer is None else asked.optimizer.name,
    }


def _batch(config: DTensorConfig, made: DryRun) -> dict[str, Any]:
    return {
        "rows": made.num_rows,
        "tokens": made.num_tokens,
        "layout": "packed" if config.sequence_packing else "padded",
        "microbatches": made.num_microbatches,
        "micro_batch_size": config.micro_batch_size,
        "micro_batch_tokens": config.micro_batch_tokens,
    }


def _flops(skeleton: nn.Module, asked: StepAsked) -> dict[str, float] | None:
    from rl_backends.metrics.flops import ModelFlops

    lengths = torch.tensor(asked.lengths)
    try:
        return {"model": float(ModelFlops.of(skeleton).of_rows(lengths, lengths - 1).sum())}
    except ModelError:  # a model whose modules do not tell
        return None


def _release(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""`explain`: what the DTensor backend would do with a model on so many ranks, without weights, GPU or ranks."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from rl_backends.dry_run.predict import ask_child, request_of, step_asked
from rl_backends.dry_run.report import Collective, DryRun, aligned, gib
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.optimizers import OptimizerConfig

__all__ = ["Explanation", "explain"]

ANY_OPTIMIZER = OptimizerConfig(lr=1e-6)
"""AdamW: what it holds does not depend on a learning rate."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a backend would do. Made by `explain`."""

    document: Mapping[str, Any]
    """Plain values, whose keys `rl_backends.dry_run.document` lists."""

    @property
    def dry_run(self) -> DryRun:
        """The predicted memory."""
        return DryRun.from_dict(self.document["memory"])

    def as_json(self) -> str:
        """The document as one line of JSON."""
        return json.dumps(self.document, ensure_ascii=False)

    def text(self, *, plan: bool = True) -> str:
        """For people; plan: also which rule shards which parameter."""
        blocks = [_head(self.document), _mesh(self.document), _numbers(self.document), _batch(self.document)]
        told = ["\n".join(block) for block in blocks]
        told.append(f"memory\n{_indented(self.dry_run.text())}")
        if sent := list(_sent(self.dry_run.collectives)):
            told.append("\n".join(["sent and received by each rank, of the whole tensors", *sent]))
        if plan:
            told.append(self.document["plan_text"])
        return "\n\n".join(told)


def explain(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None = ANY_OPTIMIZER,
    rows: int | None = None,
    length: int = 2048,
    lengths: Sequence[int] | None = None,
    reference: bool = False,
    offload_reference: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    timeout_s: float = 600.0,
) -> Explanation:
    """The mesh, the plan, dtypes, the batch, FLOPs, collectives and the memory of a step on each rank.

    Args and errors as `rl_backends.dry_run.predict.predict`.
    """
    asked = step_asked(
        config,
        world_size=world_size,
        optimizer=optimizer,
        rows=rows,
        length=length,
        lengths=lengths,
        temperature=1.0,
        reference=reference,
        offload_reference=offload_reference,
    )
    if isinstance(model, nn.Module) and not dist.is_initialized():
        from rl_backends.dry_run.document import document_of
        from rl_backends.reference import without_weights

        return Explanation(document_of(without_weights(model), config, asked, world_size=world_size))
    request = request_of(
        model, config, asked, world_size=world_size, revision=revision, trust_remote_code=trust_remote_code
    )
    return Explanation(ask_child({"what": "explain", **request}, timeout_s=timeout_s))


def _head(document: Mapping[str, Any]) -> Iterator[str]:
    model, versions = document["model"], document["versions"]
    yield f"DTensorBackend of {model['class']} ({_count(model['parameters'])} parameters) on {_ranks(document)}"
    yield ", ".join(f"{name} {release}" for name, release in versions.items() if release)


def _ranks(document: Mapping[str, Any]) -> str:
    device = document["config"]["device"]
    return f"{document['world_size']} {device} rank{'s' if document['world_size'] > 1 else ''}"


def _mesh(document: Mapping[str, Any]) -> Iterator[str]:
    yield "mesh"
    used = [axis for axis in document["mesh"] if axis["ranks"] > 1]
    if not used:
        yield "  one rank: nothing is sharded"
    for axis in used:
        yield f"  {axis['axis']:<13}{axis['ranks']:>4}  {axis['does']}"


def _numbers(document: Mapping[str, Any]) -> Iterator[str]:
    numbers, config = document["numbers"], document["config"]
    yield "numbers"
    frozen = f", frozen weights {numbers['frozen_weights']}" if numbers["frozen_weights"] else ""
    yield f"  weights, gradients and optimizer state {numbers['weights']}{frozen}; computes in {numbers['computation']}"
    yield f"  gradients summed in {numbers['reduction']}, {config['reduce_gradients'].replace('_', ' ')}"
    optimizer = f"optimizer {numbers['optimizer']}" if numbers["optimizer"] else "no optimizer"
    checkpointing = f"activation checkpointing {config['activation_checkpointing'] or 'off'}"
    yield f"  {optimizer}; {checkpointing}{'; CPU offload' if config['cpu_offload'] else ''}"


def _batch(document: Mapping[str, Any]) -> Iterator[str]:
    batch, flops = document["batch"], document["flops"]
    yield "batch"
    cut = f"{batch['microbatches']} microbatches on each rank"
    yield f"  {batch['rows']:,} rows, {batch['tokens']:,} tokens, {batch['layout']}: {cut}"
    bound = f"at most {batch['micro_batch_size']} rows"
    if batch["micro_batch_tokens"] is not None:
        bound += f" and {batch['micro_batch_tokens']:,} tokens"
    yield f"  a microbatch has {bound}"
    if flops is not None:
        yield f"  {flops['model']:.3g} FLOPs a forward_backward, all ranks together"


def _sent(collectives: Sequence[Collective]) -> Iterator[str]:
    rows = [["", "over", "ranks", "times", "bytes"]]
    phases = dict.fromkeys(each.phase for each in collectives)
    for phase in phases:
        for each in sorted((c for c in collectives if c.phase == phase), key=lambda c: -c.num_bytes):
            if each.num_bytes >= 1024:
                name = f"  {phase} {each.kind.replace('_', '-')}"
                rows.append([name, each.axes, f"{each.ranks}", f"{each.count:,}", gib(each.num_bytes)])
    if len(rows) > 1:
        yield from aligned(rows)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else "" for line in text.splitlines())


def _count(elements: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M")):
        if elements >= unit:
            return f"{elements / unit:.2f} {name}"
    return f"{elements:,}"

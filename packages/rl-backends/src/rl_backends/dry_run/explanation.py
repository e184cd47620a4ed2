"""`explain`: what the DTensor backend would do with a model on so many ranks, without weights, GPU or ranks.

Everything that it says is a document of plain values with stable keys. Bytes are those of one rank unless said
otherwise.

    format          1; another number where a key changed its meaning or went away. Keys may be added.
    model           class, parameters (elements), config (of transformers, its model_type)
    versions        of torch, transformers and this package
    config          every field of DTensorConfig
    mesh            one object for each axis: axis, ranks, what it does
    numbers         dtype of trained weights, of frozen ones (null: none are), of computation and gradient reduction,
                    and the optimizer's name
    batch           rows, tokens, layout, microbatches of a rank, and what bounds them
    flops           of a step: model (what its mathematics needs), of all ranks; null where the model does not tell
    memory          a `DryRun`: phases, categories, the largest holders, host memory, collectives, assumptions
    plan            as `rl_parallel_plans.explain.document` lists it: rules, shapes, what is whole, what is sent
    plan_text       the same for people
    seconds         that the dry run took
"""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from textwrap import indent
from typing import Any

import torch
from torch import nn

from rl_backends.dtensor.config import DTensorConfig
from rl_backends.dtensor.sharded_model import AXES
from rl_backends.errors import ModelError
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import ModelSource, open_model
from rl_backends.metrics.flops import ModelFlops
from rl_backends.optimizers.config import OptimizerConfig
from rl_backends.optimizers.optimizers import table
from rl_parallel_plans import as_json
from rl_parallel_plans.explain.report import elements, size
from rl_parallel_plans.forecast.report import PhasePeak, StepPeaks

ANY_OPTIMIZER = OptimizerConfig(lr=1e-6)
"""AdamW: what it holds does not depend on a learning rate."""
FORMAT = 1
MICROBATCHES = 2
"""That a rank works on where nobody said how many rows there are: the second finds the gradient of the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRequest:
    """The step whose memory is asked for."""

    lengths: tuple[int, ...]
    optimizer: OptimizerConfig | None
    """None takes no step, and has no state."""
    reference: bool = False


# ---- What a dry run gives: the peak memory of each phase of a step on one rank, and what ranks send one another.

WORKING_MEMORY = "working memory"
KINDS = {
    "parameters": "parameters",
    "reference": "reference",
    "gradients": "gradients",
    "unsharded gradients": "gradients",
    "optimizer state": "optimizer state",
    "unsharded parameters": "gathered parameters",
    "activations": "activations",
    "recomputed activations": "activations",
}
"""What the count calls things, in the words of a table; everything else is working memory."""
COLUMNS = tuple(dict.fromkeys((*KINDS.values(), WORKING_MEMORY)))


def by_column(phase: PhasePeak) -> dict[str, int]:
    """The categories of a phase in the words of the table."""
    found = dict.fromkeys(COLUMNS, 0)
    for category, num_bytes in phase.by_category.items():
        found[KINDS.get(category, WORKING_MEMORY)] += num_bytes
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """What one phase sends over some axes of the mesh."""

    phase: str
    kind: str
    """all_gather, reduce_scatter, all_reduce, all_to_all or broadcast."""
    axes: str
    """Names of the axes over which it runs, joined by x."""
    ranks: int
    count: int
    num_bytes: int
    """Of the whole tensors, all of them together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun(StepPeaks):
    """Peak memory of a step of the backend on one rank, predicted by running it on fake tensors.

    Its phases are between steps, logp, reference logp, forward_backward and optim_step, on rank 0, whose shards are the
    largest.
    """

    mesh: Mapping[str, int]
    num_microbatches: int
    """That each rank works on."""
    host_bytes: int
    """Held in host memory beside, where parameters or the reference are offloaded from a GPU; else 0."""
    collectives: tuple[Collective, ...]

    def text(self) -> str:
        """For people."""
        rows = [["on one rank", "peak", *COLUMNS]]
        rows += [[p.name, size(p.num_bytes), *map(size, by_column(p).values())] for p in self.phases]
        used = [0, 1, *(i for i in range(2, len(rows[0])) if any(row[i] != size(0) for row in rows[1:]))]
        smallest = self.peak.num_bytes / 50
        return "\n".join(
            [
                *table([[row[i] for i in used] for row in rows], right=True),
                "",
                f"peak: {size(self.peak.num_bytes)} in {self.peak.name}; most of it:",
                *(
                    f"  {size(num_bytes):>9}  {category}{f', made in {owner}' if owner else ''}"
                    for category, owner, num_bytes in self.peak.largest
                    if num_bytes >= smallest
                ),
                *([f"host memory beside: {size(self.host_bytes)}"] if self.host_bytes else []),
                *(f"note: {assumption}" for assumption in self.assumptions),
            ]
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, the peak by category among them."""
        return {**asdict(self), "peak_bytes": self.peak.num_bytes, "peak_phase": self.peak.name}


# ---- The whole explanation.


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a backend would do. Made by `explain`."""

    document: Mapping[str, Any]
    """Plain values, whose keys `rl_backends.dry_run.explanation` lists."""
    dry_run: DryRun

    def text(self) -> str:
        """For people."""
        return "\n".join([*_told(self.document, self.dry_run), "", self.document["plan_text"]])


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
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Explanation:
    """The mesh, the plan, dtypes, the batch, FLOPs, collectives and the memory of a step on each rank.

    Call it in a process without a process group: a step of `DTensorBackend` runs here, on fake tensors and ranks.

    Args:
        model: a causal LM, which is not changed; or a folder, a config.json or a hub id, of which no weights are read.
        config: as for the backend.
        world_size: ranks of the run; none of them is started.
        optimizer: None leaves the optimizer out: no state, no step.
        rows: of the whole batch, all of `length` tokens; None takes two microbatches for each rank.
        length: tokens of a row.
        lengths: of each row of the batch, instead of `rows` and `length`.
        reference: keep a frozen copy of the policy too.
        revision: branch, tag or commit of a hub id.
        trust_remote_code: run the model's own Python code. Only for code that you have read.

    Raises:
        ModelError: the model cannot be built or run so; or this process has a process group.
        PlanError, ValueError: what the backend would refuse.
    """
    from rl_backends.dry_run.fake import dry_run_here

    for name, value in (("world_size", world_size), ("rows", rows), ("length", length)):
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} must be >= 1")
    if lengths is not None and (not lengths or min(lengths) < 1):
        raise ValueError(f"lengths={list(lengths)} must be those of one row or more, each of 1 token or more")
    if rows is None:
        rows = config.micro_batch_size
        if config.micro_batch_tokens is not None:
            rows = max(1, min(rows, config.micro_batch_tokens // length))
        rows *= MICROBATCHES * max(1, world_size // (config.tensor_parallel_size * config.context_parallel_size))
    all_lengths = tuple([length] * rows if lengths is None else lengths)
    asked = StepRequest(lengths=all_lengths, optimizer=optimizer, reference=reference)
    if isinstance(model, nn.Module):
        skeleton = without_weights(model)
    else:
        skeleton = skeleton_of(str(model), revision=revision, trust_remote_code=trust_remote_code)

    started = time.monotonic()
    flops, read = None, torch.tensor(all_lengths)
    with suppress(ModelError):  # of a model whose modules do not tell
        flops = {"model": float(ModelFlops.of(skeleton).of_rows(read, read - 1).sum())}
    about = {
        "class": type(skeleton).__name__,
        "parameters": sum(parameter.numel() for parameter in skeleton.parameters()),
        "model_type": getattr(getattr(skeleton, "config", None), "model_type", None),
    }
    made, plan = dry_run_here(skeleton, config, asked, world_size=world_size)
    sharded_over = made.mesh["dp"] * made.mesh["ep"] * made.mesh["cp"]
    document = {
        "format": FORMAT,
        "model": about,
        "versions": {name: release_of(name) for name in ("torch", "transformers", "rl-backends")},
        "world_size": world_size,
        "config": asdict(config),
        "mesh": [{"axis": axis, "ranks": ranks, "does": AXES[axis]} for axis, ranks in made.mesh.items()],
        "numbers": {
            "weights": "float32",
            "frozen_weights": None if config.lora_cfg is None else config.lora_cfg.base_dtype,
            "computation": config.precision,
            "reduction": "float32",
            "optimizer": None if optimizer is None else optimizer.name,
        },
        "batch": {
            "rows": len(asked.lengths),
            "tokens": sum(asked.lengths),
            "layout": "packed" if config.sequence_packing else "padded",
            "microbatches": made.num_microbatches,
            "micro_batch_size": config.micro_batch_size,
            "micro_batch_tokens": config.micro_batch_tokens,
        },
        "flops": flops,
        "memory": made.as_dict(),
        "plan": json.loads(as_json(plan, dp=sharded_over)),
        "plan_text": plan.explain(dp=sharded_over),
        "seconds": round(time.monotonic() - started, 3),
    }
    return Explanation(document, made)


def predict(
    model: nn.Module | str | Path,
    config: DTensorConfig,
    *,
    world_size: int,
    optimizer: OptimizerConfig | None = None,
    **asked: Any,
) -> DryRun:
    """Run a step of `DTensorBackend` on fake tensors and ranks, and count what one of them holds.

    Args and errors as `explain`, which tells more; without an optimizer there is no state and no step.
    """
    return explain(model, config, world_size=world_size, optimizer=optimizer, **asked).dry_run


def _told(document: Mapping[str, Any], dry_run: DryRun) -> Iterator[str]:
    """The document for people, line by line, without its plan."""
    model, versions, ranks, config = (document[key] for key in ("model", "versions", "world_size", "config"))
    on = f"{ranks} {config['device']} rank{'s' if ranks > 1 else ''}"
    yield f"DTensorBackend of {model['class']} ({elements(model['parameters'])}) on {on}"
    yield ", ".join(f"{name} {release}" for name, release in versions.items() if release)

    yield "\nmesh"
    used = [axis for axis in document["mesh"] if axis["ranks"] > 1]
    if not used:
        yield "  one rank: nothing is sharded"
    for axis in used:
        yield f"  {axis['axis']:<13}{axis['ranks']:>4}  {axis['does']}"

    numbers = document["numbers"]
    yield "\nnumbers"
    frozen = f", frozen weights {numbers['frozen_weights']}" if numbers["frozen_weights"] else ""
    yield f"  weights, gradients and optimizer state {numbers['weights']}{frozen}; computes in {numbers['computation']}"
    yield f"  gradients summed in {numbers['reduction']}, {config['reduce_gradients'].replace('_', ' ')}"
    optimizer = f"optimizer {numbers['optimizer']}" if numbers["optimizer"] else "no optimizer"
    checkpointing = f"activation checkpointing {config['activation_checkpointing'] or 'off'}"
    yield f"  {optimizer}; {checkpointing}{'; CPU offload' if config['cpu_offload'] else ''}"

    batch, most_tokens = document["batch"], document["batch"]["micro_batch_tokens"]
    yield "\nbatch"
    cut = f"{batch['microbatches']} microbatches on each rank"
    yield f"  {batch['rows']:,} rows, {batch['tokens']:,} tokens, {batch['layout']}: {cut}"
    bound = "" if most_tokens is None else f" and {most_tokens:,} tokens"
    yield f"  a microbatch has at most {batch['micro_batch_size']} rows{bound}"
    if document["flops"] is not None:
        yield f"  {document['flops']['model']:.3g} FLOPs a forward_backward, all ranks together"

    yield "\nmemory"
    yield indent(dry_run.text(), "  ")

    rows = [["", "over", "ranks", "times", "bytes"]]
    for phase in dict.fromkeys(each.phase for each in dry_run.collectives):
        of_phase = [each for each in dry_run.collectives if each.phase == phase and each.num_bytes >= 1024]
        for each in sorted(of_phase, key=lambda each: -each.num_bytes):
            name = f"  {phase} {each.kind.replace('_', '-')}"
            rows.append([name, each.axes, f"{each.ranks}", f"{each.count:,}", size(each.num_bytes)])
    if len(rows) > 1:
        yield "\nsent and received by each rank, of the whole tensors"
        yield from table(rows, right=True)


def release_of(package: str) -> str | None:
    """The installed release; None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# ---- The model, without its weights.


def skeleton_of(source: str, *, revision: str | None, trust_remote_code: bool) -> nn.Module:
    """The model of a folder, a config.json, a hub id or a type such as qwen3, in float32 on the meta device."""
    import transformers

    if Path(source).expanduser().is_file() or (source in transformers.CONFIG_MAPPING and not Path(source).exists()):
        from rl_parallel_plans.model_source import read_config

        opened = ModelSource(
            model_name=source,
            folder=Path(),
            config=read_config(source, trust_remote_code=trust_remote_code),
            head="causal_lm",
            trust_remote_code=trust_remote_code,
        )
        return opened._bare()  # noqa: SLF001 - ours; a folder's generation configuration is not there
    return open_model(source, revision=revision, trust_remote_code=trust_remote_code).skeleton()

"""A backend on fake ranks and fake tensors, and the step that it takes there. Needs a process without a process group.

Calls `DTensorBackend` as a trainer does, on a model without weights. What it does not see: the CUDA context, NCCL's
buffers, workspace inside kernels, what the allocator rounds up and fragments.
"""

import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.dry_run.collectives import CollectiveCounter
from rl_backends.dry_run.report import Collective, DryRun, Phase
from rl_backends.dry_run.step import REFERENCE, StepAsked, rows_of, run_step
from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.dtensor.mesh import sizes_of
from rl_backends.errors import ModelError
from rl_backends.kernels import KernelsConfig
from rl_backends.lora import add_lora
from rl_parallel_plans import ParallelPlan
from rl_parallel_plans.forecast import Ledger, Peak, fake_floats, fake_process_group, fused_attention
from rl_parallel_plans.forecast.tracker import GRADIENTS, OPTIMIZER_STATE, PARAMETERS

__all__ = ["dry_run_here"]

LARGEST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """What a fake step has to tell."""

    ledger: Ledger
    mesh: dict[str, int]
    num_microbatches: int
    collectives: tuple[Collective, ...]
    attention_calls: int
    plan: ParallelPlan


def dry_run_here(
    skeleton: nn.Module, config: DTensorConfig, asked: StepAsked, *, world_size: int
) -> tuple[DryRun, ParallelPlan]:
    """Let a backend of `skeleton`, which lies on the meta device and is taken over, take a step as rank 0.

    Returns what was counted, and the plan by which the backend has sharded the model.

    Raises:
        ModelError: this process has a process group, or the model computes what depends on the numbers in a tensor.
        PlanError, ValueError: as `DTensorBackend`.
    """
    if dist.is_initialized():
        raise ModelError(
            "this process has a process group, and a dry run needs one of its own that sends nothing: call it before "
            "init_process_group, or name the model (a folder, config.json or hub id), which is run in another process"
        )
    vocabulary = int(skeleton.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    asked = replace(asked, different_tokens=min(asked.different_tokens, vocabulary))
    name, count = type(skeleton).__name__, sum(parameter.numel() for parameter in skeleton.parameters())
    # A thread of its own: DTensor remembers per thread what it did over which mesh, and a mesh of real ranks would meet
    # what it did over fake ones.
    with fake_process_group(world_size), ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views changed in place: there are none
        told = thread.submit(_run, skeleton, config, asked).result()
    away = _in_host_memory(config, asked)
    everything, on_device = told.ledger.peaks(), told.ledger.peaks(without=away)
    made = DryRun(
        model=name,
        num_parameters=count,
        mesh=told.mesh,
        num_rows=len(asked.lengths),
        num_tokens=sum(asked.lengths),
        num_microbatches=told.num_microbatches,
        phases=tuple(_phase(name, peak) for name, peak in on_device.items()),
        host_bytes=max(sum(each.by_category.get(kind, 0) for kind in away) for each in everything.values()),
        collectives=told.collectives,
        assumptions=tuple(_assumptions(config, attention_calls=told.attention_calls)),
    )
    return made, told.plan


def _run(skeleton: nn.Module, config: DTensorConfig, asked: StepAsked) -> _Told:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    # Fake tensors of a device need the device's driver; what differs on a GPU is what attention costs.
    # Kernels of a GPU do not run here: memory is predicted with those that run anywhere.
    kernels = KernelsConfig(loss_chunk_size=config.kernels.loss_chunk_size)
    on_cpu = replace(config, device="cpu", compile=False, lora_cfg=None, kernels=kernels)
    attention: AbstractContextManager[list[Any]] = fused_attention() if config.device == "cuda" else nullcontext([])
    ledger, backends = Ledger(), list[DTensorBackend]()
    counter = CollectiveCounter(lambda: ledger.running)

    _forget_floats(skeleton)
    if config.lora_cfg is not None:  # here, since peft moves modules about, which fake tensors do not bear
        add_lora(skeleton, config.lora_cfg, seed=0)

    def make() -> DTensorBackend:
        backend = DTensorBackend(skeleton, on_cpu, fill=lambda _: None)
        backends.append(backend)
        return backend

    try:
        with fake_floats(), attention as calls:
            run_step(make, asked, ledger=ledger, also=counter.saw)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"the forward of {type(skeleton).__name__} depends on the numbers in a tensor ({error.func}), and a dry "
            f"run has none: experts that are run one at a time are the usual case; choose another implementation of "
            f"them where the model has one (experts_implementation)"
        ) from error
    sharded = backends[0]._distributed  # noqa: SLF001 - ours
    mesh = sharded.mesh
    return _Told(
        ledger=ledger,
        mesh=sizes_of(mesh),
        num_microbatches=len(sharded.cut(rows_of(asked.lengths, different_tokens=asked.different_tokens))[0]),
        collectives=counter.found(mesh),
        attention_calls=len(calls),
        plan=sharded.plan,
    )


def _forget_floats(skeleton: nn.Module) -> None:
    """Put what was computed from the configuration, such as rotary frequencies, where parameters are."""
    for module in skeleton.modules():
        for held in (module._buffers, vars(module)):  # noqa: SLF001 - assigning would make a buffer persistent
            for name, value in held.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    held[name] = value.to("meta")


def _phase(name: str, peak: Peak) -> Phase:
    largest = tuple((*owner, size) for owner, size in list(peak.by_owner.items())[:LARGEST])
    return Phase(name=name, num_bytes=peak.total, by_category=peak.by_category, largest=largest)


def _in_host_memory(config: DTensorConfig, asked: StepAsked) -> tuple[str, ...]:
    """Categories that do not lie on the device; on a CPU there is one memory only."""
    if config.device == "cpu":
        return ()
    own = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE) if config.cpu_offload else ()
    return (*own, REFERENCE) if asked.reference and (asked.offload_reference or config.cpu_offload) else own


def _assumptions(config: DTensorConfig, *, attention_calls: int) -> Iterator[str]:
    yield "storages of rank 0, whose shards are the largest; every token but the first of a row is trained"
    yield "the loss holds a few numbers for each token"
    if config.device == "cpu":
        return
    yield "not counted: the CUDA context, NCCL's buffers, workspace inside kernels, what the allocator rounds up"
    if attention_calls:
        yield "attention costs what fused kernels cost"
    else:
        yield "attention costs what the model's own code costs: it never calls scaled_dot_product_attention"
    if config.cpu_offload:
        yield "not counted: the copies that shards and gradients of one layer have on the device as they pass by"
    if config.compile:
        yield "layers are counted as they run without torch.compile, which holds no more"

"""A step of `DTensorBackend` on fake ranks and fake tensors, under a count of its storages and collectives.

    start, one optimizer step -> between steps | logp | reference logp | forward_backward | optim_step

`dry_run_here` calls the backend as a trainer does, on a model without weights, in a process without a process group.
`run_step` takes the same step on whatever tensors the backend has: real ones to compare a prediction with. What is not
seen: the CUDA context, NCCL's buffers, workspace inside kernels, what the allocator rounds up and fragments.

Axes: B rows, T tokens.
"""

import functools
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import fields, replace
from itertools import compress
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from rl_backends.config import KernelsConfig
from rl_backends.dry_run.explanation import Collective, DryRun, StepRequest
from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.dtensor.sharded_model import sizes_of
from rl_backends.errors import ModelError
from rl_backends.examples import TokenRows
from rl_backends.kernels.table import PLAIN
from rl_backends.lora.inject import add_lora
from rl_parallel_plans import ParallelPlan
from rl_parallel_plans.forecast import (
    Ledger,
    MemoryTracker,
    fake_floats,
    fake_process_group,
    fused_attention,
    gathered_labels,
)
from rl_parallel_plans.forecast.fake import tensors_in
from rl_parallel_plans.forecast.report import phase_peaks
from rl_parallel_plans.forecast.tracker import ACTIVATIONS, BUFFERS, GRADIENTS, OPTIMIZER_STATE, PARAMETERS, TEMPORARIES
from rl_parallel_plans.structure import collapsed

BETWEEN_STEPS = "between steps"
REFERENCE = "reference"
DIFFERENT_TOKENS = 32


def run_step(
    make_backend: Callable[[], DTensorBackend],
    asked: StepRequest,
    *,
    ledger: Ledger,
    also: Callable[[Any, Any, Any], None] | None = None,
) -> DTensorBackend:
    """Make a backend, which is returned, and let it take a step; `ledger` has the phases at the head of this file."""
    names: dict[nn.Module, str] = {}
    with MemoryTracker(ledger, names, also=also) as tracker, ExitStack() as labelled:
        backend = make_backend()
        rows = rows_of(asked.lengths, backend)
        # The same name for the same module of every layer.
        names.update((module, collapsed(name)) for name, module in backend.model.named_modules())
        tracker.label(backend.model.parameters(), PARAMETERS)
        tracker.label(backend.model.buffers(), BUFFERS)
        labelled.enter_context(gathered_labels(tracker, backend.model))

        # What lasts from step to step: the state that the optimizer has after a step, here of gradients of 0, and the
        # reference.
        if asked.optimizer is not None:
            tracker.outside_backward = OPTIMIZER_STATE
            num_steps = asked.optimizer.warmup_steps + (asked.optimizer.decay_steps or 0) + 2
            backend.start_training(asked.optimizer, num_steps=num_steps)
            for parameter in backend.model.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
            backend._clip_and_step()  # noqa: SLF001 - ours; optim_step() refuses a step without forward_backward()
        reference = None
        if asked.reference:
            tracker.outside_backward = REFERENCE
            reference = backend.freeze_reference()
        tracker.outside_backward = ACTIVATIONS
        gc.collect()
        ledger.moment(BETWEEN_STEPS)

        # Without gradients one microbatch leaves nothing for the next, so that, of rows alike, it shows what all would.
        lengths = asked.lengths
        if len(set(lengths)) == 1:
            _, own, _ = backend._distributed.take(rows)  # noqa: SLF001 - ours
            lengths = lengths[: max(1, len(lengths) // len(own))]
        some = rows_of(lengths, backend)
        with ledger.phase("logp"):
            backend.logp(some)
        if reference is not None:
            with ledger.phase("reference logp"):
                reference.logp(some)
        with ledger.phase("forward_backward"):
            backend.forward_backward(rows, _loss)
        # FSDP has put other parameters in the place of those that were labelled.
        tracker.label(backend.model.parameters(), PARAMETERS)
        tracker.label((p.grad for p in backend.model.parameters() if p.grad is not None), GRADIENTS)
        gc.collect()  # as Python does now and then; what hangs in cycles would count for the step
        if asked.optimizer is not None:
            tracker.outside_backward = TEMPORARIES
            with ledger.phase("optim_step"):
                backend.optim_step()
    return backend


def rows_of(lengths: Sequence[int], backend: DTensorBackend) -> TokenRows:
    """Rows of these lengths, whose every token but the first trains; as many tokens differ as give all experts some."""
    each, place = torch.tensor(lengths), torch.arange(max(lengths))
    tokens = (place + each[:, None]) % min(DIFFERENT_TOKENS, backend._distributed.vocabulary_size)  # noqa: SLF001 - ours
    return TokenRows(tokens=tokens, lengths=each, trainable=(place > 0) & (place < each[:, None]))


def _loss(logp: Float[Tensor, "b w"], _: TokenRows) -> tuple[Tensor, dict[str, Tensor]]:
    total = -logp.sum()
    return total, {"loss": total.detach()}


# ---- On fake ranks and tensors.


def dry_run_here(
    skeleton: nn.Module, config: DTensorConfig, asked: StepRequest, *, world_size: int
) -> tuple[DryRun, ParallelPlan]:
    """Let a backend of `skeleton`, which lies on the meta device and is taken over, take a step as rank 0.

    Returns what was counted, and the plan by which the backend has sharded the model.
    """
    if dist.is_initialized():
        raise ModelError(
            "this process has a process group, and a dry run needs one of its own that sends nothing: call it before "
            "init_process_group, or run `rl-backends explain` beside it"
        )
    # A thread of its own: DTensor remembers per thread what it did over which mesh, and a mesh of real ranks would meet
    # what it did over fake ones.
    with fake_process_group(world_size), ThreadPoolExecutor(1) as thread, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # of views changed in place: there are none
        return thread.submit(_run, skeleton, config, asked).result()


def _run(skeleton: nn.Module, config: DTensorConfig, asked: StepRequest) -> tuple[DryRun, ParallelPlan]:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    # Fake tensors of a device need the device's driver; what differs on a GPU is what attention costs.
    # Kernels of a GPU do not run here: memory is predicted with those that run anywhere.
    kernels = KernelsConfig(loss_chunk_size=config.kernels.loss_chunk_size)
    on_cpu = replace(config, device="cpu", compile=False, lora_cfg=None, kernels=kernels)
    attention: AbstractContextManager[list[Any]] = fused_attention() if config.device == "cuda" else nullcontext([])
    ledger = Ledger()
    counter = CollectiveCounter(lambda: ledger.running)

    # What was computed from the configuration, such as rotary frequencies, goes where parameters are.
    for module in skeleton.modules():
        for held in (module._buffers, vars(module)):  # noqa: SLF001 - assigning would make a buffer persistent
            for name, value in held.items():
                if isinstance(value, Tensor) and value.is_floating_point():
                    held[name] = value.to("meta")
    if config.lora_cfg is not None:  # here, since peft moves modules about, which fake tensors do not bear
        add_lora(skeleton, config.lora_cfg, seed=0)

    try:
        with fake_floats(), attention as calls:
            backend = run_step(
                lambda: DTensorBackend(skeleton, on_cpu, fill=lambda _: None), asked, ledger=ledger, also=counter.saw
            )
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ModelError(
            f"the forward of {type(skeleton).__name__} depends on the numbers in a tensor ({error.func}), and a dry "
            f"run has none: experts that are run one at a time are the usual case; choose another implementation of "
            f"them where the model has one (experts_implementation)"
        ) from error

    # What lies in the memory of the host and not of a GPU; on a CPU there is one memory only.
    lies_there = config.cpu_offload and config.device != "cpu"
    away = (PARAMETERS, GRADIENTS, OPTIMIZER_STATE, REFERENCE) if lies_there else ()
    sharded = backend._distributed  # noqa: SLF001 - ours
    made = DryRun(
        mesh=sizes_of(sharded.mesh),
        num_microbatches=len(sharded.take(rows_of(asked.lengths, backend))[1]),
        phases=phase_peaks(ledger, without=away),
        host_bytes=max(sum(peak.by_category.get(kind, 0) for kind in away) for peak in ledger.peaks().values()),
        collectives=counter.found(sharded.mesh),
        assumptions=tuple(_assumptions(config, attention_calls=len(calls))),
    )
    return made, sharded.plan


def _assumptions(config: DTensorConfig, *, attention_calls: int) -> Iterator[str]:
    yield "storages of rank 0, whose shards are the largest; every token but the first of a row is trained"
    yield "the loss holds a few numbers for each token"
    chosen = {field.name: getattr(config.kernels, field.name) for field in fields(config.kernels)}
    plain = (*PLAIN, False)
    kernels = [f"{part}={name!r}" for part, name in chosen.items() if part != "loss_chunk_size" and name not in plain]
    if kernels:
        yield f"counted with the kernels that run anywhere in the place of {', '.join(kernels)}, which may hold less"
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


# ---- What ranks send one another, by phase and axes of the mesh; counted below DTensor and FSDP.

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "broadcast_functional": "broadcast",
}
"""Operators of torch.distributed and of its functional collectives."""


class CollectiveCounter:
    """Counts every collective over more than one rank that it is shown.

    phase: the name of what runs now; "" is not counted.
    """

    def __init__(self, phase: Callable[[], str]) -> None:
        self._phase = phase
        self._found: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}  # how often, and bytes

    def saw(self, operator: Any, args: Any, result: object) -> None:
        """An operator ran."""
        kind, phase = _kind(operator), self._phase()
        if kind is not None and phase and len(ranks := _ranks_of(args)) > 1:
            found = self._found.setdefault((phase, kind, ranks), [0, 0])
            found[0] += 1
            found[1] += max(tensor.nbytes for tensor in tensors_in((args, result)))

    def found(self, mesh: DeviceMesh) -> tuple[Collective, ...]:
        """What was counted, over the axes of `mesh` along which the ranks of a collective differ."""
        made = []
        for (phase, kind, ranks), (count, num_bytes) in self._found.items():
            coordinates = torch.stack([(mesh.mesh == rank).nonzero()[0] for rank in ranks])
            differ = (coordinates != coordinates[0]).any(0).tolist()
            axes = " x ".join(compress(mesh.mesh_dim_names or (), differ))
            made.append(
                Collective(phase=phase, kind=kind, axes=axes, ranks=len(ranks), count=count, num_bytes=num_bytes)
            )
        return tuple(made)


@functools.cache
def _kind(operator: Any) -> str | None:
    space, _, name = operator.name().partition("::")
    return KINDS.get(name.partition(".")[0]) if space in {"c10d", "_c10d_functional"} else None


def _ranks_of(args: Any) -> tuple[int, ...]:
    for value in args:
        if isinstance(value, torch.ScriptObject):
            try:
                return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
            except RuntimeError:  # the operation of a reduction is an object too
                continue
    names = [value for value in args if isinstance(value, str)]
    registry: Any = dist.distributed_c10d
    group = registry._resolve_process_group(names[-1])  # noqa: SLF001 - no public one
    return tuple(dist.get_process_group_ranks(group))

"""A Hugging Face model laid out over a mesh, and how rows of a batch go through it.

    sizes of the config -> mesh -> plan -> experts, tensors, rows, recomputation, compilation, FSDP -> read(rows)

Axes: B rows of the batch, b of a microbatch, w tokens of its longest row, T of the batch's.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, register_fsdp_forward_method

from rl_backends.backend import DistributedModel, max_positions, media_tokens
from rl_backends.batching.microbatches import ModelInputs, SequenceShard, of_one_shape
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.errors import ModelError
from rl_backends.kernels.table import apply_kernels
from rl_backends.loading.skeleton import materialize
from rl_backends.loading.weights import write_whole
from rl_backends.packing.enable import attention_modules
from rl_backends.process_group import Membership, join_process_group
from rl_backends.rank_agreement import on_every_rank, once_per_process_group, require_same_model, told_by_last_rank
from rl_backends.readers import Reader
from rl_parallel_plans import (
    ParallelPlan,
    Pipeline,
    apply_activation_checkpointing,
    apply_context_parallel,
    apply_expert_parallel,
    apply_fsdp,
    apply_tensor_parallel,
    named_shards,
    pipeline_stages,
    plan_for,
    to_local_if_dtensor,
)
from rl_parallel_plans.checkpoints import reshard
from rl_parallel_plans.structure import retie, stacked_layers, tied_names

METHOD = "read_hidden_states"
"""The method's name on the model. FSDP2 must know it, to gather parameters around it as it does around `forward`."""


# ---- The ranks of this run as a mesh; a lone process is a mesh of one. Axes of one rank are left out, but dp and tp.

AXES = {
    "pp": "shares out the layers",
    "dp_replicate": "copies of the shards (HSDP), each with rows of its own; gradients are summed over it",
    "dp": "shards parameters, gradients and optimizer state (FSDP); rows of its own",
    "ep": "shares the experts of a mixture, to which tokens travel; rows of its own, and shards the rest as dp does",
    "cp": "shares the tokens of each row; shards parameters as dp does",
    "tp": "shares each matrix multiplication",
}
"""What each axis does, for people."""
FIELDS = {
    "pp": "pipeline_parallel_size",
    "dp_replicate": "data_parallel_replicate_size",
    "ep": "expert_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_parallel_size",
}
"""What sizes an axis; dp has the ranks that are left."""
ROW_AXES = ("dp_replicate", "dp", "ep")
"""Axes each rank of which has rows of its own."""
ALWAYS = ("dp", "tp")
"""What sharding asks a mesh for, whatever its sizes."""


def make_mesh(config: DTensorConfig) -> DeviceMesh:
    """All ranks of the process group, arranged by the sizes in `config`: of the same sizes, the same mesh.

    Raises:
        ValueError: the ranks are not a multiple of the sizes.
    """
    num_ranks, given = dist.get_world_size(), {axis: int(getattr(config, field)) for axis, field in FIELDS.items()}
    product = math.prod(given.values())
    if num_ranks % product:
        named = " x ".join(f"{FIELDS[axis]}={size}" for axis, size in given.items() if size > 1)
        raise ValueError(
            f"{num_ranks} ranks cannot be cut into groups of {product} ({named}); start a multiple of {product} ranks, "
            f"or lower a size"
        )
    sizes = {axis: given.get(axis, num_ranks // product) for axis in AXES}
    # Each axis is a process group, with a thread of its own that wakes up a hundred times a second.
    needed = {axis: size for axis, size in sizes.items() if size > 1 or axis in ALWAYS}
    return once_per_process_group(
        (config.device, *needed.items()),
        lambda: init_device_mesh(config.device, tuple(needed.values()), mesh_dim_names=tuple(needed)),
    )


def sizes_of(mesh: DeviceMesh) -> dict[str, int]:
    """Ranks of every axis, those that were left out too."""
    present = dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))
    return {axis: present.get(axis, 1) for axis in AXES}


def rows_of(mesh: DeviceMesh) -> DeviceMesh:
    """All ranks that have rows of their own, as one axis."""
    axes = tuple(axis for axis in mesh.mesh_dim_names or () if axis in ROW_AXES)
    return mesh[axes[0]] if len(axes) == 1 else mesh[axes]._flatten("rows")  # noqa: SLF001 - no public one


# ---- The model.


class ShardedModel(DistributedModel):
    """`model` over all ranks of this run, sharded by DTensors and FSDP2.

    Args:
        model: with its weights, the same on every rank; or on the meta device with `fill`. It is taken over.
        config: sharding, device, precision, microbatches.
        fill: what puts weights into the parameters, sharded by then, of a model on the meta device.
        membership: of a model that will be there as long as this one; None joins the process group.

    Raises:
        PlanError: the model cannot be sharded as asked.
        ModelError: it is no decoder with a head, is another one on another rank, or cannot be packed as asked.
        ValueError: no GPU where one was asked for, or ranks that the sizes do not divide.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DTensorConfig,
        *,
        fill: Callable[[nn.Module], object] | None = None,
        membership: Membership | None = None,
    ) -> None:
        if not hasattr(model, "base_model"):
            raise ModelError(f"{type(model).__qualname__} has no base_model beneath a head; give a Hugging Face model")
        self.config: DTensorConfig = config
        self.membership = membership or join_process_group(config.device, timeout_s=config.timeout_s)
        """In the process group."""
        with ExitStack() as undo:
            if membership is None:
                undo.callback(self.close)
            self._build(model, fill if any(parameter.is_meta for parameter in model.parameters()) else None)
            undo.pop_all()

    def _build(self, model: nn.Module, fill: Callable[[nn.Module], object] | None) -> None:
        config = self.config
        self.mesh = make_mesh(config)
        require_same_model(model)
        embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary_size, self.max_positions = int(embeddings.weight.shape[0]), max_positions(model)
        self.media_tokens = media_tokens(model)
        self.reads_whole_rows, self.shares_prefixes = config.router_aux_loss_coef > 0, config.share_prefixes
        self.plan = plan_for(
            model,
            tp=config.tensor_parallel_size,
            sequence_parallel=config.sequence_parallel,
            ep=config.expert_parallel_size,
            custom=config.custom_parallel_plan,
        )
        self.plan.check(model)
        self.kernels = apply_kernels(model, config)
        """What computes attention, the loss and the rest."""
        if fill is None and (dist.get_world_size() > 1 or config.cpu_offload):
            # Shards alone go to the device, which the whole model may not fit on.
            fill = take_weights(model)
        whole = model if fill is not None else model.to(config.device)
        self.pipeline: Pipeline | None = None
        """Layers over ranks; None where each rank has all of them."""
        if config.pipeline_parallel_size > 1:
            self.pipeline = _split(whole, self.mesh, self.plan, config=config)
            (self.model,) = self.pipeline.stages
        else:
            self.model = _shard(whole, self.mesh, self.plan, config=config)
        if fill is not None:
            on_every_rank(partial(fill, materialize(self.model, config.device)))
        self.model.eval()  # gradients do not need training mode, and dropout would make two functions of one model
        if self.pipeline is None:  # whose stages FSDP gathers around all that they run
            setattr(self.model, METHOD, MethodType(_read, self.model))
            register_fsdp_forward_method(self.model, METHOD)
        self.rows = rows_of(self.mesh)
        """The ranks among which rows are dealt."""
        # Once: taking an axis out of a mesh costs a millisecond or two.
        context = self._context = self.mesh["cp"] if config.context_parallel_size > 1 else None
        self.context_group = None if context is None else context.get_group()
        """The ranks with other tokens of the same rows; None where there are no others."""
        self.sequence_shard = None if context is None else SequenceShard(context.get_local_rank(), context.size())
        self.token_multiple = 2 * config.context_parallel_size if config.context_parallel_size > 1 else 1

    @property
    def row_group(self) -> dist.ProcessGroup:
        """The ranks among which the rows of a batch are shared out."""
        return self.rows.get_group()

    @property
    def closed(self) -> bool:
        """Whether it has left the process group."""
        return self.membership.left

    def read(
        self, inputs: ModelInputs, reader: Reader, *, shape: tuple[int, int], stage: Any = None
    ) -> tuple[Tensor, ...]:
        """What `reader` reads at the asked places, each in its place of `[b, w, ...]`, 0 elsewhere; differentiable.

        stage: the model that `run_pipeline` gives, inside of it.
        """
        call = getattr(self.model, METHOD) if stage is None else partial(_read, stage)
        hints = self.kernels.arguments(inputs)
        read: tuple[Tensor, ...] = call(inputs, reader, num_places=shape[0] * shape[1], hints=hints)
        if self._context is not None:
            # Add what each context-parallel rank has read of its own tokens; each keeps the gradient of its own.
            from torch.distributed.tensor import DTensor, Partial, Replicate

            partial_sums = [DTensor.from_local(each, self._context, [Partial()], run_check=False) for each in read]
            read = tuple(each.redistribute(placements=[Replicate()]).to_local() for each in partial_sums)
        # Out here: of a view that a module under FSDP2 returns, hooks may be dropped.
        return tuple(each.view(*shape, *each.shape[1:]) for each in read)

    def run_pipeline(
        self, inputs: Sequence[ModelInputs], use: Callable[[int, Any, ModelInputs], Tensor], *, backward: bool
    ) -> None:
        """Send microbatches through all stages.

        use: of the number of a microbatch, the model and its inputs, to a scalar, whose gradient is taken where
            `backward`. Every stage calls it, and only the last runs what comes after the layers.
        """
        assert self.pipeline is not None
        alike = of_one_shape(inputs)
        # 1F1B wants a microbatch for each stage: what is missing are repetitions that count nothing.
        repeated = [*alike, *[alike[0]] * (self.pipeline.pp_mesh.size() - len(alike))]
        rows, tokens = alike[0].tokens.shape

        run = self.pipeline.step if backward else self.pipeline.forward
        run(list(enumerate(repeated)), lambda model, item: use(item[0], model, item[1]), shape=(rows, tokens))

    def _on_every_stage(self, out: dict[int, Tensor]) -> dict[int, Tensor]:
        if self.pipeline is None:
            return out
        kept = [out[number] for number in sorted(out)]
        return dict(enumerate(told_by_last_rank(kept, self.pipeline.group, device=self.pipeline.device)))

    def _forward(
        self,
        inputs: Sequence[ModelInputs],
        reader: Reader,
        *,
        shapes: Sequence[tuple[int, int]],
        keep: Callable[[int, Sequence[Tensor]], None],
    ) -> None:
        if self.pipeline is not None:

            def use(number: int, model: Any, each: ModelInputs) -> Tensor:
                read = self.read(each, reader, shape=shapes[number if number < len(shapes) else 0], stage=model)
                if number < len(shapes):
                    keep(number, read)
                return torch.zeros((), device=self.config.device)

            self.run_pipeline(inputs, use, backward=False)
            return
        for number, (each, shape) in enumerate(zip(inputs, shapes, strict=True)):
            keep(number, self.read(each, reader, shape=shape))
        reshard(self.model)  # what a forward without a backward has left gathered

    def close(self) -> None:
        """Leave the process group, which the last model destroys, if it is not the user's. Once is enough."""
        self.membership.leave()


@torch.no_grad()
def take_weights(model: nn.Module) -> Callable[[nn.Module], object]:
    """Leave the parameters of `model` on the meta device; return what puts their values into its shards.

    Ties and buffers stay. The values stay where they are, usually in host memory, until they were copied.
    """
    ties = tied_names(model)
    values = {name: each.detach() for name, each in model.named_parameters(remove_duplicate=False)}
    parameters = {id(each) for each in model.parameters()}
    # What `to` is made of; unlike `to("meta")` it leaves the buffers, whose values are in no file.
    model._apply(lambda each: each.to("meta") if id(each) in parameters else each)  # type: ignore[no-untyped-call]  # noqa: SLF001
    retie(model, ties)

    def fill(sharded: nn.Module) -> None:
        for shard in named_shards(sharded):
            if (whole := values.get(shard.name)) is not None:
                write_whole(whole, [shard])
        values.clear()

    return fill


def _read(
    model: Any, inputs: ModelInputs, reader: Reader, *, num_places: int, hints: dict[str, Any]
) -> tuple[Tensor, ...]:
    """What the reader reads, each in its place of [num_places, ...].

    Rows are right-padded or packed: causal attention keeps padding and neighbours out of every token's sight.
    """
    hidden = model.base_model(**inputs.as_arguments(), **hints, use_cache=False).last_hidden_state
    read = reader(model, hidden.flatten(0, 1).index_select(0, inputs.at), inputs)
    several = (read,) if isinstance(read, Tensor) else read
    return tuple(each.new_zeros(num_places, *each.shape[1:]).index_copy(0, inputs.into, each) for each in several)


def _shard(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, *, config: DTensorConfig) -> nn.Module:
    source = None if any(parameter.is_meta for parameter in model.parameters()) else 0
    apply_expert_parallel(model, mesh, plan, src_data_rank=source)
    apply_tensor_parallel(model, mesh, plan, src_data_rank=source)
    if config.context_parallel_size > 1:
        apply_context_parallel(model, mesh, plan=plan)
    if config.activation_checkpointing is not None:
        apply_activation_checkpointing(model, config.activation_checkpointing)
    if config.compile:
        if config.context_parallel_size > 1 and config.sequence_packing:
            # Where rows lie is other numbers in each pack, for each of which attention would be compiled anew.
            for _, attention in attention_modules(model):
                eager: Any = torch.compiler.disable(attention._call_impl)  # type: ignore[no-untyped-call]  # noqa: SLF001
                attention._compiled_call_impl = eager  # noqa: SLF001 - as nn.Module.compile sets it
        for layer in stacked_layers(model).values():
            layer.compile()
    options = _fsdp_options(model, config)
    alone = config.data_parallel_replicate_size * math.prod(sizes_of(mesh)[axis] for axis in options["dp_axis"]) == 1
    if alone and options["param_dtype"] is None and not config.cpu_offload:
        return model
    return apply_fsdp(model, mesh, **options)


def _split(model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, *, config: DTensorConfig) -> Pipeline:
    """This rank's stage, sharded over the ranks that share it."""
    bare = any(parameter.is_meta for parameter in model.parameters())
    return pipeline_stages(
        model,
        mesh,
        plan,
        schedule=config.pipeline_schedule,
        stream_dtype=torch.bfloat16 if config.precision == "bfloat16" else torch.float32,
        defer_gradient_sync=config.reduce_gradients == "last_microbatch",
        src_data_rank=None if bare else 0,
        activation_checkpointing=config.activation_checkpointing,
        **_fsdp_options(model, config),
    )


def _fsdp_options(model: nn.Module, config: DTensorConfig) -> dict[str, Any]:
    asked = torch.bfloat16 if config.precision == "bfloat16" else torch.float32
    stored = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
    return {
        # What parameters are sharded over as if it was one axis.
        "dp_axis": (
            "dp",
            *(["ep"] if config.expert_parallel_size > 1 else []),
            *(["cp"] if config.context_parallel_size > 1 else []),
        ),
        "dp_replicate_axis": "dp_replicate" if config.data_parallel_replicate_size > 1 else None,
        "param_dtype": None if stored == {asked} else asked,  # what gathered parameters are cast to
        "reduce_dtype": torch.float32,
        "offload_policy": CPUOffloadPolicy(pin_memory=config.device == "cuda") if config.cpu_offload else None,
    }


# ---- A frozen copy: the reference that a policy is compared with.


def copy_of(sharded: ShardedModel, skeleton: nn.Module, *, offload: bool) -> ShardedModel:
    """A second model of the same weights on the same mesh, shard by shard.

    skeleton: `without_weights` of the model that it was made of.
    offload: keep the copy's shards in host memory; each layer visits the device when it runs.
    """
    config = replace(sharded.config, cpu_offload=offload or sharded.config.cpu_offload, activation_checkpointing=None)
    skeleton.requires_grad_(requires_grad=False)

    @torch.no_grad()
    def fill(target: nn.Module) -> None:
        """Copy parameters and all buffers, also those that no file holds or that have changed since."""
        reshard(sharded.model)
        held = dict(sharded.model.named_parameters())
        for name, parameter in target.named_parameters():
            to_local_if_dtensor(parameter).copy_(to_local_if_dtensor(held[name].detach()))
        copies: dict[int, Tensor] = {}
        for path, module in sharded.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if id(buffer) not in copies:
                    copies[id(buffer)] = buffer.detach().clone()
                persistent = name not in module._non_persistent_buffers_set  # noqa: SLF001 - no public one
                target.get_submodule(path).register_buffer(name, copies[id(buffer)], persistent=persistent)

    return ShardedModel(skeleton, config, fill=fill, membership=sharded.membership)


# ---- After a pass that failed half-way: nothing gathered, no gradient kept, ready for the next one.


def forget_pass(model: nn.Module) -> None:
    """Clear every gradient of `model`, plain or under FSDP2, wherever a failed forward or backward has left it.

    torch's `reset_iter_state` leaves gradients on gathered parameters, which the next pass would add to its own.
    """
    if isinstance(model, FSDPModule):
        state: Any = model._get_fsdp_state()  # noqa: SLF001 - no public one
        if state._is_root is not None:  # noqa: SLF001 - before the first pass there is no state of one
            model.reset_iter_state()
        model.set_requires_gradient_sync(True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            groups: Any = module._get_fsdp_state()._fsdp_param_groups  # noqa: SLF001 - no public one
            for parameter in (each for group in groups for each in group.fsdp_params):
                if "unsharded_accumulated_grad" in vars(parameter):  # since torch 2.15 all of it is in `.grad`
                    parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter._unsharded_param.grad = None  # noqa: SLF001
            module.reshard()
    model.zero_grad()

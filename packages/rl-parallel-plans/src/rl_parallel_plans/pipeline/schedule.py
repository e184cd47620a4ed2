"""Run pipeline stages over the ranks of one mesh axis, by the schedules of `torch.distributed.pipelining`.

`pipeline_stages` splits a model and shards this rank's stages; `Pipeline` runs steps over them. What runs is one
function of the model and a microbatch, as it would be written for the model on one rank:

    loss = pipeline.step(microbatches, lambda model, ids: token_loss(model(input_ids=ids).logits, ids) / tokens_of_step)

Each stage calls it. The model leaves it where the layers of the stage end, and only in the last stage does the rest of
it run. Nothing divides a gradient by the number of microbatches: gradients are sums over them, as over data-parallel
ranks, so that a loss divides by what it counts over the whole step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_parallel_plans.checkpoints import entries, export_state_dict, is_first_of_its_ranks, reshard
from rl_parallel_plans.dtensor import is_dtensor, submesh, to_local_if_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.pipeline.stages import boundary_of, split_stages
from rl_parallel_plans.plan.parallel_plan import ParallelPlan
from rl_parallel_plans.sharding.grad_norm import device_of_group, get_grad_norm
from rl_parallel_plans.sharding.parallelize import parallelize
from rl_parallel_plans.structure import matching_modules

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Schedule = Literal["gpipe", "1f1b", "interleaved_1f1b"]
StageFunction = Callable[[nn.Module, Any], Tensor]
"""What every stage runs: a function of the model and a microbatch."""


def pipeline_stages(
    model: nn.Module,
    mesh: "DeviceMesh",
    plan: ParallelPlan,
    *,
    schedule: Schedule = "1f1b",
    stages_per_rank: int | None = None,
    layers: Sequence[int] | None = None,
    pp_axis: str = "pp",
    tp_axis: str = "tp",
    stream_dtype: torch.dtype | None = None,
    defer_gradient_sync: bool = False,
    **options: Any,
) -> "Pipeline":
    """Split `model` into stages over the axis `pp_axis` of `mesh`, and `parallelize` those of this rank.

    plan: the plan of the whole model.
    schedule: "gpipe" runs all forwards and then all backwards; "1f1b" runs a backward as soon as it can, and holds the
        activations of at most as many microbatches as there are stages after; "interleaved_1f1b" gives each rank
        several stages (arXiv:2104.04473), so that ranks wait less and send more.
    stages_per_rank: stages of each rank; 1 by default, and 2 for "interleaved_1f1b".
    layers: number of layers of each stage, as of `split_stages`.
    stream_dtype: dtype of the hidden states between layers; None is `param_dtype`, else the dtype of the layers.
    defer_gradient_sync: reduce gradients over the data-parallel ranks once a step and not with every microbatch: less
        communication, and unsharded gradients in memory.
    options: those of `parallelize`: dp_axis, param_dtype, activation_checkpointing and so on.

    Use neither `model` nor an optimizer over its parameters afterwards: this rank's stages are made of its modules.
    Raises PlanError, before anything has changed, for every problem of the plan, for a model that cannot be split and
    for arguments that do not go together.
    """
    if not isinstance(plan, ParallelPlan):
        raise PlanError(f"plan is a {type(plan).__name__}: make one with plan_for(model, tp=..., custom=...)")
    if options.get("cp_axis") is not None:
        raise PlanError("cp_axis is given: rows are not cut over ranks under pipeline parallelism; use one of the two")
    pp_mesh = submesh(mesh, pp_axis)
    per_rank = _stages_per_rank(schedule, stages_per_rank)
    plan.check(model)
    stages = split_stages(model, pp_mesh.size() * per_rank, layers=layers)
    mine = stages[pp_mesh.get_local_rank() :: pp_mesh.size()]
    first = boundary_of(mine[0]).info
    parameters = mine[0].get_submodule(f"{first.stack}.{first.layers.start}").parameters()
    dtype = stream_dtype or options.get("param_dtype")
    dtype = dtype or next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    for stage in mine:
        parallelize(stage, mesh, plan_of_stage(plan, stage), tp_axis=tp_axis, **options)
    sharded_stream = plan.sequence_parallel and plan.tp > 1
    return Pipeline(
        mine,
        pp_mesh,
        schedule=schedule,
        stream_dtype=dtype,
        stream_mesh=submesh(mesh, tp_axis) if sharded_stream else None,
        defer_gradient_sync=defer_gradient_sync,
    )


def plan_of_stage(plan: ParallelPlan, stage: nn.Module) -> ParallelPlan:
    """The part of a plan that concerns one stage of its model."""
    styles = {pattern: style for pattern, style in plan.styles.items() if matching_modules(stage, pattern)}
    return replace(plan, styles=styles)


class Pipeline:
    """This rank's stages, and the steps that all ranks of the pipeline take together.

    stages: this rank's, sharded or not, in order: stage i is on rank i modulo the size of `pp_mesh`.
    pp_mesh: mesh of one axis, the ranks of the pipeline.
    stream_dtype: dtype of the hidden states between layers.
    stream_mesh: the tp mesh over which the sequence is sharded between layers; None where each tp rank holds all of it.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        pp_mesh: "DeviceMesh",
        *,
        schedule: Schedule = "1f1b",
        stream_dtype: torch.dtype = torch.float32,
        stream_mesh: "DeviceMesh | None" = None,
        defer_gradient_sync: bool = False,
    ) -> None:
        from torch.distributed import pipelining  # here, and not in a step: importing it makes a tensor

        self._pipelining = pipelining
        self.stages = tuple(stages)
        self.schedule = schedule
        self.pp_mesh = pp_mesh
        self.stream_dtype = stream_dtype
        self.stream_mesh = stream_mesh
        self.group = pp_mesh.get_group()
        kind = pp_mesh.device_type
        index = None if kind == "cpu" else torch.get_device_module(kind).current_device()
        self.device = torch.device(kind) if index is None else torch.device(kind, index)
        self._runners = [_Runner(stage, defer_gradient_sync=defer_gradient_sync) for stage in self.stages]
        self._built: dict[str, tuple[tuple[int, ...], Any]] = {}
        infos = [boundary_of(stage).info for stage in self.stages]
        rank, size = pp_mesh.get_local_rank(), pp_mesh.size()
        _stages_per_rank(schedule, len(self.stages))
        if [info.index for info in infos] != list(range(rank, infos[0].num_stages, size)):
            raise PlanError(
                f"rank {rank} of {size} in the pipeline was given stages {[info.index for info in infos]} of "
                f"{infos[0].num_stages}: stage i belongs to rank i modulo {size}"
            )
        for stage in self.stages:
            boundary_of(stage).stream = stream_mesh
            boundary_of(stage).take_model_hooks(stage)

    @property
    def is_last(self) -> bool:
        """Whether this rank holds the last stage, whose outputs are the model's."""
        return boundary_of(self.stages[-1]).info.is_last

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's stages, under their names in the model."""
        for stage in self.stages:
            yield from stage.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's stages: what an optimizer takes."""
        return (parameter for _, parameter in self.named_parameters())

    def step(self, microbatches: Sequence[Any], loss: StageFunction, *, shape: tuple[int, int] | None = None) -> Tensor:
        """Forward and backward of every microbatch; gradients are added to those that are there.

        microbatches: the same on all ranks of the pipeline. One is whatever `loss` takes, all have one shape.
        loss: function of the model and a microbatch that returns a 0-dim tensor. Every stage calls it, so it begins
            with the model (or a part that runs all layers, as `model.model` does); only the last stage runs what
            comes after the layers. Gradients are those of the sum over microbatches.
        shape: rows and tokens of a microbatch; None reads them from a microbatch that is a tensor of token ids, or
            from its "input_ids".

        Returns the sum of the losses, detached, on every rank of the pipeline. Gradients of parameters that several
        stages hold (tied embeddings) are summed over them. Raises PlanError for a number of microbatches that the
        schedule cannot run, and for hidden states of another shape or dtype than expected.
        """
        for stage in self.stages:
            # What earlier steps have left is in the first copy; summed once more, it would count twice.
            for name in boundary_of(stage).info.copies:
                if not self._is_shared_object(stage, name):
                    stage.get_parameter(name).grad = None
        losses: list[Tensor] = []
        self._run("step", microbatches, loss, shape=shape, outputs=losses)
        self._sum_tied_gradients()
        total = torch.zeros((), dtype=torch.float32, device=self.device)
        for each in losses:
            total += each.detach().float()
        dist.all_reduce(total, group=self.group)  # the others add zero
        return total

    @torch.no_grad()
    def forward(
        self, microbatches: Sequence[Any], function: StageFunction, *, shape: tuple[int, int] | None = None
    ) -> list[Tensor]:
        """What `function` returns for each microbatch, without gradients: on the ranks of the last stage, else []."""
        outputs: list[Tensor] = []
        self._run("forward", microbatches, function, shape=shape, outputs=outputs)
        for stage in self.stages:  # FSDP would keep some parameters gathered until a backward
            reshard(stage)
        return outputs

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """`get_grad_norm` of the gradients of all stages, the same on every rank; a tied parameter counts once."""
        own = [
            parameter
            for stage in self.stages
            for name, parameter in stage.named_parameters()
            if name not in boundary_of(stage).info.copies
        ]
        return get_grad_norm(own, norm_type, pp_mesh=self.pp_mesh)

    @torch.no_grad()
    def export_state_dict(
        self, *, dtype: torch.dtype | None = None, device: torch.device | str | None = "cpu"
    ) -> Iterator[tuple[str, Tensor]]:
        """`export_state_dict` of all stages, in the model's order, on the first rank of the first stage.

        A collective: every rank iterates to the end, and the other ranks yield nothing. Each tensor is gathered over
        the ranks of its stage and sent when its turn comes.
        """
        rank, size = self.pp_mesh.get_local_rank(), self.pp_mesh.size()
        mine = {boundary_of(stage).info.index: stage for stage in self.stages}
        sends = is_first_of_its_ranks(self.stages[0])  # one rank of each stage: together, one group of the pp axis
        for index in range(boundary_of(self.stages[0]).info.num_stages):
            stage, owner = mine.get(index), dist.get_global_rank(self.group, index % size)
            if stage is not None and (rank == 0 or not sends):
                yield from export_state_dict(stage, dtype=dtype, device=device)
            elif stage is not None:
                copies = boundary_of(stage).info.copies
                held = {id(t): (name, tuple(t.shape), t.dtype) for name, t, _ in entries(stage) if name not in copies}
                dist.broadcast_object_list([list(held.values())], src=owner, group=self.group, device=self.device)
                for _, tensor in export_state_dict(stage, device=self.device):
                    dist.send(tensor.contiguous(), dst=dist.get_global_rank(self.group, 0), group=self.group)
            elif sends and index % size != 0:
                listed: list[Any] = [None]
                dist.broadcast_object_list(listed, src=owner, group=self.group, device=self.device)
                for name, shape, kind in listed[0] if rank == 0 else ():
                    tensor = torch.empty(shape, dtype=kind, device=self.device)
                    dist.recv(tensor, src=owner, group=self.group)
                    yield name, tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)

    def _run(
        self,
        kind: Literal["step", "forward"],
        microbatches: Sequence[Any],
        function: StageFunction,
        *,
        shape: tuple[int, int] | None,
        outputs: list[Tensor],
    ) -> None:
        if not microbatches:
            raise PlanError("there are no microbatches: a pipeline step needs at least one")
        shapes = [shape or _shape_of(microbatch) for microbatch in microbatches]
        if len(set(shapes)) > 1:
            raise PlanError(
                f"microbatches have the shapes {sorted(set(shapes))}: stages send one another tensors of one shape, so "
                "pad the microbatches of a step to one"
            )
        schedule = self.schedule_of(kind, len(microbatches), shapes[0])
        for runner in self._runners:
            runner.begin(microbatches, function, shape=shapes[0])
        # The runners hold the microbatches. torch wants a target wherever there is a loss, and hands its pieces on.
        target = torch.zeros(len(microbatches))
        run = schedule.step if kind == "step" else schedule.eval
        try:
            run(target=target, losses=outputs, return_outputs=False)
        except RuntimeError as error:
            if isinstance(error.__cause__, PlanError):  # torch wraps what a stage raises
                raise error.__cause__ from None
            raise
        finally:
            for runner in self._runners:
                runner.end()

    def schedule_of(self, kind: str, count: int, shape: tuple[int, int]) -> Any:
        """The schedule of torch for this number and shape of microbatches; the last one of each kind is kept."""
        key = (count, *shape)
        if kind in self._built and self._built[kind][0] == key:
            return self._built[kind][1]
        pipelining = self._pipelining
        self._built.pop(kind, None)  # its buffers go before the new ones come
        stages = [
            pipelining.PipelineStage(
                runner,
                runner.boundary.info.index,
                runner.boundary.info.num_stages,
                self.device,
                # Shapes are given, for torch would run a whole forward and backward to find them out.
                input_args=() if runner.boundary.info.is_first else runner.hidden(shape, self.stream_dtype),
                output_args=torch.empty((), device="meta")
                if runner.boundary.info.is_last
                else runner.hidden(shape, self.stream_dtype),
                group=self.group,
            )
            for runner in self._runners
        ]
        classes: dict[str, Any] = {
            "gpipe": pipelining.ScheduleGPipe,
            "1f1b": pipelining.Schedule1F1B,
            "interleaved_1f1b": pipelining.ScheduleInterleaved1F1B,
        }
        try:
            made = classes[self.schedule](
                stages if self.schedule == "interleaved_1f1b" else stages[0],
                n_microbatches=count,
                loss_fn=lambda output, _: output,
                scale_grads=False,
            )
        except ValueError as error:
            raise PlanError(
                f"{self.schedule} cannot run {count} microbatches: {' '.join(str(error).split())}"
            ) from error
        self._built[kind] = (key, made)
        return made

    def _is_shared_object(self, stage: nn.Module, name: str) -> bool:
        """Whether a tied parameter is still one object in two stages of this rank, which nobody has sharded."""
        found = stage.get_parameter(name)
        return any(
            found is parameter for other in self.stages if other is not stage for parameter in other.parameters()
        )

    def _sum_tied_gradients(self) -> None:
        """Give every copy of a parameter that several stages hold the sum of the gradients of all copies."""
        size, rank = self.pp_mesh.size(), self.pp_mesh.get_local_rank()
        mine = {boundary_of(stage).info.index: stage for stage in self.stages}
        groups = sorted({holders for stage in self.stages for holders in boundary_of(stage).info.tied.values()})
        gradients: dict[tuple[int, str], Tensor] = {}
        ops: list[dist.P2POp] = []
        for holders in groups:
            for holder in holders:
                if holder[0] in mine and (found := _gradient(mine[holder[0]].get_parameter(holder[1]))) is not None:
                    gradients[holder] = found.to(device_of_group(self.group, found.device))
            own = next((gradients[holder] for holder in holders if holder in gradients), None)
            if own is None:  # frozen
                continue
            # Each pair of ranks meets the same sends in the same order.
            for sender in holders:
                for receiver in dict.fromkeys(holder[0] % size for holder in holders if holder != sender):
                    source = sender[0] % size
                    if source == receiver:
                        continue
                    if source == rank:
                        peer = dist.get_global_rank(self.group, receiver)
                        ops.append(dist.P2POp(dist.isend, gradients[sender], peer, self.group))
                    elif receiver == rank:
                        gradients[sender] = torch.empty_like(own)
                        peer = dist.get_global_rank(self.group, source)
                        ops.append(dist.P2POp(dist.irecv, gradients[sender], peer, self.group))
        for work in dist.batch_isend_irecv(ops) if ops else ():
            work.wait()
        for holders in groups:
            if any(holder not in gradients for holder in holders):  # frozen
                continue
            kept = {index: mine[index].get_parameter(name) for index, name in holders if index in mine}
            if any(self._is_shared_object(mine[index], name) for index, name in holders if index in mine):
                continue
            total = reduce(torch.add, [gradients[holder] for holder in holders])  # in one order: equal on every rank
            for parameter in kept.values():
                gradient = _gradient(parameter)
                assert gradient is not None
                gradient.copy_(total)


class _Runner(nn.Module):
    """What torch's schedule runs as a stage: the stage on the next microbatch.

    torch gives microbatches to a stage in order. The stage is no submodule, for torch's schedules handle FSDP in a
    way of their own: they gather all of a stage at once, and clear its gradients when they begin.
    """

    def __init__(self, stage: nn.Module, *, defer_gradient_sync: bool) -> None:
        super().__init__()
        self.__dict__["stage"] = stage
        self.boundary = boundary_of(stage)
        self.defers = defer_gradient_sync and hasattr(stage, "set_requires_gradient_sync")
        self.microbatches: Sequence[Any] = ()
        self.function: StageFunction | None = None
        self.next = 0
        self.expected: tuple[torch.Size, torch.dtype] | None = None

    if TYPE_CHECKING:
        stage: Any

    def begin(self, microbatches: Sequence[Any], function: StageFunction, *, shape: tuple[int, int]) -> None:
        """Before a step."""
        self.microbatches, self.function, self.next = microbatches, function, 0
        self.boundary.shape = shape
        if self.defers:
            self.stage.set_requires_gradient_sync(False)

    def end(self) -> None:
        """After a step, also one that failed."""
        self.microbatches, self.function, self.boundary.call = (), None, None
        if self.defers:
            self.stage.set_requires_gradient_sync(True)

    def hidden(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The hidden states of one microbatch as they go from stage to stage, without numbers."""
        rows, tokens = shape
        if (mesh := self.boundary.stream) is not None:
            each = -(-tokens // mesh.size())  # how DTensor cuts a dim
            tokens = max(0, min(each, tokens - mesh.get_local_rank() * each))
        size = torch.Size((rows, tokens, self.boundary.width))
        self.expected = (size, dtype)
        return torch.empty(size, dtype=dtype, device="meta", requires_grad=True)

    def forward(self, received: Tensor | None = None) -> Any:
        """The next microbatch."""
        function, microbatch = self.function, self.microbatches[self.next]
        assert function is not None
        self.next += 1
        self.boundary.call = lambda model: function(model, microbatch)
        output = self.stage(received)
        if not self.boundary.info.is_last and (output.shape, output.dtype) != self.expected:
            assert self.expected is not None
            raise PlanError(
                f"hidden states leave pipeline stage {self.boundary.info.index} as {list(output.shape)} in "
                f"{output.dtype}, and the next stage expects {list(self.expected[0])} in {self.expected[1]}: pass "
                "shape= for the rows and tokens of a microbatch, stream_dtype= for the dtype"
            )
        if self.defers and self.next == len(self.microbatches) and isinstance(output, Tensor) and output.requires_grad:
            # Fires when the backward of the last microbatch begins: this one reduces what all have added up.
            output.register_hook(lambda _: self.stage.set_requires_gradient_sync(True))  # type: ignore[no-untyped-call]
        return output


def _gradient(parameter: nn.Parameter) -> Tensor | None:
    """This rank's piece of a gradient, placed as its parameter is; zeros where there is none yet, None if frozen."""
    if not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    if is_dtensor(parameter) and is_dtensor(parameter.grad) and parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return to_local_if_dtensor(parameter.grad).detach()


def _stages_per_rank(schedule: str, asked: int | None) -> int:
    if schedule not in get_args(Schedule):
        raise PlanError(f"schedule is {schedule!r}: it is one of {', '.join(get_args(Schedule))}")
    found = (2 if schedule == "interleaved_1f1b" else 1) if asked is None else asked
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise PlanError(f"stages_per_rank is {found!r}: it must be a whole number, at least 1")
    if (found > 1) != (schedule == "interleaved_1f1b"):
        raise PlanError(
            f"schedule={schedule!r} with {found} stages on each rank: interleaved_1f1b has several, the others have one"
        )
    return found


def _shape_of(microbatch: Any) -> tuple[int, int]:
    ids = microbatch.get("input_ids") if isinstance(microbatch, Mapping) else microbatch
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise PlanError(
            f"a microbatch is a {type(microbatch).__name__} without token ids [rows, tokens] of its own or as "
            '"input_ids": pass shape=(rows, tokens)'
        )
    return (ids.shape[0], ids.shape[1])

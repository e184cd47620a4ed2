"""One training step on fake tensors, every storage counted: what `parallelize` makes of a model, run as on rank 0.

    to_empty, optimizer state | forward | backward | optimizer step

The state that an optimizer has after its first step is there from the beginning, so that the step is one of many.
Needs a process group of tp x dp ranks that moves nothing.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast import tracker as kinds
from rl_parallel_plans.forecast.attention import Calls, fused_attention, nothing_packed
from rl_parallel_plans.forecast.gathered import gathered_labels
from rl_parallel_plans.forecast.ledger import Ledger
from rl_parallel_plans.forecast.losses import Forward, make_forward, make_pipeline_loss
from rl_parallel_plans.forecast.optimizers import MAKERS, LocalOptimizer
from rl_parallel_plans.forecast.options import MemoryOptions
from rl_parallel_plans.forecast.torch_internals import give_pipeline_buffers, sends_hold_tensors
from rl_parallel_plans.forecast.tracker import MemoryTracker
from rl_parallel_plans.pipeline.schedule import pipeline_stages
from rl_parallel_plans.plan.parallel_plan import ParallelPlan, plan_for
from rl_parallel_plans.sharding.parallelize import parallelize
from rl_parallel_plans.structure import collapsed, retie, tied_names

BETWEEN_STEPS = "between steps"
FORWARD = "forward"
BACKWARD = "backward"
PIPELINE = "forward and backward"
OPTIMIZER_STEP = "optimizer step"


def run_step(model: nn.Module, options: MemoryOptions) -> tuple[ParallelPlan, Ledger, Calls]:
    """Parallelise `model`, which lies on the meta device, and run a step: its plan, its account, its attention calls.

    Raises PlanError where there is no plan, it does not fit, or the model's forward depends on the numbers in a tensor.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

    names = {module: collapsed(name) for name, module in model.named_modules()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.weight_dtype)
    ledger = Ledger()
    attention: AbstractContextManager[Calls] = (
        fused_attention() if options.attention == "flash" else nullcontext(Calls())
    )
    try:
        if options.pp > 1:
            with nothing_packed(), attention as calls:
                return _run_pipeline_step(model, options, ledger, names=names), ledger, calls
        plan = _parallelized(model, options)
        forward = make_forward(model, options, ledger)
        with nothing_packed(), FakeTensorMode(allow_non_fake_inputs=True), attention as calls:
            ties = tied_names(model)
            retie(model.to_empty(device="cpu"), ties)
            optimizer = _optimizer(_trainable(model), options)
            ids = torch.zeros(options.batch_size, options.sequence_length, dtype=torch.int64)
            with MemoryTracker(ledger, names) as tracker:
                _label_what_lasts(tracker, model, optimizer=optimizer, ids=ids)
                with gathered_labels(tracker, model):
                    _step(tracker, model, optimizer=optimizer, forward=forward, ids=ids)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the forward of {type(model).__name__} depends on the numbers in a tensor ({error.func}), and a "
            "prediction has none: routing of tokens to experts one expert at a time is the usual case; choose another "
            "implementation of it where the model has one"
        ) from error
    return plan, ledger, calls


def _parallelized(model: nn.Module, options: MemoryOptions) -> ParallelPlan:
    from torch.distributed.device_mesh import init_device_mesh

    plan = _plan(model, options)
    mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
    parallelize(model, mesh, plan, **_sharding(options))
    return plan


def _plan(model: nn.Module, options: MemoryOptions) -> ParallelPlan:
    plan = plan_for(model, tp=options.tp, sequence_parallel=options.sequence_parallel, custom=options.custom)
    plan.check(model)
    return plan


def _sharding(options: MemoryOptions) -> dict[str, Any]:
    return {
        "src_data_rank": None,
        "activation_checkpointing": options.activation_checkpointing,
        "param_dtype": options.param_dtype,
        "reduce_dtype": options.reduce_dtype,
    }


def _run_pipeline_step(
    model: nn.Module, options: MemoryOptions, ledger: Ledger, *, names: Mapping[nn.Module, str]
) -> ParallelPlan:
    """A step of the stages of one pipeline rank."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    plan, loss = _plan(model, options), make_pipeline_loss(model, options, ledger)
    mesh = init_device_mesh("cpu", (options.pp, options.dp, options.tp), mesh_dim_names=("pp", "dp", "tp"))
    pipeline = pipeline_stages(model, mesh, plan, schedule=options.schedule, **_sharding(options))
    count = options.microbatches or 2 * options.pp
    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as labels:
        for stage in pipeline.stages:
            ties = tied_names(stage)
            retie(stage.to_empty(device="cpu"), ties)
        trainable = [parameter for stage in pipeline.stages for parameter in _trainable(stage)]
        optimizer = _optimizer(trainable, options)
        size = (options.batch_size, options.sequence_length)
        microbatches = list(torch.zeros(count, *size, dtype=torch.int64).unbind())
        buffers = give_pipeline_buffers(pipeline.schedule_of("step", count, size), microbatches=count)
        with MemoryTracker(ledger, names) as tracker:
            with ledger.phase(BETWEEN_STEPS):
                for stage in pipeline.stages:
                    tracker.label(stage.parameters(), kinds.PARAMETERS)
                    tracker.label(stage.buffers(), kinds.BUFFERS)
                tracker.label(optimizer.state() if optimizer is not None else (), kinds.OPTIMIZER_STATE)
                tracker.label(microbatches, kinds.INPUTS)
                tracker.label(buffers, kinds.PIPELINE)
            for stage in pipeline.stages:
                labels.enter_context(gathered_labels(tracker, stage))
            with ledger.phase(PIPELINE), sends_hold_tensors():
                pipeline.step(microbatches, loss)
            tracker.label(pipeline.parameters(), kinds.PARAMETERS)
            gradients = (parameter.grad for parameter in pipeline.parameters())
            tracker.label((gradient for gradient in gradients if gradient is not None), kinds.GRADIENTS)
            if optimizer is not None:
                tracker.outside_backward = kinds.TEMPORARIES
                with ledger.phase(OPTIMIZER_STEP):
                    optimizer.step([parameter for stage in pipeline.stages for parameter in _trainable(stage)])
    return plan


def _optimizer(parameters: Sequence[nn.Parameter], options: MemoryOptions) -> LocalOptimizer | None:
    if options.optimizer == "none":
        return None
    make = options.optimizer if callable(options.optimizer) else MAKERS[options.optimizer]
    return LocalOptimizer(make, parameters)


def _label_what_lasts(
    tracker: MemoryTracker, model: nn.Module, *, optimizer: LocalOptimizer | None, ids: Tensor
) -> None:
    with tracker.ledger.phase(BETWEEN_STEPS):
        tracker.label(model.parameters(), kinds.PARAMETERS)
        tracker.label(model.buffers(), kinds.BUFFERS)
        tracker.label(optimizer.state() if optimizer is not None else (), kinds.OPTIMIZER_STATE)
        tracker.label([ids], kinds.INPUTS)


def _step(
    tracker: MemoryTracker, model: nn.Module, *, optimizer: LocalOptimizer | None, forward: Forward, ids: Tensor
) -> None:
    ledger = tracker.ledger
    with ledger.phase(FORWARD):
        loss, held = forward(ids)
    with ledger.phase(BACKWARD):
        loss.backward()  # type: ignore[no-untyped-call]
    # What FSDP made of parameters and gradients meanwhile is known once backward has put it into their places.
    tracker.label(model.parameters(), kinds.PARAMETERS)
    tracker.label((p.grad for p in model.parameters() if p.grad is not None), kinds.GRADIENTS)
    del loss, held
    if optimizer is not None:
        tracker.outside_backward = kinds.TEMPORARIES
        with ledger.phase(OPTIMIZER_STEP):
            optimizer.step(_trainable(model))


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]

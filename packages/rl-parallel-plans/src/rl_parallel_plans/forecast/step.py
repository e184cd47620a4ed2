"""One training step on fake tensors, every storage counted: what `parallelize` makes of a model, run as on one rank.

    to_empty, optimizer state | forward | backward | optimizer step

The state that an optimizer has after its first step is there from the beginning, so that the step is one of many.
Needs a process group of pp x dp x tp ranks that exchange nothing. Targets are the token ids themselves, one per row: a
shift would cost nothing, and change nothing here.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.dtensor import is_dtensor, to_local_if_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast import fake
from rl_parallel_plans.forecast import tracker as kinds
from rl_parallel_plans.forecast.options import MakeOptimizer, MemoryOptions, OptimizerName
from rl_parallel_plans.forecast.tracker import Ledger, MemoryTracker, gathered_labels
from rl_parallel_plans.logp import get_logprobs_from_vocab_parallel_logits, linear_logp
from rl_parallel_plans.pipeline.schedule import Pipeline, pipeline_stages
from rl_parallel_plans.pipeline.stages import call_on_token_ids
from rl_parallel_plans.plan.parallel_plan import ParallelPlan, plan_for
from rl_parallel_plans.sharding.parallelize import parallelize
from rl_parallel_plans.structure import collapsed, decoder_layers, output_head, retie, tied_names

BETWEEN_STEPS = "between steps"
FORWARD = "forward"
LM_HEAD = "lm_head forward"
AFTER_LM_HEAD = "after the lm_head"
BACKWARD = "backward"
PIPELINE = "forward and backward"
OPTIMIZER_STEP = "optimizer step"

Forward = Callable[[Tensor], tuple[Tensor, object]]


def run_step(model: nn.Module, options: MemoryOptions) -> tuple[ParallelPlan, Ledger, fake.Calls]:
    """Parallelise `model`, which is on the meta device, and run a step: its plan, its ledger, its attention calls.

    Raises PlanError where there is no plan, it does not fit, or the model's forward depends on the numbers in a tensor.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    for parameter in model.parameters():
        parameter.data = parameter.data.to(options.weight_dtype)
    ledger = Ledger()
    attention: AbstractContextManager[fake.Calls] = (
        fake.fused_attention() if options.attention == "flash" else nullcontext(fake.Calls())
    )
    try:
        with fake.no_packed_rows(), attention as calls:
            return _run(model, options, ledger), ledger, calls
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise PlanError(
            f"the forward of {type(model).__name__} depends on the numbers in a tensor ({error.func}), and a "
            "prediction has none: routing of tokens to experts one expert at a time is the usual case; choose another "
            "implementation of it where the model has one"
        ) from error


def _run(model: nn.Module, options: MemoryOptions, ledger: Ledger) -> ParallelPlan:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.device_mesh import init_device_mesh

    names = {module: collapsed(name) for name, module in model.named_modules()}
    plan = plan_for(model, tp=options.tp, sequence_parallel=options.sequence_parallel, custom=options.custom)
    plan.check(model)
    sharding: dict[str, Any] = {
        "src_data_rank": None,
        "activation_checkpointing": options.activation_checkpointing,
        "param_dtype": options.param_dtype,
        "reduce_dtype": options.reduce_dtype,
    }
    pipeline: Pipeline | None = None
    stages: Sequence[nn.Module] = [model]
    if options.pp > 1:
        pipeline_loss = _pipeline_loss(model, options, ledger)
        mesh = init_device_mesh("cpu", (options.pp, options.dp, options.tp), mesh_dim_names=("pp", "dp", "tp"))
        pipeline = pipeline_stages(model, mesh, plan, schedule=options.schedule, **sharding)
        stages = pipeline.stages
    else:
        mesh = init_device_mesh("cpu", (options.dp, options.tp), mesh_dim_names=("dp", "tp"))
        parallelize(model, mesh, plan, **sharding)
        forward = _forward(model, options, ledger)

    with FakeTensorMode(allow_non_fake_inputs=True), ExitStack() as labels:
        for stage in stages:
            ties = tied_names(stage)
            retie(stage.to_empty(device="cpu"), ties)
        optimizer = None if options.optimizer == "none" else LocalOptimizer(options.optimizer, _trainable(stages))
        size = (options.batch_size, options.sequence_length)
        buffers: list[Tensor] = []
        if pipeline is None:
            batch = [torch.zeros(size, dtype=torch.int64)]
        else:
            count = options.microbatches or 2 * options.pp
            batch = list(torch.zeros(count, *size, dtype=torch.int64).unbind())
            buffers = fake.give_pipeline_buffers(pipeline.schedule_of("step", count, size), microbatches=count)
        held: tuple[Any, ...] = ()
        with MemoryTracker(ledger, names) as tracker:
            with ledger.phase(BETWEEN_STEPS):
                for stage in stages:
                    tracker.label(stage.parameters(), kinds.PARAMETERS)
                    tracker.label(stage.buffers(), kinds.BUFFERS)
                tracker.label(optimizer.state() if optimizer is not None else (), kinds.OPTIMIZER_STATE)
                tracker.label(batch, kinds.INPUTS)
                tracker.label(buffers, kinds.PIPELINE)
            for stage in stages:
                labels.enter_context(gathered_labels(tracker, stage))
            if pipeline is None:
                with ledger.phase(FORWARD):
                    held = forward(batch[0])
                with ledger.phase(BACKWARD):
                    held[0].backward()  # type: ignore[no-untyped-call]
            else:
                with ledger.phase(PIPELINE), fake.sends_hold_tensors():
                    pipeline.step(batch, pipeline_loss)
            # What FSDP made of parameters and gradients is known once backward has put it into their places.
            parameters = [parameter for stage in stages for parameter in stage.parameters()]
            tracker.label(parameters, kinds.PARAMETERS)
            tracker.label((p.grad for p in parameters if p.grad is not None), kinds.GRADIENTS)
            del held, parameters
            if optimizer is not None:
                tracker.outside_backward = kinds.TEMPORARIES
                with ledger.phase(OPTIMIZER_STEP):
                    optimizer.step(_trainable(stages))
    return plan


def _trainable(stages: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [parameter for stage in stages for parameter in stage.parameters() if parameter.requires_grad]


# -- From token ids to the loss, for each way of reading the lm_head ---------------------------------


def _forward(model: nn.Module, options: MemoryOptions, ledger: Ledger) -> Forward:
    """A function of token ids [B, S] that returns the loss and what a trainer holds until backward has ended."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    head = _head(model)
    if options.lm_head == "linear_logp":
        method = "_rl_parallel_plans_loss"
        model.__dict__[method] = types.MethodType(_loss_from_hidden(model, head, ledger), model)
        register_fsdp_forward_method(model, method)  # FSDP gathers before it what it reads
        return lambda ids: (getattr(model, method)(ids), None)

    # Name the phase of the head's forward, and gather its output at the end as ColwiseParallel(Replicate()) does.
    phases: list[Any] = []

    def before(*_: object) -> None:
        phases.append(ledger.phase(LM_HEAD))
        phases[-1].__enter__()

    def after(_: nn.Module, __: object, output: Tensor) -> Tensor:
        whole = output.full_tensor() if options.lm_head == "gathered" and is_dtensor(output) else output
        phases.pop().__exit__(None, None, None)
        ledger.moment(AFTER_LM_HEAD)
        return whole

    model.get_submodule(head).register_forward_pre_hook(before)
    model.get_submodule(head).register_forward_hook(after)
    loss = options.loss or LOSSES[options.lm_head]

    def forward(ids: Tensor) -> tuple[Tensor, object]:
        output = call_on_token_ids(model, ids)
        return loss(getattr(output, "logits", output), ids), output

    return forward


def _pipeline_loss(model: nn.Module, options: MemoryOptions, ledger: Ledger) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss as `Pipeline.step` takes it. `model` is the one that is split: the head is the last stage's."""
    head = _head(model)
    if options.lm_head == "linear_logp":
        return _loss_from_hidden(model, head, ledger)
    loss = options.loss or LOSSES[options.lm_head]

    def from_logits(model: nn.Module, ids: Tensor) -> Tensor:
        output = call_on_token_ids(model, ids)
        logits = getattr(output, "logits", output)
        if options.lm_head == "gathered" and is_dtensor(logits):
            logits = logits.full_tensor()
        ledger.moment(AFTER_LM_HEAD)
        return loss(logits, ids)

    return from_logits


def _head(model: nn.Module) -> str:
    head = output_head(model)
    if head is None:
        raise PlanError(f"{type(model).__name__} has no lm_head (get_output_embeddings or a child lm_head)")
    return head


def _loss_from_hidden(model: nn.Module, head: str, ledger: Ledger) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss by `linear_logp` as a function of the model and token ids."""
    stack = decoder_layers(model)
    backbone = stack[0].rpartition(".")[0] if stack else ""
    if not backbone:
        raise PlanError(
            f"{type(model).__name__} holds its layers itself, not in a backbone that returns hidden states: "
            'lm_head="linear_logp" cannot call what comes before the lm_head; pass lm_head="sharded"'
        )
    config = getattr(getattr(model, "config", None), "text_config", getattr(model, "config", None))
    softcap = getattr(config, "final_logit_softcapping", None)

    def from_hidden(self: nn.Module, ids: Tensor) -> Tensor:
        output = call_on_token_ids(self.get_submodule(backbone), ids)
        hidden = getattr(output, "last_hidden_state", output).flatten(0, 1)
        with ledger.phase(LM_HEAD), _AnyTokenId():  # type: ignore[no-untyped-call]
            logp = linear_logp(hidden, self.get_submodule(head), ids.flatten(), softcap=softcap, ignore_index=None)
        ledger.moment(AFTER_LM_HEAD)
        return -logp.mean()

    return from_hidden


class _AnyTokenId(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads a fake token id as 0, which is in every vocabulary: the check of targets reads the largest."""

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is fake.NUMBER_IN_TENSOR and not args[0].is_floating_point():
            return 0
        return function(*args, **(kwargs or {}))


def _from_whole_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1).gather(-1, ids[..., None]).mean()


def _from_sharded_logits(logits: Tensor, ids: Tensor) -> Tensor:
    with _AnyTokenId():  # type: ignore[no-untyped-call]
        return -get_logprobs_from_vocab_parallel_logits(logits, ids, ignore_index=None).mean()


def _in_one_piece(logits: Tensor, ids: Tensor) -> Tensor:
    logp: Tensor = _OnePiece.apply(to_local_if_dtensor(logits), ids)  # type: ignore[no-untyped-call]
    return -logp.mean()


class _OnePiece(torch.autograd.Function):
    """Log-probabilities from a rank's whole slice of logits in fp32, as trainers do it that have no chunks.

    The softmax is kept, and backward makes a one-hot matrix of int64 like it. Which tokens are this rank's changes no
    byte, so every target is taken for one of them.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        logits = logits.float()
        shifted = logits - logits.amax(-1, keepdim=True)
        log_p = shifted - shifted.exp().sum(-1, keepdim=True).log()
        targets = targets.remainder(logits.shape[-1])
        ctx.save_for_backward(log_p.exp(), targets)
        return log_p.gather(-1, targets[..., None]).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        p, targets = ctx.saved_tensors
        mine = (targets >= 0)[..., None]
        chosen = mine * torch.nn.functional.one_hot(targets, num_classes=p.shape[-1])
        return chosen.float().sub_(p).mul_(gradients[0][..., None]), None


LOSSES = {"gathered": _from_whole_logits, "one_piece": _in_one_piece, "sharded": _from_sharded_logits}


# -- The optimizer -----------------------------------------------------------------------------------

OPTIMIZERS: dict[OptimizerName, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, foreach=True),
}


class LocalOptimizer:
    """An optimizer over this rank's pieces, with the state of a step that is not the first.

    Elementwise optimizers do to a DTensor what they do to its local tensor, and over plain tensors they are soon done.
    The parameters may be other objects at each step.
    """

    def __init__(self, optimizer: OptimizerName | MakeOptimizer, parameters: Sequence[nn.Parameter]) -> None:
        self._make = optimizer if callable(optimizer) else OPTIMIZERS[optimizer]
        pieces = _local_pieces(parameters)
        for piece in pieces:
            piece.grad = torch.empty_like(piece)
        made = self._make(pieces)
        made.step()
        self._states: list[dict[str, Any]] = [made.state[piece] for piece in pieces]

    def state(self) -> list[Tensor]:
        """Every tensor of the state."""
        return [value for state in self._states for value in state.values() if isinstance(value, Tensor)]

    def step(self, parameters: Sequence[nn.Parameter]) -> None:
        """One step of `parameters`, the same as before in the same order, with the gradients that they have."""
        pieces = _local_pieces(parameters)
        optimizer = self._make(pieces)
        for piece, state, parameter in zip(pieces, self._states, parameters, strict=True):
            optimizer.state[piece] = state
            piece.grad = None if parameter.grad is None else to_local_if_dtensor(parameter.grad)
        optimizer.step()


@torch.no_grad()
def _local_pieces(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(to_local_if_dtensor(parameter).detach()) for parameter in parameters]

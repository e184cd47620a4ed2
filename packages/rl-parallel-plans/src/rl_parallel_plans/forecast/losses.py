"""Forward of a training step up to the loss, for each way of reading the lm_head.

Knows how a model is called and where its parts are; knows nothing of bytes. Targets are the tokens themselves, one per
row: a shift would cost nothing, and change nothing here.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.dtensor import is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.forecast.ledger import Ledger
from rl_parallel_plans.forecast.options import MemoryOptions
from rl_parallel_plans.forecast.torch_internals import NUMBER_IN_TENSOR
from rl_parallel_plans.logp import get_logprobs_from_vocab_parallel_logits, linear_logp
from rl_parallel_plans.structure import decoder_layers, output_head

LM_HEAD = "lm_head forward"
AFTER_LM_HEAD = "after the lm_head"

METHOD = "_rl_parallel_plans_loss"

Forward = Callable[[Tensor], tuple[Tensor, object]]


def make_forward(model: nn.Module, options: MemoryOptions, ledger: Ledger) -> Forward:
    """A function of token ids [B, S] that returns the loss and what a trainer holds until backward has ended.

    Raises PlanError where the model has no lm_head, or where "linear_logp" cannot tell what comes before it.
    """
    head = output_head(model)
    if head is None:
        raise PlanError(f"{type(model).__name__} has no lm_head (get_output_embeddings or a child lm_head)")
    if options.lm_head == "linear_logp":
        return _from_hidden(model, head, ledger)
    _watch_head(model.get_submodule(head), ledger, gather=options.lm_head == "gathered")
    loss = options.loss or LOSSES[options.lm_head]

    def forward(ids: Tensor) -> tuple[Tensor, object]:
        output = _called(model, ids)
        logits = getattr(output, "logits", output)
        return loss(logits, ids), output

    return forward


def _from_whole_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits.float().log_softmax(-1).gather(-1, ids[..., None]).mean()


def _from_sharded_logits(logits: Tensor, ids: Tensor) -> Tensor:
    with _AnyTokenId():  # type: ignore[no-untyped-call]
        return -get_logprobs_from_vocab_parallel_logits(logits, ids, ignore_index=None).mean()


def _in_one_piece(logits: Tensor, ids: Tensor) -> Tensor:
    local = logits.to_local() if is_dtensor(logits) else logits
    logp: Tensor = _OnePiece.apply(local, ids)  # type: ignore[no-untyped-call]
    return -logp.mean()


class _OnePiece(torch.autograd.Function):
    """Log-probabilities from a rank's whole slice of logits in fp32, as trainers have them that do it in one piece.

    The softmax is kept, and backward makes a one-hot matrix of int64 like it. Which words are this rank's changes no
    byte, so that every target is taken for one of them.
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


def _watch_head(head: nn.Module, ledger: Ledger, *, gather: bool) -> None:
    """Name the phase of the head's forward, and gather its output at the end as ColwiseParallel(Replicate()) does."""
    phases: list[Any] = []

    def before(*_: object) -> None:
        phases.append(ledger.phase(LM_HEAD))
        phases[-1].__enter__()

    def after(_: nn.Module, __: object, output: Tensor) -> Tensor:
        whole = output.full_tensor() if gather and is_dtensor(output) else output
        phases.pop().__exit__(None, None, None)
        ledger.moment(AFTER_LM_HEAD)
        return whole

    head.register_forward_pre_hook(before)
    head.register_forward_hook(after)


def _from_hidden(model: nn.Module, head: str, ledger: Ledger) -> Forward:
    from torch.distributed.fsdp import register_fsdp_forward_method

    loss = hidden_loss(model, head, ledger)
    model.__dict__[METHOD] = types.MethodType(loss, model)
    register_fsdp_forward_method(model, METHOD)  # FSDP gathers before it what it reads
    return lambda ids: (getattr(model, METHOD)(ids), None)


def hidden_loss(model: nn.Module, head: str, ledger: Ledger) -> Callable[[nn.Module, Tensor], Tensor]:
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
        output = _called(self.get_submodule(backbone), ids)
        hidden = getattr(output, "last_hidden_state", output).flatten(0, 1)
        with ledger.phase(LM_HEAD), _AnyTokenId():  # type: ignore[no-untyped-call]
            logp = linear_logp(hidden, self.get_submodule(head), ids.flatten(), softcap=softcap, ignore_index=None)
        ledger.moment(AFTER_LM_HEAD)
        return -logp.mean()

    return from_hidden


def make_pipeline_loss(
    model: nn.Module, options: MemoryOptions, ledger: Ledger
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The loss as `Pipeline.step` takes it. `model` is the one that was split: the head is the last stage's."""
    head = output_head(model)
    if head is None:
        raise PlanError(f"{type(model).__name__} has no lm_head (get_output_embeddings or a child lm_head)")
    if options.lm_head == "linear_logp":
        return hidden_loss(model, head, ledger)
    loss = options.loss or LOSSES[options.lm_head]

    def from_logits(model: nn.Module, ids: Tensor) -> Tensor:
        output = _called(model, ids)
        logits = getattr(output, "logits", output)
        if options.lm_head == "gathered" and is_dtensor(logits):
            logits = logits.full_tensor()
        ledger.moment(AFTER_LM_HEAD)
        return loss(logits, ids)

    return from_logits


def _called(module: nn.Module, ids: Tensor) -> Any:
    parameters = inspect.signature(type(module).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "input_ids" not in parameters:
        return module(ids)
    without_cache = {"use_cache": False} if takes_any or "use_cache" in parameters else {}
    return module(input_ids=ids, **without_cache)


class _AnyTokenId(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers what a fake token id is with 0, which lies in every vocabulary: the check of targets asks."""

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is NUMBER_IN_TENSOR and not args[0].is_floating_point():
            return 0
        return function(*args, **(kwargs or {}))

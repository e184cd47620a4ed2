"""The gradient of a loss over all rows of a batch, and one step along it, on all ranks together.

    accumulate(model, rows, loss) -> ... -> clip_and_step: sum over ranks, global norm, clip, update, clear

A rank whose loss raises goes on with a loss of 0, since the other stages and ranks wait for it; then all of them raise.
What is asked of all ranks is asked of all at once: a rank that went on alone would wait for ever.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.backend import asked_of
from rl_backends.batching.microbatches import Microbatch
from rl_backends.examples import BatchT
from rl_backends.losses import LossFunction, LossOverMicrobatches, Output, Sums
from rl_backends.megatron.cpu_compat import cpu_compat, no_cuda_calls, user_code
from rl_backends.megatron.model import MegatronModel, adds_in_place, bucket_groups
from rl_backends.megatron.optimizer import MegatronOptimizers, masters_of
from rl_backends.megatron.passes import run_passes
from rl_backends.optimizers.optimizers import GradientStep, nonfinite_step
from rl_backends.rank_agreement import add_up, gather_text, on_every_rank, raise_together, sums_of_last_rank
from rl_backends.readers import Reader


@torch.inference_mode(mode=False)
@torch.enable_grad()
def accumulate(
    model: MegatronModel,
    examples: BatchT,
    microbatches: Sequence[Microbatch],
    *,
    loss: LossFunction[BatchT],
    reader: Reader,
    output: Output,
) -> Sums:
    """Add the gradient of `loss` over this rank's microbatches to `main_grad`; return the sums of all ranks."""
    rows = [microbatch.of(examples, device="cpu") for microbatch in microbatches]
    asked = [asked_of(each, output) for each in rows]
    inputs = [
        model.inputs(each, places, offset=offset, words=words)
        for each, (places, offset, words) in zip(rows, asked, strict=True)
    ]
    loss_of = LossOverMicrobatches(loss, device=model.config.device, around=user_code)

    def read_and_ask(number: int, hidden: Tensor) -> Tensor:
        # Also after a failure: ranks that share this row's vocabulary or tokens read and go back together.
        shape = rows[number].tokens.shape[0], rows[number].tokens.shape[1]
        try:
            with no_cuda_calls():
                outputs = model.read(hidden, inputs[number], reader, shape=shape)[0]
        except Exception as error:  # noqa: BLE001 - raised below, once every rank knows
            loss_of.failure = loss_of.failure or error
            return hidden.sum() * 0.0
        if output == "score":
            outputs = outputs.sum(1)
        return loss_of(outputs, rows[number], counted=microbatches[number].counted)

    with _added_to_buffer(model):
        run_passes(model.ddp, inputs, read_and_ask)
    raise_together(loss_of.failure)
    groups, device = model.groups, torch.device(model.config.device)
    sums = on_every_rank(lambda: add_up(loss_of.sums, groups.rows) if groups.last_stage else {})
    return sums_of_last_rank(sums, groups.pp, device=device)


@contextlib.contextmanager
def _added_to_buffer(model: MegatronModel) -> Iterator[None]:
    """Backward adds to `main_grad`: where autograd can do it itself, it takes that for the gradient that it has."""
    trained = [each for chunk in model.ddp for each in chunk.params_with_grad] if adds_in_place(model.config) else []
    for each in trained:
        each.grad = each.main_grad
    try:
        yield
    finally:
        for each in trained:
            each.grad = None


def discard(model: MegatronModel) -> None:
    """Forget the gradient."""
    for group in bucket_groups(model.ddp):
        if group.grad_reduce_handle is not None:  # of a reduction that overlapped with backward
            group.grad_reduce_handle.wait()
            group.grad_reduce_handle = None
        if group.is_first_batch:  # from which Megatron learns what to expect; it may have failed half-way
            group.per_param_grad_ready_counts = {}
    for chunk in model.ddp:
        chunk.zero_grad_buffer()
    model.gpt.zero_grad()  # what a backward that failed half-way has not yet added to the buffer


@torch.no_grad()
def clip_and_step(
    ddp: Sequence[nn.Module], optimizers: MegatronOptimizers, *, version: int, names: Mapping[str, str] | None = None
) -> GradientStep:
    """Sum the gradients of all ranks, clip by the global norm, update the weights, clear the gradients.

    version: steps that the weights have seen, for the message.
    names: what messages call this rank's parameters, by Megatron's names; one that is not in it keeps its own.

    Every rank must call, after the same calls of forward_backward, and all do and return the same.

    Raises:
        NonFiniteGradientError: a gradient is not finite on some rank and `on_nonfinite_gradient` is "raise". Weights
            and optimizers are as they were, and the gradients are cleared.
    """
    several = dist.get_world_size() > 1
    with cpu_compat(), contextlib.nullcontext() if several else no_cuda_calls():
        _sum_over_ranks(ddp, optimizers)
        norm = _agree_on_norm(optimizers, next(ddp[0].parameters()).device)
        if not math.isfinite(norm):
            found = _nonfinite_gradients(optimizers, names or {})
            return nonfinite_step(optimizers, found, norm=norm, version=version)
        max_norm = optimizers.config.max_grad_norm
        if max_norm is not None and norm + 1e-6 > max_norm:  # as Megatron, whose plain code copies each gradient twice
            torch._foreach_mul_(_gradients(optimizers), max_norm / (norm + 1e-6))
        optimizers.step()
        if ddp[0].ddp_config.overlap_param_gather:  # type: ignore[union-attr]
            for group in bucket_groups(ddp):
                group.param_gather_dispatched = False  # whatever was gathered since the gradients were summed
        optimizers.zero_grad()
        return GradientStep(norm=norm, clipped=max_norm is not None and norm > max_norm, skipped=False)


def _sum_over_ranks(ddp: Sequence[nn.Module], optimizers: MegatronOptimizers) -> None:
    """Gradients become those of all ranks, where the optimizers look for them."""
    if dist.get_world_size() > 1 or ddp[0].ddp_config.overlap_grad_reduce:  # type: ignore[union-attr]
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(list(ddp), None)
    optimizers.inner.prepare_grads()


def _gradients(optimizers: MegatronOptimizers) -> list[Tensor]:
    """What this rank steps along."""
    return [each.grad for part in optimizers.parts for each in part.get_parameters() if each.grad is not None]


def _agree_on_norm(optimizers: MegatronOptimizers, device: torch.device) -> float:
    """The global norm, the same on every rank; not finite where any gradient of any rank is not.

    Replicas of a model have each reduced it, and each leaves out copies of a parameter but the first: a fault in one
    replica or copy would have the ranks' weights part.
    """
    gradients = _gradients(optimizers)
    if dist.get_world_size() == 1:  # all of them at once, where Megatron's plain code takes them one by one
        return float(nn.utils.get_total_norm(gradients))
    norm = optimizers.inner.get_grad_norm()
    counted = {id(grad) for part in optimizers.parts for grad in part.get_main_grads_for_grad_norm()}
    others = [grad for grad in gradients if id(grad) not in counted]
    no_number = math.isnan(norm) or bool(others and not nn.utils.get_total_norm(others).isfinite())
    finite = norm if math.isfinite(norm) else 0.0
    told = torch.tensor([finite, no_number, math.isinf(norm)], dtype=torch.float64, device=device)
    dist.all_reduce(told, dist.ReduceOp.MAX)
    agreed, no_number_anywhere, infinite_anywhere = told.tolist()
    return math.nan if no_number_anywhere else math.inf if infinite_anywhere else agreed


def _nonfinite_gradients(optimizers: MegatronOptimizers, names: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the parameters whose gradient has a NaN or an infinity on any rank; the same on every rank."""
    own = [
        names.get(name, name)
        for name, parameter in optimizers.named_parameters.items()
        if not torch.isfinite(parameter.main_grad).all()  # type: ignore[attr-defined] # Megatron's DDP hangs it there
    ]
    return tuple(dict.fromkeys(name for text in gather_text(json.dumps(own)) for name in json.loads(text)))


@torch.no_grad()
def summed_gradients(
    model: MegatronModel, optimizers: MegatronOptimizers
) -> Iterator[tuple[str, tuple[int, ...], Tensor]]:
    """Name, offsets and numbers of every part of a gradient that this rank steps along, summed over all ranks.

    Every rank must call it. The sum is made in place: forget the gradient before another pass.
    """
    with cpu_compat():
        _sum_over_ranks(model.ddp, optimizers)
    for master in masters_of(optimizers):
        assert master.tensor.grad is not None
        for held in model.held:
            if held.parameter is master.parameter and not held.duplicate:
                piece = master.piece(held, master.tensor.grad)
                for box in piece.boxes:
                    yield held.name, tuple(box.offsets), box.of_local(piece.local)

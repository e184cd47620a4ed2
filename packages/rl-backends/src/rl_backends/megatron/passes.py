"""Microbatches through the stages of the pipeline, and what is read of the last one's hidden states.

    first stage  tokens -> hidden [s, b, H] -> ... -> last stage  hidden -> asked places -> reader -> [b, w, ...]

One stage makes the passes one after the other. Megatron's own schedules run those of several stages, 1F1B, interleaved
where each holds several chunks of the model, and those of experts. Only the last chunk of the last stage is read.

Axes: b rows of a microbatch, w tokens of its longest, s tokens that the model reads at a time, H hidden.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_backends.batching.microbatches import ModelInputs
from rl_backends.megatron.cpu_compat import cpu_compat, no_cuda_calls
from rl_backends.megatron.groups import ParallelGroups

OnHidden = Callable[[int, Tensor], Tensor]
"""Given a microbatch's number and the last stage's hidden states; returns the scalar that backward starts from."""


def run_passes(
    chunks: Sequence[nn.Module], inputs: Sequence[ModelInputs], on_hidden: OnHidden, *, forward_only: bool = False
) -> None:
    """Forward, and backward unless `forward_only`, of every microbatch; gradients add up in `main_grad`.

    chunks: of the model on this stage, as wrapped for training or bare; one, or several for the interleaved schedule.
    inputs: of each microbatch, equally many on every rank; all stages must be given the same.
    on_hidden: called on the last stage alone, in the order of the microbatches.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config

    def through(stage: nn.Module, given: ModelInputs) -> Tensor:
        hidden: Tensor = stage(given.tokens, None, None, packed_seq_params=_packed(given))
        return hidden

    def forward_step(remaining: Iterator[tuple[int, ModelInputs]], stage: nn.Module) -> tuple[Tensor, Any]:
        number, given = next(remaining)
        hidden = through(stage, given)

        def finish(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            total = on_hidden(number, hidden).clone()  # its memory is taken away after backward
            return total, torch.zeros((), dtype=torch.int, device=hidden.device), {}

        return hidden, finish

    layers = get_model_config(chunks[0])
    with cpu_compat():
        if layers.pipeline_model_parallel_size == 1 and not layers.num_moe_experts:  # as Megatron's schedule would
            for number, given in enumerate(inputs):
                last = number == len(inputs) - 1 or layers.no_sync_func is None
                with contextlib.nullcontext() if last else layers.no_sync_func():
                    total = on_hidden(number, through(chunks[0], given))
                    if total.requires_grad and not forward_only:
                        with no_cuda_calls():
                            torch.autograd.backward(total)
            return
        of_several_chunks = {}
        if len(chunks) > 1:
            from rl_backends.megatron.interleaving import interleaving

            of_several_chunks = interleaving(layers, inputs, chunks=len(chunks))
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(list(enumerate(inputs))) for _ in chunks],
            model=list(chunks),
            num_microbatches=len(inputs),
            seq_length=inputs[0].tokens.shape[1],  # shapes are sent with what they are of, between stages
            micro_batch_size=inputs[0].tokens.shape[0],
            forward_only=forward_only,
            **of_several_chunks,
        )


class OutputHead(nn.Module):
    """The last stage's output layer as a reader looks at it: a linear layer whose words lie on several ranks."""

    def __init__(self, model: Any, groups: ParallelGroups, *, vocabulary_size: int) -> None:
        super().__init__()
        self._model = [model]  # not a submodule: its parameters are the model's
        self._groups = groups
        self._vocabulary_size = vocabulary_size

    def get_output_embeddings(self) -> nn.Module:
        """A layer with the one attribute `weight` [V, H], a DTensor where it is cut."""
        from torch.distributed.tensor import DTensor, Shard

        mesh = self._groups.tp_mesh
        weight: Tensor = self._model[0].head_weight
        share, hidden = weight.shape
        start = self._groups.tp.rank() * share
        words = max(0, self._vocabulary_size - start)
        own = weight if words >= share else weight[:words]  # the gradient of a slice is a copy, and zeros around it
        layer = nn.Module()
        if mesh is None:
            layer.weight = own
        else:
            shape = torch.Size((self._vocabulary_size, hidden))
            layer.weight = DTensor.from_local(own, mesh, [Shard(0)], run_check=False, shape=shape, stride=(hidden, 1))
        return layer

    @property
    def score(self) -> nn.Module:
        """The value or reward head; not cut."""
        head: nn.Module = self._model[0].score
        return head


def _packed(inputs: ModelInputs) -> Any:
    if inputs.cu_seq_lens is None:
        return None
    from megatron.core.packed_seq_params import PackedSeqParams

    assert inputs.position_ids is not None
    ends, longest = inputs.cu_seq_lens, inputs.longest
    ends.positions = inputs.position_ids[0]  # type: ignore[attr-defined] # for `apply_rotary`, which is given the ends
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=ends,
        cu_seqlens_kv_padded=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def in_rows(read: Tensor, inputs: ModelInputs, shape: tuple[int, int], *, context: dist.ProcessGroup) -> Tensor:
    """What was read at the asked places, each in its place of `[b, w, ...]`, 0 elsewhere; differentiable."""
    placed = read.new_zeros(shape[0] * shape[1], *read.shape[1:]).index_copy(0, inputs.into, read)
    whole: Tensor = placed if context.size() == 1 else _SumOverRanks.apply(placed, context)  # type: ignore[no-untyped-call]
    return whole.view(*shape, *read.shape[1:])


class _SumOverRanks(torch.autograd.Function):
    """What each context-parallel rank has read of its own tokens, added up; each keeps the gradient of its own."""

    @staticmethod
    def forward(ctx: Any, partial: Tensor, group: dist.ProcessGroup) -> Tensor:
        del ctx
        total = partial.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        del ctx
        return gradients[0], None

"""Megatron's GPT model, which ends before the logits and takes its rotary frequencies from the Hugging Face model.

Imports Megatron: only `gpt_model.py` imports this, when a model is built.

Axes: s tokens of this rank (under sequence parallelism a share of the row's), b rows, h hidden.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_backends.kernels.cpu import swiglu
from rl_backends.megatron.cpu_compat import no_cuda_calls
from rl_backends.megatron.rope import Rope


class FixedRotary(RotaryEmbedding):  # type: ignore[misc]
    """Angles of positions by given frequencies: no base is among its arguments, so that none can be wrong.

    The factor on cosines and sines that some variants have is in the softmax scale.
    """

    def __init__(self, rope: Rope, *, cp_group: Any) -> None:
        super().__init__(
            kv_channels=2 * len(rope.inverse_frequencies),
            rotary_percent=1.0,
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.inv_freq = rope.tensor()

    def forward(  # noqa: PLR0917 - Megatron's signature
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,  # noqa: FBT001, FBT002
        cp_group: Any = None,
    ) -> Tensor:
        """Angles [tokens, 1, 1, head_dim], of this context-parallel rank's tokens unless rows are packed.

        Megatron's own keeps the tables of the last 32 lengths, and with them the model; lengths hardly repeat here.
        """
        table: Tensor = self.get_emb(max_seq_len, offset)
        group = self.cp_group if cp_group is None else cp_group
        if group.size() > 1 and not packed_seq:
            table = get_pos_emb_on_this_cp_rank(table, 0, group)
        return table


def _linear(self: Any, input_: Tensor) -> tuple[Tensor, Tensor | None]:
    """As torch's own layer; and the bias, where somebody else adds it."""
    added, left = (None, self.bias) if self.skip_bias_add else (self.bias, None)
    return F.linear(input_, self.weight, added), left


class WholeColumns(ColumnParallelLinear):  # type: ignore[misc]
    """Of one tensor-parallel rank: no steps of autograd in Python for collectives over nobody else."""

    forward = _linear


class WholeRows(RowParallelLinear):  # type: ignore[misc]
    """Of one tensor-parallel rank, likewise."""

    forward = _linear


class WholeGateAndUp(ColumnParallelLinear):  # type: ignore[misc]
    """Gives each by itself: a CPU reads the halves of rows half as fast as rows, and they are read six times."""

    def forward(self, input_: Tensor) -> tuple[tuple[Tensor, ...], None]:
        """[s, b, h] to gate and up, [s, b, I] each."""
        return tuple(F.linear(input_, half) for half in self.weight.chunk(2)), None


class WholeEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """Adds the gradient of the rows that were read to the buffer of gradients, and makes none of all rows."""

    def forward(self, input_: Tensor) -> Tensor:
        """[b, s] to [b, s, h]."""
        few = input_.numel() < len(self.weight) and not self.reduce_scatter_embeddings
        if not (few and hasattr(self.weight, "main_grad")):
            embedded: Tensor = super().forward(input_)
            return embedded
        return read_rows(input_, self.weight)


def read_rows(tokens: Tensor, weight: Any) -> Tensor:
    """Rows `tokens` of the weight, whose gradient goes into `weight.main_grad`, which Megatron's DDP has hung there."""
    rows: Tensor = _Rows.apply(tokens, weight)  # type: ignore[no-untyped-call]
    return rows


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Any) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.main_grad = weight.main_grad
        return F.embedding(tokens, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        (tokens,) = ctx.saved_tensors
        read, place = tokens.unique(return_inverse=True)
        rows = torch.ops.aten.embedding_dense_backward(grad, place, len(read), -1, False)
        ctx.main_grad.index_add_(0, read, rows.to(ctx.main_grad.dtype))
        return None, None


class GatedMLP(MLP):  # type: ignore[misc]
    """SwiGLU without the copy that Megatron's plain code makes to add an offset of 0."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **kwargs: Any) -> Any:
        """[s, b, h] to the same, and no bias."""
        if self.config.bias_activation_fusion or per_token_scale is not None:
            return super().forward(hidden_states, per_token_scale, **kwargs)
        gate_and_up = self.linear_fc1(hidden_states)[0]
        return self.linear_fc2(swiglu(*gate_and_up) if isinstance(gate_and_up, tuple) else swiglu(gate_and_up))


class DenseLayer(TransformerLayer):  # type: ignore[misc]
    """A layer without experts, in which nothing asks for CUDA."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As Megatron's."""
        with no_cuda_calls():
            return super().forward(*args, **kwargs)


def residual_in_place(training: bool, fused: bool) -> Any:  # noqa: FBT001 - as Megatron's get_bias_dropout_add
    """Adds the residual to what a linear layer without bias has just made: a CPU has it in its cache, and no more room.

    The linear layer does not need its output for backward. There is no dropout.
    """
    del training, fused

    def add(output_and_bias: tuple[Tensor, None], residual: Tensor, _probability: float) -> Tensor:
        return output_and_bias[0].add_(residual)

    return add


class Decoder(GPTModel):  # type: ignore[misc]
    """Its forward gives hidden states [s, b, h]: after the last norm on the last pipeline stage.

    `output_layer` holds this rank's rows of the head there, or, where embeddings are tied on one stage, no weight:
    `head_weight` has them in both cases. Nobody makes logits of a whole row: they are read word by word where the loss
    needs them.
    """

    def __init__(self, rope: Rope, **arguments: Any) -> None:
        super().__init__(**arguments, position_embedding_type="rope")
        self.rotary_pos_emb = FixedRotary(rope, cp_group=self.pg_collection.cp)

    @property
    def head_weight(self) -> Tensor:
        """On the last stage: this tensor-parallel rank's rows of the output layer, the last of which may be padding."""
        if self.share_embeddings_and_output_weights:
            weight: Tensor = self.shared_embedding_or_output_weight()
            return weight
        own: Tensor = self.output_layer.weight
        return own

    def _set_attention_backend(self) -> None:
        """Megatron would write NVTE_* into the environment, and refuse one that somebody else has written there."""

    def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states

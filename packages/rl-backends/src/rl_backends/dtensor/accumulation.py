"""The passes of one microbatch through the model, for `DTensorBackend.forward_backward`.

    for each microbatch: forward -> loss -> backward          gradients add up in the parameters

Axes: b rows of a microbatch, w tokens of its longest.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.batching.microbatches import Microbatch
from rl_backends.batching.words import token_ids_of
from rl_backends.dtensor.recovery import forget_pass
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.examples import TokenBatch
from rl_backends.losses import ROUTER_LOSS, Output, Sums, last_tokens
from rl_backends.moe import RouterWatch, router_metrics
from rl_backends.rank_agreement import add_up
from rl_backends.readers import Reader

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Forward and backward passes over the microbatches of this rank.

    Raises:
        ModelError: the configuration weighs the loss of routers, and the model has none that can be read.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self.router_coefficient = sharded.config.router_aux_loss_coef
        self._watch = RouterWatch(sharded.model, plan=sharded.plan) if self.router_coefficient > 0 else None
        self.reserved_sums = () if self._watch is None else (ROUTER_LOSS,)
        """Names that a loss may not use for its own sums."""

    def discard(self) -> None:
        """Forget the gradient, and what a failure has left half done."""
        forget_pass(self._sharded.model)
        self._sharded.reduce_gradients(now=True)
        if self._watch is not None:
            self._watch.take_counts()

    def router_metrics(self) -> dict[str, float]:
        """How evenly experts were used since the last call; every rank must call it. Empty without a router's loss."""
        counts = {} if self._watch is None else self._watch.take_counts()
        if not counts:
            return {}
        for count in counts.values():
            for axis in ("rows", "cp"):
                if self._sharded.group(axis) is not None:
                    dist.all_reduce(count, group=self._sharded.group(axis))
        return router_metrics(counts)

    def forward(
        self, rows: TokenBatch, microbatch: Microbatch, *, reader: Reader, output: Output
    ) -> tuple[Tensor, Tensor | None]:
        """What the model gives for `rows`, and the loss of its routers, if that is weighed."""
        sharded, watch, at_the_end = self._sharded, self._watch, output == "score"
        asked = last_tokens(rows) if at_the_end else rows.trainable
        words = token_ids_of(rows) if output == "logp_of_token_ids" else None
        inputs = sharded.inputs(rows, asked, offset=0 if at_the_end else 1, words=words)
        recording: AbstractContextManager[Any] = nullcontext() if watch is None else watch.recording()
        with recording:
            outputs: Tensor = sharded.read(inputs, reader, shape=(rows.tokens.shape[0], rows.tokens.shape[1]))
        if at_the_end:
            outputs = outputs.sum(1)
        if watch is None:
            return outputs, None
        context = sharded.group("cp")
        return outputs, watch.loss(inputs, rows.lengths, counted=microbatch.counted, context_group=context)

    def backward(self, total: Tensor, *, last: bool) -> None:
        """Run the model's backward; gradients are summed over data-parallel ranks at the last microbatch."""
        self._sharded.reduce_gradients(now=last or self._sharded.config.reduce_gradients == "every_microbatch")
        torch.autograd.backward(total)

    def added_up(self, sums: Sums) -> Sums:
        """The sums over all ranks."""
        context = self._sharded.group("cp")
        if ROUTER_LOSS in sums and context is not None:
            dist.all_reduce(sums[ROUTER_LOSS], group=context)  # each holds the term of its own tokens
        return add_up(sums, self._sharded.rows_group, device=torch.device(self._sharded.config.device))

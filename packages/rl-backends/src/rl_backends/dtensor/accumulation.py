"""The gradient of a loss over all rows of a batch, microbatch by microbatch, on all ranks in step.

    for each microbatch: forward -> loss -> backward          gradients add up in the parameters

A rank whose loss raises goes on with a loss of 0, since the collectives of backward need every rank; then all of them
raise. Knows how rows go through the model, and mixtures' routers; no optimizer.

Axes: b rows of a microbatch, w tokens of its longest.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rl_backends.batching.microbatches import Microbatch, ModelInputs, moved
from rl_backends.batching.words import token_ids_of
from rl_backends.dtensor.recovery import forget_pass
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.examples import BatchT, TokenBatch
from rl_backends.losses import ROUTER_LOSS, LossFunction, Output, Sums, ask, last_tokens
from rl_backends.moe import RouterWatch, router_metrics
from rl_backends.rank_agreement import add_up, raise_together
from rl_backends.readers import Reader

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Runs passes over the microbatches of this rank.

    Raises:
        ModelError: the configuration weighs the loss of routers, and the model has none that can be read.
    """

    def __init__(self, sharded: ShardedModel) -> None:
        self._sharded = sharded
        self._coefficient = sharded.config.router_aux_loss_coef
        self._watch = RouterWatch(sharded.model, plan=sharded.plan) if self._coefficient > 0 else None

    def run(
        self,
        examples: BatchT,
        microbatches: Sequence[Microbatch],
        loss: LossFunction[BatchT],
        *,
        reader: Reader,
        output: Output,
    ) -> Sums:
        """Add the gradient of `loss` over all microbatches to the parameters'; return the sums of all ranks.

        Raises:
            RankError: another rank's loss raised; this rank's own is raised as it is. The gradient is cleared.
        """
        sums: Sums = {}
        failure: Exception | None = None
        try:
            for number, microbatch in enumerate(microbatches):
                rows = microbatch.of(examples, device="cpu")
                outputs, router_loss = self._forward(rows, microbatch, reader=reader, output=output)
                total, parts = outputs.sum() * 0.0, Sums()
                if failure is None:
                    try:
                        total, parts = self._ask(loss, outputs, rows, counted=microbatch.counted)
                    except Exception as error:  # noqa: BLE001 - anybody's loss; raised below, once every rank knows
                        failure = error
                if router_loss is not None:
                    parts[ROUTER_LOSS] = router_loss.detach() / len(examples.lengths)
                    total = total + router_loss * (microbatch.counted * self._coefficient / len(examples.lengths))
                self._backward(total, last=number == len(microbatches) - 1)
                for name, part in parts.items():
                    sums[name] = sums.get(name, 0.0) + (part if microbatch.counted else torch.zeros_like(part))
            raise_together(failure)
            return self._added_up(sums)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Forget the gradient, and what a failure has left half done."""
        forget_pass(self._sharded.model)
        self._sharded.reduce_gradients(now=True)
        if self._watch is not None:
            self._watch.take_counts()

    def _ask(self, loss: LossFunction[BatchT], outputs: Tensor, rows: BatchT, *, counted: bool) -> tuple[Tensor, Sums]:
        given = moved(rows, device=self._sharded.config.device)
        reserved = () if self._watch is None else (ROUTER_LOSS,)
        return ask(loss, outputs, given, counted=counted, reserved=reserved)

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

    def _forward(
        self, rows: TokenBatch, microbatch: Microbatch, *, reader: Reader, output: Output
    ) -> tuple[Tensor, Tensor | None]:
        at_the_end = output == "score"
        asked = last_tokens(rows) if at_the_end else rows.trainable
        words = token_ids_of(rows) if output == "logp_of_token_ids" else None
        inputs = self._sharded.inputs(rows, asked, offset=0 if at_the_end else 1, words=words)
        recording: AbstractContextManager[Any] = nullcontext() if self._watch is None else self._watch.recording()
        with recording:
            read: Tensor = self._sharded.read(inputs, reader, shape=(rows.tokens.shape[0], rows.tokens.shape[1]))
        outputs = read.sum(1) if at_the_end else read
        return outputs, self._router_loss(inputs, rows.lengths, counted=microbatch.counted)

    def _router_loss(self, inputs: ModelInputs, lengths: Tensor, *, counted: bool) -> Tensor | None:
        if self._watch is None:
            return None
        return self._watch.loss(inputs, lengths, counted=counted, context_group=self._sharded.group("cp"))

    def _backward(self, total: Tensor, *, last: bool) -> None:
        self._sharded.reduce_gradients(now=last or self._sharded.config.reduce_gradients == "every_microbatch")
        torch.autograd.backward(total)

    def _added_up(self, sums: Sums) -> Sums:
        context = self._sharded.group("cp")
        if ROUTER_LOSS in sums and context is not None:
            dist.all_reduce(sums[ROUTER_LOSS], group=context)  # each holds the term of its own tokens
        device = torch.device(self._sharded.config.device)
        return add_up(sums, self._sharded.rows_group, device=device)

"""The gradient of a loss over all rows of a batch, through the pipeline, on all ranks in step.

A rank whose loss raises goes on with a loss of 0, since the other stages and ranks wait for it; then all of them raise.

Axes: b rows of a microbatch, w tokens of its longest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backends.backend import asked_of
from rl_backends.batching.microbatches import Microbatch
from rl_backends.examples import BatchT
from rl_backends.losses import LossFunction, LossOverMicrobatches, Output, Sums
from rl_backends.megatron.cpu_compat import user_code
from rl_backends.megatron.model import MegatronModel
from rl_backends.megatron.passes import run_passes, told_by_last_stage
from rl_backends.rank_agreement import add_up, gather_text, on_every_rank, raise_together
from rl_backends.readers import Reader

__all__ = ["GradientAccumulation"]


class GradientAccumulation:
    """Runs passes over the microbatches of this rank; the gradient adds up in the parameters' `main_grad`."""

    def __init__(self, model: MegatronModel) -> None:
        self._model = model

    @torch.inference_mode(mode=False)
    @torch.enable_grad()
    def run(
        self,
        examples: BatchT,
        microbatches: Sequence[Microbatch],
        loss: LossFunction[BatchT],
        *,
        reader: Reader,
        output: Output,
    ) -> Sums:
        """Add the gradient of `loss` over all microbatches; return the sums of all ranks.

        Raises:
            RankError: another rank's loss raised; this rank's own is raised as it is.
        """
        model = self._model
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
                outputs = model.read(hidden, inputs[number], reader, shape=shape)[0]
            except Exception as error:  # noqa: BLE001 - raised below, once every rank knows
                loss_of.failure = loss_of.failure or error
                return hidden.sum() * 0.0
            return loss_of(outputs, rows[number], counted=microbatches[number].counted)

        run_passes(model.ddp, inputs, read_and_ask)
        raise_together(loss_of.failure)
        return self._added_up(loss_of.sums)

    def discard(self) -> None:
        """Forget the gradient."""
        self._model.ddp.zero_grad_buffer()
        self._model.gpt.zero_grad()  # what a backward that failed half-way has not yet added to the buffer

    def _added_up(self, sums: Sums) -> Sums:
        groups, device = self._model.groups, torch.device(self._model.config.device)
        sums = on_every_rank(lambda: add_up(sums, groups.rows, device=device) if groups.last_stage else {})
        names = gather_text("\n".join(sums) if groups.last_stage else "", group=groups.pp)[-1]
        values = [torch.stack(list(sums.values()))] if sums else []
        told = told_by_last_stage(values if groups.last_stage else None, groups, device=device)
        return dict(zip(names.split("\n"), told[0].unbind(), strict=True)) if told else {}

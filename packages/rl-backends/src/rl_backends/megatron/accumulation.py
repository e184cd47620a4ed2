"""The gradient of a loss over all rows of a batch, through the pipeline, on all ranks in step.

A rank whose loss raises goes on with a loss of 0, since the other stages and ranks wait for it; then all of them raise.

Axes: b rows of a microbatch, w tokens of its longest.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_backends.batching.microbatches import Microbatch, moved
from rl_backends.batching.words import token_ids_of
from rl_backends.examples import BatchT, TokenBatch
from rl_backends.losses import LossFunction, Output, Sums, ask
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
        self.started = False
        """Whether there is a gradient to step along."""

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
            RankError: another rank's loss raised; this rank's own is raised as it is. The gradient is cleared.
        """
        model = self._model
        rows = [microbatch.of(examples, device="cpu") for microbatch in microbatches]
        words = [token_ids_of(each) if output == "logp_of_token_ids" else None for each in rows]
        inputs = [model.inputs(each, each.trainable, words=asked) for each, asked in zip(rows, words, strict=True)]
        sums: Sums = {}
        failure: Exception | None = None

        def read_and_ask(number: int, hidden: Tensor) -> Tensor:
            nonlocal failure
            # Also after a failure: ranks that share this row's words or tokens read and go back together.
            try:
                outputs = model.read(hidden, inputs[number], reader, shape=_shape(rows[number]))[0]
            except Exception as error:  # noqa: BLE001 - raised below, once every rank knows
                failure = failure or error
                return hidden.sum() * 0.0
            total, parts = outputs.sum() * 0.0, Sums()
            if failure is None:
                try:
                    with user_code():
                        given = moved(rows[number], device=model.config.device)
                        total, parts = ask(loss, outputs, given, counted=microbatches[number].counted)
                except Exception as error:  # noqa: BLE001 - anybody's loss; as above
                    failure = error
            for name, part in parts.items():
                sums[name] = sums.get(name, 0.0) + (part if microbatches[number].counted else torch.zeros_like(part))
            return total

        try:
            run_passes(model.ddp, inputs, read_and_ask)
            raise_together(failure)
            self.started = True
            return self._added_up(sums)
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Forget the gradient."""
        self._model.ddp.zero_grad_buffer()
        self._model.gpt.zero_grad()  # what a backward that failed half-way has not yet added to the buffer
        self.started = False

    def _added_up(self, sums: Sums) -> Sums:
        groups, device = self._model.groups, torch.device(self._model.config.device)
        sums = on_every_rank(lambda: add_up(sums, groups.rows, device=device) if groups.last_stage else {})
        names = gather_text("\n".join(sums) if groups.last_stage else "", group=groups.pp)[-1]
        values = [torch.stack(list(sums.values()))] if sums else []
        told = told_by_last_stage(values if groups.last_stage else None, groups, device=device)
        return dict(zip(names.split("\n"), told[0].unbind(), strict=True)) if told else {}


def _shape(rows: TokenBatch) -> tuple[int, int]:
    return rows.tokens.shape[0], rows.tokens.shape[1]

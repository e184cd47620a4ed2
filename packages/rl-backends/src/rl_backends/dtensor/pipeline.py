"""Microbatches of a pipeline, whose stages send one another tensors of one shape, and what its last stage tells."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_backends.batching.microbatches import ModelInputs
from rl_backends.rank_agreement import told_by_last_rank

if TYPE_CHECKING:
    from rl_parallel_plans import Pipeline

__all__ = ["of_one_shape", "told_by_last_stage"]


def of_one_shape(inputs: Sequence[ModelInputs]) -> list[ModelInputs]:
    """The same microbatches, padded to the rows and tokens of the largest; nothing that is asked for moves.

    Padded rows get more columns, and there are more of them; of packed rows another one of padding alone follows.
    """
    rows = max(each.tokens.shape[0] for each in inputs)
    tokens = max(each.tokens.shape[1] for each in inputs)
    return [
        _more_columns(each, rows=rows, tokens=tokens) if each.cu_seq_lens is None else _another_row(each, tokens)
        for each in inputs
    ]


def _more_columns(inputs: ModelInputs, *, rows: int, tokens: int) -> ModelInputs:
    held_rows, held = inputs.tokens.shape
    padded = F.pad(inputs.tokens, (0, tokens - held, 0, rows - held_rows))
    at = inputs.at // held * tokens + inputs.at % held
    return replace(inputs, tokens=padded, at=at, longest=tokens)


def _another_row(inputs: ModelInputs, tokens: int) -> ModelInputs:
    missing = tokens - inputs.tokens.shape[1]
    if not missing:
        return inputs
    assert inputs.position_ids is not None
    assert inputs.cu_seq_lens is not None
    assert inputs.row_lengths is not None
    positions = torch.arange(missing, device=inputs.position_ids.device)[None]
    return replace(
        inputs,
        tokens=F.pad(inputs.tokens, (0, missing)),
        position_ids=torch.cat([inputs.position_ids, positions], dim=1),
        cu_seq_lens=F.pad(inputs.cu_seq_lens, (0, 1), value=tokens),
        row_lengths=(*inputs.row_lengths, missing),
        longest=max(inputs.longest, missing),
    )


def told_by_last_stage(tensors: Sequence[Tensor], pipeline: "Pipeline") -> list[Tensor]:
    """The last stage's tensors, on every stage of this rank's pipeline; others pass none."""
    return told_by_last_rank(tensors, pipeline.group, device=pipeline.device)

"""A conversion back as a Hugging Face folder, bit for bit. In one process, which holds the whole model meanwhile."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.errors import CheckpointError
from rl_backends.export import export_pretrained
from rl_backends.loading import ModelSource
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.conversion.conversion import Conversion
from rl_backends.megatron.mapping import Gatherer
from rl_backends.megatron.model import MegatronModel

__all__ = ["export_conversion"]


def export_conversion(
    conversion: Conversion,
    source: ModelSource,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer: Any = None,
) -> int:
    """Write the weights of a conversion as `export_pretrained` does, and return how many tensors there were.

    Args:
        conversion: the weights.
        source: the model that it was made of, or another of the same configuration; its weights are not read.
        folder: where to; it must not exist.
        dtype: of the folder; None for the one that the model's files had.
        max_shard_bytes: of a file.
        tokenizer: saved beside the model where it is given.

    Raises:
        CheckpointError: the conversion does not hold this model.
        FileExistsError: `folder` is there already.
        MissingDependencyError: megatron-core is absent, or another release.
        ModelError: an architecture that is not mapped.
        OSError: the disk is full or read-only.
    """
    if (asked := source.config.vocab_size) != (there := conversion.marker.vocabulary_size):
        raise CheckpointError(
            f"{conversion.folder} has a vocabulary of {there}, and {source.model_name} one of {asked}"
        )
    precision: Any = conversion.marker.dtype
    skeleton = source.skeleton()
    config = MegatronConfig(precision=precision)
    model = MegatronModel(skeleton, config, fill=lambda made: conversion.load_into(made.gpt), trainable=False)
    try:
        export_pretrained(
            skeleton,
            folder,
            dtype=getattr(torch, conversion.marker.source_dtype) if dtype is None else dtype,
            max_shard_bytes=max_shard_bytes,
            tokenizer=tokenizer,
            tensors=_tensors(model),
        )
        return len(model.shapes)
    finally:
        model.close()


def _tensors(model: MegatronModel) -> Iterator[tuple[str, Tensor]]:
    yield from Gatherer(model.held, model.shapes).tensors()

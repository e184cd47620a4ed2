"""A Megatron model from a folder or the Hub, by way of its conversion, which is made where there is none."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from rl_backends.loading import ModelSource
from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.conversion import Conversion, find_or_convert
from rl_backends.megatron.groups import ParallelGroups
from rl_backends.megatron.model import MegatronModel
from rl_backends.megatron.weights import from_files

__all__ = ["build_for_conversion", "conversion_of"]


def conversion_of(
    source: ModelSource, config: MegatronConfig, *, progress: Callable[[str], None] | None = None
) -> Conversion:
    """The conversion of `source`, made by all ranks together where there is none; every rank must call it.

    Raises:
        ModelError: an architecture that is not mapped, or files that are not a model's.
        CheckpointError: it cannot be written, or somebody else's was not finished in time.
    """
    groups = ParallelGroups.join(config)
    try:
        return find_or_convert(
            source,
            build=lambda dtype: build_for_conversion(source, dtype, config),
            directory=None if config.checkpoint_dir is None else Path(config.checkpoint_dir),
            timeout_s=config.timeout_s,
            progress=progress,
        )
    finally:
        groups.leave(collect=False)


def build_for_conversion(source: ModelSource, dtype: torch.dtype, config: MegatronConfig) -> Any:
    """Megatron's model of `source`, laid out as `config` says, holding the numbers of the files, without gradients.

    For somebody who has joined the groups of `config`.

    dtype: bfloat16 where all files are; else float32, which holds every number of other dtypes exactly.
    """
    precision: Literal["float32", "bfloat16"] = "bfloat16" if dtype is torch.bfloat16 else "float32"
    skeleton = source.skeleton()
    laid_out = replace(config, precision=precision)
    model = MegatronModel(skeleton, laid_out, fill=from_files(source, skeleton), trainable=False)
    model.close(collect=False)
    return model.gpt

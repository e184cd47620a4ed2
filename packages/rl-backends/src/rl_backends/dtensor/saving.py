"""A sharded model as a Hugging Face folder, written beside its place and renamed into it."""

import shutil
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from rl_backends.dtensor.ranks import on_rank_0

__all__ = ["save_pretrained"]


def save_pretrained(model: nn.Module, folder: Path) -> None:
    """Gather the weights on rank 0 and write `folder` with configuration and safetensors, whole or not at all.

    Raises:
        FileExistsError: `folder` is there already; nothing is overwritten.
        OSError: the disk is full or read-only; `folder` does not exist afterwards.
    """
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    on_rank_0(lambda: _write(model, weights, folder))


def _write(model: Any, weights: dict[str, Any], folder: Path) -> None:
    if folder.exists():
        raise FileExistsError(f"{folder} exists already; a saved model is never overwritten, choose another folder")
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        model.save_pretrained(unfinished, state_dict=weights, safe_serialization=True)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise

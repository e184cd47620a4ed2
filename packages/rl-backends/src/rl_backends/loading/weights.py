"""Weights from files into a model that may be sharded: each rank reads what it holds, and nothing else.

Nothing is gathered and nothing sent. A weight is cast to the model's dtype piece by piece, on its way from the file
into its place. The files must hold the whole model and nothing beside it, but for what transformers itself ignores.
"""

import re
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from rl_backends.errors import ModelError
from rl_backends.loading.conversions import Converted, as_in_model
from rl_backends.loading.files import open_tensors
from rl_backends.loading.initialise import initial_value
from rl_backends.loading.lazy_tensors import LazyTensor
from rl_backends.loading.shards_by_name import Shard, first_names, write_whole

__all__ = ["LoadReport", "load_weights"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What this rank read."""

    tensors: int
    """How many tensors of the model were filled; a tied one counts once."""
    bytes_read: int
    """Bytes of this rank's parts in the files."""
    seconds: float
    """How long all of it took."""
    ignored: tuple[str, ...]
    """Tensors of the files that the model has no use for."""
    new: tuple[str, ...]
    """Parameters of a new head, which no file holds and which were drawn at random."""


@torch.no_grad()
def load_weights(
    shards: Mapping[str, Sequence[Shard]], files: Sequence[Path], *, skeleton: nn.Module, new_head: bool, seed: int
) -> LoadReport:
    """Fill `shards`, which have memory, from `files`; the rest as `ModelSource.load_into`.

    shards: what this rank holds of each tensor, by its first name; a rank may hold nothing of some.
    skeleton: the model before it was sharded; it learns what transformers has converted in reading.
    """
    start = time.monotonic()
    with open_tensors(files) as found:
        converted = as_in_model(skeleton, found)
        feeds = _feeds(converted, skeleton)
        new = sorted(_head(skeleton) - feeds.keys()) if new_head else []
        ignored = sorted(_ignored(converted, skeleton, other_heads=bool(new)))
        if problems := _problems(converted, skeleton, fed={*feeds, *new}, ignored=ignored):
            raise ModelError(
                f"the files in {files[0].parent} are not those of {type(skeleton).__name__}: {'; '.join(problems)}"
            )
        bytes_read = sum(_read(each, shards.get(name, ())) for name, each in feeds.items())
    for name in new:
        write_whole(initial_value(skeleton, name, seed=seed), shards.get(name, ()))
    skeleton._weight_conversions = converted.transforms  # type: ignore[assignment]  # noqa: SLF001 - as from_pretrained
    return LoadReport(
        tensors=len(shards),
        bytes_read=bytes_read,
        seconds=time.monotonic() - start,
        ignored=tuple(ignored),
        new=tuple(new),
    )


def _feeds(converted: Converted, skeleton: nn.Module) -> dict[str, list[tuple[str, LazyTensor]]]:
    """What files hold of each tensor, by its first name: more than one where they hold both ends of a tie."""
    feeds: dict[str, list[tuple[str, LazyTensor]]] = {}
    for name, first in first_names(skeleton).items():
        if name in converted.tensors:
            feeds.setdefault(first, []).append((name, converted.tensors[name]))
    return feeds


def _head(skeleton: nn.Module) -> set[str]:
    """Names of what a model has beside its base model."""
    return {first for first in first_names(skeleton).values() if not _in_base_model(first, skeleton)}


def _in_base_model(name: str, skeleton: Any) -> bool:
    return name.startswith(f"{skeleton.base_model_prefix}.")


def _ignored(converted: Converted, skeleton: Any, *, other_heads: bool) -> Iterator[str]:
    """What the class says that files may hold; where a new head is made, the heads of other classes too."""
    patterns = [*(skeleton._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"]  # noqa: SLF001
    for name, renamed in converted.unexpected.items():
        if any(re.search(pattern, each) for pattern in patterns for each in (name, renamed)) or (
            other_heads and not _in_base_model(renamed, skeleton)
        ):
            yield name


def _problems(
    converted: Converted, skeleton: nn.Module, *, fed: Collection[str], ignored: Collection[str]
) -> list[str]:
    missing = [first for first in dict.fromkeys(first_names(skeleton).values()) if first not in fed]
    unexpected = [name for name in converted.unexpected if name not in ignored]
    shapes = {name: tensor.shape for name, tensor in skeleton.state_dict().items()}
    misshaped = [
        f"{name} ({list(tensor.shape)} in the files, {list(shapes[name])} in the model)"
        for name, tensor in converted.tensors.items()
        if tensor.shape != shapes[name]
    ]
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": misshaped}
    problems = [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]
    if missing and all(not _in_base_model(name, skeleton) for name in missing):
        problems.append("the head alone is missing, which new_head=True draws at random")
    return problems


def _read(feeds: Sequence[tuple[str, LazyTensor]], shards: Sequence[Shard]) -> int:
    """Fill this rank's parts of one tensor; return how many bytes of files they are."""
    (name, tensor), *others = feeds
    total = 0
    for shard in shards:
        local = shard.local
        for box in shard.boxes():
            place = box.of_local(local)
            tensor.read_into(place, box.offsets)
            total += place.numel() * tensor.dtype.itemsize
            for other, lazy in others:
                again = torch.empty_like(place)
                lazy.read_into(again, box.offsets)
                if not torch.equal(again, place):
                    raise ModelError(
                        f"the configuration ties {name} and {other}, and the files hold two different tensors; set "
                        f"tie_word_embeddings to false in config.json"
                    )
    return total


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

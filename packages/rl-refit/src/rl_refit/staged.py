"""A sink that stages its boxes in this process, and hands them over to an engine when the parties have decided.

The sinks of a worker of vLLM, of a LoRA adapter, of a server of SGLang and of vLLM's weight transfer are of this kind.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_refit.contracts import Coverage
from rl_refit.digest import Digest, digest_regions
from rl_refit.errors import PoisonedError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Holding
from rl_refit.sink import VersionedSink, places_of, read_box

__all__ = ["StagedSink", "empty_like"]


class StagedSink(VersionedSink, ABC):
    """A `WeightSink` of one rank.

    Args:
        tensors: Where new weights are staged, by the names that every refit must bring.
        engine: What `check` calls the engine: "refit successfully before using …".
    """

    def __init__(self, tensors: Mapping[str, Tensor], *, engine: str) -> None:
        super().__init__()
        self._fresh, self._engine_name = dict(tensors), engine
        self._manifest = Manifest.of_whole((name, each.dtype, each.shape) for name, each in self._fresh.items())
        self._bank: dict[str, list[Holding]] = {
            name: [(Region.whole(name, tensor.shape), tensor)] for name, tensor in self._fresh.items()
        }
        self._missing: dict[str, int] | None = None
        """Elements still to be staged in the open transaction."""

    def _prepare_to_hand_over(self, version: int) -> None:
        """All is staged and verified, and nothing decided yet: what may fail here fails nobody's weights."""

    @abstractmethod
    def _hand_over(self, version: int) -> None:
        """Give the engine what is staged. Where it raises, the sink is poisoned."""

    def _digest_engine(self, regions: Iterable[Region]) -> Digest:
        """Of what the engine holds, without what cannot be read back: all of it, unless a sink knows better."""
        return digest_regions(regions, lambda _: None)

    @property
    def device(self) -> torch.device:
        """Where tensors are staged."""
        return next((tensor.device for held in self._bank.values() for _, tensor in held), torch.device("cpu"))

    def check(self) -> None:
        """Pass if no commit has failed since one succeeded.

        Raises:
            PoisonedError: One has.
        """
        if self._poison is not None:
            raise PoisonedError(f"{self._poison}; refit successfully before using {self._engine_name}", phase="commit")

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction.

        Raises:
            RefitError: One is open already.
        """
        if self._missing is not None:
            raise RefitError("this sink is in a transaction already; commit or abort it first", phase="prepare")
        self._missing = {name: sum(box.numel for box, _ in held) for name, held in self._bank.items()}
        return Coverage(manifest_hash=manifest.hash(), sink=self._manifest, version=self._begin())

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Take a copy of `tensor`, the new values of `region`.

        Raises:
            RefitError: No transaction is open, nothing needs such a box, or `tensor` is of another dtype or shape.
        """
        if self._missing is None:
            raise RefitError("cannot stage: no transaction is open; prepare comes first")
        held = self._bank.get(region.name, ())
        places = places_of(held, region)
        if not places or places[0].shape != tensor.shape or places[0].dtype != tensor.dtype:
            boxes = [(list(box.offsets), list(box.shape)) for box, _ in held]
            raise RefitError(
                f"cannot stage {list(tensor.shape)} in {tensor.dtype} as {region}: this sink needs "
                f"{f'the boxes {boxes} in {held[0][1].dtype}' if held else 'no such tensor'}",
                phase="transfer",
                tensor=region.name,
            )
        with torch.no_grad():
            places[0].copy_(tensor)
        self._missing[region.name] -= region.numel

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """Of what is staged while a transaction is open; of what the engine holds otherwise, where it can be read."""
        if regions is None:
            regions = [box for held in self._bank.values() for box, _ in held]
        if self._missing is not None:
            return self._digest_staged(regions)
        self.check()
        return self._digest_engine(regions)

    def _digest_staged(self, regions: Iterable[Region]) -> Digest:
        return digest_regions(regions, lambda region: read_box(self._bank[region.name], region))

    def ready(self, version: int) -> None:
        """Pass if all is staged, and nothing stands in the way of a commit.

        Raises:
            RefitError: No transaction is open, some tensor was not staged exactly once, the version is not newer, or
                the engine is not ready.
        """
        self._require_ready(version, self._missing)
        self._prepare_to_hand_over(version)

    def commit(self, version: int) -> None:
        """Give the engine what is staged.

        Raises:
            RefitError: It did not take it. What it has then is not known, so the sink is poisoned.
        """
        self.ready(version)
        try:
            self._hand_over(version)
        except BaseException as error:
            self._poison = f"the commit of version {version} failed with {type(error).__name__}: {error}"
            raise
        self._committed(version)
        self._missing = None

    def abort(self) -> None:
        """Forget what was staged. The engine goes on with what it has."""
        self._missing = None


def empty_like(folder: Path) -> dict[str, Tensor]:
    """A tensor for each that the safetensors files of a Hugging Face folder hold, by their headers; no tied head.

    Raises:
        RefitError: It is no checkpoint of safetensors files.
    """
    from safetensors import SafetensorError, safe_open

    index, config = folder / "model.safetensors.index.json", folder / "config.json"
    tensors: dict[str, Tensor] = {}
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        else:
            names = sorted(file.name for file in folder.glob("*.safetensors"))
        if not names:
            raise FileNotFoundError(f"{folder} has neither {index.name} nor any *.safetensors file")
        for name in names:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  (it cannot be iterated)
                    if key in tensors:
                        raise ValueError(f"more than one file has {key}; keep one set of files in the folder")  # noqa: TRY301
                    header = file.get_slice(key)
                    shape = header.get_shape()
                    dtype = (header[:0] if shape else file.get_tensor(key)).dtype
                    tensors[key] = torch.zeros(shape, dtype=dtype)
        settings: dict[str, Any] = json.loads(config.read_bytes()) if config.is_file() else {}
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise RefitError(
            f"like= is the checkpoint folder that the server was started with, and {folder} is not: "
            f"{type(error).__name__}: {error}"
        ) from error
    tied = settings.get("tie_word_embeddings", settings.get("text_config", {}).get("tie_word_embeddings"))
    if tied and any(name.endswith("embed_tokens.weight") for name in tensors):
        tensors.pop("lm_head.weight", None)
    return tensors

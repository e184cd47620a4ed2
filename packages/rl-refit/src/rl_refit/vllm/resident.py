"""Reads source tensors back from a live vLLM model, where it keeps them as they came.

Runs in a worker. Most engines rearrange what they can: what was packed for a kernel, cut over workers, cast or shuffled
is not read back, and why is said for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import final

from torch import Tensor, nn

from rl_refit.layout import Region
from rl_refit.vllm.survey import Home, named_tensors

__all__ = ["Resident"]

_KEEPS_PLAIN = {"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"}
"""Methods whose parameters, where they keep their shape, are what was loaded."""


@final
class Resident:
    """The source tensors that can be found in `model`, by the `homes` that a survey gave them."""

    def __init__(self, model: nn.Module, homes: Mapping[str, Home]) -> None:
        self._model = model
        self._homes = homes
        self._readable = {name for name, home in homes.items() if self._why_not(home) is None}

    @property
    def whole(self) -> list[Region]:
        """Every tensor that can be read, as one box."""
        shapes = {name: home.place.shape for name, home in self._homes.items() if name in self._readable}
        return [Region(name, (0,) * len(shape), shape) for name, shape in shapes.items()]

    def unreadable(self, names: Iterable[str]) -> dict[str, str]:
        """The others of `names`, with the reason."""
        return {
            name: self._why_not(self._homes[name]) or ""
            if name in self._homes
            else "cut over workers, cast, or changed by the loader"
            for name in names
            if name not in self._readable
        }

    def ties(self) -> dict[str, str]:
        """The model's tensors that are another one's memory, as they are now."""
        roots: dict[tuple[object, ...], str] = {}
        tensors = {name: tensor for name, tensor in named_tensors(self._model).items() if tensor.numel()}
        first = {name: roots.setdefault((t.data_ptr(), t.shape, t.stride()), name) for name, t in tensors.items()}
        return {name: root for name, root in first.items() if name != root}

    def read(self, region: Region) -> Tensor | None:
        """The box, in the model's own memory; None where it cannot be read."""
        if region.name not in self._readable:
            return None
        home = self._homes[region.name]
        tensor = self._tensor(home)
        place = home.place
        whole = tensor.as_strided(place.shape, place.strides, tensor.storage_offset() + place.offset)
        return whole[region.index_within(Region(region.name, (0,) * len(place.shape), place.shape))]

    def _tensor(self, home: Home) -> Tensor:
        owner, _, name = home.name.rpartition(".")
        tensor: Tensor = getattr(self._model.get_submodule(owner), name)
        return tensor.detach()

    def _why_not(self, home: Home) -> str | None:
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        owner_name = home.name.rpartition(".")[0]
        owner, tensor = self._model.get_submodule(owner_name), self._tensor(home)
        method = type(getattr(owner, "quant_method", None)).__name__
        if method != "NoneType" and method not in _KEEPS_PLAIN:
            return f"{method} may rearrange it"
        if tensor.numel() == 0:
            return "packed for a kernel of the CPU"
        if tuple(tensor.shape) != home.shape or not tensor.is_contiguous():
            return f"kept in another form, {list(tensor.shape)} of strides {list(tensor.stride())}"
        if isinstance(owner, ParallelLMHead) and tensor.device.type == "cpu":
            return "computed from a packed copy"
        return None

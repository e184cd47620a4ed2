"""An `nn.Module`, or a plain state dict, as the source of weights; plain tensors or DTensors.

Knows nothing of the sink. Reads tensors in place: no copy, no gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.bindings import Bindings
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import ModuleReader, Rename

__all__ = ["ModuleSource", "StateDictSource"]


@final
class ModuleSource:
    """Every parameter and every buffer of `module`, persistent or not. A `WeightSource`.

    Tensors that are the same memory are ties, and are sent once. Modules under FSDP2 are resharded first, so that what
    is sent is what the optimizer updates.

    Args:
        module: The policy. Its names must be the sink's, or be made so by `rename`.
        rename: From a name in the module to its Hugging Face name. Nothing is stripped without it.
        bindings: Where the module keeps boxes of named tensors in fused, padded or permuted storage.
        exclude: Patterns, as of `fnmatch`, of Hugging Face names that are not sent, such as a value head's.
    """

    tensors_stay = True

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        bindings: Bindings | None = None,
        exclude: Iterable[str] = (),
    ) -> None:
        self._reader = ModuleReader(module, rename=rename, bindings=bindings, exclude=tuple(exclude))

    @property
    def device(self) -> torch.device:
        """Where the module is."""
        return self._reader.device

    def manifest(self) -> Manifest:
        """What the module holds now.

        Raises:
            RefitError: Two tensors get the same name, one is on the meta device, a DTensor has a placement that
                `Layout.from_placements` refuses, or a pattern of `exclude` fits no name.
        """
        return self._reader.read().manifest

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """The boxes of each tensor of `names` that this rank holds, and the module's own memory of them.

        Raises:
            KeyError: The module has no tensor of that name.
        """
        held = self._reader.read().held
        for name in names:
            yield from held[name]


@final
class StateDictSource:
    """The tensors of a mapping from Hugging Face names. A `WeightSource`, of what the mapping holds when it is read.

    Args:
        tensors: Plain tensors or DTensors; two names of the same memory are a tie.
    """

    tensors_stay = True

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._source = ModuleSource(_Shelf(tensors))

    @property
    def device(self) -> torch.device:
        """Where the first tensor is."""
        return next((tensor.device for tensor in self._tensors.values()), torch.device("cpu"))

    def manifest(self) -> Manifest:
        """What the mapping holds now."""
        return self._source.manifest()

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """The boxes of each tensor of `names` that this rank holds."""
        return self._source.shards(names)


class _Shelf(nn.Module):
    """A mapping that shows its tensors as buffers: names with dots are no names of buffers."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
        remove_duplicate: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[tuple[str, Tensor]]:
        return iter(self._tensors.items())

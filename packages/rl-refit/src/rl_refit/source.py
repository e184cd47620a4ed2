"""An `nn.Module` as the source of weights, plain or with DTensor parameters.

Knows nothing of the sink. Reads the module's tensors in place: no copy, no gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import final

from torch import Tensor, nn

from rl_refit.layout import Layout, Region, this_rank
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Rename, local_part, named_tensors, read_module

__all__ = ["ModuleSource"]


@final
class ModuleSource:
    """Every parameter and every buffer of `module`, persistent or not. A `WeightSource`.

    Tensors that are the same memory are ties, and are sent once. Modules under FSDP2 are resharded first, so that what
    is sent is what the optimizer updates.

    Args:
        module: The policy. Its names must be the sink's, or be made so by `rename`.
        rename: From a name in the module to its Hugging Face name. Nothing is stripped without it.
    """

    def __init__(self, module: nn.Module, *, rename: Rename | None = None) -> None:
        self._module = module
        self._rename = rename
        self._manifest: Manifest | None = None

    def manifest(self) -> Manifest:
        """What the module holds now.

        Raises:
            RefitError: Two tensors get the same name, one is on the meta device, or a DTensor has a placement other
                than `Shard` and `Replicate`.
        """
        self._manifest = read_module(self._module, self._rename).manifest(self._manifest)
        return self._manifest

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """The box of each tensor of `names` that this rank holds, and the module's own memory of it.

        Raises:
            KeyError: The module has no tensor of that name.
        """
        tensors, rank = named_tensors(self._module, self._rename), this_rank()
        for name in names:
            tensor = tensors[name]
            yield Layout.from_tensor(tensor).regions(name, tuple(tensor.shape))[rank], local_part(tensor)

"""An `nn.Module`, a state dict or a list of shards as the source of weights; plain tensors or DTensors.

Tensors are read in place: nothing is gathered, and nothing is copied unless it is cast.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import final

import torch
from torch import Tensor, nn

from rl_refit.contracts import NamedShard
from rl_refit.errors import RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest
from rl_refit.module_tensors import Binding, Bindings, ModuleReader, Rename, as_patterns

__all__ = ["ModuleSource", "StateDictSource"]


class ModuleSource(ModuleReader):
    """Every parameter and every buffer of `module`, persistent or not. A `WeightSource`.

    Tensors that are the same memory are ties, and are sent once. Modules under FSDP2 are resharded first, so that what
    is sent is what the optimizer updates.

    Args:
        module: The policy. Its names must be the sink's, or be made so by `rename`.
        rename: From a name in the module to its Hugging Face name. Nothing is stripped without it.
        bindings: Where the module keeps boxes of named tensors in fused, padded or permuted storage.
        exclude: Patterns, as of `fnmatch`, of Hugging Face names that are not sent, such as a value head's.
        cast: A dtype in which all floating-point parameters are sent, and no buffers: `torch.bfloat16` feeds an engine
            in bfloat16 from a master in float32. Or pattern → dtype, for parameters and buffers; the first that fits
            holds: `{"*.gate.weight": torch.float32, "*.weight": torch.bfloat16}` leaves routers alone. Each tensor is
            converted as it is sent, one at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        rename: Rename | None = None,
        bindings: Bindings | None = None,
        exclude: Iterable[str] = (),
        cast: Mapping[str, torch.dtype] | torch.dtype | None = None,
    ) -> None:
        super().__init__(module, rename=rename, bindings=bindings, exclude=as_patterns(exclude))
        self._cast = cast if isinstance(cast, torch.dtype) else dict(cast or {})
        self._buffers = {rename(name) if rename else name for name, _ in module.named_buffers(remove_duplicate=False)}
        self._read: Manifest | None = None
        self._sent: Manifest | None = None
        self.tensors_stay = not self._cast
        """Whether what `shards` yields is the module's own memory; converted copies are not."""

    def manifest(self) -> Manifest:
        """What the module holds now.

        Raises:
            RefitError: Two tensors get the same name, one is on the meta device, a DTensor has a placement that
                `Layout.from_placements` refuses, or a pattern of `exclude` or `cast` fits no name.
        """
        return self._as_sent(super().manifest())

    def _as_sent(self, read: Manifest) -> Manifest:
        if self._sent is None or read is not self._read:
            self._read, self._sent = read, cast_manifest(read, self._cast, buffers=self._buffers)
        return self._sent

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """The boxes of each tensor of `names` that this rank holds, and the module's own memory of them, or a copy.

        Raises:
            KeyError: The module has no tensor of that name.
        """
        read = self.read()
        metas = self._as_sent(read.manifest).by_name
        for name in names:
            dtype = metas[name].torch_dtype
            for region, tensor in read.held[name]:
                yield region, tensor.to(dtype)


@final
class StateDictSource(ModuleSource):
    """The tensors of a mapping from Hugging Face names. A `WeightSource`, of what the mapping holds when it is read.

    Args:
        tensors: Plain tensors or DTensors; two names of the same memory are a tie. They are read at each refit: a
            mapping of copies that nobody updates stays what it is, and so does the engine.
        bindings: As for `ModuleSource`: which boxes of named tensors lie in storage of the mapping's, such as fused
            weights whose rows tensor parallelism has put in another order.
        cast: As for `ModuleSource`; a dtype alone is for every floating-point tensor.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        bindings: Bindings | None = None,
        cast: Mapping[str, torch.dtype] | torch.dtype | None = None,
    ) -> None:
        patterns = {"*": cast} if isinstance(cast, torch.dtype) else cast
        super().__init__(NamedTensors(tensors), bindings=bindings, cast=patterns)

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[NamedShard],
        *,
        buffers: Mapping[str, Tensor] | None = None,
        cast: Mapping[str, torch.dtype] | torch.dtype | None = None,
    ) -> StateDictSource:
        """A source over this rank's shards, as a trainer lists them; see `NamedShard`.

        A shard whose memory is laid out as in the unsharded model is sent from its `tensor`. Any other is sent box by
        box in the coordinates of the unsharded tensor: rows that tensor parallelism has reordered, or a parameter that
        holds parts of several tensors, as in Megatron.

        Args:
            shards: at least one; their memory is read at each refit.
            buffers: replicated tensors by name that an engine of the same class has too and no shard holds, such as
                rotary frequencies; they are moved to the device of the shards.
            cast: As for `StateDictSource`.
        """
        shards = list(shards)
        laid_out = {
            shard.name: tensor
            for shard in shards
            if (tensor := getattr(shard, "tensor", None)) is not None and getattr(shard, "row_order", None) is None
        }
        boxed = [shard for shard in shards if shard.name not in laid_out]
        # Memory without a name of its own is listed too, so that it is read. A rank may hold nothing but padding.
        storage = {
            f"storage of {shard.name}, {number}": shard.local for number, shard in enumerate(boxed) if shard.boxes()
        }
        device = shards[0].local.device
        replicated = {name: buffer.to(device) for name, buffer in (buffers or {}).items()}

        def bindings(_: nn.Module) -> Iterator[Binding]:
            for shard in boxed:
                for box in shard.boxes():
                    region = Region(shard.name, box.offsets, box.sizes)
                    yield Binding(region, shape=shard.shape, tensor=box.of_local(shard.local))

        return cls(laid_out | storage | replicated, bindings=bindings if boxed else None, cast=cast)


def cast_manifest(
    manifest: Manifest, cast: Mapping[str, torch.dtype] | torch.dtype, *, buffers: Collection[str]
) -> Manifest:
    """The manifest with the dtypes in which tensors are sent; a tied one follows the tensor that it is tied to.

    Raises:
        RefitError: A pattern fits no floating-point tensor.
    """
    if not cast:
        return manifest
    floating = [meta.name for meta in manifest.tensors if meta.torch_dtype.is_floating_point]
    if isinstance(cast, torch.dtype):
        floating, cast = [name for name in floating if name not in buffers], {"*": cast}
    idle = [pattern for pattern in cast if not fnmatch.filter(floating, pattern)]
    if idle:
        raise RefitError(
            f"the patterns {idle} of cast fit no floating-point tensor of the source; names look like {floating[:3]}"
        )
    wanted = {
        name: next((dtype for pattern, dtype in cast.items() if fnmatch.fnmatchcase(name, pattern)), None)
        for name in floating
    }
    return Manifest(
        tuple(
            meta
            if (dtype := wanted.get(meta.tied_to or meta.name)) is None
            else dataclasses.replace(meta, dtype=str(dtype).removeprefix("torch."))
            for meta in manifest.tensors
        )
    )


class NamedTensors(nn.Module):
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

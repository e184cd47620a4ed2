"""All that moving weights asks of the two sides: `WeightSource` and `WeightSink`.

Any object with these methods takes part, whatever holds the weights. `NamedShard` is what `StateDictSource.from_shards`
asks of a trainer that lists its rank's part of each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_refit.digest import Digest
from rl_refit.layout import Region
from rl_refit.manifest import Manifest

__all__ = ["Coverage", "NamedShard", "ShardBox", "WeightSink", "WeightSource"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """A sink's answer to `prepare`."""

    manifest_hash: str
    """Hash of the source's manifest as the sink understood it."""

    sink: Manifest
    """What this rank of the sink holds, and what of it needs to be fed."""

    version: int | None
    """The version of the weights that the sink last committed; None before the first."""


@runtime_checkable
class WeightSource(Protocol):
    """Where fresh weights come from: one rank of it. Between two calls its tensors may change, its manifest may not."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""

    def manifest(self) -> Manifest:
        """Every tensor by Hugging Face name, with global shape, dtype, layout and ties."""

    def shards(self, names: Iterable[str]) -> Iterator[tuple[Region, Tensor]]:
        """This rank's boxes of each tensor of `names`, in that order, each with a tensor that holds just this box.

        The boxes of one tensor come in the order of its layout; a name of which this rank holds nothing yields nothing.
        Tied names are answered like any other. Never gathers from other ranks. A tensor stays as it is until the next
        one is asked for; until the refit is over, where the source has an attribute `tensors_stay` that is true.
        """


@runtime_checkable
class WeightSink(Protocol):
    """Where fresh weights go, one rank of it: `prepare`, `stage` …, `digest`, `commit`; or `abort` at any point."""

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors are."""

    def check(self) -> None:
        """Pass if the weights are whole, and nobody is writing them: what an engine asks before it generates.

        Raises:
            PoisonedError: They may be torn.
        """

    def poison(self, reason: str) -> None:
        """Refuse to be used until a refit succeeds: these weights are not what they should be, or not what peers have.

        A version that was committed just before does not count any more, so that the same can be refitted again.
        """

    def repeat(self) -> None:
        """Take the version that was just committed once more: others did not come through with it."""

    def rewind(self, version: int) -> None:
        """Take `version` next, or a later one, even if a later one was committed: the trainer went back to it.

        Changes neither the weights nor the version that they are said to have.
        """

    def prepare(self, manifest: Manifest) -> Coverage:
        """Open a transaction with a source that has `manifest`, over all its ranks, and say what this rank needs.

        Memory is allocated the first time only. Nothing that generates may change.
        """

    def stage(self, region: Region, tensor: Tensor, *, stays: bool = False) -> None:
        """Take `tensor`, the new values of `region`, apart from the weights that generate.

        `tensor` is the caller's and is overwritten after the call, unless it `stays` as it is until the transaction is
        closed: then the sink may keep it instead of a copy. A GPU copies in this thread's current stream.
        """

    def digest(self, regions: Iterable[Region] | None = None) -> Digest:
        """What `digest_regions` makes of `regions`: as staged while a transaction is open, of the weights otherwise.

        None means everything. A tensor that cannot be read back is left out of what comes after a commit.
        """

    def ready(self, version: int) -> None:
        """Pass if a commit of `version` can begin: asked when all is verified, before the parties decide.

        Raises:
            RefitError: It cannot. Then nobody commits.
        """

    def commit(self, version: int) -> None:
        """Make the staged weights the weights, as of `version` optimizer steps, and close the transaction.

        On a GPU its copies are over when it returns. Whoever fails half-way raises, and raises `PoisonedError` from
        then on until another commit succeeds.
        """

    def abort(self) -> None:
        """Close the transaction and forget what was staged; does nothing when none is open, and never raises."""


class ShardBox(Protocol):
    """A contiguous part of a tensor, and where this rank keeps it."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of its first element in the unsharded tensor."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Its shape."""

    def of_local(self, local: Tensor) -> Tensor:
        """A view of the box in this rank's memory."""


class NamedShard(Protocol):
    """This rank's part of one tensor, in the coordinates of the unsharded model.

    A shard may also have `tensor`, a plain tensor or DTensor, and `row_order`, which is None where `tensor` has the
    unsharded shape and sharding kept the order of the rows. Both are what `rl_parallel_plans.named_shards` yields.
    """

    @property
    def name(self) -> str:
        """Hugging Face name of the tensor."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the unsharded tensor."""

    @property
    def local(self) -> Tensor:
        """This rank's memory, not a copy."""

    def boxes(self) -> Sequence[ShardBox]:
        """The parts of the unsharded tensor that `local` holds; none where it holds nothing but padding."""

"""Weight source of a policy and the sync of its weights into an engine."""

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from rl_backends import DTensorBackend
from rl_backends.selection import Backend
from rl_parallel_plans import NamedShard
from rl_refit import Binding, Refit, RefitReport, Region, StateDictSource

__all__ = ["WeightSync", "refit_metrics", "weight_source"]


def weight_source(policy: Backend) -> StateDictSource:
    """A `WeightSource` over the policy's shards, of the values of the latest `policy.shards()`.

    Adapters are merged; call `policy.shards()` before each refit to merge them anew. What lies in memory otherwise than
    in the unsharded model is sent box by box, in the order of that: fused weights whose rows tensor parallelism has put
    in another order, and everything that Megatron has, of whose parameters each holds parts of several tensors.
    """
    shards = policy.shards()
    as_they_lie = {shard.name: shard.tensor for shard in shards if isinstance(shard, NamedShard)}
    in_boxes = [shard for shard in shards if not isinstance(shard, NamedShard) or shard.row_order is not None]
    storage = {
        f"storage of {shard.name}, {number}": shard.local
        for number, shard in enumerate(in_boxes)
        if not isinstance(shard, NamedShard) and shard.boxes()  # a rank may hold nothing but padding
    }
    device = shards[0].local.device
    buffers = {name: buffer.to(device) for name, buffer in _transient_buffers(policy).items()}

    def bindings(_: nn.Module) -> Iterator[Binding]:
        for shard in in_boxes:
            for box in shard.boxes():
                region = Region(shard.name, box.offsets, box.sizes)
                yield Binding(region, shape=shard.shape, tensor=box.of_local(shard.local))

    return StateDictSource(as_they_lie | storage | buffers, bindings=bindings if in_boxes else None)


def _transient_buffers(policy: Backend) -> dict[str, Tensor]:
    """Buffers that no state dict has, such as rotary frequencies: an engine of the same class has them too."""
    if not isinstance(policy, DTensorBackend):
        return policy.skeleton_buffers()
    transient = {
        f"{path}.{name}" if path else name
        for path, module in policy.model.named_modules()
        for name in module._non_persistent_buffers_set  # noqa: SLF001 - no public one
    }
    return {name: buffer for name, buffer in policy.model.named_buffers() if name in transient}


def refit_metrics(report: RefitReport) -> dict[str, float]:
    """What the log has of a refit; `refit_verified` is 1 where digests of both sides were compared, else 0."""
    return {
        "refit_bytes": float(report.bytes),
        "refit_s": report.total_seconds,
        "refit_verified": float(report.digest is not None),
    }


class WeightSync:
    """A `Refit` that remembers its last report and counts; satisfies `rl_algorithms.contracts.WeightSync`.

    Args:
        refit: What sends.
        merge: Called before each refit: brings what is sent up to date, where that is not the policy's own memory.
    """

    def __init__(self, refit: Refit, *, merge: Callable[[], object] | None = None) -> None:
        self._refit, self._merge = refit, merge
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """Transfer, verify and commit; see `Refit`."""
        if self._merge is not None:
            self._merge()
        self.last = self._refit(version)
        self.count += 1
        return self.last

    def metrics(self) -> dict[str, float]:
        """Bytes and seconds of the latest refit, and whether it was compared, for the log."""
        if self.last is None:
            return {}
        return refit_metrics(self.last)

    def explain(self) -> str:
        """What each refit will move."""
        return self._refit.explain()

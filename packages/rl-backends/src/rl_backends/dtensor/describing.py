"""A backend in words: its mesh, its plan, its adapters, its optimizer."""

from rl_backends.dtensor.mesh import sizes_of
from rl_backends.dtensor.sharded_model import ShardedModel
from rl_backends.lora import adapter_size
from rl_backends.optimizers import Optimizers

__all__ = ["describe"]


def describe(sharded: ShardedModel, *, optimizers: Optimizers | None) -> str:
    """Several lines; the optimizer's are there once training has begun."""
    config = sharded.config
    axes = " x ".join(f"{size} {axis}" for axis, size in sizes_of(sharded.mesh).items())
    wrapped = "under FSDP2" if sharded.under_fsdp else "without FSDP, which has nothing to shard here"
    head = (
        f"DTensor backend on {config.device}: {axes} ranks, {wrapped}, computing in {config.precision}, trained "
        f"weights and optimizer in float32"
    )
    adapters = [] if getattr(sharded.model, "peft_config", None) is None else [adapter_size(sharded.model).explain()]
    return "\n".join(
        [
            head,
            *sharded.kernels.lines,
            sharded.plan.explain(),
            *adapters,
            *([] if optimizers is None else [optimizers.explain()]),
        ]
    )

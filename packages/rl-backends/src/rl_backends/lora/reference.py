"""The policy with its adapters off: the model that training began with, at no memory of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rl_backends.errors import ModelError
from rl_backends.lora.config import LoraConfig
from rl_backends.lora.layers import adapted_layers, trained_whole

__all__ = ["adapters_disabled", "is_base"]


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Inside, forwards compute W x alone; after it, also after an error, what was before. May be nested.

    No parameter is touched, nor whether it trains, so that it holds under FSDP2 and tensor parallelism. Both the
    forward and, where there is one, its backward belong inside: recomputed activations would have adapters otherwise.

    Raises:
        ModelError: the model has no adapters, or trains other parameters too, whose first values are gone.
    """
    layers = adapted_layers(model)
    if whole := trained_whole(model):
        raise ModelError(
            f"{next(iter(whole))} is trained whole (modules_to_save), so that the policy without adapters is no longer "
            f"the model that training began with; freeze a copy as the reference instead"
        )
    # `enable_adapters` would also change which parameters train, which FSDP must not meet between two backwards.
    before = [(layer.module, layer.module.disable_adapters) for layer in layers]
    try:
        for module, _ in before:
            module._disable_adapters = True  # noqa: SLF001
        yield
    finally:
        for module, disabled in before:
            module._disable_adapters = disabled  # noqa: SLF001


def is_base(adapters: LoraConfig | None, *, steps_before: int) -> bool:
    """Whether the reference of a stage is the policy with its adapters disabled, which takes no memory.

    It is where nothing was trained before: `steps_before` is the run's optimizer steps before the stage.
    """
    return adapters is not None and not adapters.modules_to_save and steps_before == 0

"""What adapters cost, counted on a model on the meta device as well as on a sharded one."""

from dataclasses import dataclass

from torch import nn

from rl_backends.lora.layers import adapted_layers

__all__ = ["AdapterSize", "adapter_size"]

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSize:
    """Numbers of the whole model, before it is shared out over ranks."""

    layers: int
    """Linear layers with an adapter."""
    trainable: int
    """Parameters that train: adapters, and modules trained whole."""
    total: int
    """All parameters."""
    trainable_bytes: int
    """Of the parameters that train."""
    frozen_bytes: int
    """Of the others, in the dtype that they are stored in."""
    merged_bytes: int
    """What `MergedWeights` has of its own: the weights that have an adapter."""

    @property
    def training_bytes(self) -> int:
        """Of gradients and AdamW's two moments: three times `trainable_bytes`."""
        return 3 * self.trainable_bytes

    def explain(self) -> str:
        """The numbers in one line."""
        return (
            f"LoRA on {self.layers} linear layers: {self.trainable:,} of {self.total:,} parameters train "
            f"({self.trainable / self.total:.2%}), {self.trainable_bytes / MIB:.1f} MiB and "
            f"{self.training_bytes / MIB:.1f} MiB of gradients and AdamW state; frozen weights "
            f"{self.frozen_bytes / MIB:.1f} MiB; merged for a refit {self.merged_bytes / MIB:.1f} MiB more"
        )


def adapter_size(model: nn.Module) -> AdapterSize:
    """Count the parameters of a model with adapters; tied ones once.

    Raises:
        ModelError: it has none.
    """
    layers = adapted_layers(model)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
    return AdapterSize(
        layers=len(layers),
        trainable=sum(parameter.numel() for parameter in trainable),
        total=sum(parameter.numel() for parameter in (*trainable, *frozen)),
        trainable_bytes=sum(parameter.numel() * parameter.element_size() for parameter in trainable),
        frozen_bytes=sum(parameter.numel() * parameter.element_size() for parameter in frozen),
        merged_bytes=sum(layer.base.numel() * layer.base.element_size() for layer in layers),
    )

"""Low-rank adapters (LoRA) by the peft library: put in, trained, merged for engines, saved, switched off.

Needs the extra `rl-backends[lora]`; importing it imports no peft.
"""

from rl_backends.lora.config import LoraConfig
from rl_backends.lora.files import save_adapter
from rl_backends.lora.inject import add_lora, initialise_adapters
from rl_backends.lora.layers import AdapterSize, adapter_size, adapter_tensors, adapters_disabled, is_base
from rl_backends.lora.merged import MergedWeights, export_merged

__all__ = [
    "AdapterSize",
    "LoraConfig",
    "MergedWeights",
    "adapter_size",
    "adapter_tensors",
    "adapters_disabled",
    "add_lora",
    "export_merged",
    "initialise_adapters",
    "is_base",
    "save_adapter",
]

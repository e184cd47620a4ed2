"""Hugging Face models as Megatron distributed checkpoints: made once, whole or not at all, and read in any layout."""

from rl_backends.megatron.conversion.conversion import Conversion, read_conversion
from rl_backends.megatron.conversion.find import find_or_convert
from rl_backends.megatron.conversion.marker import is_conversion
from rl_backends.megatron.conversion.tensors import ShardedModel

__all__ = ["Conversion", "ShardedModel", "find_or_convert", "is_conversion", "read_conversion"]

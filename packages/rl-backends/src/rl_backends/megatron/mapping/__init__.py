"""Which part of which Hugging Face tensor each parameter of Megatron holds: one table for whatever moves weights."""

from rl_backends.megatron.mapping.gathering import Gatherer
from rl_backends.megatron.mapping.held import HeldTensor, names_in_hugging_face
from rl_backends.megatron.mapping.parameters import held_tensors

__all__ = ["Gatherer", "HeldTensor", "held_tensors", "names_in_hugging_face"]

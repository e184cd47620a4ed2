"""Every workaround by which megatron-core runs without CUDA, and the one place for them.

`with cpu_compat():` around calls of Megatron, `with user_code():` inside it around what is not Megatron's. Where CUDA
is available both do nothing. `entries()` lists what is worked around, why, and in which release it was seen.
"""

from rl_backends.megatron.cpu_compat.context import cpu_compat, entries, user_code
from rl_backends.megatron.cpu_compat.workaround import Workaround

__all__ = ["Workaround", "cpu_compat", "entries", "user_code"]

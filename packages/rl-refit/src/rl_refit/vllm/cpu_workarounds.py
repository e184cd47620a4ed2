"""What vLLM's layerwise reload leaves stale on a CPU, and how it is made fresh.

Both faults are silent: the engine goes on, with logits that mix old and new weights. Each has a test that asserts so
without its workaround, and fails once vLLM no longer needs it.

* Experts. `UnquantizedFusedMoEMethod` packs them for the CPU's kernel at the first load only, and takes any later one
  for a weight update of a GPU, whose kernels read the parameters themselves. `forget_packed_experts`, before the
  reload, makes it build its kernel again.
* A tied head. `lm_head` shares the embedding's parameter, so the reload brings it no weight of its own, and it keeps
  its packed copy of the old one. `repack_vocabulary`, after the reload, packs what the parameter holds now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_refit.errors import RefitError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SEEN_IN", "forget_packed_experts", "needed", "repack_vocabulary"]

SEEN_IN = ("0.30", "0.31", "0.32", "0.33")
"""The releases of vLLM that have the faults: seen running, and read in the code of the last."""


def needed() -> bool:
    """Whether this process's vLLM has the faults: on a CPU, in a release in which they were seen.

    Raises:
        RefitError: It runs on a CPU, and of its release nobody has shown whether it has them.
    """
    import vllm
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return False
    if ".".join(vllm.__version__.split(".")[:2]) not in SEEN_IN:
        raise RefitError(
            f"on a CPU, the reload of vLLM {' and '.join(SEEN_IN)} leaves tied heads and experts stale, which rl-refit "
            f"repairs; whether that of {vllm.__version__} does is not known: use one of those",
            phase="prepare",
        )
    return True


def forget_packed_experts(model: nn.Module) -> int:
    """Before a reload: have every mixture of experts pack its weights again. Returns how many there are."""
    methods: list[Any] = [getattr(module, "quant_method", None) for module in model.modules()]
    packed = [method for method in methods if getattr(method, "moe_kernel", None) is not None]
    for method in packed:
        method.moe_kernel = None
    return len(packed)


def repack_vocabulary(model: nn.Module) -> int:
    """After a reload: pack embeddings and heads from the parameters as they are now. Returns how many there are."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return len(layers)

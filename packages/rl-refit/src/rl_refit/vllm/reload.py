"""Loads staged layers into a live vLLM model, and puts the model together again where that fails.

Runs in a worker. The way is vLLM's layerwise reload, since its `load_weights` alone meets parameters that the engine
has packed or shuffled for its kernels: layer after layer goes to the meta device, collects its weights, is processed
as at the first load, and is copied over the tensors that were there before, whose addresses CUDA graphs have captured.
A layer keeps what it collects until it is complete, so the tensors given must stay.

On a CPU the reload leaves two things stale. Both faults are silent: the engine goes on, with logits that mix old and
new weights. Each has a test that asserts so without its workaround, and fails once vLLM no longer needs it.

* Experts. `UnquantizedFusedMoEMethod` packs them for the CPU's kernel at the first load only, and takes any later one
  for a weight update of a GPU, whose kernels read the parameters themselves. `reload_from` makes it build its kernel
  again.
* A tied head. `lm_head` shares the embedding's parameter, so the reload brings it no weight of its own, and it keeps
  its packed copy of the old one. `repack_vocabulary`, after the reload, packs what the parameter holds now.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from rl_refit.errors import RefitError

__all__ = ["SEEN_IN", "must_repair", "reload_from", "repack_vocabulary"]

SEEN_IN = ("0.30", "0.31", "0.32", "0.33")
"""The releases of vLLM that have the faults: seen running, and read in the code of the last."""


def must_repair() -> bool:
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


def repack_vocabulary(model: nn.Module) -> int:
    """After a reload: pack embeddings and heads from the parameters as they are now. Returns how many there are."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layers = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    for layer in layers:
        layer.quant_method.process_weights_after_loading(layer)
    return len(layers)


def reload_from(weights: Iterator[tuple[str, Tensor]], model: nn.Module, reload_weights: Callable[..., None]) -> None:
    """Give `model` all of `weights`; whatever is raised, no layer is left without memory.

    Args:
        weights: By Hugging Face name; whole layers, since a fused one that gets only some of its parts loses the rest.
            Layers that get nothing keep what they have.
        model: The live model.
        reload_weights: The worker's, which takes an iterator.
    """
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    log.addFilter(_is_news)  # that a layer gets nothing is meant
    try:
        if must_repair():
            for module in model.modules():
                method: Any = getattr(module, "quant_method", None)
                if getattr(method, "moe_kernel", None) is not None:
                    method.moe_kernel = None
        reload_weights(weights_iterator=weights)
    except BaseException:
        _put_back(model)
        raise
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    return "Failed to load weights" not in str(record.msg)


def _put_back(model: nn.Module) -> None:
    """Give every layer that waits for weights those which it had.

    Others have new ones: the model is torn, but the next reload finds it as it finds a whole one.
    """
    from vllm.model_executor.model_loader.reload.layerwise import _place_kernel_tensors, get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()

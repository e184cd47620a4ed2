"""Loads staged layers into a live vLLM model, and puts the model together again where that fails.

Runs in a worker. The way is vLLM's layerwise reload, since its `load_weights` alone meets parameters that the engine
has packed or shuffled for its kernels: layer after layer goes to the meta device, collects its weights, is processed
as at the first load, and is copied over the tensors that were there before, whose addresses CUDA graphs have captured.
A layer keeps what it collects until it is complete, so the tensors given must stay.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from torch import Tensor, nn

from rl_refit.vllm import cpu_workarounds

__all__ = ["reload_from"]


def reload_from(weights: Iterator[tuple[str, Tensor]], model: nn.Module, reload_weights: Callable[..., None]) -> None:
    """Give `model` all of `weights`; whatever is raised, no layer is left without memory.

    Args:
        weights: By Hugging Face name; whole layers, since a fused one that gets only some of its parts loses the rest.
            Layers that get nothing keep what they have.
        model: The live model.
        reload_weights: The worker's, which takes an iterator.
    """
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    log.addFilter(_is_news)
    try:
        if cpu_workarounds.needed():
            cpu_workarounds.forget_packed_experts(model)
        reload_weights(weights_iterator=weights)
    except BaseException:
        _put_back(model)
        raise
    finally:
        log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not that a layer gets nothing, which is meant."""
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

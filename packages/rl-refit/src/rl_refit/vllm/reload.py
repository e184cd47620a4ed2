"""Loads a bank into a live vLLM model, and puts the model together again where that fails.

Runs in a worker. The way is vLLM's layerwise reload, since its `load_weights` alone meets parameters that the engine
has packed or shuffled for its kernels: layer after layer goes to the meta device, collects its weights, is processed
as at the first load, and is copied over the tensors that were there before, whose addresses CUDA graphs have captured.
A layer keeps what it collects until it is complete, so the tensors given must stay; those of a bank do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rl_refit.vllm import cpu_workarounds

__all__ = ["all_agree", "reload_from"]


def reload_from(weights: Mapping[str, Tensor], model: nn.Module, reload_weights: Callable[..., None]) -> None:
    """Give `model` all of `weights`; whatever is raised, no layer is left without memory.

    Args:
        weights: By Hugging Face name; whole layers, since a fused one that gets only some of its parts loses the rest.
        model: The live model.
        reload_weights: The worker's, which takes an iterator over `weights`.
    """
    needs_workarounds = cpu_workarounds.needed()
    try:
        if needs_workarounds:
            cpu_workarounds.forget_packed_experts(model)
        reload_weights(weights_iterator=iter(weights.items()))
        if needs_workarounds:
            cpu_workarounds.repack_vocabulary(model)
    except BaseException:
        _put_back(model)
        raise


def all_agree(*, mine: bool, workers: int) -> bool:
    """Whether every one of the engine's workers says yes; all of them must ask."""
    if workers == 1:
        return mine
    from vllm.distributed.parallel_state import get_world_group

    flag = torch.tensor([int(mine)])
    torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN, group=get_world_group().cpu_group)
    return bool(flag)


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

"""Torch calls that megatron-core makes with CUDA in mind, and the mode that answers them on the CPU.

The mode sees every torch call of a forward pass, so that all it does for almost every one is a look-up. It sees none of
a backward pass, where torch (2.13) has no function modes: what is recomputed there relies on the attributes alone.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_backends.megatron.cpu_compat.state import is_pretending
from rl_backends.megatron.cpu_compat.workaround import CallRule, Workaround

__all__ = ["CALL_WORKAROUNDS", "CpuCalls"]


class CpuCalls(TorchFunctionMode):
    """Answers the calls that have a rule; any other goes on as it came."""

    def __init__(self, rules: Mapping[Callable[..., Any], CallRule]) -> None:
        super().__init__()
        self._rules = rules

    def __torch_function__(  # noqa: PLR0917 - torch's signature
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """The protocol of torch.overrides."""
        rule = self._rules.get(func)
        if rule is None or not is_pretending():
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, args, kwargs or {})


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _on_cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if _is_cuda(kwargs.get("device")):
        kwargs = {**kwargs, "device": "cpu"}
    if kwargs.get("pin_memory"):
        kwargs = {**kwargs, "pin_memory": False}
    return func(*args, **kwargs)


def _to_cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if len(args) > 1 and _is_cuda(args[1]):
        args = (args[0], "cpu", *args[2:])
    return _on_cpu(func, args, kwargs)


def _itself(_func: Callable[..., Any], args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0]


def _cuda_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    answer = func(*args, **kwargs)
    asks = len(args) == 1 and not kwargs and args[0].device.type == "cpu"
    return answer.replace("torch.", "torch.cuda.", 1) if asks else answer


_FACTORIES = (
    torch.arange,
    torch.as_tensor,
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.eye,
    torch.full,
    torch.full_like,
    torch.linspace,
    torch.ones,
    torch.ones_like,
    torch.rand,
    torch.randint,
    torch.randn,
    torch.randn_like,
    torch.randperm,
    torch.rand_like,
    torch.tensor,
    torch.zeros,
    torch.zeros_like,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_ones,
    torch.Tensor.new_tensor,
    torch.Tensor.new_zeros,
)

CALL_WORKAROUNDS = (
    Workaround(
        name='device="cuda" and pin_memory=True',
        reason="the schedules' token count, gradient clipping, optimizers, gradient buffers and checkpoint exchange "
        'make tensors with device="cuda"; the rope of context parallelism pins memory. Made on the CPU, not pinned.',
        calls=dict.fromkeys(_FACTORIES, _on_cpu),
    ),
    Workaround(
        name="Tensor.cuda(), Tensor.to('cuda') and Tensor.pin_memory()",
        reason="initialization of tied embeddings, the rope of context parallelism, exchange of loaded checkpoint "
        "shards and optimizer state on its way back from offloading move tensors to the GPU. They stay where they are.",
        calls={torch.Tensor.cuda: _itself, torch.Tensor.pin_memory: _itself, torch.Tensor.to: _to_cpu},
    ),
    Workaround(
        name="Tensor.type() compared with 'torch.cuda.FloatTensor'",
        reason="both optimizers and gradient clipping tell dtypes by that string, and raise TypeError for "
        "'torch.FloatTensor'. A CPU tensor spells its type as a CUDA tensor would.",
        calls={torch.Tensor.type: _cuda_type},
    ),
)

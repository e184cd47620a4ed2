"""Names of torch and megatron-core that megatron-core takes for granted, and what stands there without CUDA."""

from typing import Any

import torch

from rl_backends.megatron.cpu_compat.streams import NullStream, null_stream, use_stream
from rl_backends.megatron.cpu_compat.workaround import Workaround

__all__ = ["ATTRIBUTE_WORKAROUNDS"]


def _current_device() -> torch.device:
    return torch.device("cpu")


def _synchronize(*_: Any, **__: Any) -> None:
    pass


def _no_cuda_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _keep_no_rng_state(*_: Any, **__: Any) -> None:
    pass


def _splits_as_on_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002, ARG001 - Megatron's signature
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _scatter_contiguous(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any
) -> Any:
    whole = [part.contiguous() for part in scatter_list] if scatter_list else scatter_list
    return torch.distributed.distributed_c10d.scatter(tensor, whole, *args, **kwargs)


ATTRIBUTE_WORKAROUNDS = (
    Workaround(
        name="torch.cuda.current_device() as the device of new tensors",
        reason="rotary embedding, tensor-parallel mappings, pipeline communication and gradient buffers ask for it in "
        "every pass, and no setting avoids it. Answers the CPU.",
        attributes={"torch.cuda.current_device": _current_device},
    ),
    Workaround(
        name="torch.cuda.synchronize()",
        reason="pipeline communication of unequal lengths and saving of checkpoints wait for the GPU. Returns at once.",
        attributes={"torch.cuda.synchronize": _synchronize},
    ),
    Workaround(
        name="torch.cuda streams and events",
        reason="the all-to-all dispatcher of experts copies split sizes on a stream of its own: 'torch.cuda.Stream "
        "requires CUDA support'. Streams on which nothing is ever under way.",
        attributes={
            "torch.cuda.Stream": NullStream,
            "torch.cuda.current_stream": null_stream,
            "torch.cuda.default_stream": null_stream,
            "torch.cuda.stream": use_stream,
        },
    ),
    Workaround(
        name="CUDA's random state",
        reason="recomputation saves and restores it: saving fails, and each restoring is queued, with a stack trace, "
        "for a CUDA that never starts, so that memory grows with every step. An empty state; restoring does nothing.",
        attributes={
            "torch.cuda.get_rng_state": _no_cuda_rng_state,
            "torch.cuda.random.get_rng_state": _no_cuda_rng_state,
            "megatron.core.tensor_parallel.random._set_cuda_rng_state": _keep_no_rng_state,
        },
    ),
    Workaround(
        name="advice about CUDA_DEVICE_MAX_CONNECTIONS",
        reason="linear layers under tensor parallelism warn that the variable should be 1 for the speed of a GPU. "
        "Marked as said.",
        attributes={
            "megatron.core.tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce.warned": True
        },
    ),
    Workaround(
        name="te_general_gemm of moe_utils",
        reason="the name is bound only where Transformer Engine is installed, and the router reads it: NameError. "
        "Bound to None, which the router takes for an absent kernel.",
        absent_attributes={"megatron.core.transformer.moe.moe_utils.te_general_gemm": None},
    ),
    Workaround(
        name="split sizes of the expert all-to-all",
        reason="they become numbers only where they were on a GPU; on the CPU they stay tensors, for which "
        "all_to_all_single raises TypeError. Converted as on a GPU.",
        attributes={"megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _splits_as_on_gpu},
    ),
    Workaround(
        name="torch.distributed.scatter of tensors that are not contiguous",
        reason="gloo reads their storage from the first element on, and hands out wrong numbers without an error. Made "
        "contiguous before.",
        seen_in="torch 2.13.0, megatron-bridge 0.3.1",
        attributes={"torch.distributed.scatter": _scatter_contiguous},
    ),
)

"""Every workaround by which megatron-core (0.16.1) runs without CUDA, and the one place for them.

`with cpu_compat():` around calls of Megatron, `with user_code():` inside it around what is not Megatron's. Where CUDA
is available both do nothing. `ATTRIBUTES`, `ABSENT_ATTRIBUTES` and `CALLS` are what is worked around.

Attributes of modules are shared by all threads: they are replaced when the first thread enters and restored when the
last one leaves, under a lock. In between a replaced function answers only threads that are inside `cpu_compat` and
outside of `user_code`; to any other it is the original. Torch calls are answered per thread.
"""

import contextlib
import functools
import pkgutil
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from rl_backends.megatron.installed import require_megatron
from rl_backends.megatron.rope import apply_rotary

CallRule = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""Answers a call of a torch function: rule(function, args, kwargs) -> result."""


class _Thread(threading.local):
    """Whether this thread sees Megatron's world (a CUDA that is the CPU) or an honest torch."""

    inside = False
    """Inside `cpu_compat`, which is entered once however often it is nested."""
    pretending = False
    """Inside `cpu_compat` and outside of `user_code`."""


_thread = _Thread()


class _NullStream:
    """Stands in for `torch.cuda.Stream`, and for the events that it records: the CPU's work is done when asked for."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:  # what torch says outside of `cpu_compat`
        honest: Any = torch.cuda.streams.Stream
        return super().__new__(cls) if _thread.pretending else honest(*args, **kwargs)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record_event(self, *_: Any) -> "_NullStream":
        return self

    def _wait(self, *_: Any) -> None:
        pass

    synchronize = wait_event = wait_stream = _wait


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _splits_as_on_gpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:  # noqa: FBT001, FBT002, ARG001 - Megatron's signature
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _scatter_contiguous(
    tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any
) -> Any:
    whole = [part.contiguous() for part in scatter_list] if scatter_list else scatter_list
    return torch.distributed.distributed_c10d.scatter(tensor, whole, *args, **kwargs)


ATTRIBUTES: Mapping[str, object] = {
    # Rotary embedding, tensor-parallel mappings, pipeline communication and gradient buffers ask for the device of new
    # tensors in every pass, and no setting avoids it.
    "torch.cuda.current_device": lambda: torch.device("cpu"),
    # Pipeline communication of unequal lengths and saving of checkpoints wait for the GPU.
    "torch.cuda.synchronize": _nothing,
    # The all-to-all dispatcher of experts copies split sizes on a stream of its own, and there are no streams.
    "torch.cuda.Stream": _NullStream,
    "torch.cuda.current_stream": lambda *_: _NullStream(),
    "torch.cuda.default_stream": lambda *_: _NullStream(),
    "torch.cuda.stream": lambda _stream: contextlib.nullcontext(),
    # Recomputation saves CUDA's random state, which fails, and restores it: each restoring is queued, with a stack
    # trace, for a CUDA that never starts, so that memory grows with every step.
    "torch.cuda.get_rng_state": lambda *_, **__: torch.empty(0, dtype=torch.uint8),
    "torch.cuda.random.get_rng_state": lambda *_, **__: torch.empty(0, dtype=torch.uint8),
    "megatron.core.tensor_parallel.random._set_cuda_rng_state": _nothing,
    # Advice about CUDA_DEVICE_MAX_CONNECTIONS, which is about the speed of a GPU, counts as given.
    "megatron.core.tensor_parallel.layers.linear_with_grad_accumulation_and_async_allreduce.warned": True,
    # Split sizes of the expert all-to-all become numbers only where they were on a GPU; all_to_all_single takes no
    # tensors.
    "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu": _splits_as_on_gpu,
    # Gloo scatters what lies in memory from the first element on, whatever the strides (torch 2.13.0).
    "torch.distributed.scatter": _scatter_contiguous,
    # Plain code turns packed rows one by one, and copies queries and keys five times.
    "megatron.core.transformer.attention.apply_rotary_pos_emb": apply_rotary,
}
"""Replacements by dotted name. A function answers only where a thread is inside `cpu_compat`, else the original does;
anything else is put there as it is."""

ABSENT_ATTRIBUTES: Mapping[str, object] = {
    # Bound only where Transformer Engine is installed, and read by the router, which takes None for an absent kernel.
    "megatron.core.transformer.moe.moe_utils.te_general_gemm": None,
}
"""What is put under a dotted name that does not exist, and left alone where it does."""


def _is_cuda(device: object) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _to_cpu(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return func(args[0], "cpu", *args[2:], **kwargs) if len(args) > 1 and _is_cuda(args[1]) else func(*args, **kwargs)


def _itself(_func: Callable[..., Any], args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Any:
    return args[0]


def _cuda_type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    answer = func(*args, **kwargs)
    asks = len(args) == 1 and not kwargs and args[0].device.type == "cpu"
    return answer.replace("torch.", "torch.cuda.", 1) if asks else answer


CALLS: Mapping[Callable[..., Any], CallRule] = {
    # Initialization of tied embeddings, the rope of context parallelism, exchange of loaded checkpoint shards and
    # optimizer state on its way back from offloading move tensors to the GPU.
    torch.Tensor.cuda: _itself,
    torch.Tensor.pin_memory: _itself,
    torch.Tensor.to: _to_cpu,
    # Optimizers and gradient clipping tell dtypes by "torch.cuda.FloatTensor", and raise TypeError for
    # "torch.FloatTensor".
    torch.Tensor.type: _cuda_type,
}
"""Torch functions and methods whose calls are answered by a rule, in a thread inside `cpu_compat`."""


class _CpuCalls(TorchFunctionMode):
    """Answers the calls that have a rule, and makes on the CPU what any other asks to be made on a GPU.

    The schedules' token count, gradient clipping, optimizers, gradient buffers and checkpoint exchange make tensors
    with device="cuda"; the rope of context parallelism pins memory.
    """

    def __torch_function__(  # noqa: PLR0917 - torch's signature
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not _thread.pretending:
            return func(*args, **kwargs) if kwargs else func(*args)
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs = {**kwargs, "device": "cpu"}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
        rule = CALLS.get(func)
        if rule is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        return rule(func, args, kwargs or {})


_ABSENT = object()

_lock = threading.Lock()
_threads_inside = 0
_replaced: list[tuple[Any, str, object]] = []


@contextlib.contextmanager
def cpu_compat() -> Iterator[None]:
    """Let Megatron run on the CPU inside; where CUDA is available, do nothing.

    It may be nested, in itself and in `user_code`, and holds for the thread that entered it, in which torch runs
    backward passes on the CPU too. A tensor's `type()` lies inside, on purpose: keep it around Megatron.
    """
    if torch.cuda.is_available():
        yield
        return
    require_megatron()
    with contextlib.nullcontext() if _thread.inside else _applied(), _pretend(True):
        yield


@contextlib.contextmanager
def user_code() -> Iterator[None]:
    """Inside `cpu_compat`: show an honest torch to code that is not Megatron's. Elsewhere: nothing."""
    with _pretend(False):
        yield


def no_cuda_calls() -> contextlib.AbstractContextManager[object]:
    """Inside `cpu_compat`, around what calls torch often, and asks for CUDA by attributes alone or not at all.

    Its calls are not looked at, which takes 3 microseconds each. Where CUDA is available it does nothing.
    """
    return contextlib.nullcontext() if torch.cuda.is_available() else torch._C.DisableTorchFunction()  # noqa: SLF001 - no public one


@contextlib.contextmanager
def _pretend(value: bool) -> Iterator[None]:  # noqa: FBT001 - the one argument is the state
    before, _thread.pretending = _thread.pretending, value
    try:
        yield
    finally:
        _thread.pretending = before


@contextlib.contextmanager
def _applied() -> Iterator[None]:
    global _threads_inside  # noqa: PLW0603 - the attributes are global too
    with _lock:
        if _threads_inside == 0:
            try:
                _replace_all()
            except BaseException:
                _restore_all()
                raise
        _threads_inside += 1
    try:
        with _CpuCalls():
            _thread.inside = True
            yield
    finally:
        _thread.inside = False
        with _lock:
            _threads_inside -= 1
            if _threads_inside == 0:
                _restore_all()


_resolve = functools.cache(pkgutil.resolve_name)


def _replace_all() -> None:
    for name, value in {**ATTRIBUTES, **ABSENT_ATTRIBUTES}.items():
        module_name, _, attribute = name.rpartition(".")
        module = _resolve(module_name)
        original = getattr(module, attribute, _ABSENT)
        if name in ABSENT_ATTRIBUTES and original is not _ABSENT:
            continue
        if name not in ABSENT_ATTRIBUTES and original is _ABSENT:
            raise AttributeError(f"{name} is to be replaced on a machine without CUDA, and does not exist")
        _replaced.append((module, attribute, original))
        setattr(module, attribute, _only_inside(value, original) if isinstance(value, FunctionType) else value)


@functools.cache
def _only_inside(replacement: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if _thread.pretending else original(*args, **kwargs)

    return answer


def _restore_all() -> None:
    while _replaced:
        module, attribute, original = _replaced.pop()
        if original is _ABSENT:
            delattr(module, attribute)
        else:
            setattr(module, attribute, original)

"""What a predicted step runs on in place of GPUs and of other ranks, and the private names of torch that this needs.

    fake_process_group      this process as one of ranks that exchange nothing
    fake_floats             fake floating-point tensors; integer tensors keep their values
    fused_attention         attention that costs what a GPU's kernels cost

Checked with torch 2.13 to 2.15. Whatever reads a private name of torch says what would go wrong without it.
"""
# ruff: noqa: SLF001 - reading private names is what this file is for

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

WAIT = torch.ops._c10d_functional.wait_tensor.default
ALL_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
NUMBER_IN_TENSOR = torch.ops.aten._local_scalar_dense.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
DEVICE = torch.ops.prim.device.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default

# -- Fake tensors ------------------------------------------------------------------------------------


def fake_mode() -> object:
    """The fake tensor mode that is active; None where there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_fake(tensor: object) -> bool:
    """Whether it is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def in_backward() -> bool:
    """Whether autograd is running backward in this thread; without it, temporaries would be called activations."""
    return torch._C._current_graph_task_id() != -1


def storage_key(storage: torch.UntypedStorage) -> int:
    """One number for all Python objects of one storage, while it lives."""
    return int(storage._cdata)


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among values, and in lists and tuples of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


@contextmanager
def watched_resizing(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` whenever a storage changes its size: FSDP frees and fills storages without an operator."""
    original = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> None:
        original(storage, size)
        resized(storage)

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = original  # type: ignore[method-assign]


class ShapePropagation:
    """`active` while DTensor runs operators only to learn the shapes that they return.

    It does so on fake tensors of global shape, which hold nothing: in a fake mode of its own, or in the active one,
    where only its lock tells. If this were not known, they would be counted, gigabytes at a time. Several may watch at
    once.
    """

    def __init__(self) -> None:
        self.active = False
        self._outer: ShapePropagation | None = None

    def __enter__(self) -> None:
        self.active = True
        if self._outer is not None:
            self._outer.__enter__()

    def __exit__(self, *_: object) -> None:
        self.active = False
        if self._outer is not None:
            self._outer.__exit__()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Take the place of DTensor's lock; releases of torch without one have a fake mode of their own."""
        from torch.distributed.tensor._sharding_prop import ShardingPropagator

        original: Any = ShardingPropagator.__dict__.get("_fake_mode_lock")
        if original is None:
            yield
            return
        self._outer = original if isinstance(original, ShapePropagation) else None
        ShardingPropagator._fake_mode_lock = self  # type: ignore[assignment]
        try:
            yield
        finally:
            ShardingPropagator._fake_mode_lock = original


# -- Fake floats, real integers ----------------------------------------------------------------------

INTEGERS = frozenset({torch.int64, torch.int32, torch.bool})
# Storages are copied as bytes; bytes that a program makes itself stand for floats.
COPIED_AS_THEY_ARE = INTEGERS | {torch.uint8}
# Larger integer tensors, such as masks of [S, S], are fake too.
LARGEST_REAL_ELEMENTS = 2**23


@contextmanager
def fake_floats() -> Iterator[None]:
    """While active, floating-point tensors are fake and small integer tensors real, on the CPU.

    What a trainer does on the host (cut a batch, find places, check ids) depends on numbers, all of them integers; what
    its model computes does not, and is all floating point. So the program runs as it is.

    A number that is read from a fake tensor outside of modules and of backward is 0, or True: what a program reads
    there is whether all went well. Anywhere else torch raises DataDependentOutputException.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True), _RealIntegers():
        yield


class _RealIntegers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what needs no fake tensor outside of the fake mode that was active when this one was entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._shapes = ShapePropagation()
        self._modules_running = 0
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        self._mode = fake_mode()
        self._entered.enter_context(self._shapes.watched())
        before = register_module_forward_pre_hook(lambda *_: self._count_module(1))
        after = register_module_forward_hook(lambda *_: self._count_module(-1), always_call=True)
        self._entered.callback(before.remove)
        self._entered.callback(after.remove)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        from torch._subclasses.fake_tensor import unset_fake_temporarily

        kwargs = kwargs or {}
        if fake_mode() is not self._mode or self._shapes.active:
            return function(*args, **kwargs)
        tensors = list(tensors_in((*args, *kwargs.values())))
        if any(map(is_fake, tensors)):
            if function is NUMBER_IN_TENSOR and self._modules_running == 0 and not in_backward():
                dtype = args[0].dtype
                return True if dtype is torch.bool else 0.0 if dtype.is_floating_point else 0
            if function is GROUPED_MM:
                return _fake_grouped_mm(*args, **kwargs)
            return function(*args, **kwargs)
        if _is_real(function, args, kwargs, tensors=tensors):
            without_fake: AbstractContextManager[object] = unset_fake_temporarily()  # or indices would hold no numbers
            with without_fake:
                return function(*args, **kwargs)
        return function(*args, **kwargs)

    def _count_module(self, by: int) -> None:
        self._modules_running += by


def _is_real(function: Any, args: Any, kwargs: Any, *, tensors: list[Tensor]) -> bool:
    """Whether an operator on no fake tensor makes few integers from integers, or is of the meta device."""
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if device is not None and torch.device(device).type == "meta":
        return True
    if not tensors:
        sizes = next((each for each in args if isinstance(each, list | tuple)), ())
        elements = math.prod(sizes) if all(isinstance(size, int) for size in sizes) else 0
        return (dtype or _default_dtype(function, args)) in INTEGERS and elements <= LARGEST_REAL_ELEMENTS
    if all(tensor.is_meta for tensor in tensors):
        return device is None
    if dtype is not None and dtype not in INTEGERS:
        return False
    if any(
        type(tensor) is not Tensor or tensor.is_meta or tensor.dtype not in COPIED_AS_THEY_ARE for tensor in tensors
    ):
        return False
    try:  # where shapes are broadcast, the elements of the result; elsewhere those of the largest tensor
        elements = math.prod(torch.broadcast_shapes(*(tensor.shape for tensor in tensors)))  # type: ignore[no-untyped-call]
    except RuntimeError:
        elements = max(tensor.numel() for tensor in tensors)
    return elements <= LARGEST_REAL_ELEMENTS


def _default_dtype(function: Any, args: Any) -> torch.dtype:
    """The dtype of what a factory function makes if it is not given one."""
    name = function.name().partition(".")[0]
    numbers = [each for each in args if isinstance(each, bool | int | float)]
    if name in {"aten::arange", "aten::full", "aten::scalar_tensor"} and numbers:
        if any(isinstance(each, float) for each in numbers):
            return torch.get_default_dtype()
        return torch.bool if all(isinstance(each, bool) for each in numbers) else torch.int64
    return torch.int64 if name in {"aten::randint", "aten::randperm"} else torch.get_default_dtype()


def _fake_grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: object, **options: Any) -> Tensor:
    """The result of GROUPED_MM without numbers, in any dtype: torch refuses fake tensors except in bfloat16."""
    if left.ndim == right.ndim == 2:
        assert offsets is not None
        shape = [offsets.shape[0], left.shape[0], right.shape[1]]
    elif left.ndim != 3 or right.ndim == 3:
        shape = [*left.shape[:-1], right.shape[-1]]
    else:
        shape = [left.shape[1], right.shape[1]]
    return left.new_empty(shape, dtype=options.get("out_dtype"))


# -- Fused attention ---------------------------------------------------------------------------------

Calls = list[tuple[int, ...]]


@contextmanager
def fused_attention() -> Iterator[Calls]:
    """While active, `torch.nn.functional.scaled_dot_product_attention` costs what a fused kernel of a GPU costs.

    On a CPU it holds scores [B, heads, S, S] where there is a mask. Here the operators that it becomes on a GPU stand
    in for it: flash attention, and the memory-efficient kernel where there is a mask or the value's heads have another
    size. They hold no scores, only inputs, output and one number per row and head. Nothing is computed.

    Yields a list that gets the shape of the query of each call. Not a TorchFunctionMode: those are suspended in
    backward, where activations are recomputed.
    """
    original, calls = functional.scaled_dot_product_attention, Calls()

    def fused(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple((args[0] if args else kwargs["query"]).shape))
        return _fused(*args, **kwargs)

    functional.scaled_dot_product_attention = fused
    try:
        yield calls
    finally:
        functional.scaled_dot_product_attention = original


def _fused(  # noqa: PLR0917 - torch's signature
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    **_: Any,
) -> Tensor:
    output: Tensor
    if attn_mask is None and query.shape[-1] == value.shape[-1]:
        output = FLASH(query, key, value, dropout_p, is_causal)[0]
        return output
    shared = query.shape[-3] // key.shape[-3]  # this kernel takes no query heads that share a key/value head
    key, value = (t if shared == 1 else t.repeat_interleave(shared, -3) for t in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype is torch.bool:  # torch makes one that can be added to scores, in the query's dtype
            attn_mask = torch.full_like(attn_mask, 0, dtype=query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:-1], attn_mask.shape[-1])
    output = EFFICIENT(query, key, value, attn_mask, True)[0]
    return output


def attention_workspace_bytes(operator: object, args: Any) -> int:
    """What backward of flash attention needs inside: the gradient of the query and one sum per row, in fp32.

    As FlashAttention-2 (arXiv:2307.08691) has it; where query heads share a key/value head, also the gradients of key
    and value per query head.
    """
    if operator is not FLASH_BACKWARD:
        return 0
    query, key = (t.shape for t in args[1:3])
    gradient = query.numel() + query.numel() // query[-1]
    per_query_head = 0 if key[-3] == query[-3] else 2 * key.numel() // key[-3] * query[-3]
    return int(4 * gradient + args[2].element_size() * per_query_head)


@contextmanager
def no_packed_rows() -> Iterator[None]:
    """While active, Hugging Face models take each row for one sequence where they would find that out from positions.

    They cannot read fake positions, and would make a mask for rows of several sequences. Releases that make one for any
    row do so here too.
    """
    masks: Any = sys.modules.get("transformers.masking_utils")
    original = getattr(masks, "find_packed_sequence_indices", None)
    if original is None or original(torch.arange(2)[None]) is not None:
        yield
        return
    masks.find_packed_sequence_indices = lambda *_, **__: None
    try:
        yield
    finally:
        masks.find_packed_sequence_indices = original


# -- Fake ranks --------------------------------------------------------------------------------------


@contextmanager
def fake_process_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """Make this process one of `world_size` ranks that exchange nothing; there must be no process group yet."""
    import torch.distributed as dist
    import torch.distributed._tools.fake_collectives as _shapes  # noqa: F401 - registers what they return on fakes
    from torch.testing._internal.distributed.fake_pg import FakeStore

    on_error = sys.excepthook  # init_process_group puts one in its place that writes the rank before each line
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = on_error


def give_pipeline_buffers(schedule: Any, *, microbatches: int) -> list[Tensor]:
    """Let a schedule of torch allocate what its stages receive into, and return it.

    The first step would do so once the stages have told one another that all their shapes are known, and here nobody
    answers.
    """
    from torch.distributed.pipelining._utils import InferenceMode

    several = hasattr(schedule, "_stages")
    stages = schedule._stages if several else [schedule._stage]
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC
        stage._prepare_forward_infra(microbatches, (), {}, has_backward=True)
        stage._prepare_backward_infra(microbatches)
    prefix = "_stages" if several else "_stage"
    for name in ("forward", "backward"):
        setattr(schedule, f"{prefix}_{name}_initialized", True)
    received = [each for stage in stages for each in (stage.args_recv_info, stage.grad_recv_info)]
    infos = [info for of_microbatches in received for each in of_microbatches.values() for info in each]
    return [info.buffer for info in infos if info.buffer is not None]


@contextmanager
def sends_hold_tensors() -> Iterator[None]:
    """While active, what pipeline stages send and receive lives as long as torch's schedule keeps the transfer.

    It does so where there are ranks; the transfers of a fake group hold nothing.
    """
    import torch.distributed.pipelining.schedules as module

    schedules: Any = module
    original = schedules._batch_p2p

    class Transfer:
        def __init__(self, tensors: list[Tensor]) -> None:
            self.tensors = tensors

        def wait(self) -> None:
            pass

    def batch_p2p(ops: list[Any], desc: str | None = None) -> list[Any]:
        works = original(ops, desc=desc)
        return [*works, Transfer([op.tensor for op in ops])] if ops else works

    schedules._batch_p2p = batch_p2p
    try:
        yield
    finally:
        schedules._batch_p2p = original

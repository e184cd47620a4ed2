"""What torch does not say in public and a count of storages must know, in one place.

Checked with torch 2.9 to 2.13. Each function says what it would mean if torch changed under it.
"""
# ruff: noqa: SLF001 - reading private names is what this file is for

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

WAIT = torch.ops._c10d_functional.wait_tensor.default
ALL_GATHER = torch.ops.c10d._allgather_base_.default
REDUCE_SCATTER = torch.ops.c10d._reduce_scatter_base_.default
NUMBER_IN_TENSOR = torch.ops.aten._local_scalar_dense.default
GROUPED_MM = torch.ops.aten._grouped_mm.default
DEVICE = torch.ops.prim.device.default
FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default


def fake_mode() -> object:
    """The fake tensor mode that is active; None where there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def is_fake(tensor: object) -> bool:
    """Whether it is a fake tensor."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def grouped_mm(left: Tensor, right: Tensor, offsets: Tensor | None = None, *_: object, **options: Any) -> Tensor:
    """The result of GROUPED_MM without numbers, in any dtype: fake ones are refused but in bfloat16."""
    if left.ndim == right.ndim == 2:
        assert offsets is not None
        shape = [offsets.shape[0], left.shape[0], right.shape[1]]
    else:
        shape = (
            [*left.shape[:-1], right.shape[-1]]
            if left.ndim != 3 or right.ndim == 3
            else [left.shape[1], right.shape[1]]
        )
    return left.new_empty(shape, dtype=options.get("out_dtype"))


def fake_device(tensor: object) -> torch.device | None:
    """Where a fake tensor says that it lies; None for any other. Autograd asks of every gradient, through all modes."""
    found: torch.device | None = getattr(tensor, "fake_device", None)
    return found


def no_fake_mode() -> AbstractContextManager[object]:
    """While active, operators run for real; without it, indices would hold no numbers."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    manager: AbstractContextManager[object] = unset_fake_temporarily()
    return manager


def in_backward() -> bool:
    """Whether autograd is running backward in this thread; without it, temporaries would be called activations."""
    return torch._C._current_graph_task_id() != -1


def storage_key(storage: torch.UntypedStorage) -> int:
    """One number for all Python objects of one storage, while it lives."""
    return int(storage._cdata)


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *, dropout_p: float, is_causal: bool) -> Tensor:
    """The operator of the CUDA kernel; [B, heads, S, D]."""
    output: Tensor = FLASH(query, key, value, dropout_p, is_causal)[0]
    return output


def efficient_attention(query: Tensor, key: Tensor, value: Tensor, *, bias: Tensor | None) -> Tensor:
    """The operator of the CUDA kernel that takes a mask, with what its backward needs; [B, heads, S, D]."""
    output: Tensor = EFFICIENT(query, key, value, bias, True)[0]
    return output


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
    where only its lock tells. Unseen, they would be counted, gigabytes at a time. Several may watch at once.
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


def give_pipeline_buffers(schedule: Any, *, microbatches: int) -> list[Tensor]:
    """Let a schedule of torch make what its stages receive into, and return it.

    The first step would do so, once the stages have told one another that all their shapes are known, and here nobody
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
    """While active, what stages of a pipeline send and receive lives as long as torch's schedule keeps the transfer.

    As it does where there are ranks: the transfers of a fake group hold nothing.
    """
    import torch.distributed.pipelining.schedules as module

    schedules: Any = module
    original = schedules._batch_p2p

    class Holding:
        def __init__(self, tensors: list[Tensor]) -> None:
            self.tensors = tensors

        def wait(self) -> None:
            pass

    def batch_p2p(ops: list[Any], desc: str | None = None) -> list[Any]:
        works = original(ops, desc=desc)
        return [*works, Holding([op.tensor for op in ops])] if ops else works

    schedules._batch_p2p = batch_p2p
    try:
        yield
    finally:
        schedules._batch_p2p = original


@contextmanager
def fake_process_group(world_size: int, *, rank: int = 0) -> Iterator[None]:
    """This process as one of `world_size` ranks that exchange nothing; there must be no process group yet."""
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

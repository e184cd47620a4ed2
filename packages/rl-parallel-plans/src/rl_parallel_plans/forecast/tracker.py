"""Count the bytes of every storage alive while a training step runs, by what they are and where they were made.

A dispatch mode: it sees each operator below autograd and DTensor, on fake tensors as on real ones, and the storages
that FSDP frees and fills again. Of what lies inside one operator it knows one thing, the workspace of attention's
backward; fragmentation and the allocator's rounding it does not know.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.dtensor import to_local_if_dtensor
from rl_parallel_plans.forecast import torch_internals
from rl_parallel_plans.forecast.attention import workspace_bytes
from rl_parallel_plans.forecast.ledger import Holding, Ledger

PARAMETERS = "parameters"
UNSHARDED_PARAMETERS = "unsharded parameters"
GRADIENTS = "gradients"
UNSHARDED_GRADIENTS = "unsharded gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
RECOMPUTED = "recomputed activations"
TEMPORARIES = "temporaries"
BUFFERS = "buffers"
INPUTS = "inputs"
ALL_GATHER = "all-gather buffers"
REDUCE_SCATTER = "reduce-scatter buffers"
PIPELINE = "pipeline buffers"


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every storage is in `ledger` from its birth to its death.

    names: what to call which module.
    also: called with each operator, its arguments and its result.
    """

    def __init__(
        self,
        ledger: Ledger,
        names: Mapping[nn.Module, str],
        *,
        also: Callable[[Any, Any, Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.distributed._functional_collectives import AsyncCollectiveTensor
        from torch.distributed.tensor import DTensor

        self.ledger = ledger
        self.outside_backward = ACTIVATIONS
        self._names = names
        self._also = also
        self._wrappers: set[type] = {DTensor, AsyncCollectiveTensor}
        self._alive: dict[int, tuple[Holding, weakref.ref[torch.UntypedStorage]]] = {}
        self._running: list[str] = []
        self._shapes = torch_internals.ShapePropagation()
        self._mode: object = None
        self._entered = ExitStack()

    def label(self, tensors: Iterable[Tensor], category: str, *, unless: str | None = None) -> None:
        """Say what tensors are, whenever they were made; those made outside of the tracker count from now on.

        unless: leave those alone that have this category.
        """
        with torch.no_grad():
            for tensor in tensors:
                holding = self._holding(to_local_if_dtensor(tensor), category)
                if holding.category != unless:
                    holding.category = category

    def __enter__(self) -> Self:
        self._mode = torch_internals.fake_mode()
        before = register_module_forward_pre_hook(lambda module, _: self._running.append(self._names.get(module, "")))
        after = register_module_forward_hook(lambda *_: self._left_module(), always_call=True)
        self._entered.callback(before.remove)
        self._entered.callback(after.remove)
        self._entered.enter_context(torch_internals.watched_resizing(self._resized))
        self._entered.enter_context(self._shapes.watched())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch_internals.DEVICE and (device := torch_internals.fake_device(args[0])) is not None:
            return device
        if not self._wrappers.isdisjoint(types):
            return NotImplemented  # these call the operator again with their local tensors, which then comes by here
        fake = torch_internals.fake_mode()
        if fake is not None and function is torch_internals.WAIT:
            return args[0]  # a fake wait makes a new tensor, a real one does not
        result = function(*args, **(kwargs or {}))
        if self._shapes.active or fake is not self._mode:
            return result
        if self._also is not None:
            self._also(function, args, result)
        if function is torch_internals.ALL_GATHER:
            self.label([args[0]], ALL_GATHER)
        elif function is torch_internals.REDUCE_SCATTER:
            self.label([args[1]], REDUCE_SCATTER)
        self._see(result)
        if num_bytes := workspace_bytes(function, args):
            self.ledger.resize(self.ledger.open(num_bytes, category=TEMPORARIES, owner="attention"), 0)
        return result

    def _see(self, result: object) -> None:
        if isinstance(result, Tensor):
            if torch_internals.is_fake(result) or not result.is_meta:
                self._holding(result)
        elif isinstance(result, list | tuple):
            for each in result:
                self._see(each)

    def _holding(self, tensor: Tensor, category: str | None = None) -> Holding:
        storage = tensor.untyped_storage()
        key = torch_internals.storage_key(storage)
        if (known := self._alive.get(key)) is not None:
            return known[0]
        owner = self._running[-1] if self._running else ""
        holding = self.ledger.open(storage.nbytes(), category=category or self._category(), owner=owner)

        def died(_: object) -> None:
            del self._alive[key]
            self.ledger.resize(holding, 0)

        self._alive[key] = (holding, weakref.ref(storage, died))
        return holding

    def _category(self) -> str:
        if not torch_internals.in_backward():
            return self.outside_backward
        return RECOMPUTED if self._running else TEMPORARIES

    def _left_module(self) -> None:
        self._running.pop()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (known := self._alive.get(torch_internals.storage_key(storage))) is not None:
            self.ledger.resize(known[0], storage.nbytes())

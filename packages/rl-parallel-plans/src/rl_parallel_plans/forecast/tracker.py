"""Count the bytes of every storage alive while a training step runs, by what they are and where they were made.

`MemoryTracker` is a dispatch mode: it sees each operator below autograd and DTensor, on fake tensors as on real ones,
and the storages that FSDP frees and fills again. It counts nothing inside an operator except the workspace of
attention's backward, and neither fragmentation nor the allocator's rounding. It writes to a `Ledger`, from which the
peak of each phase is read afterwards, so that a storage may get its category late (a temporary turns out to be a
gradient) and has it for its whole life.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from rl_parallel_plans.dtensor import to_local_if_dtensor
from rl_parallel_plans.forecast import fake
from rl_parallel_plans.structure import output_head

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


@dataclass(slots=True)
class Allocation:
    """One storage: its present size, what it is, and the module that was running when it was made."""

    num_bytes: int
    category: str
    owner: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes alive at one time in a phase, and what they were."""

    total: int
    by_category: dict[str, int]
    by_owner: dict[tuple[str, str], int]


class Ledger:
    """The allocations and frees of a step in order, and the phases in which they fell."""

    def __init__(self) -> None:
        self._events: list[tuple[Allocation, int]] = []
        self._phases: dict[str, tuple[int, int]] = {}
        self.running = ""
        """Name of the innermost phase that is running; empty outside of all."""

    def open(self, num_bytes: int, *, category: str, owner: str) -> Allocation:
        """Record a new allocation, which is alive until it is resized to 0."""
        allocation = Allocation(0, category, owner)
        self.resize(allocation, num_bytes)
        return allocation

    def resize(self, allocation: Allocation, num_bytes: int) -> None:
        """Record that `allocation` has `num_bytes` from now on; 0 once it is freed."""
        if num_bytes != allocation.num_bytes:
            self._events.append((allocation, num_bytes - allocation.num_bytes))
            allocation.num_bytes = num_bytes

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Name what happens inside the context."""
        start, outer, self.running = len(self._events), self.running, name
        try:
            yield
        finally:
            self.running = outer
        self._phases[name] = (start, len(self._events))

    def moment(self, name: str) -> None:
        """Name the present state."""
        self._phases[name] = (len(self._events), len(self._events))

    def peaks(self, *, without: Collection[str] = ()) -> dict[str, Peak]:
        """The peak of each phase, earliest start first. What is alive when a phase begins counts too.

        without: categories that are left out, such as those that lie in another memory.
        """
        totals = [0, *accumulate(0 if each.category in without else delta for each, delta in self._events)]
        peaks = {}
        for name, (start, end) in sorted(self._phases.items(), key=lambda item: item[1]):
            by_category: Counter[str] = Counter()
            by_owner: Counter[tuple[str, str]] = Counter()
            for allocation, delta in self._events[: max(range(start, end + 1), key=totals.__getitem__)]:
                if allocation.category not in without:
                    by_category[allocation.category] += delta
                    by_owner[allocation.category, allocation.owner] += delta
            peaks[name] = Peak(
                by_category.total(),
                {category: count for category, count in by_category.most_common() if count},
                {owner: count for owner, count in by_owner.most_common() if count},
            )
        return peaks


class MemoryTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, every storage is in `ledger` from its allocation until it is freed.

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
        """Category of what is made outside of backward and not labelled."""
        self._names = names
        self._also = also
        self._wrappers: set[type] = {DTensor, AsyncCollectiveTensor}
        self._alive: dict[int, tuple[Allocation, weakref.ref[torch.UntypedStorage]]] = {}
        self._running: list[str] = []
        self._shapes = fake.ShapePropagation()
        self._mode: object = None
        self._entered = ExitStack()

    def label(self, tensors: Iterable[Tensor], category: str, *, unless: str | None = None) -> None:
        """Say what tensors are, whenever they were made; those made outside of the tracker count from now on.

        unless: leave those alone that have this category.
        """
        with torch.no_grad():
            for tensor in tensors:
                allocation = self._allocation(to_local_if_dtensor(tensor), category)
                if allocation.category != unless:
                    allocation.category = category

    def __enter__(self) -> Self:
        self._mode = fake.fake_mode()
        before = register_module_forward_pre_hook(lambda module, _: self._running.append(self._names.get(module, "")))
        after = register_module_forward_hook(self._left_module, always_call=True)
        self._entered.callback(before.remove)
        self._entered.callback(after.remove)
        self._entered.enter_context(fake.watched_resizing(self._resized))
        self._entered.enter_context(self._shapes.watched())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._entered.close()

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Autograd asks for the device of every gradient, through all modes, and gets that of a fake tensor wrong.
        if function is fake.DEVICE and (device := getattr(args[0], "fake_device", None)) is not None:
            return device
        if not self._wrappers.isdisjoint(types):
            return NotImplemented  # these call the operator again with their local tensors, which then comes by here
        mode = fake.fake_mode()
        if mode is not None and function is fake.WAIT:
            return args[0]  # a fake wait makes a new tensor, a real one does not
        result = function(*args, **(kwargs or {}))
        if self._shapes.active or mode is not self._mode:
            return result
        if self._also is not None:
            self._also(function, args, result)
        if function is fake.ALL_GATHER:
            self.label([args[0]], ALL_GATHER)
        elif function is fake.REDUCE_SCATTER:
            self.label([args[1]], REDUCE_SCATTER)
        for tensor in fake.tensors_in([result]):
            if fake.is_fake(tensor) or not tensor.is_meta:
                self._allocation(tensor)
        if num_bytes := fake.attention_workspace_bytes(function, args):
            self.ledger.resize(self.ledger.open(num_bytes, category=TEMPORARIES, owner="attention"), 0)
        return result

    def _allocation(self, tensor: Tensor, category: str | None = None) -> Allocation:
        storage = tensor.untyped_storage()
        key = fake.storage_key(storage)
        if (known := self._alive.get(key)) is not None:
            return known[0]
        if category is None:
            category = self.outside_backward
            if fake.in_backward():
                category = RECOMPUTED if self._running else TEMPORARIES
        owner = self._running[-1] if self._running else ""
        allocation = self.ledger.open(storage.nbytes(), category=category, owner=owner)

        def freed(_: object) -> None:
            del self._alive[key]
            self.ledger.resize(allocation, 0)

        self._alive[key] = (allocation, weakref.ref(storage, freed))
        return allocation

    def _left_module(self, *_: object) -> None:
        self._running.pop()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        if (known := self._alive.get(fake.storage_key(storage))) is not None:
            self.ledger.resize(known[0], storage.nbytes())


@contextmanager
def gathered_labels(tracker: MemoryTracker, model: nn.Module) -> Iterator[None]:
    """While active, label the parameters that FSDP gathers and their gradients, among all that a step makes.

    Each module is looked at when it runs, and the lm_head whenever any does, since `linear_logp` reads it without
    calling it.
    """
    path = output_head(model)
    head = [] if path is None else [model.get_submodule(path)]
    seen: set[int] = set()

    def running(module: nn.Module, _: object) -> None:
        for owner in (module, *head):
            parameters = [parameter for parameter in owner.parameters(recurse=False) if parameter.is_leaf]
            tracker.label(parameters, UNSHARDED_PARAMETERS, unless=PARAMETERS)
            for parameter in parameters:
                if id(parameter) not in seen and parameter.requires_grad:
                    seen.add(id(parameter))
                    parameter.register_post_accumulate_grad_hook(accumulated)  # type: ignore[no-untyped-call]

    def accumulated(parameter: Tensor) -> None:
        if parameter.grad is not None:
            tracker.label([parameter.grad], UNSHARDED_GRADIENTS)

    owners = [module for module in model.modules() if next(module.parameters(recurse=False), None) is not None]
    handles = [owner.register_forward_pre_hook(running) for owner in owners]
    yield
    for handle in handles:
        handle.remove()

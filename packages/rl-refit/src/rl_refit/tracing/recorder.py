"""What operations write into which storage, and from which named tensors it came.

Knows tensors and operations, no loader. Names flow with the data: what an operation makes of a tensor carries the
tensor's names, and so does the storage that it writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rl_refit.errors import RefitError
from rl_refit.tracing.engine_memory import storage_id
from rl_refit.tracing.written import Write

__all__ = ["Recorder"]

_OVERWRITING = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "_foreach_copy_", "_foreach_zero_"}
)
"""In-place operations whose result does not depend on what was there; all others (`add_`, `mul_`) leave it stale."""

_AT_INDICES = frozenset({"index_put_", "_index_put_impl_", "index_copy_", "index_fill_", "scatter_", "masked_fill_"})
"""In-place operations that overwrite the elements which a tensor names."""

_EMPTY = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})
_NEEDS_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


@dataclass(frozen=True, slots=True)
class _Call:
    """One operation with its arguments."""

    func: Any
    args: Sequence[Any]
    kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        """Without its namespace and overload: `copy_`."""
        name: str = self.func.overloadpacket.__name__
        return name

    def inputs(self) -> list[Tensor]:
        """Every tensor among the arguments."""
        return _tensors([*self.args, *self.kwargs.values()])

    def written(self) -> Iterator[tuple[Tensor, bool]]:
        """The tensors that it writes, each with whether it is the argument `out`."""
        for position, name, is_out in _written_arguments(self.func):
            value = self.args[position] if position < len(self.args) else self.kwargs.get(name)
            yield from ((tensor, is_out) for tensor in _tensors(value))

    def returns_without_running(self) -> Any:
        """What it returns: the tensors that it writes, or nothing."""
        tensors = [tensor for tensor, _ in self.written()]
        returned = len(self.func._schema.returns)  # noqa: SLF001  the only place that says it
        return None if returned == 0 else tensors[0] if returned == 1 else tuple(tensors)

    def accumulates(self) -> bool:
        """Whether it adds to what is there."""
        return self.kwargs.get("accumulate", False) is True or any(value is True for value in self.args[3:4])

    def run(self) -> Any:
        """Its result."""
        return self.func(*self.args, **self.kwargs)


@final
class Recorder(TorchDispatchMode):
    """Runs operations as they are, but for those on memory that must keep its values.

    Args:
        kept: Tensors that are not to be changed where they have values.
        sources: Named tensors without values.
    """

    def __init__(self, kept: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages: dict[int, torch.UntypedStorage] = {}  # held, so that no address is used twice
        self._writes: dict[int, list[Write]] = {}
        self._names: dict[int, set[str]] = {}
        self._kept = {self._see(tensor) for tensor in kept.values() if not tensor.is_meta}
        for name, tensor in sources.items():
            self._names.setdefault(self._see(tensor), set()).add(name)
            self._writes.setdefault(self._see(tensor), []).append(Write.of(tensor))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: nothing is compiled under this mode, and skipping would import the compiler, for seconds."""
        return False

    def writes_to(self, tensor: Tensor) -> list[Write]:
        """What was written into the storage of `tensor`."""
        return self._writes.get(self._see(tensor), [])

    def arrived(self, tensors: Iterable[Tensor]) -> set[str]:
        """The names that reached the storage of one of `tensors`."""
        return set().union(*(self._names.get(self._see(tensor), set()) for tensor in tensors))

    def __torch_dispatch__(  # noqa: PLR0917  torch's signature
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record what one operation writes."""
        call = _Call(func, args, dict(kwargs or {}))
        inputs, written = call.inputs(), list(call.written())
        known = {self._see(tensor) for tensor in inputs if tensor.numel()}
        names: set[str] = set().union(*(self._names.get(storage, set()) for storage in known))
        without_values = any(tensor.is_meta for tensor in inputs)
        if (names or without_values) and _needs_values(func):
            raise _no_values(call, names)
        for tensor, is_out in written:
            self._record(call, tensor, is_out=is_out)
            self._names.setdefault(self._see(tensor), set()).update(names)
        if written and self._skips(call, [tensor for tensor, _ in written], without_values=without_values):
            return call.returns_without_running()
        if without_values and call.kwargs.get("device") is not None:
            call.kwargs["device"] = torch.device("meta")  # what has no values has no device to move to
        result = call.run()
        if not written:
            self._add_results(call, _tensors(result), names)
        return result

    def _skips(self, call: _Call, tensors: list[Tensor], *, without_values: bool) -> bool:
        """Whether a write is not done: into values that are to stay, or of what has none to where torch refuses it."""
        refused = call.name in _AT_INDICES or any(not tensor.is_meta for tensor in tensors)
        return (without_values and refused) or any(self._see(tensor) in self._kept for tensor in tensors)

    def _record(self, call: _Call, tensor: Tensor, *, is_out: bool) -> None:
        if call.name in _OVERWRITING or is_out:
            write = Write.of(tensor)
        elif call.name in _AT_INDICES and not call.accumulates():
            write = Write.of(tensor, _mask(call, tensor))
        else:
            return
        self._writes.setdefault(self._see(tensor), []).append(write)

    def _add_results(self, call: _Call, results: list[Tensor], names: set[str]) -> None:
        for tensor in results:
            is_new = storage_id(tensor) not in self._storages
            self._names.setdefault(self._see(tensor), set()).update(names)
            if is_new and call.name not in _EMPTY:
                self._writes[storage_id(tensor)] = [Write.of(tensor)]

    def _see(self, tensor: Tensor) -> int:
        storage = storage_id(tensor)
        if storage not in self._storages:
            self._storages[storage] = tensor.untyped_storage()
        return storage


@cache
def _written_arguments(func: Any) -> tuple[tuple[int, str, bool], ...]:
    """Position and name of each argument that an operation writes, and whether it is `out`."""
    return tuple(
        (position, argument.name, bool(argument.is_out))
        for position, argument in enumerate(func._schema.arguments)  # noqa: SLF001  the only place that says it
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _needs_values(func: Any) -> bool:
    return any(tag in func.tags for tag in _NEEDS_VALUES)


def _tensors(tree: object) -> list[Tensor]:
    """The tensors of nested arguments: an operation takes lists and tuples of them, and nothing deeper."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, list | tuple):
        return [tensor for branch in tree for tensor in _tensors(branch)]
    return []


def _mask(call: _Call, tensor: Tensor) -> Tensor:
    """Where in `tensor` an operation writes that is told so by another tensor."""
    mask = torch.zeros(tensor.shape, dtype=torch.uint8)
    given = [*call.args[1:], *call.kwargs.values()]
    places = given[0] if call.name in {"index_put_", "_index_put_impl_", "masked_fill_"} else given[1]
    if any(place.is_meta for place in _tensors(places)):
        raise _no_values(call, set())
    match call.name:
        case "index_put_" | "_index_put_impl_":
            mask.index_put_(tuple(given[0]), torch.ones((), dtype=torch.uint8))
        case "masked_fill_":
            mask.masked_fill_(given[0], 1)
        case "scatter_":
            mask.scatter_(given[0], given[1], 1)
        case _:
            mask.index_fill_(given[0], given[1], 1)
    return mask.bool()


def _no_values(call: _Call, names: set[str]) -> RefitError:
    what = f"of {', '.join(sorted(names)[:3])}" if names else "of a tensor"
    return RefitError(
        f"load_weights asks for values {what}, with {call.func}; write tracing gives it tensors that have none. "
        f"Use trace, which gives it numbers",
        tensor=min(names, default=None),
    )

"""A forward as the straight line of torch calls that it makes: recorded once for each shape, then replayed.

A decoding step of a small model, or of few rows, costs the Python of its modules more than its arithmetic: calls of
modules, configs, keyword arguments, masks and caches by way of objects. None of it depends on the tokens. `record` runs
a forward once and notes each call of torch, with what it was given, as a node of a `torch.fx.Graph`, which torch turns
into Python; the `Recording` makes the same calls on the same kernels in the same order, and so returns the same bits.
(torch's own `make_fx` takes ten times as long to record, replays slower, and meanwhile compiled modules raise in other
threads: it notes operators, and marks the whole process as tracing.)

A recording is right only for what does not change between two steps of one shape. So it refers to tensors by where they
come from: inputs, parameters and buffers, which are read where they are (new weights that are written in place are
used), and what its own calls returned. A tensor of any other origin, a value of a tensor that Python asks for (`item`,
`if`), and results whose shape depends on values raise `NotRecordableError`, which says what it was. What decides in
Python by anything else would slip through, which is why `RecordedDecoding` compares each recording with the forward,
to the bit and on other tokens, before it relies on it.
"""

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode, is_tensor_method_or_property, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# What tells something of a tensor that its shape and kind decide; everything else that is no tensor is a value.
METADATA = {
    *("__get__", "__len__", "dim", "element_size", "get_device", "is_complex", "is_contiguous", "is_floating_point"),
    *("is_signed", "ndimension", "nelement", "numel", "size", "storage_offset", "stride", "result_type", "can_cast"),
}
# Calls that may return the very tensor that they were given, and then do nothing.
CONVERSIONS = frozenset({"to", "contiguous", "float", "type_as", "half", "bfloat16", "double", "type"})
# Uses of a shape before it is recorded, which takes as long as some sixteen forwards and saves half of each later one:
# what came so often is likely to come as often again. Many shapes of a long tail occur a few times only.
USES_BEFORE = 32
MAX_RECORDINGS = 256
# Steps in a row that find other parameters or buffers than the last: no refit does that.
MAX_CHANGES = 4


class NotRecordableError(Exception):
    """A forward does something that a replay could not repeat; the message says what."""


Recording = Callable[..., Tensor]
"""Takes the inputs in the order of `record`'s, and returns what the forward does."""


def record(forward: Callable[..., Tensor], inputs: Sequence[Tensor], *, live: Sequence[Tensor]) -> Recording:
    """Run `forward(*inputs)` once, and return the calls of torch that it made.

    Args:
        forward: Returns a tensor. What it writes to must be among the inputs or `live`.
        inputs: Given anew to each replay, in the same shapes, dtypes and strides.
        live: Tensors that a replay reads where they are, such as parameters.

    Raises:
        NotRecordableError: A replay would not do what the forward does.
    """
    recorder = _Recorder([*inputs, *live])
    with _ValueDependence(), recorder:  # type: ignore[no-untyped-call]
        output = forward(*inputs)
    recorder.graph.output(recorder.nodes_of(output))
    # Not a GraphModule, which would keep the text for good.
    code = recorder.graph.python_code("self")
    scope = dict(code.globals)
    exec(code.src, scope)  # noqa: S102 - torch's own text
    return lambda *inputs: scope["forward"](None, *inputs, *live)


class _ValueDependence(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators whose result is a value for Python, or has a shape that depends on values."""

    def __torch_dispatch__(  # noqa: PLR0917 - torch's signature
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.data_dependent_output in func.tags:
            raise NotRecordableError("it asks for the value of a tensor")
        if torch.Tag.dynamic_output_shape in func.tags:
            raise NotRecordableError("the shape of a result depends on values")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchFunctionMode):
    """Notes the calls of torch that are made inside as nodes of a graph, whose placeholders are the tensors `given`."""

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.graph = fx.Graph()
        # Each by its identity, and kept, so that no identity comes again.
        self._nodes: dict[int, fx.Node] = {}
        self._kept: list[Tensor] = []
        for place, tensor in enumerate(given):
            self._note(tensor, self.graph.placeholder(f"given_{place}"))

    def __torch_function__(  # noqa: PLR0917 - torch's signature
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.__name__
        try:
            result = func(*args, **kwargs)
        except NotRecordableError as error:
            raise NotRecordableError(f"{error} ({resolve_name(func) or name})") from None
        if isinstance(result, Tensor):
            if not (name in CONVERSIONS and args and result is args[0]):
                self._note(result, self._call(func, args, kwargs))
        elif isinstance(result, (tuple, list)) and any(isinstance(each, Tensor) for each in result):
            whole = self._call(func, args, kwargs)
            for place, each in enumerate(result):
                if isinstance(each, Tensor):
                    self._note(each, self.graph.call_function(operator.getitem, (whole, place)))
        elif name == "__setitem__":
            self._call(func, args, kwargs)
        elif name not in METADATA and any(isinstance(each, Tensor) for each in tree_leaves((args, kwargs))):
            raise NotRecordableError(f"it asks for the value of a tensor ({resolve_name(func) or name})")
        return result

    def nodes_of(self, value: Any) -> Any:
        """Return `value` with the node of each tensor in it in the tensor's place."""

        def node_of(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and id(leaf) not in self._nodes:
                raise NotRecordableError(
                    f"it uses a tensor of shape {list(leaf.shape)} that is no parameter, buffer or input and was not "
                    f"made by a call of torch"
                )
            return self._nodes[id(leaf)] if isinstance(leaf, Tensor) else leaf

        return fx.node.map_aggregate(value, node_of)

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        args, kwargs = self.nodes_of(args), self.nodes_of(kwargs)
        if func.__name__ == "__get__":  # of an attribute, such as `mT`
            return self.graph.call_function(getattr, (args[0], func.__self__.__name__))
        if is_tensor_method_or_property(func):
            return self.graph.call_method(func.__name__, args, kwargs)
        return self.graph.call_function(func, args, kwargs)

    def _note(self, tensor: Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = node
        self._kept.append(tensor)


@dataclass(slots=True)
class _Shape:
    """What is known of one shape."""

    uses: int = 0
    candidate: Recording | None = None
    """Recorded, and not yet compared with the forward."""

    replay: Recording | None = None


class RecordedDecoding:
    """Calls a forward of `model`, or replays it, by the shape that the caller names.

    A shape is run as it is at first, then recorded, then replayed beside the forward and compared to the bit, and
    replayed alone from there on. A model that cannot be recorded, or whose replay differs, runs as it is for good, and
    `why_not` says why; one with hooks runs as it is while it has them.
    """

    def __init__(self, model: nn.Module, *, why_not: str | None = None) -> None:
        self.why_not = why_not
        self._shapes: OrderedDict[tuple[int, ...], _Shape] = OrderedDict()
        modules = list(model.modules())
        self._hooks: list[Mapping[Any, Any]] = [
            torch_module._global_forward_hooks,  # noqa: SLF001
            torch_module._global_forward_pre_hooks,  # noqa: SLF001
            *(module._forward_hooks for module in modules),  # noqa: SLF001
            *(module._forward_pre_hooks for module in modules),  # noqa: SLF001
        ]
        self._places = [
            (held, name)
            for module in modules
            for held in (module._parameters, module._buffers)  # noqa: SLF001
            for name in held
        ]
        self._live = self._held()
        self._changes = 0
        """Calls without a break before which some of these were replaced."""

    @property
    def num_replayed(self) -> int:
        """Shapes that are replayed now."""
        return sum(shape.replay is not None for shape in self._shapes.values())

    def __call__(self, shape: tuple[int, ...], forward: Callable[..., Tensor], inputs: Sequence[Tensor]) -> Tensor:
        """Return `forward(*inputs)`; calls of one `shape` differ in the values of `inputs` alone."""
        if self.why_not is not None or any(self._hooks) or torch.is_autocast_enabled(inputs[0].device.type):
            return forward(*inputs)
        held = self._held()
        if any(map(operator.is_not, held, self._live)):
            # Other tensors than before, which recordings do not know of.
            self._shapes.clear()
            self._live = held
            self._changes += 1
            if self._changes > MAX_CHANGES:
                self.why_not = "its parameters or buffers are other tensors at each step"
                return forward(*inputs)
        else:
            self._changes = 0
        known = self._shapes.setdefault(shape, _Shape())
        self._shapes.move_to_end(shape)
        if len(self._shapes) > MAX_RECORDINGS:
            self._shapes.popitem(last=False)
        if known.replay is not None:
            return known.replay(*inputs)
        expected = forward(*inputs)
        try:
            if known.candidate is not None:
                if torch.equal(expected, known.candidate(*inputs)):
                    known.replay = known.candidate
                elif expected.isfinite().all():  # of broken weights nothing is learnt
                    self.why_not = "what was recorded did not give the same logits on the next step"
            elif known.uses >= USES_BEFORE:
                known.candidate = record(forward, inputs, live=[each for each in held if each is not None])
        except NotRecordableError as error:
            self.why_not = str(error)
        except Exception as error:  # noqa: BLE001 - of a model under the modes above: it runs without them
            self.why_not = f"it does not run while it is recorded: {type(error).__name__}: {error}"
        if self.why_not is not None:
            self._shapes.clear()
        known.uses += 1
        return expected

    def explain(self) -> str:
        """How forwards run, in a line for people."""
        if self.why_not is not None:
            return f"decoding: by the model's own forward, step by step, and not recorded: {self.why_not}"
        if any(self._hooks):
            return "decoding: by the model's own forward, step by step, since it has hooks"
        replayed = f"{self.num_replayed} shapes so far"
        return f"decoding: the model's torch calls, recorded for each shape that occurs often and replayed; {replayed}"

    def _held(self) -> list[Tensor | None]:
        return [held.get(name) for held, name in self._places]

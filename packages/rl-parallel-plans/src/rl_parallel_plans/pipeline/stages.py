"""Split a model into pipeline stages by its structure: which layers and modules each holds, and a module for each.

A stage is the model itself with empty modules instead of those that other stages hold. Its forward stays the model's
own code, with the model's own masks, rotary embeddings and layer indices, and its parameters keep their names:

    first stage     embedding, layers 0 to i    runs until layer i+1 would begin, and returns what that would be given
    other stages    layers i+1 to j             the model's code runs up to layer i, where the received tensor enters
    last stage      layers from j+1, norm, head     returns what the model returns

This is exact if nothing but the hidden states goes from one layer to the next. `split_stages` finds out: it runs the
model once without weights, with recorders instead of the layers and of all else that has parameters, follows each
tensor that is computed from their outputs, and refuses the model if one reaches a layer by another argument.
"""

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from rl_parallel_plans.dtensor import has_numbers, is_dtensor
from rl_parallel_plans.errors import PlanError
from rl_parallel_plans.structure import joined, text_layers, tied_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class StageInfo:
    """What one stage of a pipeline holds."""

    index: int
    """Its number, from 0."""
    num_stages: int
    """Stages of the pipeline."""
    stack: str
    """Path of the `nn.ModuleList` of layers."""
    layers: range
    """Indices of its layers in that list."""
    before: tuple[str, ...]
    """Paths of modules with parameters that run before the layers: the embedding. Empty but in the first stage."""
    after: tuple[str, ...]
    """Paths of modules with parameters that run after the layers: final norm, lm_head. Empty but in the last stage."""
    tied: Mapping[str, tuple[tuple[int, str], ...]]
    """Parameters that other stages hold too: name in this stage to (stage, name there) of all that hold it, in order.
    The first of them is the one to count and to export."""

    @property
    def is_first(self) -> bool:
        """Whether it reads token ids."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether it returns what the model returns."""
        return self.index == self.num_stages - 1

    @property
    def copies(self) -> frozenset[str]:
        """Names of its parameters that an earlier stage holds too."""
        return frozenset(name for name, holders in self.tied.items() if holders[0][0] != self.index)

    def __str__(self) -> str:
        first, last = self.layers.start, self.layers.stop - 1
        layers = f"{self.stack}.{first}" + (f" to {last}" if last > first else "")
        return ", ".join([*self.before, layers, *self.after])


def split_stages(model: nn.Module, num_stages: int, *, layers: Sequence[int] | None = None) -> list[nn.Module]:
    """`model` as `num_stages` modules of consecutive layers, in order; `stage_info` says what each of them holds.

    Needs no process group, and works on the meta device. The stages share layers, parameters and config with `model`:
    drop `model` and the stages of other ranks to free their memory.

    layers: number of layers of each stage. By default the parameters of the layers, with those of the final norm and
        the lm_head in the last stage, are divided as evenly as possible; an embedding takes no time to run.

    Raises PlanError if the model has no stack of layers or fewer layers than stages, or if anything but the hidden
    states goes from one layer to the next.
    """
    found = trace(model)
    counts = _counts(model, found, num_stages=num_stages, layers=layers)
    return [_stage(model, found, info) for info in _infos(model, found, counts)]


def stage_info(stage: nn.Module) -> StageInfo | None:
    """What a stage holds; None for a module that is no stage."""
    boundary = stage.__dict__.get(_BOUNDARY)
    return boundary.info if isinstance(boundary, Boundary) else None


def boundary_of(stage: nn.Module) -> "Boundary":
    """Where hidden states enter and leave a stage; PlanError for a module that is no stage."""
    boundary = stage.__dict__.get(_BOUNDARY)
    if not isinstance(boundary, Boundary):
        raise PlanError(f"{type(stage).__name__} is no pipeline stage: make stages with split_stages")
    return boundary


# -- A stage ---------------------------------------------------------------------------------------

_BOUNDARY = "pipeline_boundary"
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


class Boundary:
    """Where hidden states enter and leave one stage, and what its forward runs."""

    def __init__(self, info: StageInfo, found: "Trace", model_class: type[nn.Module]) -> None:
        self.info = info
        self.hidden_argument = found.hidden_argument
        self.returns_tuple = found.returns_tuple
        self.width = found.width
        self.model_class = model_class
        self.call: Callable[[nn.Module], Any] | None = None
        """What a forward of the stage runs, given the model."""
        self.stream: DeviceMesh | None = None
        """The tp mesh over whose ranks the sequence is sharded between layers; None where hidden states are whole."""
        self.shape: tuple[int, int] = (0, 0)
        """Rows and tokens of a microbatch; read only where the sequence is sharded."""
        self.received: Tensor | None = None
        """What the stage before has sent, during a forward; None in the first stage."""
        self.model_hooks: dict[str, dict[int, Any]] = {name: {} for name in _HOOKS}
        """Hooks that run when the model is called. What stays on the stage runs around all of a forward."""

    def run(self, stage: nn.Module, received: Tensor | None) -> Any:
        """One forward: the hidden states for the next stage, and in the last one whatever `call` returns."""
        if self.call is None:
            raise PlanError("a pipeline stage does not run by itself: call Pipeline.step or Pipeline.forward")
        self.received = received
        try:
            output = self.call(self._model(stage))
        except _LayersDone as done:
            hidden = done.hidden
            done.__traceback__ = None  # it holds the frames of the forward, and they hold activations
            return (hidden.to_local() if is_dtensor(hidden) else hidden).contiguous()
        finally:
            self.received = None
        if not self.info.is_last:
            raise PlanError(
                f"the function that the pipeline runs returned in stage {self.info.index} without running the layers: "
                "it is called on every stage, and must call the model, or a part of the model that runs all layers"
            )
        return output

    def entered(self) -> Tensor:
        """What the first layer of the stage is given: a DTensor where the sequence is sharded between layers."""
        assert self.received is not None
        if self.stream is None:
            return self.received
        from torch.distributed.tensor import DTensor, Shard

        rows, tokens = self.shape
        shape, stride = torch.Size((rows, tokens, self.width)), (tokens * self.width, self.width, 1)
        return DTensor.from_local(self.received, self.stream, [Shard(1)], run_check=False, shape=shape, stride=stride)

    def take_model_hooks(self, stage: nn.Module) -> None:
        """From now on hooks of the stage run when the model is called, as before; FSDP's stay around the stage."""
        of_fsdp = {
            key
            for hooks in (stage._forward_pre_hooks, stage._forward_hooks)  # noqa: SLF001 - no public one
            for key, hook in hooks.items()
            if type(getattr(hook, "__self__", None)).__name__ == "FSDPState"
        }
        for name in _HOOKS:
            hooks = getattr(stage, name)
            for key in hooks.keys() - of_fsdp:
                self.model_hooks[name][key] = hooks.pop(key)

    def _model(self, stage: nn.Module) -> nn.Module:
        """The stage as an instance of the model's own class, with the model's own forward.

        Not the stage itself, whose forward this is. FSDP's hooks stand around the stage: its parameters are gathered
        for all that `call` does, so that `linear_logp` may read the lm_head's weight without calling the lm_head.
        """
        model = self.model_class.__new__(self.model_class)
        model.__dict__.update(stage.__dict__)
        for name in ("forward", "own_forward"):  # the latter where the plan has wrapped the stage
            model.__dict__.pop(name, None)
        for name in _HOOKS:
            model.__dict__[name] = type(getattr(stage, name))(sorted(self.model_hooks[name].items()))
        return model


def _forward(stage: nn.Module, received: Tensor | None = None) -> Any:
    return boundary_of(stage).run(stage, received)


class _LayersDone(Exception):  # noqa: N818 - no error: how a stage leaves the model's forward after its last layer
    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class Elsewhere(nn.Module):
    """Stands for a module that another stage holds. It has no parameters, and patterns of plans do not match it."""

    def __init__(self, path: str, module: nn.Module, boundary: Boundary) -> None:
        super().__init__()
        _copy_attributes(module, self)
        self.pipeline_path = path
        self.boundary = boundary

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: another stage should have been called."""
        del args, kwargs
        raise PlanError(
            f"{self.pipeline_path} is held by another pipeline stage, and stage {self.boundary.info.index} calls it: "
            "under pipeline parallelism a model reads token ids, positions and masks, and no images"
        )


class _EarlierLayer(Elsewhere):
    """A layer of an earlier stage: returns what this stage received."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        del args, kwargs
        entered = self.boundary.entered()
        return (entered,) if self.boundary.returns_tuple else entered


class _NextLayer(Elsewhere):
    """The layer after those of the stage: ends the forward with the hidden states that it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        where = self.boundary.hidden_argument
        raise _LayersDone(args[where] if isinstance(where, int) else kwargs[where])


class _BeforeLayers(Elsewhere):
    """A module that runs before the layers: zeros of the right shape. No layer of this stage reads them."""

    def __init__(self, path: str, module: nn.Module, boundary: Boundary) -> None:
        super().__init__(path, module, boundary)
        self.output_shape = _output_shape(module)
        self.weight_shape = getattr(getattr(module, "weight", None), "shape", torch.Size())

    @property
    def weight(self) -> Tensor:
        """Zeros as well: models ask the embedding's weight for its device."""
        assert self.boundary.received is not None
        return self.boundary.received.detach().new_zeros(()).expand(self.weight_shape)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        assert self.boundary.received is not None
        zero = self.boundary.received.detach().new_zeros(())
        return zero.expand(self.output_shape(_first_tensor(args, kwargs)))


def _stage(model: nn.Module, found: "Trace", info: StageInfo) -> nn.Module:
    boundary = Boundary(info, found, type(model))
    memo = _shared(model)
    for index, layer in enumerate(found.layers):
        path = f"{found.stack}.{index}"
        if index in info.layers:
            memo[id(layer)] = layer
        elif index < info.layers.start:
            memo[id(layer)] = _EarlierLayer(path, layer, boundary)
        else:
            memo[id(layer)] = (_NextLayer if index == info.layers.stop else Elsewhere)(path, layer, boundary)
    for path in (*found.before, *found.after):
        module = model.get_submodule(path)
        if path in info.before or path in info.after:
            memo[id(module)] = module
        else:
            memo[id(module)] = (_BeforeLayers if path in found.called_before else Elsewhere)(path, module, boundary)
    stage = copy.deepcopy(model, memo)  # what is left to copy has no parameters
    stage.__dict__[_BOUNDARY] = boundary
    stage.__dict__["forward"] = types.MethodType(_forward, stage)
    return stage


def _shared(model: nn.Module) -> dict[int, Any]:
    """A memo for `copy.deepcopy` by which a copy shares configs with the model."""
    configs = [module.__dict__.get("config") for module in model.modules()]
    return {id(config): config for config in configs if config is not None}


def _copy_attributes(module: nn.Module, stand_in: nn.Module) -> None:
    """What a model may read of a layer in its loop, such as `attention_type`: attributes that hold no modules."""
    properties = {
        name
        for cls in type(module).__mro__
        if not issubclass(nn.Module, cls)
        for name, value in vars(cls).items()
        if isinstance(value, property)
    }
    for name in (*module.__dict__, *properties):
        if name.startswith("_") or name == "forward":
            continue
        with suppress(Exception):  # a property may raise what it likes
            value = getattr(module, name)
            if not isinstance(value, nn.Module | Tensor):
                stand_in.__dict__.setdefault(name, value)
    for name, child in module.named_children():  # or of its attention: `layer.self_attn.attention_type`
        own = {key: value for key, value in vars(child).items() if not key.startswith("_")}
        plain = {key: value for key, value in own.items() if not isinstance(value, nn.Module | Tensor)}
        stand_in.__dict__.setdefault(name, types.SimpleNamespace(**plain))


def _output_shape(module: nn.Module) -> Callable[[Tensor], torch.Size]:
    """The shape of a module's output as a function of its first input."""
    embeddings = [part.embedding_dim for part in module.modules() if isinstance(part, nn.Embedding)]
    features = module.out_features if isinstance(module, nn.Linear) else None

    def shape(tensor: Tensor) -> torch.Size:
        if isinstance(module, nn.Embedding) or (embeddings and not tensor.is_floating_point()):
            return torch.Size((*tensor.shape, embeddings[0]))
        return tensor.shape if features is None else torch.Size((*tensor.shape[:-1], features))

    return shape


def _first_tensor(args: Any, kwargs: Any) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


# -- Which stage holds what ------------------------------------------------------------------------


def _counts(model: nn.Module, found: "Trace", *, num_stages: int, layers: Sequence[int] | None) -> list[int]:
    """Number of layers of each stage."""
    if not isinstance(num_stages, int) or isinstance(num_stages, bool) or num_stages < 1:
        raise PlanError(f"the number of pipeline stages is {num_stages!r}: it must be a whole number, at least 1")
    total = len(found.layers)
    if layers is not None:
        counts = list(layers)
        if len(counts) != num_stages or sum(counts) != total or min(counts) < 1:
            raise PlanError(
                f"layers={counts} does not divide {total} layers into {num_stages} stages: give one number for each "
                f"stage, at least 1, that add up to {total}"
            )
        return counts
    if num_stages > total:
        raise PlanError(f"{num_stages} pipeline stages need as many layers, and {found.stack} has {total}")
    costs = [sum(parameter.numel() for parameter in layer.parameters()) for layer in found.layers]
    costs[-1] += sum(p.numel() for path in found.after for p in model.get_submodule(path).parameters())
    return _balanced(costs, num_stages)


def _balanced(costs: list[int], parts: int) -> list[int]:
    """Lengths of `parts` runs of `costs` whose largest sum is least; of those, the ones whose squares add up to least.

    The second rule divides evenly what the first leaves open, such as the layers before a very large head.
    """
    upto = [0]
    for cost in costs:
        upto.append(upto[-1] + cost)
    # best[end]: (largest sum, sum of squares, lengths) of the runs that cover costs[:end]
    best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
    for part in range(1, parts + 1):
        following: dict[int, tuple[int, int, list[int]]] = {}
        for end in range(part, len(costs) - (parts - part) + 1):
            options = []
            for start, (largest, squares, lengths) in best.items():
                if start < end:
                    own = upto[end] - upto[start]
                    options.append((max(largest, own), squares + own * own, [*lengths, end - start]))
            following[end] = min(options)
        best = following
    return best[len(costs)][2]


def _infos(model: nn.Module, found: "Trace", counts: Sequence[int]) -> list[StageInfo]:
    held: list[tuple[range, tuple[str, ...], tuple[str, ...]]] = []
    for index, count in enumerate(counts):
        start = sum(counts[:index])
        before, after = found.before if index == 0 else (), found.after if index == len(counts) - 1 else ()
        held.append((range(start, start + count), before, after))

    def stage_of(name: str) -> int:
        for index, (layers, before, after) in enumerate(held):
            paths = (*before, *(f"{found.stack}.{layer}" for layer in layers), *after)
            if any(name.startswith(f"{path}.") for path in paths):
                return index
        raise AssertionError(name)

    shared: list[tuple[tuple[int, str], ...]] = []
    for names in tied_names(model):
        first_names: dict[int, str] = {}
        for name in names:
            first_names.setdefault(stage_of(name), name)
        if len(first_names) > 1:
            shared.append(tuple(sorted(first_names.items())))
    return [
        StageInfo(
            index=index,
            num_stages=len(counts),
            stack=found.stack,
            layers=layers,
            before=before,
            after=after,
            tied={dict(each)[index]: each for each in shared if index in dict(each)},
        )
        for index, (layers, before, after) in enumerate(held)
    ]


# -- What goes from layer to layer -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """How a model calls its layers."""

    stack: str
    """Path of the list of layers."""
    layers: list[nn.Module]
    """The layers."""
    hidden_argument: int | str
    """Where a layer is given the hidden states: position or keyword."""
    returns_tuple: bool
    """Whether the model takes the hidden states out of a tuple that a layer returns."""
    width: int
    """Features of the hidden states."""
    before: tuple[str, ...]
    """Paths of modules with parameters that belong before the layers."""
    after: tuple[str, ...]
    """Paths of modules with parameters that belong after them."""
    called_before: frozenset[str]
    """Those of `before` that a forward on token ids calls."""


ROWS, TOKENS = 2, 5


def trace(model: nn.Module) -> Trace:
    """Run the model's own code on token ids, without weights and without layers, and record how it calls its layers.

    Raises PlanError where a pipeline of its layers would not compute what the model does, naming what stands against.
    """
    name = type(model).__name__
    if any(is_dtensor(parameter) for parameter in model.parameters()):
        raise PlanError(f"{name} is sharded already: split it into pipeline stages first, then shard each stage")
    stack = text_layers(model)
    if stack is None or not stack[0] or not len(stack[1]):
        raise PlanError(f"{name} holds no nn.ModuleList of layers inside of it: there is nothing to split into stages")
    path, layers = stack[0], list(stack[1])
    if len({id(layer) for layer in layers}) < len(layers):
        raise PlanError(f"{path} holds one layer several times, and a pipeline stage cannot hold a part of it")
    order = {where: number for number, (where, _) in enumerate(model.named_modules())}
    parts = sorted(_parts(model, path), key=lambda part: order[part[0]])
    record = _Record(path, len(layers))
    memo = _shared(model)
    memo |= {id(layer): _RecordedLayer(f"{path}.{i}", layer, record) for i, layer in enumerate(layers)}
    memo |= {id(module): _RecordedModule(where, module, record) for where, module, _ in parts}
    for buffer in model.buffers():
        known = has_numbers(buffer)
        memo[id(buffer)] = buffer.detach().cpu().clone() if known else torch.ones(buffer.shape, dtype=buffer.dtype)
    outline = copy.deepcopy(model, memo)
    ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
    try:
        with torch.no_grad(), _Following(record):
            call_on_token_ids(outline, ids)
    except PlanError as refusal:
        raise PlanError(f"{name} cannot be split into pipeline stages: {refusal}") from None
    except Exception as error:
        raise PlanError(
            f"{name} cannot be split into pipeline stages: its forward on token ids does more with its layers than to "
            f"call them in order ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
        ) from error
    if record.layers_called < len(layers):
        raise PlanError(
            f"{name} cannot be split into pipeline stages: its forward on token ids calls {record.layers_called} of "
            f"the {len(layers)} layers in {path}"
        )
    assert record.hidden_argument is not None
    # What is not called on token ids (a vision tower) goes where it is defined: before the layers or after them.
    sides = {where: record.called.get(where, side) for where, _, side in parts}
    return Trace(
        stack=path,
        layers=layers,
        hidden_argument=record.hidden_argument,
        returns_tuple=record.returns_tuple,
        width=record.width,
        before=tuple(where for where, side in sides.items() if side == "before"),
        after=tuple(where for where, side in sides.items() if side == "after"),
        called_before=frozenset(where for where, side in record.called.items() if side == "before"),
    )


def call_on_token_ids(model: nn.Module, ids: Tensor) -> Any:
    """The model's output for token ids alone, without a key/value cache."""
    parameters = inspect.signature(type(model).forward).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if "input_ids" not in parameters:
        return model(ids)
    return model(input_ids=ids, **({"use_cache": False} if takes_any or "use_cache" in parameters else {}))


def _parts(model: nn.Module, stack: str) -> Iterator[tuple[str, nn.Module, str]]:
    """The largest modules with parameters outside of the layers: path, module, and side of the layers they stand on."""
    tokens = stack.split(".")
    for depth in range(len(tokens)):
        path = ".".join(tokens[:depth])
        owner, side = model.get_submodule(path), "before"
        if (own := next((name for name, _ in owner.named_parameters(recurse=False)), None)) is not None:
            raise PlanError(
                f"{type(model).__name__} cannot be split into pipeline stages: {joined(path, own)} is a parameter of a "
                f"module that holds all layers, and no one stage can hold it"
            )
        for name, child in owner.named_children():
            if name == tokens[depth]:
                side = "after"
            else:
                yield from ((where, module, side) for where, module in _with_forward(joined(path, name), child))


def _with_forward(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module where it has parameters; of a container that is never called, what it contains."""
    if type(module).forward is nn.Module.forward:
        for name, child in module.named_children():
            yield from _with_forward(f"{path}.{name}", child)
    elif next(module.parameters(), None) is not None:
        yield path, module


class _Record:
    """What has been seen of a forward so far."""

    def __init__(self, stack: str, num_layers: int) -> None:
        self.stack, self.num_layers = stack, num_layers
        self.layers_called = 0
        self.hidden_argument: int | str | None = None
        self.returns_tuple = False
        self.width = 0
        self.called: dict[str, str] = {}
        self.origins: dict[int, tuple[Tensor, str]] = {}
        """Tensors that depend on numbers that not every stage has, by identity, each with the module they are from."""
        self.last_output: Tensor | None = None

    def origin(self, value: object) -> str | None:
        found = self.origins.get(id(value))
        return None if found is None else found[1]

    def mark(self, tensor: Tensor, origin: str) -> Tensor:
        self.origins[id(tensor)] = (tensor, origin)  # kept alive, so that no other tensor gets its identity
        return tensor


class _RecordedModule(nn.Module):
    """In a trace, a module with parameters outside of the layers."""

    def __init__(self, path: str, module: nn.Module, record: _Record) -> None:
        super().__init__()
        self.path, self.record, self.output_shape = path, record, _output_shape(module)
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            self.__dict__["weight"] = record.mark(torch.zeros(()).expand(weight.shape), path)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_RecordedModule":
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        record, count = self.record, self.record.layers_called
        if 0 < count < record.num_layers:
            raise PlanError(f"it calls {self.path} between layers {count - 1} and {count}")
        side = "before" if count == 0 else "after"
        if record.called.setdefault(self.path, side) != side:
            raise PlanError(f"it calls {self.path} before its layers and after them")
        # Expanded as the zeros of a stage are: a model that writes into them is refused here.
        return record.mark(torch.zeros(()).expand(self.output_shape(_first_tensor(args, kwargs))), self.path)


class _RecordedLayer(nn.Module):
    """In a trace, a layer."""

    def __init__(self, path: str, layer: nn.Module, record: _Record) -> None:
        super().__init__()
        _copy_attributes(layer, self)
        self.pipeline_path, self.record = path, record

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        record, count = self.record, self.record.layers_called
        if self.pipeline_path != f"{record.stack}.{count}":
            raise PlanError(f"it calls {self.pipeline_path} as layer number {count}")
        arguments: dict[int | str, Any] = dict(enumerate(args))
        arguments.update(kwargs)
        if count == 0:
            record.hidden_argument, hidden = self._hidden(arguments)
            if hidden.ndim != 3 or tuple(hidden.shape[:2]) != (ROWS, TOKENS):
                raise PlanError(f"its hidden states are {list(hidden.shape)} and not [rows, tokens, features]")
            record.width = hidden.shape[-1]
        else:
            assert record.hidden_argument is not None
            hidden = arguments[record.hidden_argument]
            if hidden is not record.last_output:
                raise PlanError(f"it changes the hidden states itself between layers {count - 1} and {count}")
        for where, value in arguments.items():
            if where != record.hidden_argument:
                self._check(where, value)
        record.layers_called += 1
        record.last_output = record.mark(hidden.clone(), self.pipeline_path)
        return record.last_output

    def _hidden(self, arguments: Mapping[int | str, Any]) -> tuple[int | str, Tensor]:
        found = [
            (where, value)
            for where, value in arguments.items()
            if isinstance(value, Tensor) and self.record.origin(value) is not None
        ]
        if not found:
            raise PlanError(f"{self.pipeline_path} is given nothing that was computed from the embedding")
        # The first is the hidden states; another one, such as the embedding itself, is refused by `_check`.
        return found[0]

    def _check(self, where: int | str, value: object) -> None:
        """PlanError where an argument other than the hidden states carries numbers that not every stage has."""
        argument = f"argument {where}" if isinstance(where, int) else f"argument {where!r}"
        if isinstance(value, dict | list) and not value:
            raise PlanError(
                f"layers are given an empty {type(value).__name__} as {argument}, by which one may leave something for "
                "another in a later stage"
            )
        for path, leaf in tree_flatten_with_path(value)[0]:
            if (origin := self.record.origin(leaf)) is not None:
                raise PlanError(
                    f"{self.pipeline_path} is given, beside the hidden states, what was computed from {origin} "
                    f"({argument}{keystr(path)}): a later stage does not have it"
                )


class _Following(TorchFunctionMode):
    """Mark each tensor that is computed from marked ones."""

    def __init__(self, record: _Record) -> None:
        super().__init__()
        self.record = record

    def __torch_function__(  # noqa: PLR0917 - torch's signature
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, record, name = kwargs or {}, self.record, getattr(func, "__name__", "")
        if args and args[0] is record.last_output and record.last_output is not None:
            if func is Tensor.__getitem__ and type(args[1]) is int:
                if args[1] != 0:
                    raise PlanError("it reads more than the hidden states from what a layer returns")
                record.returns_tuple = True
                return args[0]
            if name in {"unbind", "__iter__", "__len__"}:
                raise PlanError("its layers return several values")
        result = func(*args, **kwargs)
        # The shape, dtype or device of a marked tensor is not its numbers.
        if name.endswith("_like") or name.startswith("new_"):
            return result
        read = args[:1] if name in {"to", "type_as", "expand_as", "view_as", "reshape_as"} else (args, kwargs)
        origins = [origin for leaf in tree_leaves(read) if (origin := record.origin(leaf)) is not None]
        if origins:
            written = args[:1] if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) else ()
            changed = [leaf for leaf in tree_leaves((result, written)) if isinstance(leaf, Tensor)]
            for tensor in changed:
                record.mark(tensor, origins[0])
            if not changed and name in {"item", "tolist", "__bool__", "__int__", "__float__", "__index__"}:
                raise PlanError(f"it looks at numbers that were computed from {origins[0]}")
        return result

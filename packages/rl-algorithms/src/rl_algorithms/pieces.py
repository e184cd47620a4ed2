"""The named parts that an `Objective` is made of: a pure function, beside its formula, its source and its refusals.

A piece is named in an objective by a name of the registry, by `file.py:function` or `package.module:function`, or is a
function itself. It asks for its inputs by the names of its parameters, and is given those alone:

    def gmpo(log_ratio, advantage, mask, *, clip_low=0.4, clip_high=0.4):
        "-A times the geometric mean of the clipped ratio"

`KINDS` lists what a piece of each kind may ask for. A parameter of another name is a number of the piece's own and must
have a default; the `options` of the objective set it. A decorator is not needed; `piece` adds a formula with numbers
in their places, a source and refusals, and registers the name.

Every row that a piece is given is whole, and which rows are given is an accident of how the step was cut. So a piece
may look along a row and must not look across rows, except one of kind "tokens" with `whole_step=True`, which is called
once with every row of the step. Tensors that depend on the sampler are 0 off the mask.
"""

import difflib
import functools
import hashlib
import importlib
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

__all__ = ["KINDS", "Piece", "PieceName", "find", "named_files", "piece", "registered", "source_digest"]

PieceName = str | Callable[..., Any]
"""A registered name, `file.py:function`, `package.module:function`, or the function."""

LOGP = ("logp", "logp_old", "logp_proximal", "log_ratio", "mask")
ROLLOUTS = ("rewards", "token_rewards", "groups", "num_tokens", "mask", "logp_old", "greedy_rewards", "components")

KINDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "advantage": {"inputs": (*ROLLOUTS, "weights"), "numbers": ("baseline", "scale", "epsilon")},
    "ratio": {"inputs": ("logp", "logp_proximal", "log_ratio", "mask"), "numbers": ()},
    "surrogate": {
        "inputs": (*LOGP, "ratio", "advantage", "selected", "entropy"),
        "numbers": ("clip_low", "clip_high", "dual_clip"),
    },
    "tokens": {"inputs": (*LOGP, "advantage", "entropy"), "numbers": ()},
    "weight": {"inputs": ("logp_proximal", "logp_old", "log_weight", "mask"), "numbers": ()},
    "kl": {"inputs": ("logp", "logp_ref", "ratio", "mask"), "numbers": ()},
    "aggregation": {"inputs": ("mask", "counts"), "numbers": ("max_length",)},
}
"""For each kind, the tensors that its pieces may ask for, and the numbers that are fields of the configuration.

    advantage    -> [B] or [B, T]   rewards [B], token_rewards [B, T], float64; groups [B]; num_tokens [B] of the
                                    responses; components [B, K] and their weights [K]; greedy_rewards [B]
    ratio        -> [B, T]          log_ratio = logp - logp_proximal
    surrogate    -> [B, T]          or the loss and where a clip bound; ratio, advantage, selected [B, T]
    tokens       -> bool [B, T]     which tokens keep their policy gradient
    weight       -> [B, T]          of a correction; log_weight = logp_proximal - logp_old
    kl           -> [B, T]          an estimate in nats
    aggregation  -> float64 [B, T]  each token's weight in the step's loss, with `counts` of the whole step
"""

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def _allowed(**numbers: Any) -> None:
    """Refuse nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One named part of an objective."""

    kind: str
    """One of `KINDS`."""

    name: str
    """What an objective calls it."""

    function: Callable[..., Any]
    """Pure; see `KINDS` for what it is given and returns."""

    formula: Callable[..., str]
    """Called with the piece's numbers; the formula as text, on one line."""

    source: str = ""
    """Papers, or the file."""

    refuse: Callable[..., str | None] = _allowed
    """Called with the piece's numbers; why they mean nothing, or None."""

    whole_step: bool = False
    """Of kind "tokens": called once with all rows of the step, before it is cut."""

    inputs: tuple[str, ...] = ()
    """The tensors that the function asks for."""

    numbers: tuple[str, ...] = ()
    """The fields of the configuration that it asks for."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Its own numbers, with their defaults."""

    def __call__(self, available: Mapping[str, Any], numbers: Mapping[str, Any]) -> Any:
        """The function on what it asks for; `numbers` as `bound` returned them.

        Raises:
            ValueError: it returned something of another shape, which would be broadcast to another loss.
        """
        returned = self.function(**{name: available[name] for name in self.inputs}, **numbers)
        shape = getattr(returned[0] if isinstance(returned, tuple) else returned, "shape", None)
        wanted = available["mask"].shape
        if shape != wanted and not (self.kind == "advantage" and shape == wanted[:1]):
            kinds = f"{[*wanted]}, rows by tokens" + (f", or {[*wanted[:1]]}" if self.kind == "advantage" else "")
            found = type(returned).__name__ if shape is None else f"a tensor of shape {[*shape]}"
            raise ValueError(f"{self.kind} {self.name!r} returned {found}; what it returns has the shape {kinds}")
        return returned

    def bound(self, *, options: Mapping[str, Any], **numbers: Any) -> dict[str, Any]:
        """All numbers that the function is called with.

        Args:
            options: of the configuration; every one must be an option of this piece.
            numbers: fields of the configuration, of which the piece takes those that it asks for.

        Raises:
            ValueError: an option that the piece does not have, or numbers that it refuses.
        """
        for name in options:
            if name not in self.options:
                known = f"it has {', '.join(self.options)}" if self.options else "it has none"
                raise ValueError(
                    f"{name!r} is no option of {self.kind} {self.name!r}{_nearest(name, self.options)}; {known}"
                )
        found = {**{name: numbers[name] for name in self.numbers}, **self.options, **options}
        if (reason := self.refuse(**found)) is not None:
            raise ValueError(reason)
        return found

    def explain(self, numbers: Mapping[str, Any]) -> str:
        """The formula with the numbers in their places."""
        return self.formula(**numbers)


_REGISTRY: dict[tuple[str, str], Piece] = {}


def piece(
    kind: str,
    name: str | None = None,
    *,
    formula: str | Callable[..., str] | None = None,
    source: str = "",
    refuse: Callable[..., str | None] = _allowed,
    whole_step: bool = False,
) -> Callable[[FunctionT], FunctionT]:
    """Register the decorated function, and return it unchanged.

    Args:
        kind: one of `KINDS`.
        name: what objectives call it; by default the function's name.
        formula: text, in which `{clip_high:g}` is replaced by that number, or a function of the piece's numbers. By
            default the first line of the docstring.
        source: papers.
        refuse: a function of the piece's numbers that returns why they mean nothing, or None.
        whole_step: see `Piece`.

    Raises:
        ValueError: there is no such kind, or the function asks for what pieces of this kind are not given.
    """

    def register(function: FunctionT) -> FunctionT:
        made = _made(kind, name or function.__name__, function, formula=formula, source=source, whole_step=whole_step)
        known = _REGISTRY.get((kind, made.name))
        if known is not None and known.function.__module__ != function.__module__:
            raise ValueError(
                f"there is a {kind} {made.name!r} already, of {known.function.__module__}; give yours another name"
            )
        _REGISTRY[kind, made.name] = Piece(**{**_fields(made), "refuse": refuse})
        return function

    return register


def registered(kind: str) -> dict[str, Piece]:
    """The pieces of a kind by name."""
    return {name: made for (of, name), made in _REGISTRY.items() if of == kind}


def find(kind: str, named: PieceName) -> Piece:
    """The piece of this name, or made of this function.

    Raises:
        ValueError: there is none, its file cannot be imported, or the function asks for what it is not given.
    """
    if callable(named):
        same = [made for made in registered(kind).values() if made.function is named]
        return same[0] if same else _of_function(kind, named)
    if (kind, named) in _REGISTRY:
        return _REGISTRY[kind, named]
    if ":" in named:
        return _of_text(kind, named, _place(named))
    names = list(registered(kind))
    raise ValueError(
        f"{named!r} is no {kind}{_nearest(named, names)}; there are {', '.join(names)}, and file.py:function is one of "
        f"your own"
    )


def named_files(*names: PieceName | None) -> list[str]:
    """Those of `names` that are `file.py:function` or `package.module:function`."""
    return [name for name in names if isinstance(name, str) and ":" in name]


def source_digest(named: str) -> str:
    """SHA-256 of the source that `file.py:function` or `package.module:function` was imported from."""
    _, source = _module(_place(named))
    return hashlib.sha256(source).hexdigest()


def _place(named: str) -> str:
    """The file, as an absolute path, or the module that `place:function` names."""
    place = named.rpartition(":")[0]
    return str(Path(place).expanduser().absolute()) if place.endswith(".py") else place


@functools.cache  # a file is imported once, whatever becomes of it during the run
def _of_text(kind: str, named: str, place: str) -> Piece:
    attribute = named.rpartition(":")[2]
    module, _ = _module(place)
    function = getattr(module, attribute, None)
    if function is None:
        functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and name[0] != "_"]
        raise ValueError(
            f"{place} has no function {attribute!r}{_nearest(attribute, functions)}"
            + (f"; it has {', '.join(functions)}" if functions else "")
        )
    return _of_function(kind, function, name=named)


@functools.cache
def _of_function(kind: str, function: Callable[..., Any], *, name: str | None = None) -> Piece:
    decorated = [made for made in registered(kind).values() if made.function is function]
    if decorated and name is not None:
        return Piece(**{**_fields(decorated[0]), "name": name})
    short = getattr(function, "__name__", type(function).__name__)
    made = _made(kind, name or short, function, source=name or "")
    text = made.explain({})

    def said(**numbers: Any) -> str:  # the text is only what its author says: name the function as it is called
        given = [*made.inputs, *(f"{key}={value:g}" for key, value in numbers.items() if value is not None)]
        return f"{short}({', '.join(given)}): {text}"

    return Piece(**{**_fields(made), "formula": said})


@functools.cache
def _module(place: str) -> tuple[Any, bytes]:
    """The module that a file or a dotted name is, and its source as it was imported."""
    if not place.endswith(".py"):
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ValueError(f"there is no module {place}: {error}") from error
        file = getattr(module, "__file__", None)
        return module, Path(file).read_bytes() if file else b""
    path = Path(place)
    if not path.is_file():
        like = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.py")], n=1)
        hint = f"did you mean {like[0]}?" if like else "a path is relative to the current directory"
        raise ValueError(f"there is no file {path.name} in {path.parent}; {hint}")
    source = path.read_bytes()
    name = f"rl_algorithms_file_{path.stem}_{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    module = types.ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        exec(compile(source, str(path), "exec"), vars(module))  # noqa: S102 - the user's own file, named by the user
    except Exception as error:
        del sys.modules[name]
        raise ValueError(f"importing {place} raised {type(error).__name__}: {error}") from error
    return module, source


def _made(
    kind: str,
    name: str,
    function: Callable[..., Any],
    *,
    formula: str | Callable[..., str] | None = None,
    source: str = "",
    whole_step: bool = False,
) -> Piece:
    if kind not in KINDS:
        raise ValueError(f"{kind!r} is no kind of piece{_nearest(kind, KINDS)}; there are {', '.join(KINDS)}")
    known = KINDS[kind]
    inputs, numbers, options = [], [], {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in known["inputs"]:
            inputs.append(parameter.name)
        elif parameter.name in known["numbers"]:
            numbers.append(parameter.name)
        elif parameter.default is not inspect.Parameter.empty:
            options[parameter.name] = parameter.default
        else:
            given = (*known["inputs"], *known["numbers"])
            raise ValueError(
                f"{kind} {name!r} asks for {parameter.name!r}{_nearest(parameter.name, given)}; a {kind} is given "
                f"{', '.join(given)}, and a number of its own needs a default"
            )
    if formula is None:
        first = (inspect.getdoc(function) or "no docstring").partition("\n")[0]
        formula = first.replace("{", "{{").replace("}", "}}")
    return Piece(
        kind=kind,
        name=name,
        function=function,
        formula=formula if callable(formula) else formula.format,
        source=source,
        whole_step=whole_step,
        inputs=tuple(inputs),
        numbers=tuple(numbers),
        options=options,
    )


def _fields(made: Piece) -> dict[str, Any]:
    return {name: getattr(made, name) for name in Piece.__dataclass_fields__}


def _nearest(name: str, known: Any) -> str:
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""

"""The flags of an engine and of how it samples: one for each field of EngineSpec and Sampling, with its docstring."""

import argparse
import ast
import dataclasses
import inspect
import json
import math
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_generation.commands import CommandError, say
from rl_generation.engine import Engine
from rl_generation.loading import ENGINES, FOREIGN, EngineSpec, load_engine
from rl_generation.requests import Sampling
from rl_generation.vllm.options import BasicVllmOptions

VLLM_FLAGS = {each.name for each in dataclasses.fields(BasicVllmOptions)} - {"max_num_seqs", "vllm_kwargs"}
"""Fields of VllmOptions that have a flag; `--max-batch-size` is that of every engine."""


# ---- one flag a field


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        pair = int(token), float(bias)
    except ValueError:
        pair = 0, math.nan
    if not math.isfinite(pair[1]):  # -inf is no JSON, which the record of a run is
        raise argparse.ArgumentTypeError(f"must be a token id and a finite number, such as 5=-100; got {text!r}")
    return pair


INTEGER, TEXT = {"type": int, "metavar": "N"}, {"metavar": "TEXT"}
FLAGS: dict[Any, dict[str, Any]] = {
    bool: {"action": argparse.BooleanOptionalAction},
    int: INTEGER,
    float: {"type": float, "metavar": "X"},
    str: TEXT,
    tuple[int, ...]: {**INTEGER, "action": "append"},
    tuple[str, ...]: {**TEXT, "action": "append"},
    tuple[tuple[int, float], ...]: {"type": _bias, "action": "append", "metavar": "ID=X"},
}
"""Type of a field → what argparse is told; None, where it is admitted, is said by leaving the flag out."""


def _docs(config: Any) -> dict[str, str]:
    """Field → the string that stands under it in the source, in one line."""
    docs: dict[str, str] = {}
    owners: list[Any] = [each for each in reversed(config.__mro__) if dataclasses.is_dataclass(each)]
    for owner in owners:
        (definition,) = ast.parse(inspect.getsource(owner)).body
        assert isinstance(definition, ast.ClassDef)
        for field_and_doc in pairwise(definition.body):
            match field_and_doc:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = " ".join(text.split())
    return docs


def _add_flags(
    group: Any, config: Any, *, leave_out: Sequence[str] = (), defaults: Mapping[str, object] | None = None
) -> None:
    """Declare a flag for each field; `defaults` stand in place of the fields' own."""
    hints, docs, given = get_type_hints(config), _docs(config), defaults or {}
    for field in dataclasses.fields(config):
        if field.name in leave_out:
            continue
        hint = hints[field.name]
        if get_origin(hint) in {Union, UnionType}:
            (hint,) = (each for each in get_args(hint) if each is not NoneType)
        options = {"choices": get_args(hint)} if get_origin(hint) is Literal else FLAGS[hint]
        default = given.get(field.name, field.default)
        many = options.get("action") == "append"
        name = field.name.removesuffix("s") if many and options.get("type") is not _bias else field.name
        told = docs[field.name].replace("%", "%%")
        told += " It can be repeated." if many else "" if default in {None, False, ""} else f" (default {default})"
        group.add_argument(
            f"--{name.replace('_', '-')}",
            dest=field.name,
            default=given.get(field.name, argparse.SUPPRESS),
            help=told,
            **options,
        )


def _given(arguments: argparse.Namespace, config: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(config)]
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


# ---- the engine


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the engine or several of them, and their options."""
    parser.add_argument("model", metavar="MODEL", help="a folder of safetensors, or a hub id")
    group = parser.add_argument_group("engine")
    told = f"transformers, in this process, or vLLM; `bench` takes several, a flag each (default {ENGINES[0]})"
    group.add_argument("--engine", action="append", choices=ENGINES, help=told)
    _add_flags(group, EngineSpec, leave_out=("model", "engine", "with_tokenizer", "vllm_kwargs"))
    group.add_argument(
        "--no-tokenizer",
        dest="with_tokenizer",
        action="store_false",
        help="do without: token ids in, token ids out; no texts, no stop strings and no bad words",
    )
    group = parser.add_argument_group("vLLM")
    _add_flags(group, BasicVllmOptions, leave_out=("max_num_seqs", "vllm_kwargs"))
    group.add_argument(
        "--vllm-kwarg",
        action="append",
        default=[],
        metavar="KEY=JSON",
        help="any other of its engine arguments, as block_size=32; can be repeated",
    )


def spec_of(arguments: argparse.Namespace) -> EngineSpec:
    """As `specs_of`, for a command that takes one engine."""
    spec, *others = specs_of(arguments)
    if others:
        raise CommandError(f"this command takes one engine; got --engine {spec.engine} --engine {others[0].engine}")
    return spec


def specs_of(arguments: argparse.Namespace) -> list[EngineSpec]:
    """Return what the flags ask for of several engines, each of which takes the options that are its own.

    Raises:
        CommandError: An engine stands twice; or a `--vllm-kwarg` is no `key=value`, its value is no JSON, or it stands
            twice.
        EngineOptionError: An option belongs to none of them.
    """
    engines = arguments.engine or ENGINES[:1]
    if len(set(engines)) < len(engines):
        raise CommandError(f"an engine stands twice in {','.join(engines)}")
    own = {name: getattr(arguments, name) for name in VLLM_FLAGS if hasattr(arguments, name)}
    others = json_pairs(arguments.vllm_kwarg, "--vllm-kwarg")
    for name in own.keys() & others:
        raise CommandError(f"--vllm-kwarg sets {name}={others[name]!r}, which is given as {own[name]!r} already")
    given = _given(arguments, EngineSpec) | {"vllm_kwargs": own | others}
    foreign_to_all = set.intersection(*(set(FOREIGN[engine]) for engine in engines))
    specs = []
    for engine in engines:
        own = {name: each for name, each in given.items() if name not in set(FOREIGN[engine]) - foreign_to_all}
        specs.append(EngineSpec(**{**own, "engine": engine}))
    return specs


def start_engine(spec: EngineSpec) -> tuple[Engine, Any]:
    """Load an engine and its tokenizer, and say so; bars of others are for terminals only."""
    from transformers.utils import logging

    say(f"{spec.engine}: loading {spec.model}")
    if not sys.stderr.isatty():
        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    return load_engine(spec)


def json_pairs(texts: Sequence[str], flag: str) -> dict[str, Any]:
    """Parse `key=value` each, whose values are JSON.

    Raises:
        CommandError: One is not such a pair, or a key stands twice.
    """
    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise CommandError(f"{flag} takes KEY=JSON, such as some_option=true; got {text!r}")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as error:
            raise CommandError(
                f"{flag} {name}: {value!r} is not JSON ({error.msg}); text needs quotes: {name}='\"{value}\"'"
            ) from None
        if name in pairs:
            raise CommandError(f"{flag} {name} stands twice, with {json.dumps(pairs[name])} and {json.dumps(parsed)}")
        pairs[name] = parsed
    return pairs


# ---- how it samples


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Declare a flag for each field of Sampling; `defaults` stand in place of Sampling's own."""
    _add_flags(parser.add_argument_group("sampling"), Sampling, defaults=defaults)


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Return what the flags ask for.

    Raises:
        CommandError: Sampling refuses a value.
    """
    try:
        return Sampling(**_given(arguments, Sampling))
    except ValueError as error:
        raise CommandError(str(error)) from None

"""The flags of commands: the model, the ranks, the backend, and one for each field of the backend's configuration.

Each has its field's docstring as its help.
"""

import argparse
import ast
import inspect
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from rl_backends.config import KernelsConfig
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.megatron.config import MegatronConfig

CONFIGS: Mapping[str, type[Any]] = {"dtensor": DTensorConfig, "megatron": MegatronConfig}
NO_FLAG = ("enabled", "lora_cfg", "kernels")
"""What is chosen by --backend, and what is no single value."""
KERNELS_PREFIX = "kernels_"


def add_model_arguments(parser: argparse.ArgumentParser, given: Sequence[str]) -> str:
    """Declare the model, the ranks and the backend; return the backend that the command line `given` asks for.

    An unknown one is refused, in words, when `parser` reads the command line.
    """
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, a hub id, or a type such as qwen3")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the whole run (default %(default)s)")
    add_common_flags(parser)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for each in (parser, first):
        each.add_argument(
            "--backend",
            choices=tuple(CONFIGS),
            default="dtensor",
            metavar="|".join(CONFIGS),
            help="which has flags of its own (default %(default)s)",
        )
    try:
        backend: str = first.parse_known_args(given)[0].backend
    except argparse.ArgumentError:
        return "dtensor"
    return backend


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what every command takes."""
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")


def add_backend_flags(parser: argparse.ArgumentParser, backend: str, *, leave_out: Sequence[str] = ()) -> None:
    """Declare the fields of the backend's configuration."""
    _add_config_flags(parser, CONFIGS[backend], leave_out=(*NO_FLAG, *leave_out), title=f"{backend} backend")
    if backend == "dtensor":
        _add_config_flags(parser, KernelsConfig, prefix=KERNELS_PREFIX, title="kernels")


def chosen_config(arguments: argparse.Namespace, **others: Any) -> Any:
    """The configuration of the chosen backend; `others` go before its defaults, and flags before them."""
    if arguments.backend == "dtensor":
        others = {"kernels": config_of(KernelsConfig, arguments, prefix=KERNELS_PREFIX), **others}
    return config_of(CONFIGS[arguments.backend], arguments, enabled=True, **others)


# ---- Flags of a dataclass, and the dataclass from them.

ConfigT = TypeVar("ConfigT")


def _add_config_flags(
    parser: argparse.ArgumentParser, config: type[Any], *, leave_out: Sequence[str] = (), prefix: str = "", title: str
) -> None:
    group = parser.add_argument_group(title)
    docs, hints = field_docs(config), get_type_hints(config)
    for field in fields(config):
        if field.name in leave_out:
            continue
        flag = f"--{prefix}{field.name}".replace("_", "-")
        default = None if field.default is MISSING else field.default
        default = {True: "on", False: "off", None: "none"}[default] if default in {True, False, None} else default
        told = f"{docs[field.name]} (default: {default})".replace("%", "%%")
        # How argparse reads a value of this type; None beside it is what a flag that is not given means.
        hint = hints[field.name]
        kinds = [each for each in get_args(hint) if each is not NoneType] if isinstance(hint, UnionType) else [hint]
        options: dict[str, Any] = {"type": kinds[0], "metavar": "TEXT" if kinds[0] is str else "N"}
        if kinds[0] is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif get_origin(kinds[0]) is Literal:
            choices = get_args(kinds[0])
            options = {"choices": choices, "metavar": "|".join(choices)}
        group.add_argument(flag, dest=f"{prefix}{field.name}", default=argparse.SUPPRESS, help=told, **options)


def config_of(config: type[ConfigT], arguments: argparse.Namespace, *, prefix: str = "", **others: Any) -> ConfigT:
    """The configuration that the flags ask for; `others` go before its defaults, and flags before them."""
    names = {f"{prefix}{field.name}": field.name for field in fields(config)}  # type: ignore[arg-type]
    given = {names[name]: value for name, value in vars(arguments).items() if name in names}
    return config(**{**others, **given})


def field_docs(config: type[Any]) -> dict[str, str]:
    """Field -> the string that stands under it in the source, of the class or one that it derives from, in one line."""
    found: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(config.__mro__)):
        [body] = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
        assert isinstance(body, ast.ClassDef)
        for field, under in pairwise(body.body):
            match field, under:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[name] = " ".join(text.split())
    return found

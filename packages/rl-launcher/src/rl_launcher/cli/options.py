"""Options of a command out of a configuration dataclass: its fields become flags, their docstrings the help."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Annotated, Any, get_type_hints

import typer

from rl_launcher.recipe.schema import docstrings

__all__ = ["Flags", "with_flags"]

Flags = dict[str, Any]
"""What was given, by the name of the field; lists as tuples."""


def with_flags(
    command: Callable[..., None], sections: Mapping[str, type], *, leave_out: tuple[str, ...] = ()
) -> Callable[..., None]:
    """`command`, with an option for each field of `sections`; they reach it as its last argument, `flags`.

    The name of a section stands before those of its fields; that of one may be empty.
    """
    hints = get_type_hints(command, include_extras=True)
    own = inspect.signature(command).parameters.values()
    parameters = [each.replace(annotation=hints[each.name]) for each in own if each.name != "flags"]
    options = [
        option
        for prefix, section in sections.items()
        for option in _options(section, prefix)
        if option.name not in leave_out
    ]

    def run(**given: Any) -> None:
        flags = {option.name: given.pop(option.name) for option in options}
        command(**given, flags={name: tuple(v) if isinstance(v, list) else v for name, v in flags.items()})

    run.__signature__ = inspect.Signature([*parameters, *options])  # type: ignore[attr-defined]  # typer reads it
    run.__annotations__ = {each.name: each.annotation for each in (*parameters, *options)}
    run.__doc__, run.__name__ = command.__doc__, command.__name__
    return run


def _options(section: type, prefix: str) -> Iterator[inspect.Parameter]:
    help_of, hints = docstrings(section), get_type_hints(section)
    for field in fields(section):
        hint, name = hints[field.name], prefix + field.name
        flag = name.replace("_", "-")
        names = [f"--{flag}/--no-{flag}"] if hint is bool else [f"--{flag}"]
        option = typer.Option(*names, help=help_of.get(field.name, ""), show_default=field.default is not None)
        many = hint == tuple[str, ...]
        default: Any = [] if many else ... if field.default is MISSING else field.default
        yield inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is ... else default,
            annotation=Annotated[list[str] if many else hint, option],
        )

"""Tool schemas: what a Python function takes, as JSON Schema, from its signature and its docstring.

The schema has the shape that chat templates take as `tools` (OpenAI's function calling). A parameter needs an
annotation that JSON can express; a description comes from the `Args:` section of a Google docstring. The same schema
then checks the arguments of a call, so that what the policy was promised is what the function gets.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

__all__ = ["Schema", "ToolSchemaError", "check_arguments", "tool_schema"]

Schema: TypeAlias = dict[str, Any]

SIMPLE: dict[object, str] = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
ACCEPTED: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}
ARGUMENT = re.compile(r"^(\w+)(?: *\([^)\n]*\))?: *(.*)$")


class ToolSchemaError(ValueError):
    """A function that cannot be offered as a tool; the message names function and parameter."""


def tool_schema(function: Callable[..., Any]) -> Schema:
    """The function as an entry of a chat template's `tools`.

    Raises:
        ToolSchemaError: it has no docstring, takes `*args`, `**kwargs` or positional-only arguments, or a parameter has
            no annotation or one that JSON cannot express (str, int, float, bool, None, list, dict, Literal, unions).
    """
    name = getattr(function, "__name__", type(function).__name__)
    documentation = inspect.getdoc(function)
    if not documentation:
        raise ToolSchemaError(f"the tool {name} has no docstring, and the policy learns from it what the tool does")
    summary, descriptions = _read_docstring(documentation)
    hints = get_type_hints(function)
    properties: Schema = {}
    required = []
    for parameter in inspect.signature(function).parameters.values():
        where = f"the parameter {parameter.name} of the tool {name}"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ToolSchemaError(f"{where} is {parameter.kind.description}, and calls name their arguments one by one")
        if parameter.name not in hints:
            raise ToolSchemaError(f"{where} has no annotation, and the policy must be told what to give")
        schema = _type_schema(hints[parameter.name], where)
        if parameter.name in descriptions:
            schema["description"] = descriptions[parameter.name]
        if parameter.default is parameter.empty:
            required.append(parameter.name)
        properties[parameter.name] = schema
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": summary, "parameters": parameters}}


def check_arguments(schema: Schema, arguments: Mapping[str, object]) -> str | None:
    """What is wrong with the arguments of a call, for the policy to read; None if nothing is."""
    parameters = schema["function"]["parameters"]
    known = parameters["properties"]
    if unknown := [name for name in arguments if name not in known]:
        return f"there is no argument {unknown[0]!r}; the arguments are {', '.join(known) or 'none'}"
    if missing := [name for name in parameters["required"] if name not in arguments]:
        return f"the argument {missing[0]!r} is missing"
    for name, value in arguments.items():
        if not _fits(known[name], value):
            wanted = {key: part for key, part in known[name].items() if key != "description"}
            return f"the argument {name!r} is {json.dumps(value)[:100]}, and must be {json.dumps(wanted)}"
    return None


def _type_schema(annotation: Any, where: str) -> Schema:
    if annotation in SIMPLE:
        return {"type": SIMPLE[annotation]}
    origin, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(argument, where) for argument in arguments]}
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin is list:
        return {"type": "array", **({"items": _type_schema(arguments[0], where)} if arguments else {})}
    if origin is dict and (not arguments or arguments[0] is str):
        return {"type": "object", **({"additionalProperties": _type_schema(arguments[1], where)} if arguments else {})}
    raise ToolSchemaError(
        f"{where} is annotated {annotation!r}, which JSON cannot express here; use str, int, float, bool, None, list, "
        f"dict with str keys, Literal, or unions of these"
    )


def _fits(schema: Schema, value: object) -> bool:
    if "anyOf" in schema:
        return any(_fits(option, value) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    if not isinstance(value, ACCEPTED[schema["type"]]) or (isinstance(value, bool) and schema["type"] != "boolean"):
        return False
    if isinstance(value, list) and "items" in schema:
        return all(_fits(schema["items"], item) for item in value)
    if isinstance(value, dict) and "additionalProperties" in schema:
        return all(_fits(schema["additionalProperties"], item) for item in value.values())
    return True


def _read_docstring(documentation: str) -> tuple[str, dict[str, str]]:
    """What stands before the first section, and the description of each argument."""
    lines = documentation.splitlines()
    sections = [
        i for i, line in enumerate(lines) if re.fullmatch(r"(Args|Returns|Raises|Yields|Examples?|Note):", line)
    ]
    summary = "\n".join(lines[: sections[0] if sections else None]).strip()
    descriptions: dict[str, str] = {}
    for start in (i for i in sections if lines[i] == "Args:"):
        end = next((i for i in sections if i > start), len(lines))
        block = inspect.cleandoc("\n".join(["", *lines[start + 1 : end]])).splitlines()
        name = None
        for line in block:
            if found := ARGUMENT.match(line):
                name = found[1]
                descriptions[name] = found[2].strip()
            elif name is not None and line.strip():
                descriptions[name] = f"{descriptions[name]} {line.strip()}"
    return summary, descriptions

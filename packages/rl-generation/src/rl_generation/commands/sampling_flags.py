"""A Sampling from flags, and from the `sampling` object of one row. Does not know engines or prompts."""

import argparse
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rl_generation.commands.console import CommandError
from rl_generation.requests import Sampling

__all__ = ["add_sampling_arguments", "is_integer", "override", "sampling_of"]


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        pair = int(token), float(bias)
    except ValueError:
        pair = 0, math.nan
    if not math.isfinite(pair[1]):  # -inf is no JSON, which the record of a run is
        raise argparse.ArgumentTypeError(f"must be a token id and a finite number, such as 5=-100; got {text!r}")
    return pair


TEXT = {"action": "append", "metavar": "TEXT"}
FLAGS: dict[str, tuple[str, dict[str, Any]]] = {
    "max_new_tokens": ("--max-new-tokens", {"type": int, "metavar": "N", "help": "tokens of an answer at most"}),
    "n": ("--n", {"type": int, "metavar": "N", "help": "answers to each prompt"}),
    "temperature": ("--temperature", {"type": float, "metavar": "X", "help": "0 is greedy"}),
    "top_p": ("--top-p", {"type": float, "metavar": "X", "help": "draw from the likeliest tokens up to this share"}),
    "top_k": ("--top-k", {"type": int, "metavar": "N", "help": "draw from this many likeliest tokens; 0: from all"}),
    "min_p": ("--min-p", {"type": float, "metavar": "X", "help": "draw from tokens this likely beside the likeliest"}),
    "stop_token_ids": (
        "--stop-token-id",
        {"type": int, "action": "append", "metavar": "ID", "help": "a token that ends an answer; can be repeated"},
    ),
    "stop": ("--stop", {**TEXT, "help": "a string that ends an answer; can be repeated"}),
    "bad_words": ("--bad-word", {**TEXT, "help": "a word that is never completed; can be repeated"}),
    "ignore_eos": (
        "--ignore-eos",
        {"action": argparse.BooleanOptionalAction, "help": "generate past the model's own stop tokens"},
    ),
    "seed": ("--seed", {"type": int, "metavar": "N", "help": "makes the answers repeatable"}),
    "presence_penalty": (
        "--presence-penalty",
        {"type": float, "metavar": "X", "help": "taken from the logit of each token of the answer"},
    ),
    "frequency_penalty": (
        "--frequency-penalty",
        {"type": float, "metavar": "X", "help": "taken from it as often as the answer has the token"},
    ),
    "repetition_penalty": (
        "--repetition-penalty",
        {"type": float, "metavar": "X", "help": "divides the positive logit of each token of prompt and answer"},
    ),
    "logit_bias": (
        "--logit-bias",
        {"type": _bias, "action": "append", "metavar": "ID=X", "help": "added to a token's logit; can be repeated"},
    ),
    "min_new_tokens": ("--min-new-tokens", {"type": int, "metavar": "N", "help": "no stop token before this many"}),
    "json_schema": ("--json-schema", {"metavar": "JSON", "help": "schema that the answer follows"}),
    "regex": ("--regex", {"metavar": "TEXT", "help": "regular expression that the whole answer matches"}),
    "top_logp": ("--top-logp", {"type": int, "metavar": "N", "help": "save the logp of this many likeliest tokens"}),
}
"""Of each field of Sampling: its flag, and what argparse is told."""


def add_sampling_arguments(parser: argparse.ArgumentParser, **defaults: object) -> None:
    """Declare a flag for each field of Sampling; `defaults` stand in place of Sampling's own."""
    group = parser.add_argument_group("sampling")
    known = {field.name: field.default for field in dataclasses.fields(Sampling)} | defaults
    for name, (flag, options) in FLAGS.items():
        default = known[name]
        noted = "" if default in {None, ()} else f" (default {default})"
        group.add_argument(
            flag,
            dest=name,
            default=defaults.get(name, argparse.SUPPRESS),
            **{**options, "help": f"{options['help']}{noted}"},
        )


def sampling_of(arguments: argparse.Namespace) -> Sampling:
    """Return what the flags ask for.

    Raises:
        CommandError: Sampling refuses a value.
    """
    given: dict[str, Any] = {name: getattr(arguments, name) for name in FLAGS if hasattr(arguments, name)}
    try:
        return Sampling(**_with_tuples(given))
    except ValueError as error:
        raise CommandError(str(error)) from None


def override(base: Sampling, fields: Mapping[str, object]) -> Sampling:
    """Return `base` with the `fields` of a JSON object in place of its own.

    Raises:
        ValueError: A field that Sampling does not have, of another JSON type, or with a value that it refuses.
    """
    for name, value in fields.items():
        if name not in CHECKS:
            raise ValueError(f"sampling has no field {name!r}; it has {', '.join(CHECKS)}")
        wanted, check = CHECKS[name]
        if not check(value):
            raise ValueError(f"sampling.{name} must be {wanted}; got {value!r}")
    return dataclasses.replace(base, **_with_tuples(fields))


def _with_tuples(fields: Mapping[str, object]) -> dict[str, Any]:
    """The arguments of Sampling; the token ids of a JSON object are text."""
    arguments: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            arguments[name] = tuple((int(token), bias) for token, bias in value.items())
        else:
            arguments[name] = tuple(value) if isinstance(value, list) else value
    return arguments


def is_integer(value: object) -> bool:
    """Whether `value` is a JSON integer; `true` is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return is_integer(value) or isinstance(value, float)


def _is_list(check: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, list) and all(map(check, value))


INTEGER = ("an integer", is_integer)
NUMBER = ("a number", _is_number)
STRING = ("text", lambda value: isinstance(value, str))
STRINGS = ("a list of strings", _is_list(lambda value: isinstance(value, str)))
CHECKS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "max_new_tokens": INTEGER,
    "n": INTEGER,
    "temperature": NUMBER,
    "top_p": NUMBER,
    "top_k": INTEGER,
    "min_p": NUMBER,
    "stop_token_ids": ("a list of integers", _is_list(is_integer)),
    "stop": STRINGS,
    "bad_words": STRINGS,
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
    "seed": INTEGER,
    "presence_penalty": NUMBER,
    "frequency_penalty": NUMBER,
    "repetition_penalty": NUMBER,
    "logit_bias": (
        "an object of numbers by token id",
        lambda value: (
            isinstance(value, dict) and all(token.isdecimal() and _is_number(bias) for token, bias in value.items())
        ),
    ),
    "min_new_tokens": INTEGER,
    "json_schema": STRING,
    "regex": STRING,
    "top_logp": INTEGER,
}

"""Reads the fields of a JSON body, each with its type, and refuses what nobody reads.

OpenAI's and vLLM's interfaces have many fields; a server that ignores the ones it does not know answers a question that
was not asked. So a field is read, or cannot change the answer, or has its neutral value, or is an error that names it
and the nearest valid one. JSON's null stands for a missing field.
"""

import difflib
import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast, final

from rl_generation.server.guard import HttpError

__all__ = ["Fields", "is_token_ids", "shortened"]

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "allowed_token_ids": ([],),
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "functions": ([],),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "modalities": (["text"],),
    "priority": (0,),
    "prompt_logprobs": (),
    "spaces_between_special_tokens": (True,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of OpenAI's or vLLM's that exist but are not served, with the values that ask for nothing."""

IRRELEVANT = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""Fields of OpenAI's on which a response cannot depend; any value is taken, and nothing is stored."""

MOST = 2**63 - 1
"""The largest integer that engines can hold."""


@final
class Fields:
    """The fields of one body. Each method reads one, and returns None where it is missing.

    Args:
        body: What the client sent.

    Raises:
        HttpError: 400; the body is no JSON object, or (from the methods) a field has the wrong type.
    """

    def __init__(self, body: bytes) -> None:
        try:
            fields = json.loads(body, parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates)
            if b"\\ud" in body.lower():  # half of a surrogate pair is JSON, but no text
                json.dumps(fields, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise HttpError(400, f"the body is no JSON: {error}", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise HttpError(400, f"the body must be a JSON object; got {type(fields).__name__}", code="invalid_json")
        self._given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
        self._read: set[str] = set()

    def has(self, name: str) -> bool:
        """Whether the field was given; it counts as read only when it is."""
        return name in self._given

    def everything(self) -> dict[str, Any]:
        """All fields, for a body that is another's in other words; they count as read."""
        self._read |= self._given.keys()
        return dict(self._given)

    def anything(self, name: str) -> Any:
        """Any JSON value."""
        self._read.add(name)
        return self._given.get(name)

    def _of_kind(self, name: str, wanted: str, fits: Callable[[Any], bool]) -> Any:
        value = self.anything(name)
        if value is not None and not fits(value):
            raise HttpError(400, f"{name} must be {wanted}; got {shortened(value)}", param=name, code="invalid_type")
        return value

    def integer(self, name: str) -> int | None:
        """A whole number."""
        value = self._of_kind(name, "an integer", _is_integer)
        return cast("int | None", self._of_kind(name, "an integer of 64 bits", lambda _: -MOST <= value <= MOST))

    def number(self, name: str) -> float | None:
        """A finite number."""
        value = self._of_kind(name, "a number", lambda value: isinstance(value, float) or _is_integer(value))
        self._of_kind(name, "a finite number", lambda _: abs(value) <= 1e300)  # JSON has none, but 1e999 reads as one
        return None if value is None else float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._of_kind(name, "true or false", lambda value: isinstance(value, bool))
        return default if value is None else bool(value)

    def text(self, name: str) -> str | None:
        """A string."""
        return cast("str | None", self._of_kind(name, "a string", lambda value: isinstance(value, str)))

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or one string."""
        value = self.anything(name)
        if isinstance(value, str):
            return (value,)
        value = self._of_kind(name, "a string or a list of strings", lambda value: _is_list(value, str))
        return None if value is None else tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...] | None:
        """A list of whole numbers, 0 or more."""
        value = self._of_kind(name, "a list of token ids (integers of at least 0)", is_token_ids)
        return None if value is None else tuple(value)

    def mapping(self, name: str) -> dict[str, Any] | None:
        """A JSON object."""
        return cast("dict[str, Any] | None", self._of_kind(name, "an object", lambda value: isinstance(value, dict)))

    def mappings(self, name: str) -> list[dict[str, Any]] | None:
        """A list of JSON objects."""
        value = self._of_kind(name, "a list of objects", lambda value: _is_list(value, dict))
        return cast("list[dict[str, Any]] | None", value)

    def refuse_others(self) -> None:
        """Raise for the first field that nobody read, unless its value is neutral. Call it after the last read."""
        for name, value in self._given.items():
            if name in self._read or name in IRRELEVANT:
                continue
            if name not in NEUTRAL:
                near = difflib.get_close_matches(name[:80], sorted(self._read), n=1, cutoff=0.5)
                meant = f": did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(self._read))}"
                raise HttpError(400, f"unknown field {name[:80]!r}{meant}", param=name[:80], code="unknown_field")
            # Equality in which true is not 1.
            if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in NEUTRAL[name]):
                neutral = " or ".join(json.dumps(each) for each in NEUTRAL[name]) or "null"
                message = f"{name}={shortened(value)} is not supported; leave it out, or send {neutral}"
                raise HttpError(400, message, param=name, code="unsupported_field")


def is_token_ids(value: object) -> bool:
    """Whether a JSON value is a list of whole numbers, 0 or more."""
    return isinstance(value, list) and all(_is_integer(each) and each >= 0 for each in value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(each, kind) for each in value)


def shortened(value: object) -> str:
    """Write a JSON value for a message, which shall not echo megabytes."""
    text = json.dumps(value) if not isinstance(value, float) or math.isfinite(value) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        message = f"the field {shortened(twice)} stands twice in one object of the body: only one would count"
        raise HttpError(400, message, param=twice[:80], code="invalid_json")
    return fields


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")

"""Errors as JSON, so that the party that fails can tell all others why. Nothing is ever pickled.

Knows the kinds of `rl_refit.errors`; whatever else a party raises arrives as an `AbortedError` that quotes it.
"""

from __future__ import annotations

from typing import Any

from rl_refit import errors
from rl_refit.errors import AbortedError, DeadlineError, RefitError

__all__ = ["error_from_message", "error_to_message"]

_KINDS: dict[str, type[RefitError]] = {
    name: getattr(errors, name) for name in ("CoverageError", "DigestError", "DeadlineError", "PeerError", "RefitError")
}
_LISTS = ("unfed", "unmapped", "mismatched", "tensors")
"""The attributes of some kinds that are tuples of names."""


def error_to_message(error: BaseException, *, party: str, where: str) -> dict[str, Any]:
    """What others need to know: the kind, the text, and who failed where."""
    message: dict[str, Any] = {
        "kind": type(error).__name__,
        "text": str(error) or type(error).__name__,
        "party": (isinstance(error, AbortedError) and error.peer) or party,
        "where": where,
    }
    if isinstance(error, RefitError):
        message |= {"phase": error.phase, "tensor": error.tensor, "bucket": error.bucket, "about": error.peer}
        message |= {name: list(getattr(error, name)) for name in _LISTS if hasattr(error, name)}
    if isinstance(error, DeadlineError):
        message["seconds"] = error.seconds
    return message


def error_from_message(message: dict[str, Any]) -> RefitError:
    """The error to raise at a party that did not fail itself; of the same kind where it is one of ours."""
    kind = _KINDS.get(message["kind"])
    quoted = message["text"] if kind is not None else f"{message['kind']}: {message['text']}"
    text = f"{message['party']} gave up in {message['where']}: {quoted}"
    error = AbortedError(text) if kind is None else kind(text)
    error.phase, error.tensor, error.bucket = message.get("phase"), message.get("tensor"), message.get("bucket")
    error.peer = message.get("about") or message["party"]
    if isinstance(error, DeadlineError):
        error.seconds = message["seconds"]
    for name in _LISTS:
        if name in message and hasattr(error, name):
            setattr(error, name, tuple(message[name]))
    return error

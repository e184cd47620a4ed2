"""What a refit may raise: one base, and a kind for each rule that a caller can act on.

Every error has one message and keyword attributes, all with defaults, so that it crosses a process boundary by pickle.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "AbortedError",
    "CoverageError",
    "DeadlineError",
    "DigestError",
    "PeerError",
    "PoisonedError",
    "RefitError",
    "error_from_message",
    "error_to_message",
]


class RefitError(RuntimeError):
    """A refit was refused or given up.

    Attributes:
        phase: "prepare", "transfer", "verify" or "commit"; None outside of a refit.
        tensor: The tensor at which it happened, where one is to blame.
        bucket: The index of the bucket at which it happened, in transfer.
        peer: The other party that is to blame or was waited for, as "source 0" or "sink 1".
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        tensor: str | None = None,
        bucket: int | None = None,
        peer: str | None = None,
    ) -> None:
        super().__init__(message)
        self.phase = phase
        self.tensor = tensor
        self.bucket = bucket
        self.peer = peer


class CoverageError(RefitError):
    """Source and sink do not hold the same tensors; the message lists every difference.

    Attributes:
        unfed: Tensors of the sink that the source does not have.
        unmapped: Tensors of the source that have no place in the sink.
        mismatched: One line for every tensor whose shape, dtype or ties differ.
    """

    def __init__(
        self,
        message: str,
        *,
        unfed: tuple[str, ...] = (),
        unmapped: tuple[str, ...] = (),
        mismatched: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, phase="prepare")
        self.unfed = unfed
        self.unmapped = unmapped
        self.mismatched = mismatched


class DigestError(RefitError):
    """What was staged in the sink is not what the source sent.

    Attributes:
        tensors: Every tensor whose digests differ.
    """

    def __init__(self, message: str, *, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(message, phase="verify", tensor=tensors[0] if tensors else None)
        self.tensors = tensors


class DeadlineError(RefitError):
    """A phase took longer than `deadline_s`.

    Attributes:
        seconds: How long the phase had run when it was stopped.
    """

    def __init__(
        self,
        message: str,
        *,
        phase: str | None = None,
        bucket: int | None = None,
        peer: str | None = None,
        seconds: float = 0.0,
    ) -> None:
        super().__init__(message, phase=phase, bucket=bucket, peer=peer)
        self.seconds = seconds


class PoisonedError(RefitError):
    """The sink's weights may be torn, because a commit failed half-way; only a refit that succeeds repairs them."""


class PeerError(RefitError):
    """Another party of the refit is dead, stopped or out of reach; `peer` names it."""


class AbortedError(RefitError):
    """Another party gave the refit up; `peer` names it, and the message its reason."""


# -- As JSON, so that the party that fails can tell all others why ---------------------------------------------------

_KINDS: dict[str, type[RefitError]] = {
    kind.__name__: kind for kind in (CoverageError, DigestError, DeadlineError, PeerError, RefitError)
}
"""Those that arrive as what they are; whatever else a party raises arrives as an `AbortedError` that quotes it."""
_DETAILS = ("phase", "tensor", "bucket", "peer", "unfed", "unmapped", "mismatched", "tensors", "seconds")


def error_to_message(error: BaseException, *, party: str, where: str | None = None) -> dict[str, Any]:
    """What others need to know: the kind, the text, who failed where, and what attributes an error of ours has."""
    return {
        "kind": type(error).__name__,
        "text": str(error) or type(error).__name__,
        "party": (isinstance(error, AbortedError) and error.peer) or party,
        "where": where or (f"phase {phase}" if (phase := getattr(error, "phase", None)) else "its refit"),
        **{name: getattr(error, name) for name in _DETAILS if isinstance(error, RefitError) and hasattr(error, name)},
    }


def error_from_message(message: dict[str, Any]) -> RefitError:
    """The error to raise at a party that did not fail itself; of the same kind where it is one of ours."""
    kind = _KINDS.get(message["kind"])
    quoted = message["text"] if kind is not None else f"{message['kind']}: {message['text']}"
    error = (kind or AbortedError)(f"{message['party']} gave up in {message['where']}: {quoted}")
    for name in message.keys() & set(_DETAILS):
        setattr(error, name, tuple(message[name]) if isinstance(message[name], list) else message[name])
    error.peer = error.peer or message["party"]
    return error

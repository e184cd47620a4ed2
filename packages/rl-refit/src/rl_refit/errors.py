"""What a refit may raise: one base, and a kind for each rule that a caller can act on.

Every error has one message and keyword attributes, all with defaults, so that it crosses a process boundary by pickle.
"""

from __future__ import annotations

__all__ = [
    "AbortedError",
    "CoverageError",
    "DeadlineError",
    "DigestError",
    "PeerError",
    "PoisonedError",
    "RefitError",
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

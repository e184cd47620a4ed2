"""What a run refuses by itself; what its parts refuse has their own types."""

__all__ = ["LauncherError", "RunStoppedError"]


class LauncherError(ValueError):
    """A run that cannot be made as asked; the message says why and what to do."""


class RunStoppedError(LauncherError):
    """A run that ended early; `interrupted` says whether a person or a signal ended it, and the cause is chained."""

    def __init__(self, message: str, *, interrupted: bool) -> None:
        super().__init__(message)
        self.interrupted = interrupted

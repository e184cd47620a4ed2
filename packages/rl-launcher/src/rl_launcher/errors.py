"""What a run refuses by itself; what its parts refuse has their own types."""

__all__ = ["LauncherError"]


class LauncherError(ValueError):
    """A run that cannot be made as asked; the message says why and what to do."""

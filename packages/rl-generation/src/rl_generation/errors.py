"""What rl-generation refuses."""

from typing import final

__all__ = ["LogpError", "ModelError", "PromptError"]


@final
class PromptError(ValueError):
    """A prompt, or a stop token, that cannot be served. Raised before any token is generated."""


@final
class ModelError(ValueError):
    """A model that the engine cannot serve, or cannot serve in the state that it is in."""


@final
class LogpError(ValueError):
    """A log-probability that is NaN or infinite: the logits are broken, so the whole call is lost."""

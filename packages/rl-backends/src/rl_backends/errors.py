"""What is refused, and what stops a step. Every message names the thing, says why, and says what to do."""

from collections.abc import Sequence


class ModelError(ValueError):
    """A model or tokenizer that cannot be used, or not in the way that was asked for."""


class BatchError(ValueError):
    """Examples that cannot be cut into microbatches, or hold what no model can compute."""


class CheckpointError(RuntimeError):
    """A checkpoint that is absent, unfinished, damaged or another model's; or one that could not be written."""


class NonFiniteGradientError(RuntimeError):
    """The gradient norm is NaN or infinite; the weights were not touched and the gradient is cleared."""


class RankError(RuntimeError):
    """Another rank failed, and this one gave up with it; the message holds that rank's error."""


class MissingDependencyError(ImportError):
    """A library that an optional part needs is absent, or of a release that it was not made for."""


def some(names: Sequence[str]) -> str:
    """The first three, and how many more there are, for messages."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

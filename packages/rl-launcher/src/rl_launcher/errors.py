"""What a run refuses by itself; what its parts refuse has their own types."""

from typing import ClassVar

__all__ = ["TO_BE_RESUMED", "ConditionError", "Refusal", "RestartableError", "RunStoppedError"]

FAILED, TO_BE_RESUMED, INTERRUPTED = 1, 75, 130
"""Exit codes of runs that ended early. 75 is EX_TEMPFAIL of sysexits.h: nothing is wrong, come again."""


class Refusal(ValueError):
    """A run that cannot be made as asked; the message says why and what to do."""


class RestartableError(RuntimeError):
    """A process of the run is gone, and with new ones it could go on from its last checkpoint."""

    condition: ClassVar[str] = "trainer_died"
    """The name in `rl_launcher.conditions.CONDITIONS` of what happened."""

    weights_lost: ClassVar[bool] = True
    """Whether the weights of the policy went with it, so that only what is saved is left."""


class ConditionError(Refusal):
    """A run that a named condition ends after the step at hand; `condition` is its name."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"{condition}: {message}")
        self.condition = condition


class RunStoppedError(Refusal):
    """A run that ended early; `interrupted` says whether a person or a signal ended it, and the cause is chained."""

    def __init__(self, message: str, *, interrupted: bool = False, to_be_resumed: bool = False) -> None:
        super().__init__(message)
        self.interrupted, self.to_be_resumed = interrupted, to_be_resumed

    @property
    def exit_code(self) -> int:
        """130 where a signal ended it, 75 where it ended as asked, to be resumed, 1 where it failed."""
        return INTERRUPTED if self.interrupted else TO_BE_RESUMED if self.to_be_resumed else FAILED

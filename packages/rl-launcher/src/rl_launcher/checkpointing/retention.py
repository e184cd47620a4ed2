"""Which checkpoints are kept, and when the next is due: rules over numbers. Knows no files and no clock."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rl_launcher.recipe_schema import CheckpointingConfig

__all__ = ["Due", "Measured", "due", "to_keep"]


class Measured(Protocol):
    """What is known of a checkpoint."""

    @property
    def total(self) -> int:
        """Its place in the run."""

    @property
    def metric(self) -> float | None:
        """How good it is; None where nothing was measured before it."""


MeasuredT = TypeVar("MeasuredT", bound=Measured)


def to_keep(checkpoints: Sequence[MeasuredT], config: CheckpointingConfig) -> list[MeasuredT]:
    """The newest `ft_keep_latest_k` and the best `keep_top_k`, oldest first; of equals, the later is the better.

    What was never measured is kept for its age alone.
    """
    by_age = sorted(checkpoints, key=lambda each: each.total)
    sign = 1.0 if config.higher_is_better else -1.0
    measured = [(sign * each.metric, each.total, each) for each in by_age if each.metric is not None]
    best = sorted(measured, key=lambda each: each[:2], reverse=True)[: config.keep_top_k]
    kept = {each.total for each in by_age[-config.ft_keep_latest_k :]} | {total for _, total, _ in best}
    return [each for each in by_age if each.total in kept]


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What is to be done after a step."""

    save: bool
    end: bool
    """Save, and end the run: `checkpoint_must_save_by` would pass during the next step."""


def due(
    config: CheckpointingConfig, *, before: int, after: int, since_save_s: float, elapsed_s: float, step_s: float
) -> Due:
    """Decide after a step.

    Args:
        config: of the recipe.
        before: steps over all stages before this one.
        after: and after it; a batch of rollouts may be several at once.
        since_save_s: seconds since the last checkpoint, or since the process started.
        elapsed_s: seconds since the process started.
        step_s: how long the longest step so far took: the next may take as long.
    """
    period, limit = config.save_period, config.must_save_after_s
    counted = period > 0 and before // period < after // period
    timed = config.save_period_s is not None and since_save_s >= config.save_period_s
    end = limit is not None and elapsed_s + step_s >= limit
    return Due(save=counted or timed or end, end=end)

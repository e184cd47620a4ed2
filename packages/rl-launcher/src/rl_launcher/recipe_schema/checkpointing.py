"""When a run is saved so that it can go on, which of the savings are kept, and what is watched meanwhile."""

import re
from dataclasses import dataclass
from typing import ClassVar, Literal

from rl_launcher.recipe_schema.strict import STRICT, refuse_below

__all__ = ["CheckpointingConfig", "HealthConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingConfig:
    """Checkpoints in `run_dir/checkpoints`; a run that ends early leaves one in any case. The words are NeMo-RL's."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    save_period: int = 0
    """Optimizer steps between checkpoints; 0 saves none while all goes well. What a killed process loses at most."""

    save_period_s: float | None = None
    """Seconds between checkpoints, looked at after each step; null does not look at the clock."""

    checkpoint_must_save_by: str | None = None
    """`DD:HH:MM:SS` or `HH:MM:SS` after the start: then the run saves and ends, to be resumed."""

    ft_keep_latest_k: int = 1
    """The newest so many are kept, to go on from."""

    keep_top_k: int = 0
    """The best so many by `metric_name` are kept besides; 0 keeps none for its merit."""

    metric_name: str = "held_out_greedy"
    """Of the log: what makes a checkpoint good. A checkpoint of a step that did not measure it takes the last value."""

    higher_is_better: bool = True
    """Whether more of the metric is better."""

    def __post_init__(self) -> None:
        refuse_below(
            self, at_least={"save_period": 0, "ft_keep_latest_k": 1, "keep_top_k": 0}, above={"save_period_s": 0}
        )
        if self.checkpoint_must_save_by is not None and self.must_save_after_s is None:
            raise ValueError(
                f"checkpoint_must_save_by={self.checkpoint_must_save_by} must be DD:HH:MM:SS or HH:MM:SS, as 03:45:00"
            )

    @property
    def must_save_after_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds; None where there is none."""
        text = self.checkpoint_must_save_by
        if text is None or not (match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", text)):
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Conditions that a run notices by itself, by name, and what it does then."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    on_reward_collapse: Literal["stop", "warn", "ignore"] = "warn"
    """`reward_collapse`: the mean reward of `reward_collapse_steps` logged steps is below `reward_collapse_share` of
    the best such mean before. `stop` saves and ends the run."""

    reward_collapse_steps: int = 20
    """Logged steps that are looked at together. Fewer notice sooner, and are fooled by noise."""

    reward_collapse_share: float = 0.5
    """Share of the best mean below which a reward has collapsed."""

    on_logp_mismatch: Literal["stop", "warn", "ignore"] = "warn"
    """`logp_mismatch`: `token_mult_prob_error` is above `max_token_mult_prob_error`: engine and trainer do not hold the
    same model."""

    max_token_mult_prob_error: float = 1.05
    """What engine and trainer may differ by; 1 is perfect."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"reward_collapse_steps": 1, "max_token_mult_prob_error": 1})
        if not 0.0 < self.reward_collapse_share < 1.0:
            raise ValueError(f"reward_collapse_share={self.reward_collapse_share} must be between 0 and 1")

"""Notices from the logged figures that something is wrong: figures in, happenings out. Stops and writes nothing."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rl_launcher.health.happenings import Happening
from rl_launcher.recipe_schema import HealthConfig

__all__ = ["RewardWindow", "Watch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """A happening, and whether it ends the run."""

    happening: Happening
    stop: bool


class RewardWindow:
    """The mean of the last `size` rewards against the best such mean before."""

    def __init__(self, *, size: int, share: float) -> None:
        self._share, self._size = share, size
        self._last: deque[float] = deque(maxlen=size)
        self.best = float("-inf")
        """The best mean of a full window so far."""

    def add(self, reward: float) -> float | None:
        """Take in one step's reward; return the mean of the window if it has collapsed, else None."""
        self._last.append(reward)
        if len(self._last) < self._size:
            return None
        mean = sum(self._last) / self._size
        collapsed = self.best > 0 and mean < self._share * self.best
        self.best = max(self.best, mean)
        return mean if collapsed else None


class Watch:
    """Looks at what is logged. A condition is told when it begins, and again only after it was over."""

    def __init__(self, config: HealthConfig) -> None:
        self._config = config
        self._rewards: dict[str, RewardWindow] = {}
        self._under_way: set[str] = set()
        self._errors = 0

    def observe(self, stage: str, values: Mapping[str, float], *, errors: int = 0) -> list[Noticed]:
        """Take in the figures of one step.

        Args:
            stage: whose step it is; rewards of different stages are not compared.
            values: as they are logged.
            errors: rollouts that could not be judged, over the whole run.
        """
        config = self._config
        found = [
            self._begun("reward_collapse", self._collapse(stage, values), config.on_reward_collapse),
            self._begun("logp_mismatch", self._mismatch(values), config.on_logp_mismatch),
        ]
        return [each for each in found if each is not None] + self._failed_rollouts(errors)

    def replay(self, rows: Sequence[Mapping[str, object]], *, errors: int) -> None:
        """Take in what an earlier process of the run has logged, of which it told already."""
        for row in rows:
            self.observe(str(row["stage"]), {k: float(v) for k, v in row.items() if isinstance(v, int | float)})
        self._errors = errors

    def _collapse(self, stage: str, values: Mapping[str, float]) -> str | None:
        if "reward" not in values:
            return None
        config = self._config
        window = self._rewards.setdefault(
            stage, RewardWindow(size=config.reward_collapse_steps, share=config.reward_collapse_share)
        )
        mean = window.add(values["reward"])
        if mean is None:
            return None
        return (
            f"the mean reward of the last {config.reward_collapse_steps} logged steps is {mean:.4g}, below "
            f"health.reward_collapse_share={config.reward_collapse_share} of the best such mean, {window.best:.4g}; "
            f"look at the learning rate, the samples of the report, and kl"
        )

    def _mismatch(self, values: Mapping[str, float]) -> str | None:
        error, limit = values.get("token_mult_prob_error", 1.0), self._config.max_token_mult_prob_error
        if error <= limit:
            return None
        return (
            f"token_mult_prob_error={error:.6g} is above health.max_token_mult_prob_error={limit}: engine and trainer "
            f"do not hold the same model; look at their precisions, and at what the last refit verified"
        )

    def _begun(self, name: str, message: str | None, wanted: str) -> Noticed | None:
        if message is None:
            self._under_way.discard(name)
        if message is None or name in self._under_way or wanted == "ignore":
            return None
        self._under_way.add(name)
        stop = wanted == "stop"
        reaction = "the run is saved and ends" if stop else f"none but this message (health.on_{name}=warn)"
        return Noticed(happening=Happening(name=name, message=message, reaction=reaction), stop=stop)

    def _failed_rollouts(self, errors: int) -> list[Noticed]:
        before, self._errors = self._errors, max(errors, self._errors)
        if errors <= before or errors.bit_length() == before.bit_length():  # told at powers of two alone
            return []
        message = f"{errors} rollouts of the run so far could not be judged, or their environment failed"
        reaction = "each costs one rollout, as env.on_error says; the run goes on"
        return [Noticed(happening=Happening(name="rollouts_failed", message=message, reaction=reaction), stop=False)]

"""Try a reward or an environment on a few rollouts before training: what it gives, and how long it takes."""

import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rl_algorithms.advantages import group_advantage, has_signal
from rl_algorithms.objective import AdvantageConfig
from rl_algorithms.rollouts import collect
from rl_algorithms.stepping import PhaseTimer
from rl_launcher.build import build, sampling
from rl_launcher.checks import preflight
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import Resolved
from rl_launcher.run.evaluate import turn_limits
from rl_launcher.schema import HOW_TO_JUDGE, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRollout:
    """One response and what it earned."""

    prompt: str
    expected: str | None
    """The gold answer of the row, if it has one."""
    response: str
    """All responses of the conversation, if it has several turns."""
    reward: float
    components: dict[str, float]
    """The parts of the reward by name; empty for a single reward function."""
    advantage: float
    """Within the prompt's group, as GRPO would use it."""
    truncated: bool
    failed: str | None
    """Why it could not be judged, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """The rollouts of a trial, grouped by prompt, and what they cost."""

    rollouts: list[TrialRollout]
    reward_s: float
    """Seconds of one call of the reward function or environment, on average."""
    reward_calls: int
    generate_s: float
    """Seconds to sample all responses."""
    groups: int
    groups_with_signal: int
    """Prompts whose rollouts did not all get the same reward."""

    @property
    def exit_code(self) -> int:
        """0 if at least one group has a signal to train on, 1 if none has."""
        return 0 if self.groups_with_signal else 1

    def text(self) -> str:
        """One screen for people."""
        lines: list[str] = []
        for number, each in enumerate(self.rollouts):
            if number == 0 or each.prompt != self.rollouts[number - 1].prompt:
                gold = "" if each.expected is None else f"   expected {each.expected!r}"
                lines.append(f"prompt {each.prompt!r}{gold}")
            parts = "".join(f"  {name} {value:.4g}" for name, value in each.components.items())
            judged = f"failed: {each.failed}" if each.failed else f"reward {each.reward:<8.4g}{parts}"
            cut = "  (cut off at max_new_tokens)" if each.truncated else ""
            lines.append(f"  {judged}  advantage {each.advantage:+.3f}  {each.response!r}{cut}")
        lines.append(
            f"{self.groups_with_signal} of {self.groups} groups have a training signal; {self.reward_s:.3g} s a call "
            f"of the reward ({self.reward_calls} calls), {self.generate_s:.3g} s to generate"
        )
        if not self.groups_with_signal:
            lines.append(
                "Within each group all rewards are equal, so GRPO would learn nothing. Check that the reward "
                "recognises a right response, raise --rollouts, or start from a policy that is sometimes right"
            )
        return "\n".join(lines)

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def try_reward(
    resolved: Resolved[Recipe], *, objects: Objects = NO_OBJECTS, prompts: int = 2, rollouts: int = 4
) -> TrialResult:
    """Sample `rollouts` responses to each of the first `prompts` training prompts with the untrained policy.

    Raises:
        Refusal: the recipe has no `env`, or fewer prompts or rollouts than 1 and 2 are requested; or whatever a part
            refuses. What the reward raises is raised as it is in a run.
    """
    recipe = resolved.value
    if recipe.env is None and objects.reward is None and objects.environment is None:
        raise Refusal(f"try-reward scores responses, and the recipe has no env; {HOW_TO_JUDGE}")
    if prompts < 1 or rollouts < 2:
        raise Refusal(f"prompts={prompts} must be >= 1 and rollouts={rollouts} >= 2: a group of one has no advantage")
    preflight.check(recipe, new_run=False)
    timer = PhaseTimer()
    with tempfile.TemporaryDirectory(prefix="rl-launcher-try-reward-") as folder:
        parts = build(replace(recipe, run_dir=folder), run_dir=Path(folder), objects=objects)
        try:
            parts.weight_sync(version=0)
            rows = parts.prompts[:prompts]
            found = collect(
                rows,
                group_size=rollouts,
                engine=parts.engine,
                sampling=sampling(recipe.policy.generation),
                environment=parts.environment,
                chat=parts.chat,
                timer=timer,
                seed=recipe.seed,
                **turn_limits(recipe),
            )
        finally:
            parts.close()
    config = AdvantageConfig() if recipe.grpo is None else recipe.grpo.objective.advantage
    judged = ~found.failed
    advantage = found.rewards.new_zeros(len(found.rewards))
    advantage[judged] = group_advantage(
        found.rewards[judged],
        found.groups[judged],
        baseline=config.baseline,
        scale=config.scale,
        epsilon=config.epsilon,
    )
    with_signal = found.groups[judged][has_signal(found.rewards[judged], found.groups[judged])]
    seconds, calls = timer.lap(), int(found.turns.max()) + 1
    return TrialResult(
        rollouts=[
            TrialRollout(
                prompt=rows[row // rollouts].row.prompt,
                expected=rows[row // rollouts].row.answer,
                response=response,
                reward=found.rewards[row].item(),
                components=dict(zip(found.component_names, found.components[row].tolist(), strict=True)),
                advantage=advantage[row].item(),
                truncated=bool(found.truncated[row]),
                failed=found.failures[row],
            )
            for row, response in enumerate(found.answers)
        ],
        reward_s=seconds.get("phase_s/reward", 0.0) / calls,
        reward_calls=calls,
        generate_s=seconds.get("phase_s/generate", 0.0),
        groups=len(rows),
        groups_with_signal=len(set(with_signal.tolist())),
    )

"""Try a reward or an environment on a few rollouts before training: what it gives, and how long it takes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from rl_algorithms.advantages import group_advantage, has_signal
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment
from rl_algorithms.objective import AdvantageConfig
from rl_algorithms.policy_gradient import estimate_advantage
from rl_algorithms.rollouts import collect, with_greedy_rewards
from rl_algorithms.stepping import PhaseTimer

__all__ = ["TrialResult", "TrialRollout", "try_reward"]

SamplingT = TypeVar("SamplingT")


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
    prompts: Sequence[Prompt],
    *,
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
    group_size: int = 4,
    advantage: AdvantageConfig | None = None,
    max_turns: int = 1,
    max_length: int | None = None,
    seed: int = 0,
    greedy: SamplingT | None = None,
) -> TrialResult:
    """Sample `group_size` responses to each prompt, score them, and compute their advantages; nothing is trained.

    Args:
        prompts: whose responses are scored.
        engine: what samples.
        sampling: its options.
        environment: what scores.
        chat: between text and tokens.
        group_size: rollouts of each prompt.
        advantage: how rewards become advantages; None takes GRPO's defaults.
        max_turns: responses that the policy may give in one conversation.
        max_length: tokens that a conversation may have, as for `collect`.
        seed: of the environment's episodes.
        greedy: `sampling` at temperature 0, for an advantage that compares with greedy responses.

    Raises:
        ValueError: there is no prompt, or `group_size` is below 2. What the reward raises is raised as in training.
    """
    if not prompts or group_size < 2:
        raise ValueError(
            f"prompts={len(prompts)} must be >= 1 and rollouts={group_size} >= 2: a group of one has no advantage"
        )
    timer, config = PhaseTimer(), advantage or AdvantageConfig()
    ask: dict[str, Any] = {"engine": engine, "environment": environment, "chat": chat, "seed": seed}
    ask |= {"max_turns": max_turns, "max_length": max_length}
    found = collect(prompts, group_size=group_size, sampling=sampling, timer=timer, **ask)
    if config.compares_greedy and greedy is not None:
        found = with_greedy_rewards(found, collect(prompts, group_size=1, sampling=greedy, **ask))
    judged = ~found.failed
    rewards, groups = found.rewards[judged], found.groups[judged]
    advantages = found.rewards.new_zeros(len(found.rewards))
    if config.estimator is None:
        advantages[judged] = group_advantage(
            rewards, groups, baseline=config.baseline, scale=config.scale, epsilon=config.epsilon
        )
    else:
        kept = found.take(judged)
        estimated = estimate_advantage(kept, kept.token_rewards, config)
        if estimated.ndim == 2:
            estimated = (estimated * kept.response).sum(dim=1) / kept.response.sum(dim=1).clamp(min=1)
        advantages[judged] = estimated
    seconds, calls = timer.lap(), int(found.turns.max()) + 1
    return TrialResult(
        rollouts=[
            TrialRollout(
                prompt=prompts[row // group_size].row.prompt,
                expected=prompts[row // group_size].row.answer,
                response=response,
                reward=found.rewards[row].item(),
                components=dict(zip(found.component_names, found.components[row].tolist(), strict=True)),
                advantage=advantages[row].item(),
                truncated=bool(found.truncated[row]),
                failed=found.failures[row],
            )
            for row, response in enumerate(found.answers)
        ],
        reward_s=seconds.get("phase_s/reward", 0.0) / calls,
        reward_calls=calls,
        generate_s=seconds.get("phase_s/generate", 0.0),
        groups=len(prompts),
        groups_with_signal=len(set(groups[has_signal(rewards, groups)].tolist())),
    )

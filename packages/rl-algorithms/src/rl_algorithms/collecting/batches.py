"""One batch of rollouts for a loop that samples and trains in turn, and what none may be trained on. Knows no loss.

A prompt is known by its ticket, its place in the order of the run, and its episodes begin from a seed of that: another
batch has other episodes, steps taken or not, and a run that goes on has those that it would have had.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from rl_algorithms.chat import Prompt
from rl_algorithms.collecting.driver import collect
from rl_algorithms.collecting.dynamic_sampling import collect_with_signal
from rl_algorithms.collecting.seeds import episode_seed
from rl_algorithms.rollouts import Rollouts

__all__ = ["BatchConfig", "collect_batch", "require_some_judged", "ticket_seeds"]


@runtime_checkable
class BatchConfig(Protocol):
    """How rollouts are asked for: what the configurations of all loops that sample have."""

    @property
    def num_prompts(self) -> int:
        """In each batch."""

    @property
    def num_generations_per_prompt(self) -> int:
        """Rollouts of each."""

    @property
    def max_turns(self) -> int:
        """Answers in one conversation at most."""

    @property
    def max_length(self) -> int | None:
        """Tokens that a conversation may have."""


def collect_batch(
    prompts: Iterator[list[Prompt]],
    config: BatchConfig,
    *,
    number: int,
    version: int,
    seed: int,
    max_batches: int = 1,
    **asked: Any,
) -> Rollouts:
    """The rollouts of one batch, all sampled by the weights that are about to be trained on it.

    Args:
        prompts: batches of `num_prompts`.
        config: how they are asked for.
        number: of the batch in the run, from 0.
        version: of the policy's weights, which the engine must hold.
        seed: of the run.
        max_batches: batches of prompts to ask at most, until enough groups have a signal.
        **asked: what else `collect` is given.

    Raises:
        ValueError: all rollouts failed, or other weights sampled a token.
    """
    first = number * config.num_prompts

    def ask(again: int) -> Rollouts:
        batch = next(prompts)
        return collect(
            batch,
            group_size=config.num_generations_per_prompt,
            max_turns=config.max_turns,
            max_length=config.max_length,
            seeds=ticket_seeds(seed, range(first, first + len(batch)), again=again),
            **asked,
        )

    rollouts = collect_with_signal(ask, num_groups=config.num_prompts, max_batches=max_batches)
    require_some_judged(rollouts)
    _require_version(rollouts, version)
    return rollouts


def ticket_seeds(seed: int, tickets: Sequence[int], *, again: int = 0) -> list[int]:
    """The seed of each prompt's episodes, from the run's; `again` counts the batches asked before in its place."""
    return [episode_seed(seed, ticket, again) for ticket in tickets]


def require_some_judged(rollouts: Rollouts) -> Rollouts:
    """The rollouts; refused where none of them says anything of the policy.

    Raises:
        ValueError: all failed, or there are none; it gives the first reason.
    """
    if (~rollouts.failed).any():
        return rollouts
    first = next((reason for reason in rollouts.failures if reason), "no row was sampled")
    raise ValueError(
        f"all {len(rollouts.failed)} rows failed, so that nothing can be said of the policy; the first: {first}. "
        f"Mend the environment (a tool, a sandbox, a deadline)"
    )


def _require_version(rollouts: Rollouts, version: int) -> None:
    versions = rollouts.versions[rollouts.response]
    others = versions[versions != version]
    if len(others):
        raise ValueError(
            f"{len(others)} of {len(versions)} tokens were sampled by version {int(others[0])} of the weights, and "
            f"this loop trains version {version} on them, as if it had sampled them; the engine must hold the policy's "
            f"weights when a batch is begun, and count the same optimizer steps. For older weights there is async_grpo"
        )

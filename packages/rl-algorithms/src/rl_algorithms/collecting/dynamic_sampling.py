"""DAPO's dynamic sampling (arXiv:2503.14476 §3.2): ask on until enough groups have a signal. Takes no step.

A group whose rewards are all equal teaches nothing, and a batch of many such groups is a small one. Judged by the
rewards of the task; penalties of length, which would make every group differ, come later.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from rl_algorithms.advantages import has_signal
from rl_algorithms.rollouts import Rollouts, concatenate

__all__ = ["collect_with_signal"]


def collect_with_signal(ask: Callable[[int], Rollouts], *, num_groups: int, max_batches: int) -> Rollouts:
    """Rollouts of one batch of prompts, and of up to `max_batches` until `num_groups` groups have a signal.

    Args:
        ask: gives the rollouts of the next batch of prompts; it is told how many were asked before.
        num_groups: how many are wanted.
        max_batches: 1 asks once, whatever comes.

    Returns:
        All rollouts but those of groups with a signal beyond `num_groups`. `metrics` say how many batches were asked as
        `generation_batches`, and as `groups_too_many` how many groups were left out.
    """
    parts: list[Rollouts] = []
    for again in range(max_batches):
        parts.append(ask(again))
        rollouts = concatenate(parts) if len(parts) > 1 else parts[0]
        found = _groups_with_signal(rollouts)
        if len(found) >= num_groups:
            break
    if max_batches == 1:
        return rollouts
    surplus = found[num_groups:]
    kept = rollouts.take(~torch.isin(rollouts.groups, torch.tensor(surplus, dtype=torch.int64)))
    counted = {"generation_batches": float(len(parts)), "groups_too_many": float(len(surplus))}
    return replace(kept, metrics={**kept.metrics, **counted})


def _groups_with_signal(rollouts: Rollouts) -> list[int]:
    """Their numbers, in the order in which they were asked."""
    valid = ~rollouts.failed
    groups = rollouts.groups[valid]
    return list(dict.fromkeys(groups[has_signal(rollouts.rewards[valid], groups)].tolist()))

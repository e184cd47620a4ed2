"""The pairs of a DPO run: sampled from the policy or given, compared with the reference, kept and found again.

A checkpoint keeps all of sampled pairs, but only the reference's log-probabilities of given ones: the rest is data.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from torch import Tensor

from rl_algorithms import dpo
from rl_algorithms.chat import Chat, Prompt
from rl_algorithms.contracts import Engine, Environment, Reference
from rl_algorithms.data import DataError, batches
from rl_algorithms.preferences.pairs import Pair, pairs_from_rollouts, rows_of_pairs
from rl_algorithms.rollouts import collect
from rl_algorithms.stepping import PhaseTimer, take_rows

__all__ = ["DPOPairs", "sample_pairs"]

SamplingT = TypeVar("SamplingT")
TRAIN, HELD_OUT = "train/", "held_out/"


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOPairs:
    """The pairs to train on and those to measure by."""

    train: dpo.Examples
    held_out: dpo.Examples | None
    """None if all responses to each held-out prompt got the same reward."""

    def describe(self) -> str:
        """How many there are."""
        num_held_out = 0 if self.held_out is None else len(self.held_out.tokens) // 2
        return f"{len(self.train.tokens) // 2} pairs to train on, {num_held_out} held out"

    def compared(
        self, reference: Reference, *, between: Callable[[], object] = lambda: None, rows_at_once: int = 4096
    ) -> "DPOPairs":
        """The same pairs with the log-probabilities of `reference`; see `dpo.with_reference`."""
        compare = functools.partial(dpo.with_reference, reference, between=between, rows_at_once=rows_at_once)
        held_out = None if self.held_out is None else compare(self.held_out)
        return DPOPairs(train=compare(self.train), held_out=held_out)

    def tensors(self, *, given: bool) -> dict[str, Tensor]:
        """What a checkpoint must keep: everything, or of `given` pairs the reference's log-probabilities alone."""
        names = ["logp_ref"] if given else [field.name for field in fields(dpo.Examples)]
        parts = {TRAIN: self.train} | ({} if self.held_out is None else {HELD_OUT: self.held_out})
        return {part + name: getattr(examples, name) for part, examples in parts.items() for name in names}

    @classmethod
    def sampled_from(cls, tensors: Mapping[str, Tensor]) -> "DPOPairs":
        """Sampled pairs from their `tensors`."""

        def found(part: str) -> dpo.Examples:
            return dpo.Examples(**{field.name: tensors[part + field.name] for field in fields(dpo.Examples)})

        has_held_out = any(name.startswith(HELD_OUT) for name in tensors)
        return cls(train=found(TRAIN), held_out=found(HELD_OUT) if has_held_out else None)

    @classmethod
    def given(
        cls, train: dpo.Examples, held_out: dpo.Examples, *, max_held_out: int, tensors: Mapping[str, Tensor]
    ) -> "DPOPairs":
        """Given pairs, with the log-probabilities in `tensors`; without these if `tensors` is empty.

        Args:
            train: to train on.
            held_out: of which the first `max_held_out` pairs are measured.
            max_held_out: at most so many.
            tensors: as `tensors(given=True)` returned them, or none.
        """

        def with_logp(part: str, examples: dpo.Examples) -> dpo.Examples:
            return replace(examples, logp_ref=tensors[f"{part}logp_ref"]) if tensors else examples

        measured = take_rows(held_out, rows_of_pairs(range(min(len(held_out.tokens) // 2, max_held_out))))
        return cls(train=with_logp(TRAIN, train), held_out=with_logp(HELD_OUT, measured))


def sample_pairs(
    config: dpo.DPOConfig,
    *,
    prompts: list[Prompt],
    held_out: Sequence[Prompt],
    engine: Engine[SamplingT],
    sampling: SamplingT,
    environment: Environment,
    chat: Chat,
    seed: int = 0,
) -> DPOPairs:
    """Sample responses to `config.num_prompts` of the prompts and to all held-out ones, and pair them by reward.

    Raises:
        DataError: all responses to each training prompt got the same reward, so there is nothing to prefer.
    """
    ask: dict[str, Any] = {"engine": engine, "sampling": sampling, "environment": environment, "chat": chat}
    ask |= {"max_turns": config.max_turns, "max_length": config.max_length}

    def sample(some: Sequence[Prompt]) -> list[Pair]:
        rollouts = collect(some, group_size=config.num_generations_per_prompt, timer=PhaseTimer(), **ask)
        return pairs_from_rollouts(rollouts, pairs_per_prompt=config.pairs_per_prompt)

    drawn = next(batches(prompts, size=min(config.num_prompts, len(prompts)), seed=seed))
    pairs = sample(drawn)
    if not pairs:
        raise DataError(
            f"none of {len(drawn)} prompts has responses of different reward among its "
            f"{config.num_generations_per_prompt}, so there are no preference pairs; give the policy an sft stage "
            f"first, raise dpo.num_prompts or dpo.num_generations_per_prompt, or correct the reward"
        )
    measured = sample(held_out)
    return DPOPairs(train=dpo.prepare(pairs), held_out=dpo.prepare(measured) if measured else None)

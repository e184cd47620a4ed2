"""Held-out accuracy of the engine's weights, sampled and greedy, and a few answers to look at."""

import math
from dataclasses import dataclass
from typing import Literal

from rl_algorithms.evaluation import Accuracy, evaluate
from rl_generation import Sampling
from rl_launcher.building import Parts, sampling
from rl_launcher.observe import Sample
from rl_launcher.recipe_schema import Recipe

__all__ = ["Evaluator", "HeldOut"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How the engine's weights do on prompts that nothing trained on."""

    sampled: Accuracy
    greedy: Accuracy

    def metrics(self) -> dict[str, float]:
        """Both figures, for the log."""
        return {"held_out_sampled": self.sampled.mean, "held_out_greedy": self.greedy.mean}

    def describe(self) -> str:
        """Both figures with their standard errors, where there are any."""
        return f"sampled {_describe(self.sampled)}, greedy {_describe(self.greedy)}"


class Evaluator:
    """Asks the same held-out prompts, with the same random numbers, every time."""

    def __init__(self, parts: Parts, recipe: Recipe) -> None:
        self._parts, self._config = parts, recipe.evaluation
        self._sampled = sampling(recipe.policy.generation, seed=recipe.seed)
        self._greedy = sampling(recipe.policy.generation, greedy=True)

    @property
    def size(self) -> int:
        """Held-out prompts asked before and after training."""
        return min(self._config.max_prompts, len(self._parts.held_out))

    def both(self) -> HeldOut:
        """Sampled and greedy answers to all of them."""
        return HeldOut(sampled=self._ask(self._sampled, self.size), greedy=self._ask(self._greedy, self.size))

    def quick(self) -> float:
        """Accuracy of greedy answers to those that are asked while training."""
        return self._ask(self._greedy, self._config.max_prompts_while_training).mean

    def due(self, previous_step: int, step: int) -> bool:
        """Whether an evaluation falls between two optimizer steps."""
        return self._config.every > 0 and previous_step // self._config.every < step // self._config.every

    def samples(self, held_out: HeldOut, *, stage: str, when: Literal["before", "after"]) -> list[Sample]:
        """The first few sampled answers, as the report shows them."""
        rollouts, prompts = held_out.sampled.rollouts, self._parts.held_out[: min(self._config.samples, self.size)]
        return [
            Sample(
                when=when,
                stage=stage,
                prompt=prompt.row.prompt,
                expected=prompt.row.answer,
                response=rollouts.answers[index],
                reward=rollouts.rewards[index, 0].item(),
                truncated=bool(rollouts.truncated[index]),
            )
            for index, prompt in enumerate(prompts)
        ]

    def _ask(self, how: Sampling, num_prompts: int) -> Accuracy:
        parts = self._parts
        return evaluate(
            parts.held_out[:num_prompts],
            engine=parts.engine,
            sampling=how,
            environment=parts.environment,
            chat=parts.chat,
        )


def _describe(accuracy: Accuracy) -> str:
    error = accuracy.standard_error
    return f"{accuracy.mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{accuracy.mean:.3f} (one prompt)"

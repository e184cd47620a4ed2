"""Held-out accuracy of the engine's weights, sampled and greedy, and a few answers to look at."""

import math
from dataclasses import dataclass

from rl_algorithms.evaluation import Accuracy, evaluate
from rl_algorithms.rollouts import Rollouts
from rl_generation import Sampling
from rl_launcher.building import Parts
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
        generation = recipe.policy.generation
        self._sampled = Sampling(
            max_new_tokens=generation.max_new_tokens, temperature=generation.temperature, seed=recipe.seed
        )
        self._greedy = Sampling(max_new_tokens=generation.max_new_tokens, temperature=0.0)

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

    def samples(self, held_out: HeldOut, *, stage: str, when: str) -> list[Sample]:
        """The first few sampled answers, as the report shows them."""
        return _samples(self._parts, held_out.sampled.rollouts, self._config.samples, stage=stage, when=when)

    def _ask(self, sampling: Sampling, num_prompts: int) -> Accuracy:
        parts = self._parts
        return evaluate(
            parts.held_out[:num_prompts],
            engine=parts.engine,
            sampling=sampling,
            environment=parts.environment,
            chat=parts.chat,
        )


def _samples(parts: Parts, rollouts: Rollouts, number: int, *, stage: str, when: str) -> list[Sample]:
    return [
        Sample(
            when="before" if when == "before" else "after",
            stage=stage,
            prompt=prompt.row.prompt,
            expected=prompt.row.answer,
            response=rollouts.answers[index],
            reward=rollouts.rewards[index, 0].item(),
            truncated=bool(rollouts.truncated[index]),
        )
        for index, prompt in enumerate(parts.held_out[: min(number, len(rollouts.answers))])
    ]


def _describe(accuracy: Accuracy) -> str:
    error = accuracy.standard_error
    return f"{accuracy.mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{accuracy.mean:.3f} (one prompt)"

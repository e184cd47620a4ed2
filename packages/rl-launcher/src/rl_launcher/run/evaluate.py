"""Evaluate a model on held-out data, during a run or on its own.

Answers are the engine's, and are judged only where the recipe says how; the loss is the policy's.
"""

import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from rl_algorithms import sft
from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn
from rl_algorithms.estimates import Estimate
from rl_algorithms.evaluation import Accuracy, Figures, evaluate
from rl_algorithms.rollouts import Rollouts
from rl_generation import Sampling
from rl_launcher.build import sampling
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import Resolved, load_recipe
from rl_launcher.run_parts import Parts
from rl_launcher.schema import HOW_TO_JUDGE, Recipe
from rl_observe import Sample, SampleTokens, token_sample

__all__ = ["Evaluator", "HeldOut", "Measured", "Outcome", "measure", "measured_recipe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """How the engine's weights do on prompts that nothing trained on."""

    sampled: Accuracy
    greedy: Accuracy

    def metrics(self) -> dict[str, float]:
        """Both figures and the pass@k, for the log; intervals as `/low` and `/high`, where there are any."""
        named = {
            "held_out_sampled": self.sampled.reward,
            "held_out_greedy": self.greedy.reward,
            **{f"held_out_pass@{k}": estimate for k, estimate in self.sampled.pass_at.items() if k > 1},
        }
        figures = {name: estimate.mean for name, estimate in named.items()}
        for name, estimate in named.items():
            if math.isfinite(estimate.low):
                figures |= {f"{name}/low": estimate.low, f"{name}/high": estimate.high}
        return figures

    def describe(self) -> str:
        """Both figures with their standard errors, where there are any, and the pass@k."""
        parts = [f"sampled {_describe(self.sampled.reward)}", f"greedy {_describe(self.greedy.reward)}"]
        parts += [f"pass@{k} {_describe(estimate)}" for k, estimate in self.sampled.pass_at.items() if k > 1]
        return ", ".join(parts)

    def table(self) -> str:
        """One line for each figure, with its interval."""
        lines = [
            f"{'sampled reward':<16}{_with_interval(self.sampled.reward)}",
            f"{'greedy reward':<16}{_with_interval(self.greedy.reward)}",
            *(f"{f'pass@{k}':<16}{_with_interval(estimate)}" for k, estimate in self.sampled.pass_at.items()),
        ]
        if failed := self.sampled.num_failed + self.greedy.num_failed:
            lines.append(f"{failed} answers could not be judged, and are in none of these")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run does before or after the stage that it is about."""

    answers: HeldOut | None
    """None where nobody judges."""

    figures: dict[str, float]
    """What else was measured, as `held_out_loss`."""

    def metrics(self) -> dict[str, float]:
        """Everything, for the log."""
        return {**({} if self.answers is None else self.answers.metrics()), **self.figures}

    def describe(self) -> str:
        """In a line."""
        parts = [] if self.answers is None else [self.answers.describe()]
        parts += [
            f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}" for name, value in self.figures.items()
        ]
        return ", ".join(parts) or "nothing was measured"


class _Listener:
    """Hears answers that nobody judges, for people to read."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """Each ends with its first answer."""
        return [EnvironmentReturn(reward=0.0, terminated=True) for _ in conversations]


FIRST_CALL = 1 << 40
"""The number of an evaluation's first call: the same every time, and far from those of training."""


class Evaluator:
    """Asks the same held-out prompts, with the same random numbers, every time, and reads the same demonstrations."""

    def __init__(self, parts: Parts, recipe: Recipe) -> None:
        self._parts, self._config = parts, recipe.evaluation
        self._judged = recipe.env is not None
        self._imitates = [*recipe.stages] == ["sft"]
        self._sampled = sampling(recipe.policy.generation)
        self._greedy = sampling(recipe.policy.generation, greedy=True)
        stage: Any = recipe.grpo or recipe.distill
        self._turns = (
            {"max_turns": 1}
            if stage is None
            else {
                "max_turns": stage.max_turns,
                "max_length": stage.max_length,
            }
        )
        self._seed, self._num_with_tokens = recipe.seed, recipe.logger.num_samples_with_tokens

    @property
    def size(self) -> int:
        """Held-out prompts asked before and after training; where nobody judges, rows that are measured by."""
        if self._judged:
            return min(self._config.max_prompts, len(self._parts.held_out))
        if self._parts.pairs is not None:
            return min(self._config.max_prompts_while_training, len(self._parts.pairs.held_out.tokens) // 2)
        return len(self._demonstrations)

    @property
    def _demonstrations(self) -> sft.Lessons:
        return self._parts.held_out_demonstrations[: self._config.max_prompts_while_training]

    def outcome(self) -> Outcome:
        """All that is measured before and after training."""
        answers = self.both() if self._judged else None
        return Outcome(answers=answers, figures=self.loss() if self._imitates else {})

    def both(self) -> HeldOut:
        """Sampled and greedy answers to all of them."""
        sampled = self._ask(self._sampled, self.size, samples=self._config.samples_per_prompt)
        return HeldOut(sampled=sampled, greedy=self._ask(self._greedy, self.size))

    def quick(self) -> dict[str, float]:
        """Accuracy of greedy answers to those that are asked while training; nothing where nobody judges."""
        if not self._judged:
            return {}
        return {"held_out_greedy": self._ask(self._greedy, self._config.max_prompts_while_training).mean}

    def loss(self) -> dict[str, float]:
        """The policy's `held_out_loss`: -logp a learnt token of held-out demonstrations, in nats; nothing without any.

        Always of the same rows, before and after training too, so that its values are one curve.
        """
        if not self._demonstrations:
            return {}
        examples = sft.prepare(self._demonstrations)
        weights = examples.trainable.double() * examples.weight[:, None]
        nll = -torch.where(weights > 0, self._parts.policy.logp(examples).double(), 0.0)
        return {"held_out_loss": ((nll * weights).sum() / weights.sum()).item()}

    def due(self, previous_step: int, step: int) -> bool:
        """Whether an evaluation falls between two optimizer steps."""
        return self._config.every > 0 and previous_step // self._config.every < step // self._config.every

    def samples(self, outcome: Outcome, *, stage: str, when: Literal["before", "after"]) -> list[Sample]:
        """The first few sampled answers, as the report shows them; where nobody judges, they are asked for here."""
        asked = self._parts.held_out[: min(self._config.samples, self._config.max_prompts)]
        if not asked:
            return []
        if outcome.answers is None:
            rollouts, each = self._ask(self._sampled, len(asked), environment=_Listener()).rollouts, 1
        else:
            rollouts, each = outcome.answers.sampled.rollouts, self._config.samples_per_prompt
        samples: list[Sample] = []
        for number, prompt in enumerate(asked):
            row = number * each  # the first answer to each prompt
            sample = Sample(
                when=when,
                stage=stage,
                prompt=prompt.row.prompt,
                expected=prompt.row.answer,
                response=rollouts.answers[row],
                reward=None if outcome.answers is None else rollouts.rewards[row].item(),
                truncated=bool(rollouts.truncated[row]),
            )
            if number < self._num_with_tokens:
                sample["tokens"] = self._tokens(rollouts, row)
            samples.append(sample)
        return samples

    def _tokens(self, rollouts: Rollouts, row: int) -> SampleTokens:
        length = int(rollouts.lengths[row])
        return token_sample(
            rollouts.tokens[row, :length].tolist(),
            logp=rollouts.logp_old[row, :length].tolist(),
            response=rollouts.response[row, :length].tolist(),
            turns=rollouts.turns[row, :length].tolist(),
            decode=self._parts.tokenizer.decode,
        )

    def _ask(
        self, how: Sampling, num_prompts: int, *, samples: int = 1, environment: Environment | None = None
    ) -> Accuracy:
        parts, config = self._parts, self._config
        pass_at = tuple(k for k in config.pass_at if k <= samples)
        return evaluate(
            parts.held_out[:num_prompts],
            engine=parts.engine.reseeded(self._seed, first_call=FIRST_CALL),
            sampling=how,
            environment=parts.environment if environment is None else environment,
            chat=parts.chat,
            samples_per_prompt=samples,
            seed=self._seed,
            figures=Figures(pass_at=pass_at, pass_reward=config.pass_reward),
            **self._turns,
        )


def _describe(estimate: Estimate) -> str:
    error = estimate.standard_error
    return f"{estimate.mean:.3f} ± {error:.3f}" if math.isfinite(error) else f"{estimate.mean:.3f} (one prompt)"


def _with_interval(estimate: Estimate) -> str:
    if not math.isfinite(estimate.low):
        return f"{estimate.mean:.3f}  (one prompt: no interval)"
    return f"{estimate.mean:.3f}  [{estimate.low:.3f}, {estimate.high:.3f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was found."""

    model: str
    held_out: HeldOut
    num_prompts: int
    samples_per_prompt: int
    num_failed: int

    def text(self) -> str:
        """For people."""
        asked = f"{self.num_prompts} held-out prompts, {self.samples_per_prompt} sampled and 1 greedy answer each"
        return f"{self.model}: {asked}; intervals hold the truth 95 times in 100\n{self.held_out.table()}"

    def figures(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "model": self.model,
            "prompts": self.num_prompts,
            "samples_per_prompt": self.samples_per_prompt,
            "failed": self.num_failed,
            **self.held_out.metrics(),
        }


def measured_recipe(subject: Path, *, overrides: Sequence[str] = (), model: str | None = None) -> Resolved[Recipe]:
    """The recipe of `subject`, with the model that is to be measured in the place of its policy's.

    Raises:
        ValueError: it is no recipe and no run, or the run has left no model.
    """
    is_run = subject.is_dir()
    file = subject / "recipe.yaml" if is_run else subject
    if is_run and not file.is_file() and (subject / "config.json").is_file():
        raise Refusal(
            f"{subject} is a model, and what it is asked stands in a recipe: rl-launcher evaluate RECIPE --model "
            f"{subject}"
        )
    if is_run and not file.is_file():
        raise Refusal(f"{subject} is no run: it holds no recipe.yaml; give a run's directory, or a recipe")
    if is_run and model is None:
        model = str(subject / "model")
        if not Path(model).is_dir():
            raise Refusal(
                f"{subject} has no model: it did not end well. Take one out of a checkpoint with `rl-launcher export "
                f"{subject} FOLDER`, and measure it with --model FOLDER"
            )
    named = [] if model is None else [f"policy.model_name={json.dumps(model)}", "policy.revision=null"]
    return load_recipe(file, schema=Recipe, overrides=[*overrides, *named])


def measure(resolved: Resolved[Recipe]) -> Measured:
    """Ask the held-out prompts.

    Raises:
        ValueError: whatever a part refuses.
    """
    from rl_launcher.build import build
    from rl_launcher.checks import preflight
    from rl_launcher.run.evaluate import Evaluator

    asked = resolved.value
    if asked.env is None:
        raise Refusal(f"evaluate asks held-out prompts, and env, which judges the answers, is missing; {HOW_TO_JUDGE}")
    preflight.check(replace(asked, sft=None, grpo=None, dpo=None, distill=None), new_run=False)
    with tempfile.TemporaryDirectory(prefix="rl-launcher-evaluate-") as folder:
        # Parts that must write, on Ray, write where nobody looks; the stages are asked for their turns alone.
        parts = build(replace(asked, run_dir=folder, sft=None, distill=None))
        try:
            parts.weight_sync(version=0)
            evaluator = Evaluator(parts, asked)
            held_out = evaluator.both()
        finally:
            parts.close()
    return Measured(
        model=asked.policy.model_name,
        held_out=held_out,
        num_prompts=evaluator.size,
        samples_per_prompt=asked.evaluation.samples_per_prompt,
        num_failed=held_out.sampled.num_failed + held_out.greedy.num_failed,
    )

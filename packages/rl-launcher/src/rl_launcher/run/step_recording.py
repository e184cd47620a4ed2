"""Hand each batch of rollouts, and the optimizer steps on it, to rl-observe, which records them token by token.

The loop tells of the rollouts (`on_rollouts`), an `ObservedPolicy` of the steps; nothing is computed that the loop has
not computed itself. On Ray the loss runs in other processes, and what it computes of each token is not recorded.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_algorithms.contracts import Policy
from rl_algorithms.observation import ObservedPolicy, ObservedStep
from rl_algorithms.rollouts import Rollouts
from rl_launcher.build.parts import Parts
from rl_launcher.recipe_files.dataclass_schema import to_plain
from rl_launcher.schema import GRPOStage, Recipe
from rl_observe import StepRecorder, StepRollouts

FROM_EXAMPLES = ("advantage", "logp_ref", "logp_proximal")
FROM_LOSS = ("logp", "loss", "weight", "entropy")


class StepRecording:
    """What is recorded of a GRPO stage, batch by batch."""

    def __init__(self, recorder: StepRecorder, stage: GRPOStage, *, recipe: Recipe, parts: Parts) -> None:
        self._recorder, self._parts = recorder, parts
        if not recorder.enabled:
            return
        tokenizer = parts.tokenizer
        recorder.decode = tokenizer.decode
        self._rows = {prompt.row.where: prompt.row for prompt in parts.data.prompts}
        config = parts.selection.config
        self._constant: dict[str, Any] = {
            "algorithm": "grpo",
            "synchronous": stage.async_grpo is None,
            "runtime": recipe.cluster.runtime,
            "precision": config.precision,
            "device": config.device,
            "engine": recipe.policy.generation.backend,
            "sampling": to_plain(recipe.policy.generation),
            "objective": to_plain(stage.objective),
            "group_size": stage.num_generations_per_prompt,
            "seed": recipe.seed,
            "stop_token_ids": list(parts.data.chat.stop_token_ids),
            "special_token_ids": {
                name: token
                for name in ("bos", "eos", "pad")
                if (token := getattr(tokenizer, f"{name}_token_id", None)) is not None
            },
        }
        self._rollouts: Rollouts | None = None
        self._expect()

    def on_rollouts(self, rollouts: Rollouts) -> None:
        """Begin a batch."""
        if self._recorder.enabled:
            self._rollouts = rollouts

    def on_step(self, step: ObservedStep) -> None:
        """Add an optimizer step to the batch."""
        self._steps.append(step)
        self._learning_rates.append(self._parts.policy.learning_rate)

    def observed(self, policy: Policy) -> Policy:
        """The policy, which tells of its optimizer steps; as it is, if nothing is recorded."""
        return ObservedPolicy(policy, self.on_step) if self._recorder.enabled else policy

    def next_of(self, steps: Iterator[dict[str, float]], *, number: int) -> dict[str, float] | None:
        """The metrics of the next batch, or None after the last; a batch that fails is recorded as step `number`."""
        try:
            return next(steps, None)
        except Exception as error:
            self.record(number, error=str(error))
            raise

    def record(self, step: int, *, timings: Mapping[str, float] | None = None, error: str | None = None) -> None:
        """Record the batch, whose last optimizer step has the number `step`, also if it was ended by an error."""
        if not self._recorder.enabled or self._rollouts is None:
            return
        rollouts, steps, first = self._rollouts, self._steps, step - len(self._steps) + 1
        updates = [
            {
                "step": first + number,
                "learning_rate": rate,
                **each.metrics,
                **({} if each.error is None else {"error": each.error}),
            }
            for number, (each, rate) in enumerate(zip(steps, self._learning_rates, strict=False))
        ]
        about = {**self._constant, **self._before, "timings": dict(timings or {})}
        if error is not None:
            about["error"] = error
        if steps and not steps[0].columns:
            about["not_recorded"] = {"logp": "the loss ran in other processes, which keep no log-probabilities"}
        self._recorder.record("grpo", step, lambda: self._lay_out(rollouts, steps), updates=updates, about=about)
        self._expect()

    def _expect(self) -> None:
        """Note what the next batch begins with."""
        parts = self._parts
        self._rollouts, self._steps = None, list[ObservedStep]()
        self._learning_rates = [parts.policy.learning_rate]
        last = parts.weight_sync.last
        self._before = {
            "version": parts.policy.version,
            "engine_calls": parts.engine.seeds.calls,
            "refit": None if last is None else {"version": last.version, "digest": last.digest},
        }

    def _lay_out(self, rollouts: Rollouts, steps: list[ObservedStep]) -> StepRollouts:
        shape = rollouts.tokens.shape
        update = torch.full((len(rollouts),), -1)
        trainable, clipped = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape, dtype=torch.bool)
        columns: dict[str, Tensor] = {}

        def fill(name: str, rows: Tensor, values: Tensor) -> None:
            if name not in columns:
                columns[name] = torch.full(shape, float("nan"))
            columns[name][rows, : values.shape[1]] = values.float()

        for number, step in enumerate(steps):
            update[step.rows] = number
            width = step.examples.tokens.shape[1]
            trainable[step.rows, :width] = step.examples.trainable
            for name in FROM_EXAMPLES:
                values = getattr(step.examples, name)
                if values[step.examples.trainable].isfinite().any():
                    fill(name, step.rows, torch.where(step.examples.trainable, values, float("nan")))
            for name in FROM_LOSS:
                if name in step.columns:
                    values = step.columns[name]
                    fill(name, step.rows, torch.where(step.examples.trainable, values, float("nan")))
            if "clipped" in step.columns:
                clipped[step.rows, :width] = step.columns["clipped"]
        known = [self._rows.get(source) for source in rollouts.sources]
        return StepRollouts(
            tokens=rollouts.tokens,
            lengths=rollouts.lengths,
            response=rollouts.response,
            logp_old=rollouts.logp_old,
            trainable=trainable if steps else None,
            clipped=clipped if steps else None,
            token_rewards=rollouts.token_rewards,
            rewards=rollouts.rewards,
            components=rollouts.components,
            component_names=rollouts.component_names,
            groups=rollouts.groups,
            turns=rollouts.turns,
            versions=rollouts.versions,
            truncated=rollouts.truncated,
            failed=rollouts.failed,
            update=update,
            sources=rollouts.sources,
            prompts=["" if row is None else row.prompt for row in known],
            expected=[None if row is None else row.answer for row in known],
            responses=rollouts.answers,
            failures=rollouts.failures,
            **columns,
        )

"""Hand each batch, and the optimizer steps on it, to rl-observe, which records them token by token.

A stage that samples tells of its rollouts (`on_rollouts`); a stage that learns from given rows, pairs or labelled
responses has none, and the rows of each step are the batch. An `ObservedPolicy` tells of the steps. Nothing is computed
that the loop has not computed itself; on Ray the ranks bring back what their losses computed of each token.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_algorithms.contracts import TokenBatch
from rl_algorithms.data import batches
from rl_algorithms.observation import ObservedPolicy, ObservedStep
from rl_algorithms.policy_gradient import kept_rows
from rl_algorithms.rollouts import Rollouts
from rl_launcher.build.parts import Parts
from rl_launcher.recipe_files.dataclass_schema import to_plain
from rl_launcher.run.record import PHASE
from rl_launcher.schema import Recipe
from rl_observe import StepRecorder, StepRollouts, TrainedRows
from rl_observe.layers import LayerNorms

FROM_EXAMPLES = ("advantage", "logp_ref", "logp_proximal")
FROM_LOSS = ("logp", "loss", "weight", "entropy")
SAMPLES = {"grpo", "ppo", "distill"}
"""Stages whose rollouts are the rows that they train on."""
PAIRS = {"dpo", "orpo", "reward_model"}
"""Stages whose rows are pairs: chosen, then rejected."""

ItemT = TypeVar("ItemT")


class StepRecording:
    """What is recorded of a stage, batch by batch.

    Args:
        recorder: what writes.
        name: of the stage.
        stage: its section of the recipe.
        recipe: of the run.
        parts: of the run.
        model: what the stage trains; by default the policy.
    """

    def __init__(
        self, recorder: StepRecorder, name: str, stage: Any, *, recipe: Recipe, parts: Parts, model: Any = None
    ) -> None:
        self._recorder, self._parts, self._name = recorder, parts, name
        self._model = parts.policy if model is None else model
        if not recorder.enabled:
            return
        tokenizer = parts.tokenizer
        recorder.decode = tokenizer.decode
        self._objective = getattr(stage, "objective", None)
        if not hasattr(self._objective, "selection"):  # a reward model's is a word
            self._objective = None
        self._rows = {prompt.row.where: prompt.row for prompt in parts.data.prompts}
        config = parts.selection.config
        self._constant: dict[str, Any] = {
            "algorithm": name,
            "synchronous": getattr(stage, "async_grpo", None) is None,
            "runtime": recipe.cluster.runtime,
            "precision": config.precision,
            "device": config.device,
            "seed": recipe.seed,
            "stop_token_ids": list(parts.data.chat.stop_token_ids),
            "special_token_ids": {
                special: token
                for special in ("bos", "eos", "pad")
                if (token := getattr(tokenizer, f"{special}_token_id", None)) is not None
            },
        }
        if name in SAMPLES:
            self._constant |= {
                "engine": recipe.policy.generation.backend,
                "sampling": to_plain(recipe.policy.generation),
                "group_size": getattr(stage, "num_generations_per_prompt", 1),
                "mixture": _is_mixture(parts.policy),
            }
            if self._objective is not None:
                # The critic's advantages do not follow from rewards alone.
                key = "objective" if name == "grpo" else "policy_objective"
                self._constant[key] = to_plain(self._objective)
            if name == "distill":
                self._constant["partly_known"] = ["logp"]  # of tokens that the teacher named
        else:
            self._constant["given_rows"] = True
        self._layers = LayerNorms(getattr(self._model, "model", None))
        self._rollouts: Rollouts | None = None
        self._values: Tensor | None = None
        self._drawn: Iterator[list[str]] = itertools.repeat([])
        self._expect()

    def on_rollouts(self, rollouts: Rollouts) -> None:
        """Begin a batch."""
        if self._recorder.enabled:
            self._rollouts = rollouts
            # A call has the next seed of the run; a request has one of its own, and counts no call.
            if self._name in SAMPLES:
                self._before["by_request"] = self._parts.engine.seeds.calls == self._before["engine_calls"]

    def on_step(self, step: ObservedStep) -> None:
        """Add an optimizer step to the batch."""
        self._steps.append(step)
        self._learning_rates.append(self._model.learning_rate)

    def observed(self, policy: Any) -> Any:
        """The policy or reward model, which tells of its optimizer steps; as it is, if nothing is recorded."""
        if not self._recorder.enabled:
            return policy
        return WatchedPolicy(policy, self.on_step, every=self._name not in SAMPLES, layers=self._layers)

    def valued(self, value_model: Any) -> Any:
        """The critic, whose values of a batch are recorded."""
        return _Valued(value_model, self._keep_values) if self._recorder.enabled else value_model

    def _keep_values(self, values: Tensor) -> None:
        self._values = values

    def draws(self, units: int, *, word: str, size: int, seed: int, taken: int) -> None:
        """Number the rows of the steps as `offline.draw_batches` draws them: pairs, or `word`, from 0."""
        drawn = itertools.islice(batches(range(units), size=size, seed=seed), taken, None)
        self._drawn = ([f"{word} {number} of the training data" for number in batch] for batch in drawn)

    def telling_sources(self, batches: Iterator[list[ItemT]], of: Callable[[ItemT], str]) -> Iterator[list[ItemT]]:
        """The same batches of given rows; where each row of a batch comes from is noted as the batch is drawn."""
        for batch in batches:
            self._drawn = iter([[of(item) for item in batch]])
            yield batch

    def next_of(self, steps: Iterator[dict[str, float]], *, number: int) -> dict[str, float] | None:
        """The metrics of the next batch, or None after the last; a batch that fails is recorded as step `number`."""
        try:
            return next(steps, None)
        except Exception as error:
            self.record(number, error=str(error))
            raise

    def numbered(self, steps: Iterator[dict[str, float]], *, start: int) -> Iterator[tuple[int, dict[str, float]]]:
        """The metrics of steps one by one, numbered from `start`; a step that fails is recorded too."""
        for number in itertools.count(start):
            if (metrics := self.next_of(steps, number=number)) is None:
                return
            yield number, metrics

    def record(self, step: int, *, timings: Mapping[str, float] | None = None, error: str | None = None) -> None:
        """Record the batch, whose last optimizer step has the number `step`, also if it was ended by an error."""
        if not self._recorder.enabled:
            return
        rollouts, steps, first = self._rollouts, self._steps, step - len(self._steps) + 1
        if not steps and (rollouts is None or self._name not in SAMPLES):
            self._expect()
            return
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
        if layers := self._layers.take():
            about["layers"] = layers
        if error is not None:
            about["error"] = error
        if steps and not steps[0].columns:
            about["not_recorded"] = {"logp": "the loss ran in other processes, which keep no log-probabilities"}
        values, sources = self._values, next(self._drawn, [])

        def laid_out() -> StepRollouts:
            if rollouts is not None and self._name in SAMPLES:
                return self._lay_out(rollouts, steps, values)
            return self._lay_out_rows(steps[-1], sources, rollouts)

        self._recorder.record(self._name, step, laid_out, updates=updates, about=about)
        self._expect()

    def _expect(self) -> None:
        """Note what the next batch begins with."""
        parts = self._parts
        self._rollouts, self._values, self._steps = None, None, list[ObservedStep]()
        self._learning_rates = [self._model.learning_rate]
        self._layers.expect()
        self._before: dict[str, Any] = {"version": self._model.version}
        if self._name in SAMPLES:
            last = parts.weight_sync.last
            self._before |= {
                "engine_calls": parts.engine.seeds.calls,
                "refit": None if last is None else {"version": last.version, "digest": last.digest},
            }

    def _lay_out(self, rollouts: Rollouts, steps: list[ObservedStep], values: Tensor | None) -> StepRollouts:
        trained = []
        for step in steps:
            given = {name: getattr(step.examples, name, None) for name in FROM_EXAMPLES}
            given |= {name: step.columns.get(name) for name in FROM_LOSS}
            columns: dict[str, Tensor] = {name: each.float() for name, each in given.items() if each is not None}
            if "clipped" in step.columns:
                columns["clipped"] = step.columns["clipped"]
            trained.append(TrainedRows(rows=step.rows, trainable=step.examples.trainable, columns=columns))
        figures: dict[str, Tensor] = {}
        others: dict[str, Any] = self._texts_of(rollouts.sources)
        if values is not None and self._objective is not None:
            kept = kept_rows(rollouts, self._objective).nonzero()[:, 0]
            # The critic is asked about rows one token longer, for what comes after a response that was cut off.
            width = min(values.shape[1], rollouts.tokens.shape[1])
            others["value"] = torch.full(rollouts.tokens.shape, float("nan"))
            mask = rollouts.response[kept][:, :width]
            others["value"][kept, :width] = torch.where(mask, values[:, :width].float(), float("nan"))
            last = torch.zeros(len(rollouts))
            at = rollouts.lengths[kept].clamp(max=values.shape[1] - 1)
            last[kept] = values[torch.arange(len(kept)), at].float()
            figures["last_value"] = torch.where(rollouts.truncated, last, 0.0)
        return StepRollouts(
            tokens=rollouts.tokens,
            lengths=rollouts.lengths,
            response=rollouts.response,
            logp_old=rollouts.logp_old,
            token_rewards=rollouts.token_rewards,
            rewards=rollouts.rewards,
            components=rollouts.components,
            component_names=rollouts.component_names,
            groups=rollouts.groups,
            turns=rollouts.turns,
            versions=rollouts.versions,
            truncated=rollouts.truncated,
            failed=rollouts.failed,
            update=None if steps else torch.full((len(rollouts),), -1),
            trained=trained,
            responses=rollouts.answers,
            failures=rollouts.failures,
            figures=figures,
            **others,
        )

    def _texts_of(self, sources: Sequence[str]) -> dict[str, Sequence[Any]]:
        """Where each rollout comes from, its prompt and its gold answer; many rollouts have the same."""
        known = {source: self._rows.get(source) for source in {*sources}}
        prompts = {source: "" if row is None else row.prompt for source, row in known.items()}
        answers = {source: None if row is None else row.answer for source, row in known.items()}
        return {
            "sources": sources,
            "prompts": [*map(prompts.__getitem__, sources)],
            "expected": [*map(answers.__getitem__, sources)],
        }

    def _lay_out_rows(self, step: ObservedStep, sources: Sequence[str], rollouts: Rollouts | None) -> StepRollouts:
        """The rows of one step on given rows. A pair is a group, its chosen response has the reward 1.

        The pairs of online DPO have the rewards of the rollouts that they were made of.
        """
        examples = step.examples
        mask, number = examples.trainable.bool(), len(examples.tokens)
        rewards, groups = torch.zeros(number, dtype=torch.float64), torch.arange(number)
        if self._name in PAIRS and number % 2 == 0 and not hasattr(examples, "target"):
            rewards[0::2], groups = 1.0, torch.arange(number) // 2
        elif hasattr(examples, "desirable"):
            rewards = examples.desirable.double()
        elif hasattr(examples, "target"):
            rewards = examples.target.double()
        elif hasattr(examples, "weight"):
            rewards = examples.weight.double()
        figures: dict[str, Tensor] = {}
        for name in ("logp_ref", "weight", "margin"):  # of whole rows
            given = getattr(examples, name, None)
            if given is not None and given.ndim == 1 and given.isfinite().any():
                figures[name] = given
        if "score" in step.columns:
            figures["score"] = step.columns["score"]
        columns: dict[str, Any] = {
            name: torch.where(mask, step.columns[name].float(), float("nan"))
            for name in FROM_LOSS
            if name in step.columns
        }
        texts: dict[str, Any] = {}
        if rollouts is not None:
            place = {_key(tokens, length): row for row, (tokens, length) in enumerate(_each(rollouts))}
            rows = [place.get(_key(tokens, length)) for tokens, length in _each(examples)]
            if None not in rows:
                found = [row for row in rows if row is not None]
                rewards = rollouts.rewards[found]
                texts = self._texts_of([rollouts.sources[row] for row in found])
                texts["responses"] = [rollouts.answers[row] for row in found]
        elif sources:
            texts["sources"] = [sources[row * len(sources) // number] for row in range(number)]
        return StepRollouts(
            tokens=examples.tokens,
            lengths=examples.lengths,
            response=mask,
            trainable=mask,
            rewards=rewards,
            groups=groups,
            truncated=torch.zeros(number, dtype=torch.bool),
            figures=figures,
            **columns,
            **texts,
        )


def timings_of(metrics: Mapping[str, float]) -> dict[str, float]:
    """The seconds of each phase among the metrics of a step."""
    return {name: value for name, value in metrics.items() if name.startswith(PHASE)}


class WatchedPolicy(ObservedPolicy):
    """An observed policy whose layers are looked at during the first pass of each batch."""

    def __init__(
        self, policy: Any, on_step: Callable[[ObservedStep], object], *, every: bool, layers: LayerNorms
    ) -> None:
        super().__init__(policy, on_step, every=every)
        self._layers = layers

    def forward_backward(self, examples: TokenBatch, loss: Callable[..., Any], **options: Any) -> Any:
        """The policy's own."""
        with self._layers.watching():
            return super().forward_backward(examples, loss, **options)


class _Valued:
    """A value model that tells of the values it gave."""

    def __init__(self, model: Any, on_values: Callable[[Tensor], object]) -> None:
        self._model, self._on_values = model, on_values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def value(self, examples: TokenBatch) -> Tensor:
        values: Tensor = self._model.value(examples)
        self._on_values(values.detach().cpu())
        return values


def _each(rows: Any) -> Iterator[tuple[list[int], int]]:
    yield from zip(rows.tokens.tolist(), rows.lengths.tolist(), strict=True)


def _key(tokens: list[int], length: int) -> tuple[int, ...]:
    return tuple(tokens[:length])


def _is_mixture(policy: Any) -> bool:
    """Whether the model routes tokens to experts; False if this process cannot look at it."""
    config = getattr(getattr(policy, "model", None), "config", None)
    return any(getattr(config, name, 0) for name in ("num_experts", "num_local_experts", "n_routed_experts"))

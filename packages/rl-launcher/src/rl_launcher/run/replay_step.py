"""Compute the stages of a recorded step again, for `rl-observe replay RUN STEP`.

The parts are built from the run's recipe, in this process and on its CPU; the code is the loop's own. Stages that need
the weights take them from a checkpoint of the run with the version that the step began with, from `weights`, or from
the recipe's own model for a step of version 0.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_algorithms import grpo
from rl_algorithms.contracts import Conversation, ResettingEnvironment, TokenBatch
from rl_algorithms.observation import ObservedPolicy, ObservedStep, number_rows
from rl_algorithms.policy_gradient import kept_rows, prepare
from rl_algorithms.rollouts import Rollouts, episode_seed
from rl_launcher.build.build import build
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints.folders import POLICY, list_checkpoints
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.schema import ClusterConfig, GRPOStage, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import RecordedStep, RunDirectory
from rl_observe.replay import NotReplayable, Recompute


@contextmanager
def recompute(
    run: RunDirectory, step: RecordedStep, *, weights: Path | None = None, objects: Objects = NO_OBJECTS
) -> Iterator[Mapping[str, Recompute]]:
    """Functions that compute the stages of `step` again, by stage; they hold the models until the context ends.

    Args:
        run: the run that recorded the step.
        step: one of its steps of GRPO.
        weights: a Hugging Face folder with the weights that the step began with.
        objects: Python objects that the run was started with.

    Raises:
        Refusal: the step is of another stage, or the run has no recipe.
        ValueError: the parts cannot be built.
    """
    if not run.recipe.is_file():
        raise Refusal(f"{run.path} has no recipe.yaml, which says how its stages are computed")
    overrides = [] if weights is None else [f"policy.model_name={weights}", "policy.revision=null"]
    recipe: Recipe = load_recipe(run.recipe, schema=Recipe, overrides=overrides).value
    stage = recipe.grpo
    if step.stage != "grpo" or stage is None:
        raise Refusal(f"step {step.step} is of the stage {step.stage}, and steps of grpo are replayed")
    with TemporaryDirectory(prefix="rl-launcher-replay-") as folder:
        recipe = replace(recipe, run_dir=folder, cluster=ClusterConfig())
        parts = build(recipe, objects=objects)
        try:
            stages = _Stages(run, step, recipe, stage, parts, has_weights=weights is not None)
            yield {
                "prompt": stages.prompt,
                "reward": stages.reward,
                "advantage": stages.advantage,
                "logp_old": stages.logp_old,
                "logp": lambda _: stages.of_loss("logp"),
                "loss": lambda _: stages.of_loss("loss"),
                "gradient": lambda _: np.array([stages.first_update.metrics["grad_norm"]]),
            }
        finally:
            parts.close()


@dataclass
class _Stages:
    run: RunDirectory
    step: RecordedStep
    recipe: Recipe
    config: GRPOStage
    parts: Parts
    has_weights: bool

    def prompt(self, step: RecordedStep) -> Any:
        """Each data row rendered and tokenized again."""
        if isinstance(self.parts.environment, ResettingEnvironment):
            raise NotReplayable("the environment itself says how an episode begins")
        found: Any = np.full(step.filled.shape, -1, dtype=np.int64)
        for row, prompt in enumerate(self._prompts()):
            tokens = prompt.tokens[: found.shape[1]]
            found[row, : len(tokens)] = tokens
        return found

    def reward(self, step: RecordedStep) -> Any:
        """Each response scored again, by the functions that the recipe names."""
        if self.config.max_turns > 1:
            raise NotReplayable("a conversation of several turns cannot be played again from its tokens")
        failed = step.row("failed", missing=0).astype(bool)
        tokens, chat = step.padded("tokens"), self.parts.data.chat
        conversations = []
        for row, prompt in enumerate(self._prompts()):
            response = tuple(tokens[row][step.response[row]].tolist())
            conversations.append(
                Conversation(
                    messages=prompt.messages,
                    answer=chat.text(response),
                    row=dict(prompt.row.columns),
                    tokens=response,
                    version=step.version or 0,
                    state=prompt.state,
                    truncated=bool(step.row("truncated", missing=0)[row]),
                )
            )
        judged = self.parts.environment.step(conversations)
        rewards = [np.nan if each.failed is not None else each.reward for each in judged]
        return np.where(failed, np.nan, np.array(rewards, dtype=np.float64))

    def advantage(self, step: RecordedStep) -> Any:
        """The loop's own `prepare` on the recorded rewards and log-probabilities."""
        examples, rows = self._examples(step)
        found = np.full(step.filled.shape, np.nan, dtype=np.float32)
        values = torch.where(examples.trainable, examples.advantage, float("nan")).numpy()
        found[rows.numpy(), : values.shape[1]] = values
        return found

    def logp_old(self, step: RecordedStep) -> Any:
        """The engine samples the batch again; NaN from the first token on that is another one."""
        engine = self.recipe.policy.generation.backend
        if engine != "transformers":
            raise NotReplayable(f"the engine {engine} does not promise the same bits in another process")
        if not step.data.get("synchronous") or self.config.max_turns > 1:
            raise NotReplayable("how rollouts were batched depended on timing, or on an environment")
        if self.config.objective.selection.max_generation_batches > 1:
            raise NotReplayable("the batch was put together from several")
        self._load_weights()
        self.parts.weight_sync(version=step.version or 0)
        tokens, starts = step.padded("tokens"), step.response.argmax(axis=1)
        prompts = [tokens[row, :start].tolist() for row, start in enumerate(starts.tolist())]
        # The seeds of the requests, as `rl_algorithms.rollouts.collect_batch` makes them.
        config, number = self.config, step.step // self.config.steps_per_generation - 1
        places = [divmod(row, config.num_generations_per_prompt) for row in range(len(prompts))]
        tickets = [(number * config.num_prompts + prompt, place) for prompt, place in places]
        seeds = [
            episode_seed(episode_seed(episode_seed(self.recipe.seed, ticket, 0), place), 0) for ticket, place in tickets
        ]
        made = self.parts.engine.generate_seeded(prompts, self.recipe.policy.generation.sampling(), seeds=seeds)
        found: Any = np.full(step.filled.shape, np.nan, dtype=np.float32)
        for row, (start, rollout) in enumerate(zip(starts.tolist(), made, strict=True)):
            length = min(len(rollout.tokens), found.shape[1] - start)
            same = np.array(rollout.tokens[:length]) == tokens[row, start : start + length]
            kept = length if same.all() else int(same.argmin())
            found[row, start : start + kept] = rollout.logp[:kept]
        return found

    def of_loss(self, name: str) -> Any:
        """A column of the first update, by the loss that trained."""
        update = self.first_update
        if name not in update.columns:
            raise NotReplayable(f"the loss gives no {name}")
        found = np.full(self.step.filled.shape, np.nan, dtype=np.float32)
        values = torch.where(update.examples.trainable, update.columns[name].float(), float("nan")).numpy()
        found[update.rows.numpy(), : values.shape[1]] = values
        return found

    @cached_property
    def first_update(self) -> ObservedStep:
        """The first optimizer step on the batch, taken again: afterwards the weights are other ones."""
        step, config, policy = self.step, self.config, self.parts.policy
        generation = self.recipe.policy.generation
        policy.start_training(config.optimizer, num_steps=config.max_num_steps, temperature=generation.temperature)
        self._load_weights()
        examples, _ = self._examples(step)
        rollouts = self._rollouts(step)
        numbered = number_rows(examples, rollouts, config.objective)
        number = step.step // config.steps_per_generation - 1
        seed, groups = episode_seed(self.recipe.seed, number), rollouts.groups[numbered.rows]
        first = next(iter(grpo.minibatches(numbered, config, groups=groups, seed=seed)), None)
        if first is None:
            raise NotReplayable("nothing was trained on in this step")
        recorded = set(np.flatnonzero(step.row("update", missing=0) == 0).tolist())
        if set(first.rows.tolist()) != recorded:  # type: ignore[attr-defined]  # they are NumberedExamples
            raise NotReplayable(
                f"the first update would train on other rows than the {len(recorded)} recorded ones: another seed, or "
                f"other advantages"
            )
        seen: list[ObservedStep] = []
        grpo.step(ObservedPolicy(policy, seen.append), first, config.objective)
        return seen[0]

    def _prompts(self) -> list[Any]:
        by_source = {prompt.row.where: prompt for prompt in self.parts.data.prompts}
        sources = [shared["source"] for shared in self.step.shared]
        if missing := [str(source) for source in sources if source not in by_source]:
            raise NotReplayable(f"the data have no row {missing[0]}: they changed, or lie elsewhere")
        return [by_source[source] for source in sources]

    def _load_weights(self) -> None:
        version, policy = self.step.version or 0, self.parts.policy
        if not self.has_weights and version:
            checkpoints = {each.version: each for each in list_checkpoints(self.run)}
            if version not in checkpoints:
                known = ", ".join(map(str, checkpoints)) or "none"
                raise NotReplayable(
                    f"no checkpoint has the weights of version {version} (there are {known}); keep some with "
                    f"checkpointing.save_period, or give --weights"
                )
            policy.load_checkpoint(checkpoints[version].folder / POLICY, optimizer=False)
        policy.version = version

    def _rollouts(self, step: RecordedStep) -> Rollouts:
        rewards = torch.from_numpy(step.columns["rewards"].copy())
        token_rewards = torch.zeros(step.filled.shape, dtype=torch.float64)
        if step.has("token_rewards"):
            token_rewards = torch.from_numpy(np.nan_to_num(step.padded("token_rewards")))
        else:
            last = step.filled.shape[1] - 1 - step.response[:, ::-1].argmax(axis=1)
            token_rewards[torch.arange(len(step)), torch.from_numpy(last.copy())] = rewards
        components = step.columns.get("components", np.zeros((len(step), 0)))
        return Rollouts(
            tokens=torch.from_numpy(np.where(step.filled, step.padded("tokens"), 0)),
            lengths=torch.from_numpy(step.columns["lengths"].astype(np.int64)),
            response=torch.from_numpy(step.response.copy()),
            logp_old=torch.from_numpy(np.nan_to_num(step.padded("logp_old"))),
            versions=torch.from_numpy(step.padded("versions").astype(np.int64)),
            turns=torch.from_numpy(step.padded("turns").astype(np.int64)),
            token_rewards=token_rewards,
            rewards=rewards,
            components=torch.from_numpy(components.astype(np.float64)),
            component_names=tuple(step.component_names),
            groups=torch.from_numpy(step.columns["groups"].astype(np.int64)),
            truncated=torch.from_numpy(step.row("truncated", missing=0).astype(bool)),
            failed=torch.from_numpy(step.row("failed", missing=0).astype(bool)),
            answers=tuple(step.text(row) for row in range(len(step))),
            failures=tuple(line.get("failure") for line in step.lines),
        )

    def _examples(self, step: RecordedStep) -> tuple[grpo.Examples, Tensor]:
        rollouts, objective = self._rollouts(step), self.config.objective
        rows = kept_rows(rollouts, objective).nonzero()[:, 0]
        frozen = {name: _Recorded(step, name, rows) for name in ("logp_proximal", "logp_ref")}
        examples = prepare(rollouts, objective, policy=frozen["logp_proximal"], reference=frozen["logp_ref"])
        return examples, rows


@dataclass(frozen=True, slots=True)
class _Recorded:
    """In the place of a model whose weights are gone: the log-probabilities that it gave."""

    step: RecordedStep
    column: str
    rows: Tensor

    def logp(self, examples: TokenBatch) -> Tensor:
        """The recorded column, in the form of `Reference.logp`."""
        if not self.step.has(self.column):
            raise NotReplayable(f"{self.column} was not recorded")
        values = torch.from_numpy(np.nan_to_num(self.step.padded(self.column)))[self.rows]
        return values[:, : examples.tokens.shape[1]]

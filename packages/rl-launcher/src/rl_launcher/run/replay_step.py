"""Compute the stages of a recorded step again, for `rl-observe replay RUN STEP`.

The parts are built from the run's recipe, in this process and on its CPU; the code is the loop's own. Stages that need
the weights take them from a checkpoint of the run with the version that the step began with, from `weights`, or from
the recipe's own model for a step of version 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_algorithms import distill, dpo, grpo, kto, offline, orpo, ppo, sft
from rl_algorithms.contracts import Conversation, ResettingEnvironment, TokenBatch, matches
from rl_algorithms.data import batches
from rl_algorithms.observation import ObservedStep, number_rows, numbered
from rl_algorithms.policy_gradient import kept_rows, prepare
from rl_algorithms.preferences.answers import answer_logp
from rl_algorithms.rollouts import Rollouts, episode_seed
from rl_algorithms.stepping import take_rows
from rl_launcher.build.build import build
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints.folders import POLICY, list_checkpoints
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run.step_recording import WatchedPolicy
from rl_launcher.schema import ClusterConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import RecordedStep, RunDirectory, read_metrics
from rl_observe.layers import LayerNorms
from rl_observe.recorded_steps import FIGURE
from rl_observe.replay import NotReplayable, Recompute

REPLAYED = ("grpo", "ppo", "distill", "sft", "dpo", "orpo", "kto")
"""Stages whose steps are replayed. A reward model is another model than the one that a step's weights are kept of."""


@contextmanager
def recompute(
    run: RunDirectory, step: RecordedStep, *, weights: Path | None = None, objects: Objects = NO_OBJECTS
) -> Iterator[Mapping[str, Recompute]]:
    """Functions that compute the stages of `step` again, by stage; they hold the models until the context ends.

    Of a run that another program has recorded there are none, so that what needs no model is still replayed.

    Args:
        run: the run that recorded the step.
        step: one of its steps, of a stage among `REPLAYED`.
        weights: a Hugging Face folder with the weights that the step began with.
        objects: Python objects that the run was started with.

    Raises:
        Refusal: the step is of another stage, or `weights` are given of a run that rl-launcher did not record.
        ValueError: the parts cannot be built.
    """
    if not run.origins.is_file():  # which this package writes beside each recipe of its own
        if weights is not None:
            raise Refusal(
                f"{run.path} was recorded by another program than rl-launcher, which alone knows the model that "
                f"--weights are of: leave it out"
            )
        yield {}
        return
    overrides = [] if weights is None else [f"policy.model_name={weights}", "policy.revision=null"]
    recipe: Recipe = load_recipe(run.recipe, schema=Recipe, overrides=overrides).value
    config = recipe.stages.get(step.stage)
    if step.stage not in REPLAYED or config is None:
        raise Refusal(
            f"step {step.step} is of the stage {step.stage}; replayed are steps of {', '.join(REPLAYED)} that "
            f"the run's recipe has"
        )
    with TemporaryDirectory(prefix="rl-launcher-replay-") as folder:
        recipe = replace(recipe, run_dir=folder, cluster=ClusterConfig())
        parts = build(recipe, objects=objects)
        try:
            kind = _Stages if step.stage in {"grpo", "ppo", "distill"} else _GivenRows
            stages = kind(run, step, recipe, config, parts, has_weights=weights is not None)
            functions: dict[str, Any] = {
                "prompt": stages.prompt,
                "logp": lambda _: stages.of_loss("logp"),
                "loss": lambda _: stages.of_loss("loss"),
                "gradient": lambda _: np.array([stages.first_update.metrics["grad_norm"]]),
                "layers": lambda _: stages.layers,
            }
            if isinstance(stages, _Stages):
                functions |= {
                    "reward": stages.reward, "advantage": stages.advantage, "logp_old": stages.logp_old
                }  # fmt: skip
            yield functions
        finally:
            parts.close()


@dataclass
class _OfWeights(ABC):
    """What every stage needs: the weights that the step began with, and its first update, taken again."""

    run: RunDirectory
    step: RecordedStep
    recipe: Recipe
    config: Any
    """The stage's section of the recipe."""
    parts: Parts
    has_weights: bool

    def of_loss(self, name: str) -> Any:
        """A column of the first update, by the loss that trained; a loss that is not one of tokens as one number."""
        update = self.first_update
        if name == "loss" and not self.step.has("loss"):
            return np.array([update.metrics["loss"]])
        if name not in update.columns:
            raise NotReplayable(f"the loss gives no {name}")
        found = np.full(self.step.filled.shape, np.nan, dtype=np.float32)
        values = torch.where(update.examples.trainable, update.columns[name].float(), float("nan")).numpy()
        found[update.rows.numpy(), : values.shape[1]] = values
        return found

    @property
    def layers(self) -> dict[str, float]:
        """What the layers of the policy put out in the first update."""
        self.first_update  # noqa: B018 - it is computed once
        return self._layers

    @cached_property
    def first_update(self) -> ObservedStep:
        """The first optimizer step on the batch, taken again: afterwards the weights are other ones."""
        policy, generation = self.parts.policy, self.recipe.policy.generation
        samples = self.step.stage in {"grpo", "ppo", "distill"} or (
            self.step.stage == "dpo" and self.config.pairs != "data"
        )
        policy.start_training(
            self.config.optimizer,
            num_steps=self.config.max_num_steps,
            temperature=generation.temperature if samples else 1.0,
        )
        self._load_weights()
        layers, seen = LayerNorms(getattr(policy, "model", None)), list[ObservedStep]()
        layers.expect()
        self._take_step(WatchedPolicy(policy, seen.append, every=True, layers=layers))
        self._layers = layers.take()
        return seen[0]

    @abstractmethod
    def _take_step(self, policy: WatchedPolicy) -> None:
        """Take the first optimizer step of the batch again, with `policy`."""

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


class _Stages(_OfWeights):
    """A step on rollouts."""

    def prompt(self, step: RecordedStep) -> Any:
        """Each data row rendered and tokenized again."""
        if matches(self.parts.environment, ResettingEnvironment):
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
        if self.step.stage == "distill" and self.recipe.env is None:
            raise NotReplayable("nothing is rewarded in this stage")
        if self.recipe.reward_model is not None:
            raise NotReplayable("a reward model of the run gave the rewards, and its weights are not kept by step")
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
        """The loop's own `prepare` on the recorded rewards, log-probabilities and values."""
        if self.step.stage == "distill":
            raise NotReplayable("a teacher takes the place of advantages")
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
        if self.step.stage == "grpo" and self.config.objective.selection.max_generation_batches > 1:
            raise NotReplayable("the batch was put together from several")
        self._load_weights()
        self.parts.weight_sync(version=step.version or 0)
        tokens, starts = step.padded("tokens"), step.response.argmax(axis=1)
        prompts = [tokens[row, :start].tolist() for row, start in enumerate(starts.tolist())]
        sampling = self.recipe.policy.generation.sampling()
        if step.data.get("by_request"):
            # As `rollouts.collect_batch` seeds them: by the prompt's place in the run, the row in its group, the turn.
            config, groups = self.config, step.columns["groups"].tolist()
            first, size = (step.step // config.steps_per_generation - 1) * config.num_prompts, groups.count(groups[0])
            of_groups = [episode_seed(self.recipe.seed, first + group, 0) for group in groups]
            seeds = [episode_seed(episode_seed(seed, row % size), 0) for row, seed in enumerate(of_groups)]
            made = list(self.parts.engine.generate_seeded(prompts, sampling, seeds=seeds))
        else:
            made = list(self.parts.engine.generate(prompts, sampling))
        found: Any = np.full(step.filled.shape, np.nan, dtype=np.float32)
        for row, (start, rollout) in enumerate(zip(starts.tolist(), made, strict=True)):
            length = min(len(rollout.tokens), found.shape[1] - start)
            same = np.array(rollout.tokens[:length]) == tokens[row, start : start + length]
            kept = length if same.all() else int(same.argmin())
            found[row, start : start + kept] = rollout.logp[:kept]
        return found

    def _take_step(self, policy: WatchedPolicy) -> None:
        step, config = self.step, self.config
        number = step.step // config.steps_per_generation - 1
        seed = episode_seed(self.recipe.seed, number)
        if step.stage == "distill":
            first = self._first_of_distill(seed)
        else:
            examples, _ = self._examples(step)
            rollouts = self._rollouts(step)
            given = number_rows(examples, rollouts, config.objective)
            if step.stage == "grpo":
                groups = rollouts.groups[given.rows]
                first = next(iter(grpo.minibatches(given, config, groups=groups, seed=seed)), None)
            else:
                first = self._first_of(given, parts=config.steps_per_generation // config.num_epochs, seed=seed)
        if first is None:
            raise NotReplayable("nothing was trained on in this step")
        recorded = set(np.flatnonzero(step.row("update", missing=0) == 0).tolist())
        if set(first.rows.tolist()) != recorded:
            raise NotReplayable(
                f"the first update would train on other rows than the {len(recorded)} recorded ones: another seed, or "
                f"other advantages"
            )
        if step.stage == "distill":
            distill.step(policy, first, config)
        else:
            grpo.step(policy, first, config.objective)

    def _first_of(self, examples: Any, *, parts: int, seed: int) -> Any:
        """The first minibatch, as the loops of PPO and distillation deal the rows."""
        rows = examples.trainable.any(dim=1).nonzero()[:, 0]
        order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))].tensor_split(parts)
        return next((take_rows(examples, part) for part in order if len(part)), None)

    def _first_of_distill(self, seed: int) -> Any:
        if self.config.teacher_prompt_template is not None:
            raise NotReplayable("the teacher read another prompt, which was not recorded")
        rollouts, teacher = self._rollouts(self.step), self.parts.teacher
        assert teacher is not None  # the recipe has the stage
        kept = rollouts.take(~rollouts.failed)
        rows = distill.Rows(tokens=kept.tokens, lengths=kept.lengths, trainable=kept.response)
        examples = numbered(distill.prepare(rows, teacher, k=self.config.k), (~rollouts.failed).nonzero()[:, 0])
        return self._first_of(examples, parts=self.config.steps_per_generation, seed=seed)

    def _prompts(self) -> list[Any]:
        by_source = {prompt.row.where: prompt for prompt in self.parts.data.prompts}
        if "sources" in self.step.cut:
            raise NotReplayable(self.step.cut_told)
        sources = [shared["source"] for shared in self.step.shared]
        if missing := [str(source) for source in sources if source not in by_source]:
            raise NotReplayable(f"the data have no row {missing[0]}: they changed, or lie elsewhere")
        return [by_source[source] for source in sources]

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
        if objective.advantage.compares_greedy:
            raise NotReplayable("the rewards of greedy responses, which the advantage needs, were not recorded")
        rows = kept_rows(rollouts, objective).nonzero()[:, 0]
        frozen: dict[str, Any] = {name: _Recorded(step, name, rows) for name in ("logp_proximal", "logp_ref")}
        if step.stage == "ppo":
            critic: Any = _Recorded(step, "value", rows)
            ready = ppo.prepare(
                rollouts,
                self.config,
                value_model=critic,
                policy=frozen["logp_proximal"],
                reference=frozen["logp_ref"],
            )
            return ready[0], rows
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

    def value(self, examples: TokenBatch) -> Tensor:
        """The recorded values, in the form of `ValueModel.value`: of rows one token longer."""
        known, values = self.logp(examples), torch.zeros(examples.tokens.shape)
        values[:, : known.shape[1]] = known
        if self.step.has(f"{FIGURE}last_value"):
            rows = torch.arange(len(values))
            after = examples.lengths - 1  # the row's own length, where it is one token longer
            last = torch.from_numpy(self.step.columns[f"{FIGURE}last_value"].copy())[self.rows]
            own = torch.from_numpy(self.step.columns["lengths"].astype(np.int64))[self.rows]
            values[rows[after == own], own[after == own]] = last[after == own]
        return values


class _GivenRows(_OfWeights):
    """A step on demonstrations, pairs or labelled responses."""

    def prompt(self, step: RecordedStep) -> Any:
        """The rows that the data set gives for this step, rendered and tokenized again: all of their tokens."""
        data, config = self.parts.data, self.config
        size, seed = config.batch_size, self.recipe.seed
        if step.stage == "sft":
            drawn = next(islice(batches(data.demonstrations, size=size, seed=seed), step.step - 1, None))
            examples: Any = sft.prepare(drawn)
        else:
            if step.stage == "dpo" and config.pairs != "data":
                raise NotReplayable("the pairs were sampled")
            rows: Any
            if step.stage == "kto":
                rows = None if data.labelled is None else kto.prepare(data.labelled.train)
            else:
                rows = None if data.pairs is None else data.pairs.train
            if rows is None:
                raise NotReplayable("the recipe's data have no such rows")
            examples = next(offline.draw_batches(rows, config=config, steps_taken=step.step - 1, seed=seed))
        width = step.filled.shape[1]
        if examples.tokens.shape[0] != len(step):
            raise NotReplayable(
                f"the data give {examples.tokens.shape[0]} rows for this step, recorded are {len(step)}"
            )
        filled = torch.arange(examples.tokens.shape[1]) < examples.lengths[:, None]
        tokens = torch.where(filled, examples.tokens, -1)[:, :width].numpy()
        return np.pad(tokens, ((0, 0), (0, width - tokens.shape[1])), constant_values=-1)

    def _take_step(self, policy: WatchedPolicy) -> None:
        step, config = self.step, self.config
        rows: dict[str, Any] = {
            "tokens": torch.from_numpy(np.where(step.filled, step.padded("tokens"), 0)),
            "lengths": torch.from_numpy(step.columns["lengths"].astype(np.int64)),
            "trainable": torch.from_numpy(step.trainable.copy()),
        }

        def figure(name: str) -> Tensor:
            if not step.has(FIGURE + name):
                return torch.full((len(step),), torch.nan)
            return torch.from_numpy(step.columns[FIGURE + name].copy())

        match step.stage:
            case "sft":
                sft.step(policy, sft.Examples(**rows, weight=figure("weight")), config)
            case "dpo":
                dpo.step(policy, dpo.Examples(**rows, logp_ref=figure("logp_ref")), config)
            case "orpo":
                orpo.step(policy, orpo.Examples(**rows), config)
            case "kto":
                # z comes from rows with exchanged responses, which are not recorded; it is logged as "kl".
                row = next((row for row in read_metrics(self.run) if _is_step(row, "kto", step.step)), {})
                if row.get("kl") is None:
                    raise NotReplayable("the z of this step, logged as kl, is not in metrics.jsonl")
                z, good = float(str(row["kl"])), torch.from_numpy(step.columns["rewards"] > 0)
                examples = kto.Examples(**rows, desirable=good, logp_ref=figure("logp_ref"))

                def loss(logp: Tensor, part: kto.Examples) -> tuple[Tensor, dict[str, Tensor]]:
                    logratio = answer_logp(logp, part.trainable) - part.logp_ref
                    total = kto.kto(logratio, part.desirable, config, z=z).sum() / len(step)
                    return total, {"loss": total.detach()}

                offline.take_step(policy, examples, loss, mean_over=len(step))


def _is_step(row: Mapping[str, Any], stage: str, number: int) -> bool:
    return row.get("stage") == stage and row.get("step") == number

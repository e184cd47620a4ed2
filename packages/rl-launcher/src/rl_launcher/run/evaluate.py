"""Evaluate a model on held-out data, during a run or on its own.

The engine samples responses to held-out prompts, which are scored if the recipe has an `env`; losses are the policy's.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from rl_algorithms import evaluation
from rl_algorithms.chat import Prompt
from rl_algorithms.contracts import Conversation, Environment, EnvironmentReturn
from rl_algorithms.environments.counted_environment import Judge
from rl_algorithms.evaluation import Accuracy, HeldOut, Measured, Outcome
from rl_algorithms.rollouts import Rollouts
from rl_generation import Sampling
from rl_launcher.build.build import build
from rl_launcher.build.parts import Parts
from rl_launcher.checks import preflight
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files import Resolved, load_recipe
from rl_launcher.schema import HOW_TO_JUDGE, STAGES, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects
from rl_observe import Sample, SampleTokens, token_sample


class _Unscored:
    """An environment for responses that are only shown to people."""

    def step(self, conversations: Sequence[Conversation]) -> Sequence[EnvironmentReturn]:
        """End every conversation after its first response."""
        return [EnvironmentReturn(reward=0.0, terminated=True) for _ in conversations]


OWN_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "max_new_tokens")
"""Keys of `evaluation` that replace those of `policy.generation`."""
TURNS_WITHOUT_STAGE = 8
"""Responses in one conversation at most, where no stage says it and the environment goes on."""
FIRST_CALL = 1 << 40
"""The number of an evaluation's first engine call: always the same, and far from those of training."""


class Evaluator:
    """Samples responses to the same held-out prompts with the same seeds every time, and reads the same rows."""

    def __init__(self, parts: Parts, recipe: Recipe) -> None:
        self._parts, self._config = parts, recipe.evaluation
        self._has_env, self._seed = recipe.env is not None, recipe.seed
        self._num_samples = recipe.num_samples
        self._imitates = [*recipe.stages] == ["sft"]
        given = {name: getattr(recipe.evaluation, name) for name in OWN_SAMPLING}
        own: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        self._sampled = replace(recipe.policy.generation.sampling(), **own)
        self._greedy = replace(self._sampled, temperature=0.0)
        self._num_with_tokens = recipe.logger.num_samples_with_tokens
        self._turns = turn_limits(recipe)
        self._demonstrations = parts.data.held_out_demonstrations[: self._config.max_prompts_while_training]

    @property
    def _judge(self) -> Judge | None:
        """What scores responses: `env`, or else the reward model of this run once it is trained; None if neither."""
        return self._parts.environment if self._has_env else self._parts.companions.judge

    @property
    def size(self) -> int:
        """Held-out prompts before and after training; without an `env`, rows or pairs that are measured."""
        if self._judge is not None:
            return min(self._config.max_prompts, len(self._parts.data.held_out))
        if self._parts.data.labelled is not None:
            return min(self._config.max_prompts_while_training, len(self._parts.data.labelled.held_out))
        if self._parts.data.pairs is not None:
            return min(self._config.max_prompts_while_training, len(self._parts.data.pairs.held_out.tokens) // 2)
        return len(self._demonstrations)

    def outcome(self) -> Outcome:
        """All that is measured before and after training."""
        loss = self.loss() if self._imitates else {}
        if self._judge is None:
            return Outcome(answers=None, figures=loss)
        sets = {name: value for each, held in self.sets().items() for name, value in held.metrics_of(each).items()}
        return Outcome(answers=self.both(), figures={**loss, **sets})

    def sets(self, *, most: int | None = None) -> dict[str, HeldOut]:
        """The same of each of `evaluation.sets`; while training, of at most `most` of their prompts."""
        config, found = self._config, {}
        for name, prompts in self._parts.validation.items():
            asked = prompts[: config.max_prompts if most is None else most]
            each = config.sets[name].samples_per_prompt or config.samples_per_prompt
            sampled = most is None or config.while_training == "sampled"
            greedy = config.greedy if most is None else config.while_training == "greedy"
            found[name] = HeldOut(
                sampled=self._sample(self._sampled, asked, samples=each) if sampled else None,
                greedy=self._sample(self._greedy, asked) if greedy else None,
            )
        return found

    def both(self) -> HeldOut:
        """Sampled responses to all held-out prompts, and greedy ones unless `evaluation.greedy` is false."""
        prompts = self._parts.data.held_out[: self.size]
        sampled = self._sample(self._sampled, prompts, samples=self._config.samples_per_prompt)
        greedy = self._sample(self._greedy, prompts) if self._config.greedy else None
        return HeldOut(sampled=sampled, greedy=greedy)

    def quick(self) -> dict[str, float]:
        """What `evaluation.while_training` measures, of the prompts that are used then; empty without a reward."""
        if self._judge is None:
            return {}
        most = self._config.max_prompts_while_training
        prompts = self._parts.data.held_out[:most]
        sets = {
            name: value for each, held in self.sets(most=most).items() for name, value in held.metrics_of(each).items()
        }
        if self._config.while_training == "greedy":
            return {"held_out_greedy": self._sample(self._greedy, prompts).mean, **sets}
        sampled = self._sample(self._sampled, prompts, samples=self._config.samples_per_prompt)
        return {**HeldOut(sampled=sampled, greedy=None).metrics(), **sets}

    def loss(self) -> dict[str, float]:
        """The policy's `held_out_loss`: -logp of a trained token of held-out demonstrations, in nats; {} without any.

        Always of the same rows, also before and after training, so that its values form one curve.
        """
        if not self._demonstrations:
            return {}
        return {"held_out_loss": evaluation.demonstration_nll(self._parts.policy, self._demonstrations)}

    def samples(self, outcome: Outcome, *, stage: str, when: Literal["before", "after"]) -> list[Sample]:
        """The first few sampled responses for the report; without an `env` they are sampled here."""
        prompts = self._parts.data.held_out[: min(self._num_samples, self._config.max_prompts)]
        if not prompts:
            return []
        if outcome.answers is None:
            rollouts, each = self._sample(self._sampled, prompts, environment=_Unscored()).rollouts, 1
        else:
            assert outcome.answers.sampled is not None  # `both` samples
            rollouts, each = outcome.answers.sampled.rollouts, self._config.samples_per_prompt
        samples: list[Sample] = []
        for number, prompt in enumerate(prompts):
            row = number * each  # the first response to each prompt
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

    def _sample(
        self, how: Sampling, prompts: Sequence[Prompt], *, samples: int = 1, environment: Environment | None = None
    ) -> Accuracy:
        parts, config = self._parts, self._config
        judge = self._judge if environment is None else environment
        assert judge is not None  # callers check
        pass_at = tuple(k for k in config.pass_at if k <= samples)
        return evaluation.evaluate(
            prompts,
            engine=parts.engine.reseeded(self._seed, first_call=FIRST_CALL),
            sampling=how,
            environment=judge,
            chat=parts.data.chat,
            samples_per_prompt=samples,
            seed=self._seed,
            figures=evaluation.Figures(pass_at=pass_at, pass_reward=config.pass_reward),
            **self._turns,
        )


def turn_limits(recipe: Recipe) -> dict[str, Any]:
    """`max_turns` and `max_length` of a conversation, as the recipe's sampling stage has them.

    Without such a stage, as where `sft` is the only one, an environment gets `TURNS_WITHOUT_STAGE` responses.
    """
    stage = recipe.grpo or recipe.ppo or recipe.dpo or recipe.distill
    if stage is not None:
        return {"max_turns": stage.max_turns, "max_length": stage.max_length}
    converses = recipe.env is not None and recipe.env.environment is not None
    return {"max_turns": TURNS_WITHOUT_STAGE if converses else 1}


def measured_recipe(subject: Path, *, overrides: Sequence[str] = (), model: str | None = None) -> Resolved[Recipe]:
    """The recipe to evaluate `subject` by: a recipe or a run, with `model` instead of the recipe's.

    Raises:
        Refusal: it is neither, or the run has no model.
    """
    is_run = subject.is_dir()
    file = subject / "recipe.yaml" if is_run else subject
    if is_run and not file.is_file() and (subject / "config.json").is_file():
        raise Refusal(
            f"{subject} is a model, and the prompts to evaluate it on are named by a recipe: rl-launcher evaluate "
            f"RECIPE --model {subject}"
        )
    if is_run and not file.is_file():
        raise Refusal(f"{subject} is no run: it holds no recipe.yaml; give a run's directory, or a recipe")
    if is_run and model is None:
        model = str(subject / "model")
        if not Path(model).is_dir():
            raise Refusal(
                f"{subject} has no model, since the run ended early. Export one of its checkpoints with "
                f"`rl-launcher export {subject} FOLDER`, and evaluate it with --model FOLDER"
            )
    named = [] if model is None else [f"policy.model_name={json.dumps(model)}", "policy.revision=null"]
    return load_recipe(file, schema=Recipe, overrides=[*overrides, *named])


def measure(resolved: Resolved[Recipe], objects: Objects = NO_OBJECTS) -> Measured:
    """Sample responses to the held-out prompts of a recipe, and score them.

    Raises:
        Refusal: the recipe has no `env` to score them by; or whatever a part refuses.
    """
    recipe = resolved.value
    if recipe.env is None:
        raise Refusal(f"measuring scores responses to held-out prompts, and the recipe has no env; {HOW_TO_JUDGE}")
    without: Any = dict.fromkeys(STAGES)
    preflight.check(replace(recipe, **without), new_run=False)
    with tempfile.TemporaryDirectory(prefix="rl-launcher-evaluate-") as folder:
        # On Ray the parts write logs, which nobody reads here. Of the stages only the limits of turns are used.
        ppo = None if recipe.ppo is None else replace(recipe.ppo, critic=replace(recipe.ppo.critic, start_from=None))
        unused: Any = dict.fromkeys(("sft", "reward_model", "distill"))
        parts = build(replace(recipe, run_dir=folder, ppo=ppo, **unused), objects=objects)
        try:
            parts.weight_sync(version=0)
            evaluator = Evaluator(parts, recipe)
            held_out, sets = evaluator.both(), evaluator.sets()
        finally:
            parts.close()
    return Measured(
        model=recipe.policy.model_name,
        held_out=held_out,
        num_prompts=evaluator.size,
        samples_per_prompt=recipe.evaluation.samples_per_prompt,
        num_failed=held_out.num_failed,
        sets=sets,
    )

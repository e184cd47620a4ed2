"""`Recipe`: a whole recipe, made of sections, and the rules that hold between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

from rl_algorithms import presets
from rl_algorithms.data.config import DataConfig
from rl_algorithms.environments.config import EnvironmentConfig
from rl_algorithms.evaluation import EvaluationConfig
from rl_algorithms.objective import Objective
from rl_launcher.recipe_files.dataclass_schema import STRICT, to_plain
from rl_launcher.recipe_files.nodes import Node, merge, node_of
from rl_launcher.recipe_files.problems import Problem, RecipeError
from rl_launcher.schema.policy import PolicyConfig
from rl_launcher.schema.running import CheckpointingConfig, ClusterConfig
from rl_launcher.schema.stages import DistillStage, DPOStage, GRPOStage, SFTStage
from rl_observe import HealthConfig
from rl_observe.config import LoggerConfig

HEADLINES = ("grpo", "dpo", "distill")
STAGES = ("sft", *HEADLINES)
"""All stages in the order in which they run; a run has at most one of the headlines."""

HOW_TO_JUDGE = (
    'write env: {reward: "reward.py:score"}, a file and a function in it, or env: {environment: "file.py:name"}'
)
HELD_OUT_LOSS = "held_out_loss"
METRICS_OF_REWARDS = ("held_out_greedy", "held_out_sampled", "held_out_pass@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run. Its stages are the sections that are present: `sft` first, then one of `grpo`, `dpo` and `distill`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    foreign_keys: ClassVar[Path] = Path(__file__).parent / "foreign_keys.yaml"
    """Keys of TRL, verl and OpenRLHF with ours; `load_recipe` answers an unknown key from it."""

    expanded_keys: ClassVar[Mapping[type, Mapping[str, str]]] = {
        Objective: {
            key: f"Argument of preset={', '.join(name for name in names if key in presets.preset_arguments(name))}."
            for names in [presets.preset_names()]
            for key in dict.fromkeys(argument for name in names for argument in presets.preset_arguments(name))
        }
    }
    """Keys that `adjust` replaces by others, for editors: the arguments of presets."""

    run_dir: str
    """Directory for everything that the run writes. It must not exist yet."""

    seed: int = 0
    """Seed of initial weights, data order and sampling. The same recipe and seed give the same run on one machine."""

    cpu_threads: int | None = None
    """Threads that torch uses on the CPU; null leaves it to torch. Tiny models are fastest with 1."""

    policy: PolicyConfig
    """The model that is trained and the engine that samples from it."""

    data: DataConfig
    """The prompts."""

    env: EnvironmentConfig | None = None
    """The reward function or environment. Null for sft and for dpo on given pairs, which have no rewards; held-out rows
    then measure the loss."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How the policy is measured on held-out prompts."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Processes and nodes."""

    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """When checkpoints are written and which are kept."""

    health: HealthConfig = field(default_factory=HealthConfig)
    """Which signs of trouble are watched for."""

    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where metrics are sent."""

    sft: SFTStage | None = None
    """Supervised fine-tuning, before any other stage; null leaves it out."""

    grpo: GRPOStage | None = None
    """Reinforcement learning with GRPO; null leaves it out."""

    dpo: DPOStage | None = None
    """Preference learning with DPO; null leaves it out."""

    distill: DistillStage | None = None
    """On-policy distillation from a teacher; null leaves it out."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"cpu_threads={self.cpu_threads} must be null or >= 1")
        if len(given := [name for name in HEADLINES if name in self.stages]) > 1:
            raise ValueError(f"{' and '.join(given)} are given, and a run has only one of them; set the others to null")
        for name, stage in self.stages.items():
            if (warmup := stage.optimizer.warmup_steps) >= stage.max_num_steps:
                raise ValueError(
                    f"{name}.optimizer.warmup_steps={warmup} must be less than {name}.max_num_steps="
                    f"{stage.max_num_steps}, or the learning rate never reaches its peak; set "
                    f"{name}.optimizer.warmup_steps={max(stage.max_num_steps // 2, 0)}"
                )
        if self.env is None:
            _refuse_what_needs_rewards(self)
        if self.grpo is not None and self.env is not None:
            _check_grpo(self.grpo, self.env, self.policy)
        saved = self.checkpointing
        if saved.keep_top_k and saved.metric_name == HELD_OUT_LOSS and saved.higher_is_better:
            raise ValueError(
                f"checkpointing.keep_top_k={saved.keep_top_k} would keep the highest {saved.metric_name}, and the "
                f"lowest is the best; set checkpointing.higher_is_better=false"
            )

    @property
    def stages(self) -> dict[str, Any]:
        """The sections that are present, by name, in the order in which they run."""
        return {name: stage for name in STAGES if (stage := getattr(self, name)) is not None}

    @property
    def headline(self) -> str:
        """The last stage, which the run is about: "before" and "after" mean before and after this stage.

        Raises:
            ValueError: there is no stage.
        """
        if not self.stages:
            raise ValueError(
                f"{', '.join(STAGES)} are all absent, so there is nothing to train; give at least one of them "
                f"(rl-launcher evaluate needs none)"
            )
        return [*self.stages][-1]

    @classmethod
    def adjust(cls, recipe: Node) -> tuple[Node, list[str]]:
        """Expand `grpo.objective.preset`, and fit what a recipe inherits into a run that was made shorter.

        A run takes at least the optimizer steps of one batch of rollouts, and a warm-up longer than the run is
        shortened to half of it. What the user set beside the number of steps stays as it is, and is refused.
        """
        recipe, notes = _expand_preset(recipe)

        def is_inherited(key: Node, beside: Node) -> bool:
            was_overridden = beside.key.override is not None and key.key.override is None
            return was_overridden or (key.key.is_shipped and not beside.key.is_shipped)

        for name in STAGES:
            steps, has_steps = recipe.find((name, "max_num_steps"))
            if not has_steps or type(steps.value) is not int or steps.value < 1:
                continue
            given = f"{name}.max_num_steps={steps.value} ({steps.key})"
            batch, has_batch = recipe.find((name, "steps_per_generation"))
            if has_batch and type(batch.value) is int and batch.value > steps.value and is_inherited(batch, steps):
                notes.append(f"{given} is raised to {batch.value}, the optimizer steps of one batch of rollouts")
                steps = replace(steps, value=batch.value)
                recipe = recipe.with_value((name, "max_num_steps"), steps)
            path = (name, "optimizer", "warmup_steps")
            warmup, has_warmup = recipe.find(path)
            is_int = has_warmup and type(warmup.value) is int
            if is_int and warmup.value >= steps.value and is_inherited(warmup, steps):  # type: ignore[operator]
                half = steps.value // 2  # type: ignore[operator]
                was = f"{name}.optimizer.warmup_steps={warmup.value} ({warmup.key})"
                notes.append(f"{was} is shortened to {half}, since {given}")
                recipe = recipe.with_value(path, replace(steps, value=half))
        return recipe, notes


def _expand_preset(recipe: Node) -> tuple[Node, list[str]]:
    """Replace `grpo.objective.preset` and its arguments by the fields of that objective; other keys win over these.

    Raises:
        RecipeError: there is no such preset, or it refuses an argument.
    """
    path = ("grpo", "objective")
    section, found = recipe.find(path)
    if not found or not isinstance(section.value, dict):
        return recipe, []
    children = dict(section.value)
    named = children.pop("preset", None)
    if named is None or named.value is None:
        return recipe, []
    try:
        arguments = presets.preset_arguments(str(named.value))
        given = {name: children.pop(name).plain() for name in arguments if name in children}
        surrogate, is_another = section.find(("ratio", "surrogate"))
        made = presets.preset(str(named.value), **given)
        made = presets.with_surrogate(made, str(surrogate.value) if is_another else None)
    except (TypeError, ValueError) as error:
        problem = Problem(
            key="grpo.objective.preset",
            where=named.where,
            message=str(error),
            hint="`rl-algorithms explain` lists the presets, and `rl-algorithms explain NAME` prints one",
        )
        raise RecipeError("the recipe", [problem]) from error
    base = node_of(to_plain(made), named.origin)
    expanded = merge(base, replace(section, value=children))
    note = f"grpo.objective starts from the preset {named.value} ({named.where})"
    if children:
        note += f", and {', '.join(f'grpo.objective.{name}' for name in children)} change it"
    return recipe.with_value(path, expanded), [note]


def _refuse_what_needs_rewards(recipe: Recipe) -> None:
    needs = {"grpo": "learns from rewards", "distill": "logs the rewards of its rollouts"}
    if recipe.dpo is not None and recipe.dpo.pairs != "data":
        needs["dpo"] = "pairs its own responses by their rewards (dpo.pairs=data takes given pairs)"
    for name in recipe.stages:
        if name in needs:
            raise ValueError(f"{name} {needs[name]}, and env is missing; {HOW_TO_JUDGE}")
    saved = recipe.checkpointing
    if saved.keep_top_k and (saved.metric_name == "reward" or saved.metric_name.startswith(METRICS_OF_REWARDS)):
        other = "held_out_pair_accuracy" if recipe.dpo is not None else f"{HELD_OUT_LOSS} with higher_is_better=false"
        raise ValueError(
            f"checkpointing.keep_top_k={saved.keep_top_k} keeps the best by metric_name={saved.metric_name}, and "
            f"without env no response gets a reward; set metric_name={other}, or keep_top_k=0"
        )
    for each in fields(EvaluationConfig):
        value = getattr(recipe.evaluation, each.name)
        if each.name in {"samples_per_prompt", "pass_at", "pass_reward"} and value != each.default:
            raise ValueError(
                f"evaluation.{each.name}={value} concerns responses with rewards, and env is missing; leave the key "
                f"out, or {HOW_TO_JUDGE}"
            )


def _check_grpo(stage: GRPOStage, env: EnvironmentConfig, policy: PolicyConfig) -> None:
    advantage, generation = stage.objective.advantage, policy.generation
    if advantage.normalize_each_reward:
        compared = [name for name in env.rewards if env.weights.get(name, 1.0)]
        if not compared:
            raise ValueError(
                "grpo.objective.advantage.normalize_each_reward=true compares rewards by name, and env names none; "
                "give env.rewards={name: function, ...} instead of env.reward"
            )
        if unknown := sorted(set(advantage.reward_weights) - set(compared)):
            raise ValueError(
                f"grpo.objective.advantage.reward_weights names {', '.join(unknown)}, and the rewards that count "
                f"are {', '.join(compared)}"
            )
    if stage.max_turns > 1 and env.environment is None:
        raise ValueError(
            f"grpo.max_turns={stage.max_turns} needs an environment that replies to a response, and a reward function "
            f"ends every conversation; name one by env.environment"
        )
    takes_weights_in_flight = generation.backend == "vllm" and generation.vllm_cfg.async_engine
    if stage.async_grpo is not None and stage.async_grpo.weights == "in_flight" and not takes_weights_in_flight:
        raise ValueError(
            f"grpo.async_grpo.weights=in_flight changes weights in the middle of responses, and policy.generation."
            f"backend={generation.backend} with vllm_cfg.async_engine={str(generation.vllm_cfg.async_engine).lower()} "
            f"changes them between calls; set backend=vllm and async_engine=true, or weights=between_calls"
        )

"""A whole recipe: its sections, and what must hold between them."""

from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from rl_launcher.schema.data import DataConfig, EnvironmentConfig, EvaluationConfig
from rl_launcher.schema.policy import PolicyConfig
from rl_launcher.schema.running import CheckpointingConfig, ClusterConfig
from rl_launcher.schema.stages import DistillStage, DPOStage, GRPOStage, SFTStage
from rl_launcher.schema.strict import STRICT
from rl_observe import HealthConfig
from rl_observe.config import LoggerConfig

__all__ = ["HEADLINES", "HOW_TO_JUDGE", "STAGES", "Recipe"]

HEADLINES = ("grpo", "dpo", "distill")
STAGES = ("sft", *HEADLINES)
"""In the order in which they run; of the headlines a run takes one."""

HOW_TO_JUDGE = (
    'write env: {reward: "reward.py:score"}, a file and a function in it, or env: {environment: "file.py:name"}'
)
HELD_OUT_LOSS = "held_out_loss"
OF_JUDGED_ANSWERS = {
    field.name: field.default
    for field in fields(EvaluationConfig)
    if field.name in {"samples_per_prompt", "pass_at", "pass_reward"}
}
OF_ANSWERS = ("held_out_greedy", "held_out_sampled", "held_out_pass@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run. Its stages are the sections that are there: `sft` first, then one of `grpo`, `dpo` and `distill`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    run_dir: str
    """Where everything that the run leaves goes; a folder that does not exist yet."""

    seed: int = 0
    """Of weights, data order and sampling. The same recipe and seed give the same run on the same machine."""

    cpu_threads: int | None = None
    """Threads that torch computes with on the CPU; null leaves it to torch. Tiny models are fastest with 1."""

    policy: PolicyConfig
    """The model and its engine."""

    data: DataConfig
    """The prompts."""

    env: EnvironmentConfig | None = None
    """The reward. Null where nothing is judged: sft, and dpo on given pairs; then held-out rows measure the loss."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The held-out prompts."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """The machines."""

    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """What is saved to go on from."""

    health: HealthConfig = field(default_factory=HealthConfig)
    """What is watched."""

    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where figures go."""

    sft: SFTStage | None = None
    """Warm start; null to leave it out."""

    grpo: GRPOStage | None = None
    """Reinforcement learning; null to leave it out."""

    dpo: DPOStage | None = None
    """Preference learning; null to leave it out."""

    distill: DistillStage | None = None
    """On-policy distillation; null to leave it out."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"cpu_threads={self.cpu_threads} must be null or >= 1")
        if len(given := [name for name in HEADLINES if name in self.stages]) > 1:
            raise ValueError(f"{' and '.join(given)} are given, and a run takes one of them; set the others to null")
        for name, stage in self.stages.items():
            _refuse_endless_warmup(name, stage)
        if self.env is None:
            _refuse_what_needs_a_judge(self)
        if self.grpo is not None and self.env is not None:
            _refuse_rewards_without_names(self.grpo, self.env)
            _refuse_turns_without_environment(self.grpo, self.env)
            _refuse_weights_that_no_engine_takes(self.grpo, self.policy)
        if self.checkpointing.keep_top_k and self.checkpointing.metric_name == HELD_OUT_LOSS:
            _refuse_the_highest_loss(self.checkpointing)

    @property
    def stages(self) -> dict[str, Any]:
        """The sections that are there, by name, in the order in which they run."""
        return {name: stage for name in STAGES if (stage := getattr(self, name)) is not None}

    @property
    def headline(self) -> str:
        """The stage that the run is about: before and after mean before and after this one.

        Raises:
            ValueError: there is no stage.
        """
        if not self.stages:
            raise ValueError(
                f"{', '.join(STAGES)} are all absent, so there is nothing to train; give at least one of them "
                f"(rl-launcher evaluate needs none)"
            )
        return [*self.stages][-1]


def _refuse_what_needs_a_judge(recipe: Recipe) -> None:
    judged = {"grpo": "learns from rewards", "distill": "logs the rewards of what it learns from"}
    if recipe.dpo is not None and recipe.dpo.pairs == "sampled":
        judged["dpo"] = "pairs its own answers by their rewards (dpo.pairs=data takes given pairs)"
    for name in recipe.stages:
        if name in judged:
            raise ValueError(f"{name} {judged[name]}, and env is missing; {HOW_TO_JUDGE}")
    saved = recipe.checkpointing
    if saved.keep_top_k and (saved.metric_name == "reward" or saved.metric_name.startswith(OF_ANSWERS)):
        other = "held_out_pair_accuracy" if recipe.dpo is not None else f"{HELD_OUT_LOSS} with higher_is_better=false"
        raise ValueError(
            f"checkpointing.keep_top_k={saved.keep_top_k} keeps the best by metric_name={saved.metric_name}, and "
            f"without env no answer is judged; say metric_name={other}, or keep_top_k=0"
        )
    for key, default in OF_JUDGED_ANSWERS.items():
        if (value := getattr(recipe.evaluation, key)) != default:
            raise ValueError(
                f"evaluation.{key}={value} is about answers that are judged, and env is missing; leave the key out, or "
                f"{HOW_TO_JUDGE}"
            )


def _refuse_the_highest_loss(saved: CheckpointingConfig) -> None:
    if saved.higher_is_better:
        raise ValueError(
            f"checkpointing.keep_top_k={saved.keep_top_k} would keep the highest {saved.metric_name}, and the lowest "
            f"is the best; say checkpointing.higher_is_better=false"
        )


def _refuse_endless_warmup(name: str, stage: Any) -> None:
    if stage.optimizer.warmup_steps >= stage.max_num_steps:
        raise ValueError(
            f"{name}.optimizer.warmup_steps={stage.optimizer.warmup_steps} must be less than "
            f"{name}.max_num_steps={stage.max_num_steps}, or the learning rate never reaches its peak"
        )


def _refuse_rewards_without_names(stage: GRPOStage, env: EnvironmentConfig) -> None:
    if not stage.objective.advantage.normalize_each_reward:
        return
    compared = [name for name in env.rewards if env.weights.get(name, 1.0)]
    if not compared:
        raise ValueError(
            "grpo.objective.advantage.normalize_each_reward=true compares rewards by name, and env names none; "
            "give env.rewards={name: function, ...} in the place of env.reward"
        )
    if unknown := sorted(set(stage.objective.advantage.reward_weights) - set(compared)):
        raise ValueError(
            f"grpo.objective.advantage.reward_weights names {', '.join(unknown)}, and the rewards that count "
            f"are {', '.join(compared)}"
        )


def _refuse_turns_without_environment(stage: GRPOStage, env: EnvironmentConfig) -> None:
    if stage.max_turns > 1 and env.environment is None:
        raise ValueError(
            f"grpo.max_turns={stage.max_turns} needs somebody who goes on after an answer, and a reward function ends "
            f"every conversation; name an environment by env.environment"
        )


def _refuse_weights_that_no_engine_takes(stage: GRPOStage, policy: PolicyConfig) -> None:
    generation = policy.generation
    if stage.async_grpo is None:
        return
    able = generation.backend == "vllm" and generation.vllm_cfg.async_engine
    if stage.async_grpo.weights == "in_flight" and not able:
        raise ValueError(
            f"grpo.async_grpo.weights=in_flight brings weights in the middle of answers, and policy.generation.backend="
            f"{generation.backend} with vllm_cfg.async_engine={str(generation.vllm_cfg.async_engine).lower()} takes "
            f"them between calls; say backend=vllm and async_engine=true, or weights=between_calls"
        )

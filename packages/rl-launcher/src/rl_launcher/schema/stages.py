"""The stages of a recipe: for each the loop's own configuration from rl-algorithms, and its optimizer."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from rl_algorithms.async_grpo import AsyncGRPOConfig
from rl_algorithms.chat import TrainOn
from rl_algorithms.data.config import DataConfig
from rl_algorithms.distill import DistillConfig
from rl_algorithms.dpo import DPOConfig
from rl_algorithms.grpo import GRPOConfig
from rl_algorithms.kto import KTOConfig
from rl_algorithms.orpo import ORPOConfig
from rl_algorithms.ppo import PPOConfig
from rl_algorithms.reward_model import RewardModelConfig
from rl_algorithms.sft import SFTConfig
from rl_algorithms.staleness import AsyncConfig
from rl_backends import OptimizerConfig
from rl_launcher.recipe_files.dataclass_schema import STRICT

MOST_STEPS = 10**9
"""`max_num_steps` of a stage that is measured in epochs alone."""

SAMPLING = frozenset({"num_prompts", "num_generations_per_prompt", "pairs_per_prompt", "max_turns", "max_length"})
"""Keys of DPO that have no effect on given pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStage(SFTConfig):
    """Supervised fine-tuning on the answers of the data, before any other stage."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""

    train_on: TrainOn = "assistant"
    """Which messages of a conversation contribute to the loss: every `assistant` message, only the `last_turn`, or
    `all`. A message with `"train": false` never does. Of a prompt with an answer it is the answer, or both for
    `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOStage(GRPOConfig):
    """Reinforcement learning with GRPO."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""

    async_grpo: AsyncConfig | None = None
    """Sample while the policy trains; null alternates sampling and training."""

    def __post_init__(self) -> None:
        GRPOConfig.__post_init__(self)
        if self.async_grpo is not None:
            self.asynchronous()

    @property
    def keeps_reference(self) -> bool:
        """Whether steps compare with the policy as it was when the stage began."""
        return self.objective.kl.weight > 0

    def asynchronous(self) -> AsyncGRPOConfig:
        """Return the configuration of `rl_algorithms.async_grpo.train`.

        Raises:
            ValueError: `async_grpo` is null, or the configuration is invalid, such as a staleness below a synchronous
                run's.
        """
        if self.async_grpo is None:
            raise ValueError("async_grpo=null is synchronous")
        shared = {each.name: getattr(self, each.name) for each in fields(GRPOConfig)}
        own = {each.name: getattr(self.async_grpo, each.name) for each in fields(AsyncConfig)}
        return AsyncGRPOConfig(**shared, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelStage(RewardModelConfig):
    """A reward model, trained from the policy as it is by then; before grpo or ppo it scores their responses."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer of the reward model."""

    data: DataConfig | None = None
    """The pairs, `prompt`, `chosen` and `rejected`, in a recipe that goes on with grpo or ppo; null reads them from
    the section `data`, which then has no prompts to sample responses to."""

    def __post_init__(self) -> None:
        RewardModelConfig.__post_init__(self)
        if self.objective != "bradley-terry":
            raise ValueError(
                f"objective={self.objective} learns from scored responses, and a recipe's data are pairs; set "
                f"objective=bradley-terry, or call rl_algorithms.reward_model.train in a program of your own"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticConfig:
    """The critic: a model of its own, which says what each state is worth."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    optimizer: OptimizerConfig
    """The critic's optimizer. Its learning rate is usually several times the policy's."""

    start_from: Literal["policy", "reward_model"] | None = None
    """Whose weights it starts with: those of the `policy`, with a head drawn at random, or those of the `reward_model`
    of this recipe, head included. Null takes the reward model if there is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOStage(PPOConfig):
    """Reinforcement learning with PPO: a critic of its own is the baseline of every token."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The policy's optimizer, whose state starts fresh in this stage."""

    critic: CriticConfig
    """The model that predicts rewards; what is made of its values is in `value`."""

    def __post_init__(self) -> None:
        PPOConfig.__post_init__(self)

    @property
    def keeps_reference(self) -> bool:
        """Whether steps compare with the policy as it was when the stage began."""
        return self.objective.kl.weight > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOStage(KTOConfig):
    """Preference learning from single responses that are each good or bad: `prompt`, `completion` and `label`."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPOStage(ORPOConfig):
    """Preference learning on given pairs without a reference: imitation and an odds ratio in one loss."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOStage(DPOConfig):
    """Preference learning on pairs of responses: given, or the policy's own, sampled once or before each step."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""

    pairs: Literal["sampled", "online", "data"] = "sampled"
    """Where the pairs come from. `sampled`: the policy's responses before its first step, paired by their rewards.
    `online`: new responses to `num_prompts` prompts before each step, which is on all their pairs. `data`: the columns
    `chosen` and `rejected` of `data.source`, at temperature 1; needs no reward."""

    def __post_init__(self) -> None:
        DPOConfig.__post_init__(self)
        if self.pairs == "data":
            _refuse_what_only_sampling_has(self)
        if self.pairs == "online" and self.batch_size != DPOConfig.__dataclass_fields__["batch_size"].default:
            raise ValueError(
                f"batch_size={self.batch_size} is of pairs that are there before the first step, and pairs=online "
                f"steps on all that are found among num_prompts={self.num_prompts}; leave batch_size out"
            )
        if self.pairs != "data" and self.max_num_epochs is not None:
            raise ValueError(
                f"max_num_epochs={self.max_num_epochs:g} counts passes over given pairs, and pairs={self.pairs} makes "
                f"its own; set max_num_steps instead, or pairs=data"
            )

    @property
    def keeps_reference(self) -> bool:
        """Whether steps compare with the policy as it was when the stage began; other pairs were compared before."""
        return self.pairs == "online" and not self.reference_free


def steps_of_epochs(stage: Any, *, num_items: int) -> int:
    """The steps that a stage takes: `max_num_steps`, or fewer where `max_num_epochs` passes end before.

    Args:
        stage: with rows or prompts per batch, and one or several steps on each.
        num_items: rows, pairs or prompts in its data.
    """
    if stage.max_num_epochs is None:
        return int(stage.max_num_steps)
    size = stage.num_prompts if hasattr(stage, "steps_per_generation") else stage.batch_size
    batches = max(1, int(stage.max_num_epochs * num_items / size + 1e-9))  # a product such as 0.1 * 30 may be 2.999...
    return min(int(stage.max_num_steps), batches * int(getattr(stage, "steps_per_generation", 1)))


def _refuse_what_only_sampling_has(stage: DPOStage) -> None:
    for each in fields(DPOConfig):
        if each.name in SAMPLING and (value := getattr(stage, each.name)) != each.default:
            raise ValueError(
                f"{each.name}={value} concerns responses sampled to make pairs, and pairs=data takes all pairs "
                f"of data.source; leave {each.name} out, or set pairs=sampled"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The teacher. It must have the policy's tokenizer."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    model_name: str
    """A Hugging Face folder, a Hub id or a function, as in `policy.model_name`."""

    revision: str | None = None
    """Branch, tag or commit of a Hub id. Pin it to make the run repeatable."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for code that you have read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillStage(DistillConfig):
    """On-policy distillation: the policy learns the teacher's distribution on its own rollouts."""

    max_num_epochs: float | None = None
    """Passes over the data that end the stage, if `max_num_steps` does not end it earlier; null is no limit. With it,
    `max_num_steps` may be left out."""

    optimizer: OptimizerConfig
    """The optimizer, whose state starts fresh in this stage."""

    teacher: TeacherConfig
    """The teacher, which is sharded like the policy."""

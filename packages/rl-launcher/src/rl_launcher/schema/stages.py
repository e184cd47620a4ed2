"""The stages that a run may have: what each loop may choose, and its optimizer."""

from dataclasses import dataclass, fields
from typing import ClassVar, Literal

from rl_algorithms.async_grpo import AsyncGRPOConfig
from rl_algorithms.chat import TrainOn
from rl_algorithms.distill import DistillConfig
from rl_algorithms.dpo import DPOConfig
from rl_algorithms.grpo import GRPOConfig
from rl_algorithms.sft import SFTConfig
from rl_backends import OptimizerConfig
from rl_launcher.schema.strict import STRICT, refuse_below

__all__ = ["AsyncConfig", "DPOStage", "DistillStage", "GRPOStage", "SFTStage", "TeacherConfig"]

SAMPLING = frozenset({"num_prompts", "num_generations_per_prompt", "pairs_per_prompt"})
"""Keys of DPO that are of no effect where nothing is sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStage(SFTConfig):
    """Supervised fine-tuning on the data's answers, before anything else."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""

    train_on: TrainOn = "assistant"
    """What of a conversation is learnt: every `assistant` message, the `last_turn` alone, or `all`, whoever said it. A
    message with `"train": false` is not learnt. Of a prompt with an answer it is the answer, unless `all`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncConfig:
    """How sampling goes on while the policy trains; see `rl_algorithms.async_grpo`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    max_staleness: int
    """Optimizer steps that the policy may be ahead of what sampled a token it trains on. `steps_per_generation - 1` is
    synchronous; each further `steps_per_generation` lets sampling be a batch ahead."""

    weights: Literal["between_calls", "in_flight"] = "between_calls"
    """When engines take new weights. `between_calls`: a refit waits for calls to end. `in_flight`: at once, in the
    middle of answers, each token of which knows its version; asks for `policy.generation.vllm_cfg.async_engine`."""

    num_collectors: int = 1
    """Threads that ask for answers. As many as there are engines keep all of them busy."""

    groups_per_call: int = 8
    """Prompts in each call at most. More fill an engine's batch; fewer let a refit `between_calls` wait less."""

    ask_again: bool = True
    """Ask the prompt of a group that became too old again. False goes on to the next: what is slow is learnt less."""

    timeout_s: float = 1800.0
    """How long to wait at most for rollouts, and for calls to end before a refit."""

    stop_timeout_s: float = 60.0
    """How long the end of the stage, also by an error, waits for calls under way."""

    def __post_init__(self) -> None:
        above = {"num_collectors": 0, "groups_per_call": 0, "timeout_s": 0, "stop_timeout_s": 0}
        refuse_below(self, at_least={"max_staleness": 0}, above=above)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOStage(GRPOConfig):
    """Reinforcement learning against the reward."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""

    async_grpo: AsyncConfig | None = None
    """Sample while the policy trains; null takes turns."""

    def __post_init__(self) -> None:
        GRPOConfig.__post_init__(self)
        if self.async_grpo is not None:
            self.asynchronous()

    def asynchronous(self) -> AsyncGRPOConfig:
        """What `rl_algorithms.async_grpo.train` is given.

        Raises:
            ValueError: what may not be asynchronous, such as a bound on staleness below that of a synchronous run.
        """
        if self.async_grpo is None:
            raise ValueError("async_grpo=null is synchronous")
        shared = {each.name: getattr(self, each.name) for each in fields(GRPOConfig)}
        own = {each.name: getattr(self.async_grpo, each.name) for each in fields(AsyncConfig)}
        return AsyncGRPOConfig(**shared, **own)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOStage(DPOConfig):
    """Preference learning on pairs of answers: the policy's own, or given ones."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""

    pairs: Literal["sampled", "data"] = "sampled"
    """Where the pairs come from. `sampled`: the policy answers, and the reward says which answers are right and which
    wrong. `data`: columns `chosen` and `rejected` of `data.source`, at temperature 1; needs no reward."""

    def __post_init__(self) -> None:
        DPOConfig.__post_init__(self)
        if self.pairs == "data":
            _refuse_what_only_sampling_has(self)


def _refuse_what_only_sampling_has(stage: DPOStage) -> None:
    for each in fields(DPOConfig):
        if each.name in SAMPLING and (value := getattr(stage, each.name)) != each.default:
            raise ValueError(
                f"{each.name}={value} says how answers are sampled to make pairs, and pairs=data takes those of "
                f"data.source, all of them; leave {each.name} out, or say pairs=sampled"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherConfig:
    """The model that is distilled from. It must have the policy's tokenizer."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    model_name: str
    """A Hugging Face folder, a hub id, or `package.module:function` or `file.py:function` as of `policy.model_name`."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; pin it to make the run repeatable."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillStage(DistillConfig):
    """On-policy distillation: the policy becomes likelier to say what a teacher would."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""

    teacher: TeacherConfig
    """Sharded and computed as the policy is."""

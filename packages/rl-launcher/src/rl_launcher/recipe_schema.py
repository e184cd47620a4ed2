"""What a recipe may say: sections made of the dataclasses of the packages that obey them.

Adds only what no package can know alone: which model, which data, which reward, and in what order stages run.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rl_algorithms.chat import PromptFormat
from rl_algorithms.dpo import DPOConfig
from rl_algorithms.grpo import GRPOConfig
from rl_algorithms.sft import SFTConfig
from rl_backends import DTensorConfig, MegatronConfig, OptimizerConfig, select_backend
from rl_refit import RefitConfig

__all__ = [
    "DPOStage",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GRPOStage",
    "GenerationConfig",
    "PolicyConfig",
    "Recipe",
    "SFTStage",
]

STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How answers are sampled, in training and in evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    max_new_tokens: int
    """Longest answer in tokens, its stop token included; longer ones are cut off and count as truncated."""

    temperature: float = 1.0
    """Divides the logits before sampling. The policy's log-probabilities are taken at the same temperature."""

    max_batch_size: int = 256
    """Answers that are generated side by side. More is faster and takes more memory."""

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "max_batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be > 0; evaluation takes greedy answers by itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model that is trained, and the engine that samples from it."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    model_name: str
    """A Hugging Face folder, a hub id, or `package.module:function` or `file.py:function` that takes a seed and returns
    a model and its tokenizer."""

    revision: str | None = None
    """Branch, tag or commit of a hub id; pin it to make the run repeatable."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for code that you have read."""

    padded_vocabulary: bool = False
    """Accept a model with more embeddings than its tokenizer has tokens, as Qwen's have."""

    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    """The training backend of PyTorch's own parallelism, used unless the next one is enabled."""

    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    """The training backend of megatron-core, which takes precedence where it is enabled."""

    generation: GenerationConfig
    """The engine."""

    refit: RefitConfig = field(default_factory=RefitConfig)
    """The way from the one to the other."""

    def __post_init__(self) -> None:
        select_backend(self)  # refuses where there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """What is learnt from, and what the result is judged by."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    source: str
    """A JSONL file of rows with a `prompt` and, if you like, an `answer` and other columns; `package.module:function`
    or `file.py:function` that returns a `rl_algorithms.data.Dataset`."""

    held_out_share: float | None = None
    """Share of a JSONL file's prompts that is never trained on; 0.1 when not given. A function holds out its own."""

    prompt_format: PromptFormat = "chat"
    """`chat` renders prompts with the tokenizer's chat template; `plain` takes their text as it is."""

    def __post_init__(self) -> None:
        if self.held_out_share is not None and not 0.0 < self.held_out_share < 1.0:
            raise ValueError(f"held_out_share={self.held_out_share} must be between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """What judges an answer."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    reward: str
    """`package.module:function` or `file.py:function`, called with keyword lists: `prompts`, `completions` and every
    column of the data; returns one number per answer."""

    on_error: Literal["stop", "zero"] = "stop"
    """`zero` counts an answer as 0 when the function raises on it or returns NaN, and says how many; `stop` stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """How the held-out prompts are used."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    every: int = 0
    """Optimizer steps between evaluations while training; 0 evaluates before and after only."""

    max_prompts: int = 1000
    """At most so many held-out prompts before and after training."""

    max_prompts_while_training: int = 256
    """At most so many while training, with greedy answers only."""

    samples: int = 12
    """Held-out answers that are kept, before and after, for the report."""

    def __post_init__(self) -> None:
        for name in ("every", "samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 0")
        for name in ("max_prompts", "max_prompts_while_training"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be >= 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTStage(SFTConfig):
    """Supervised fine-tuning on the data's answers, before anything else."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOStage(GRPOConfig):
    """Reinforcement learning against the reward."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOStage(DPOConfig):
    """Preference learning on pairs of the policy's own answers, right and wrong by the reward."""

    optimizer: OptimizerConfig
    """AdamW, fresh for this stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run. Its stages are the sections that are there, in this order: `sft`, then `grpo` or `dpo`."""

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

    env: EnvironmentConfig
    """The reward."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """The held-out prompts."""

    sft: SFTStage | None = None
    """Warm start; null to leave it out."""

    grpo: GRPOStage | None = None
    """Reinforcement learning; null to leave it out."""

    dpo: DPOStage | None = None
    """Preference learning; null to leave it out."""

    def __post_init__(self) -> None:
        if self.sft is None and self.grpo is None and self.dpo is None:
            raise ValueError("sft, grpo and dpo are all absent, so there is nothing to do; give at least one of them")
        if self.grpo is not None and self.dpo is not None:
            raise ValueError("grpo and dpo are both given, and a run takes one of them; set the other to null")
        for name, stage in (("sft", self.sft), ("grpo", self.grpo), ("dpo", self.dpo)):
            if stage is not None and stage.optimizer.warmup_steps >= stage.max_num_steps:
                raise ValueError(
                    f"{name}.optimizer.warmup_steps={stage.optimizer.warmup_steps} must be less than "
                    f"{name}.max_num_steps={stage.max_num_steps}, or the learning rate never reaches its peak"
                )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"cpu_threads={self.cpu_threads} must be null or >= 1")

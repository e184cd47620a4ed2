"""The model that is trained, the backend that trains it, and the engine that samples from it."""

from dataclasses import dataclass, field
from typing import ClassVar

from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_launcher.recipe_schema.generation import GenerationConfig
from rl_launcher.recipe_schema.strict import STRICT
from rl_refit import RefitConfig

__all__ = ["PolicyConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model that is trained, and the engine that samples from it."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    __aliases__: ClassVar[dict[str, str]] = {"dtensor_config": "dtensor_cfg"}  # both are NeMo-RL's

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

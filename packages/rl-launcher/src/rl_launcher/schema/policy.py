"""The `policy` section of a recipe: model, training backend, generation engine."""

from dataclasses import dataclass, field
from typing import ClassVar

from rl_algorithms.choices import check_fields
from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_generation.training_engine import EngineConfig
from rl_launcher.recipe_files.dataclass_schema import STRICT
from rl_refit import RefitConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesConfig:
    """GPUs of separate engines, out of those in the cluster section."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    num_nodes: int | None = None
    """Nodes for engines only; null takes `gpus_per_node` GPUs of every node and leaves the rest to the trainer."""

    gpus_per_node: int | None = None
    """GPUs of each of these nodes; null takes all of them."""

    def __post_init__(self) -> None:
        check_fields(self, at_least={"num_nodes": 1, "gpus_per_node": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedConfig:
    """Whether engines share the trainer's GPUs."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    enabled: bool = True
    """`true` runs engine and trainer alternately on the same GPUs; the idle one frees its memory. `false` gives engines
    the GPUs in `resources`, and the trainer the rest."""

    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """GPUs of separate engines; only if `enabled` is false."""

    def __post_init__(self) -> None:
        named = self.resources.num_nodes is not None or self.resources.gpus_per_node is not None
        if self.enabled and named:
            raise ValueError(
                "resources are for separate engines, and enabled=true shares the trainer's GPUs; set enabled=false"
            )
        if not self.enabled and not named:
            raise ValueError(
                "enabled=false gives engines GPUs of their own, and resources does not say how many; set "
                "resources.gpus_per_node, or resources.num_nodes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteConfig:
    """Engines on other machines, each made there from the same recipe by `rl-launcher serve`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    urls: tuple[str, ...]
    """Of the servers, one for each engine, as `http://10.0.0.2:8000`."""

    control_urls: tuple[str, ...]
    """Of their control ports, in the same order. Refits are arranged there."""

    token_env: str | None = None
    """Environment variable with the token of the control ports; either this or `token_file`."""

    token_file: str | None = None
    """File with the token, which only you may read."""

    api_key_env: str | None = None
    """Environment variable with the API key of the servers, where they ask for one."""

    host: str = "127.0.0.1"
    """Address of this machine that the servers reach. Whoever else reaches it could send other weights: keep it within
    a network of your own."""

    request_timeout_s: float = 600.0
    """Seconds that the answer to a prompt may take, retries included."""

    def __post_init__(self) -> None:
        if not self.urls or len(self.urls) != len(self.control_urls):
            raise ValueError(
                f"urls has {len(self.urls)} servers and control_urls {len(self.control_urls)} control ports; give both "
                f"of each engine, in the same order"
            )
        if (self.token_env is None) == (self.token_file is None):
            raise ValueError("give either token_env or token_file: the control ports ask for a token")
        if not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout_s={self.request_timeout_s} must be > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig(EngineConfig):
    """How responses are sampled, in training and in evaluation."""

    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    """Whether engines share the trainer's GPUs, on Ray."""

    remote: RemoteConfig | None = None
    """Sample from engines on other machines, which `rl-launcher serve` runs there; null makes the engine here."""

    max_restarts: int = 3
    """How many times in a run an engine that died is restarted, refitted and given its unfinished requests again. Only
    on Ray, where an engine is a process of its own."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_fields(self, at_least={"max_restarts": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """The model that is trained and the engine that samples from it."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT
    __aliases__: ClassVar[dict[str, str]] = {"dtensor_config": "dtensor_cfg"}  # both are NeMo-RL's

    model_name: str
    """A Hugging Face folder, a Hub id, or a function `package.module:name` or `file.py:name` that takes a seed and
    returns a model and its tokenizer."""

    revision: str | None = None
    """Branch, tag or commit of a Hub id. Pin it to make the run repeatable."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model. Set it only for code that you have read."""

    padded_vocabulary: bool = False
    """Accept a model with more embeddings than its tokenizer has tokens, as Qwen's have."""

    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    """The training backend built on PyTorch's DTensor, used unless `megatron_cfg` is enabled."""

    megatron_cfg: MegatronConfig = field(default_factory=MegatronConfig)
    """The training backend built on megatron-core; if enabled, it takes precedence."""

    generation: GenerationConfig
    """The engine and how it samples."""

    refit: RefitConfig = field(default_factory=RefitConfig)
    """How new weights reach the engine."""

    def __post_init__(self) -> None:
        select_backend(self)  # raises if neither backend is enabled

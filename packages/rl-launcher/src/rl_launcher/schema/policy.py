"""The `policy` section of a recipe: model, training backend, generation engine."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal
from urllib.parse import urlsplit

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
    """Engines on other machines, which join the trainer and leave it: `rl-launcher serve` brings each of them."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    kind: Literal["rl-generation", "sglang"] = "rl-generation"
    """`rl-generation` makes the engine of this recipe where `rl-launcher serve` runs. `sglang` takes a server of SGLang
    that you have started there. That was tested with a server that answers as SGLang does; SGLang itself never ran."""

    address: str
    """Where the engines find the trainer, as `tcp://10.0.0.1:29555`: an address of its machine that they reach. Whoever
    else reaches it could send them other weights: keep it within a network of your own."""

    at_least: int = 1
    """Engines that must take each version of the weights. The run waits for so many before it begins, and goes on while
    there are so many."""

    token_env: str | None = None
    """Environment variable with a token that trainer and engines share; either this or `token_file`."""

    token_file: str | None = None
    """File with the token, which only you may read."""

    api_key_env: str | None = None
    """Environment variable with the API key of the servers, where they ask for one; on the machine of a server of
    SGLang, with the one that may change its weights."""

    request_timeout_s: float = 600.0
    """Seconds that the answer to a prompt may take, retries included."""

    folder: str | None = None
    """Of SGLang: a folder for versions of the weights on the server's machine, which loads them from there."""

    checkpoint: str | None = None
    """Of SGLang: the folder with the checkpoint that the server was started with; null is `policy.model_name`."""

    weights_dtype: str | None = None
    """Of SGLang: dtype of the tensors of that checkpoint, such as `bfloat16`; null is the one that is trained."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.address)
        if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
            raise ValueError(f"address={self.address} must be tcp://host:port, of this machine")
        if parts.hostname in {"0.0.0.0", "::"}:  # noqa: S104 - refused
            raise ValueError(f"address={self.address} is no address that an engine can find: name the trainer's own")
        check_fields(self, at_least={"at_least": 1})
        if (self.token_env is None) == (self.token_file is None):
            raise ValueError("give either token_env or token_file: engines join the trainer that has the same token")
        if not self.request_timeout_s > 0:
            raise ValueError(f"request_timeout_s={self.request_timeout_s} must be > 0")
        of_sglang = {name: getattr(self, name) for name in ("folder", "checkpoint", "weights_dtype")}
        if self.kind != "sglang":
            for name, value in of_sglang.items():
                if value is not None:
                    raise ValueError(f"{name}={value} is for kind=sglang, and kind={self.kind}; leave it out")
        elif self.folder is None:
            raise ValueError(
                "kind=sglang needs folder, in which the server finds each version of the weights; /dev/shm/weights "
                "keeps them in memory"
            )
        if self.weights_dtype not in {None, "float32", "bfloat16", "float16"}:
            raise ValueError(f"weights_dtype={self.weights_dtype} must be null, float32, bfloat16 or float16")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig(EngineConfig):
    """How responses are sampled, in training and in evaluation."""

    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    """Whether engines share the trainer's GPUs, on Ray."""

    remote: RemoteConfig | None = None
    """Sample from engines on other machines, which `rl-launcher serve` brings; null makes the engine here."""

    max_restarts: int = 3
    """How many times in a run an engine that died is restarted, refitted and given its unfinished requests again. Only
    on Ray, where an engine is a process of its own."""

    def __post_init__(self) -> None:
        EngineConfig.__post_init__(self)
        check_fields(self, at_least={"max_restarts": 0})
        if self.remote is None or self.remote.kind != "sglang":
            return
        if self.backend != "transformers":
            raise ValueError(
                f"backend={self.backend} is of an engine that this recipe makes, and remote.kind=sglang takes servers "
                f"that you start; leave backend and its section out"
            )
        if self.cuts:
            given = ", ".join(f"{name}={value}" for name, value in self.cuts.items())
            raise ValueError(
                f"{given} leaves tokens out, and SGLang's log-probabilities are those before that "
                f"(remote.kind=sglang); leave it out, or use another engine"
            )


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

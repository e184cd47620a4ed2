"""What a vLLM engine is made with, under the names of vLLM's EngineArgs. Does not import vLLM.

Reference: vLLM 0.32, `vllm/engine/arg_utils.py`.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import ClassVar, final

from rl_generation.errors import EngineOptionError
from rl_generation.rollout import LogpOf

__all__ = ["DUMMY", "VllmOptions", "check_options", "engine_arguments", "nearest"]

DUMMY = "dummy"
"""vLLM's load format that draws random weights and reads none."""

MODES: Mapping[LogpOf, str] = {"sampled": "processed_logprobs", "raw": "raw_logprobs"}
"""Of log-probabilities, as vLLM calls them."""

ELSEWHERE: Mapping[str, str] = {
    "logprobs_mode": "the engine's logp_of=",
    "disable_log_stats": "nothing: the engine's metrics and timings come from these statistics",
    "stream_interval": "nothing: a stream yields every token as it comes",
}
"""Keys of EngineArgs that this package sets itself, and where the caller says what he wants."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions:
    """A vLLM engine: the model, how it is cut, and what memory it may take.

    Raises:
        EngineOptionError: A value is impossible, or `vllm_kwargs` repeats a field.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    model: str
    """Folder of a checkpoint, or its id on the Hugging Face hub."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer behind stop strings and bad words; None takes the one beside the model, and
    does without where there is none."""

    revision: str | None = None
    """Branch, tag or commit of the model on the hub; None is its main branch, which may move under you."""

    trust_remote_code: bool = False
    """True runs Python code that comes with the checkpoint, as you."""

    dtype: str = "auto"
    """Of weights and activations: "auto" is the checkpoint's unless it is float32, of which vLLM makes a
    half-size one, and the engine warns; "float32" is for tests that compare log-probabilities."""

    load_format: str | None = None
    """How weights are read, as in vLLM ("auto", "safetensors", "dummy", …); None is "dummy" where `for_training` and
    the model admits it, else "auto". After "dummy" the engine refuses to generate until a version is committed."""

    for_training: bool = False
    """True starts with random weights, which is fast and reads nothing, because the first refit brings the real ones;
    until it has, the engine refuses to generate."""

    tensor_parallel_size: int = 1
    """Ranks over which every layer is cut; more fits larger models, at the price of communication in each layer."""

    pipeline_parallel_size: int = 1
    """Ranks over which the layers are divided; more fits larger models over slow links."""

    data_parallel_size: int = 1
    """Replicas of the whole engine; more answers more prompts at once. Above 1 asks for `own_process=True`."""

    enable_expert_parallel: bool = False
    """True gives each rank whole experts in place of a slice of all of them, in mixture-of-experts models."""

    max_model_len: int | None = None
    """Tokens of a prompt and its answer together; None is the model's own limit, which may ask for much cache."""

    max_num_seqs: int | None = None
    """Answers generated at once; more is faster until memory or computation is full. None leaves it to vLLM."""

    gpu_memory_utilization: float | None = None
    """Share of the device's memory for weights and cache; lower leaves room for a trainer beside it. A refit stages the
    new weights outside of this share. None is vLLM's own 0.92, or of an engine beside a trainer, on a GPU, 0.92 less
    the weights."""

    kv_cache_memory_bytes: int | None = None
    """Size of the key/value cache of each rank, and `gpu_memory_utilization` is ignored; on a CPU always give it, or
    vLLM reserves a share of all of the host's memory."""

    enforce_eager: bool = False
    """True starts sooner and generates slower: no CUDA graphs, no compilation."""

    enable_prefix_caching: bool = True
    """Prefill what prompts begin with alike only once; False prefills every answer's prompt anew."""

    enable_sleep_mode: bool = False
    """True lets `sleep` free the device's memory for a trainer; vLLM refuses it on a CPU, which has no such memory."""

    quantization: str | None = None
    """Method by which weights are quantised, as in vLLM; None takes what the checkpoint says."""

    speculative_config: Mapping[str, object] | None = None
    """vLLM's dictionary for speculative decoding; None generates a token a step."""

    enable_lora: bool = False
    """True lets requests name an adapter that `add_lora` loaded; costs memory for `max_loras` of them."""

    max_loras: int = 1
    """Adapters in one batch; for `enable_lora`."""

    max_lora_rank: int = 16
    """Largest rank of an adapter; for `enable_lora`."""

    worker_extension_cls: str | None = None
    """Dotted name of a class that every worker inherits besides vLLM's own, whose methods `collective_rpc` can call:
    what a refit needs."""

    seed: int = 0
    """Of vLLM's running generator, which requests without a seed of their own draw from."""

    vllm_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Any other arguments of vLLM's EngineArgs, by its names; one it does not know is refused."""

    def __post_init__(self) -> None:
        if not self.model:
            raise EngineOptionError("model must name a folder or a model on the hub; got model=''")
        _check_types(self)
        _check_sizes(self)
        _check_memory(self)
        _check_lora_sizes(self)
        self._check_kwargs()

    def _check_kwargs(self) -> None:
        own = {each.name for each in fields(self)}
        for key in self.vllm_kwargs:
            if key in own:
                raise EngineOptionError(
                    f"vllm_kwargs repeats {key!r}, which is an option of its own: give {key}={self.vllm_kwargs[key]!r}"
                )
            if key in ELSEWHERE:
                raise EngineOptionError(f"vllm_kwargs sets {key!r}, which the engine does; use {ELSEWHERE[key]}")


def check_options(options: object, *, own_process: bool) -> None:
    """Raise EngineOptionError where an engine is given something else, or asked for more replicas than it can have."""
    if not isinstance(options, VllmOptions):
        raise EngineOptionError(f"options must be VllmOptions(model={options!r}); got {type(options).__name__}")
    if options.data_parallel_size > 1 and not own_process:
        raise EngineOptionError(
            f"in process, vLLM has one replica; for data_parallel_size={options.data_parallel_size} give "
            f"own_process=True, or make one engine in each of several processes"
        )


def engine_arguments(
    options: VllmOptions, *, logp_of: LogpOf, load_format: str, skip_tokenizer_init: bool
) -> dict[str, object]:
    """Return the keyword arguments of vLLM's EngineArgs; what is None is left to vLLM.

    Args:
        options: The caller's.
        logp_of: Becomes `logprobs_mode`.
        load_format: What `options.load_format` comes to (`rl_generation.vllm.checkpoint.load_format_of`).
        skip_tokenizer_init: Whether there is no tokenizer.

    Raises:
        EngineOptionError: `logp_of` is unknown.
    """
    if logp_of not in MODES:
        raise EngineOptionError(f"logp_of must be 'sampled' or 'raw'; got logp_of={logp_of!r}")
    given = {each.name: getattr(options, each.name) for each in fields(options)}
    for name in ("for_training", "vllm_kwargs", "load_format"):
        del given[name]
    if not options.enable_lora:
        del given["max_loras"], given["max_lora_rank"]
    ours = {
        "load_format": load_format,
        "logprobs_mode": MODES[logp_of],
        "skip_tokenizer_init": skip_tokenizer_init,
        "disable_log_stats": False,
        "generation_config": "vllm",  # else what a client leaves out would be the checkpoint's, and not neutral
    }
    arguments = {**{key: value for key, value in given.items() if value is not None}, **ours, **options.vllm_kwargs}
    for name in ("speculative_config",):
        if name in arguments:
            arguments[name] = dict(arguments[name])
    return arguments


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known name that is most like `name`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


def _check_types(options: VllmOptions) -> None:
    for name in (each.name for each in fields(options) if each.type is bool):
        value = getattr(options, name)
        if not isinstance(value, bool):
            raise EngineOptionError(f"{name} must be True or False; got {name}={value!r}")
    if options.tokenizer == "":
        raise EngineOptionError("tokenizer must name a folder or a tokenizer on the hub, or be None; got tokenizer=''")
    for name in ("speculative_config", "vllm_kwargs"):
        value = getattr(options, name)
        if not (isinstance(value, Mapping) or (name == "speculative_config" and value is None)):
            raise EngineOptionError(f"{name} must be a dictionary; got {name}={value!r}")


def _check_lora_sizes(options: VllmOptions) -> None:
    for each in fields(options):
        value = getattr(options, each.name)
        if each.name in ("max_loras", "max_lora_rank") and value != each.default and not options.enable_lora:
            raise EngineOptionError(f"{each.name}={value} needs enable_lora=True; without it there are no adapters")


def _check_sizes(options: VllmOptions) -> None:
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "max_loras", "max_lora_rank")
    for name in names:
        _check_count(name, getattr(options, name))
    for name in ("max_model_len", "max_num_seqs", "kv_cache_memory_bytes"):
        if getattr(options, name) is not None:
            _check_count(name, getattr(options, name))
    if isinstance(options.seed, bool) or not isinstance(options.seed, int) or options.seed < 0:
        raise EngineOptionError(f"seed must be an integer of at least 0; got seed={options.seed!r}")


def _check_memory(options: VllmOptions) -> None:
    share = options.gpu_memory_utilization
    if isinstance(share, bool) or (share is not None and not (math.isfinite(share) and 0.0 < share <= 1.0)):
        raise EngineOptionError(f"gpu_memory_utilization must be in (0, 1]; got gpu_memory_utilization={share!r}")


def _check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise EngineOptionError(f"{name} must be an integer of at least 1; got {name}={value!r}")

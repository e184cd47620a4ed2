"""What a vLLM engine is made with, under the names of vLLM's EngineArgs, and its adapters. Does not import vLLM.

Reference: vLLM 0.32, `vllm/engine/arg_utils.py`.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, final

from rl_generation.checkpoints import ModelSource
from rl_generation.errors import EngineOptionError
from rl_generation.rollout import LogpOf

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

COUNTS: Mapping[str, int] = {
    **dict.fromkeys(("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"), 1),
    **dict.fromkeys(("max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "max_loras", "max_lora_rank"), 1),
    "seed": 0,
}
"""The least value of each whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicVllmOptions:
    """What `VllmOptions`, recipes and command lines alike say of a vLLM engine.

    Raises:
        EngineOptionError: A value is impossible, or `vllm_kwargs` repeats a field.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    tensor_parallel_size: int = 1
    """Ranks over which every layer is cut; more fits larger models, at the price of communication in each layer."""

    pipeline_parallel_size: int = 1
    """Ranks over which the layers are divided; more fits larger models over slow links."""

    enable_expert_parallel: bool = False
    """Give each rank whole experts in place of a slice of all of them, in mixture-of-experts models."""

    max_model_len: int | None = None
    """Tokens of a prompt and its response together; left out, the model's own limit, which may ask for much cache."""

    max_num_seqs: int | None = None
    """Responses generated at once; more is faster until memory or computation is full. Left out, vLLM decides."""

    gpu_memory_utilization: float | None = None
    """Share of the device's memory for weights and cache; lower leaves room for a trainer beside it. A refit stages the
    new weights outside of this share. Left out, vLLM's own 0.92, or beside a trainer, on a GPU, 0.92 less the
    weights."""

    kv_cache_memory_bytes: int | None = None
    """Size of the key/value cache of each rank, in place of the share. On a CPU always give it, or vLLM reserves a
    share of all of the host's memory; only an engine beside a trainer then has room for eight responses, within 256
    MiB and 4 GiB."""

    enforce_eager: bool = False
    """Start sooner and generate slower: no CUDA graphs, no compilation, which needs a C++ compiler on a CPU."""

    enable_prefix_caching: bool = True
    """Prefill what prompts begin with alike only once, and not anew for every response."""

    vllm_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Any other arguments of vLLM's EngineArgs, by its names (`speculative_config`, `quantization`, …); one it does not
    know is refused."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value, least = getattr(self, each.name), COUNTS.get(each.name)
            missing = value is None and each.default is None
            if each.type is bool and not isinstance(value, bool):
                raise EngineOptionError(f"{each.name} must be True or False; got {each.name}={value!r}")
            whole = isinstance(value, int) and not isinstance(value, bool)
            if least is not None and not missing and not (whole and value >= least):
                raise EngineOptionError(
                    f"{each.name} must be an integer of at least {least}; got {each.name}={value!r}"
                )
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or (share is not None and not (math.isfinite(share) and 0.0 < share <= 1.0)):
            raise EngineOptionError(f"gpu_memory_utilization must be in (0, 1]; got gpu_memory_utilization={share!r}")
        if not isinstance(self.vllm_kwargs, Mapping):
            raise EngineOptionError(f"vllm_kwargs must be a dictionary; got vllm_kwargs={self.vllm_kwargs!r}")
        own = {each.name for each in fields(self)}
        for key, value in self.vllm_kwargs.items():
            if key in own:
                raise EngineOptionError(
                    f"vllm_kwargs repeats {key!r}, which is an option of its own: give {key}={value!r}"
                )
            if key in ELSEWHERE:
                raise EngineOptionError(f"vllm_kwargs sets {key!r}, which the engine does; use {ELSEWHERE[key]}")

    @property
    def sizes(self) -> dict[str, Any]:
        """What `estimate_memory` takes of these options, by its names."""
        names = ("tensor_parallel_size", "pipeline_parallel_size", "max_model_len", "max_num_seqs")
        return {name: getattr(self, name) for name in (*names, "kv_cache_memory_bytes")}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(BasicVllmOptions, ModelSource):
    """A vLLM engine: the model, how it is cut, and what memory it may take.

    Raises:
        EngineOptionError: A value is impossible, or `vllm_kwargs` repeats a field.
    """

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer behind stop strings and bad words; None takes the one beside the model, and
    does without where there is none."""

    dtype: str = "auto"
    """Of weights and activations: "auto" is the checkpoint's unless it is float32, of which vLLM makes a
    half-size one, and the engine warns; "float32" is for tests that compare log-probabilities."""

    load_format: str | None = None
    """How weights are read, as in vLLM ("auto", "safetensors", "dummy", …); None is "dummy" where `for_training` and
    the model admits it, else "auto". After "dummy" the engine refuses to generate until a version is committed."""

    for_training: bool = False
    """True starts with random weights, which is fast and reads nothing, because the first refit brings the real ones;
    until it has, the engine refuses to generate."""

    data_parallel_size: int = 1
    """Replicas of the whole engine; more answers more prompts at once."""

    enable_sleep_mode: bool = False
    """True lets `sleep` free the device's memory for a trainer; vLLM refuses it on a CPU, which has no such memory."""

    enable_lora: bool = False
    """True lets requests name an adapter, which vLLM loads then; costs memory for `max_loras` of them."""

    max_loras: int = 1
    """Adapters in one batch; for `enable_lora`."""

    max_lora_rank: int = 16
    """Largest rank of an adapter; for `enable_lora`."""

    worker_extension_cls: str | None = None
    """Dotted name of a class that every worker inherits besides vLLM's own, whose methods `collective_rpc` can call:
    what a refit needs."""

    seed: int = 0
    """Of vLLM's running generator, which requests without a seed of their own draw from."""

    def __post_init__(self) -> None:
        BasicVllmOptions.__post_init__(self)
        if not self.model:
            raise EngineOptionError("model must name a folder or a model on the hub; got model=''")
        if self.tokenizer == "":
            raise EngineOptionError(
                "tokenizer must name a folder or a tokenizer on the hub, or be None; got tokenizer=''"
            )
        for name, default in (("max_loras", 1), ("max_lora_rank", 16)):
            if (value := getattr(self, name)) != default and not self.enable_lora:
                raise EngineOptionError(f"{name}={value} needs enable_lora=True; without it there are no adapters")


def engine_arguments(
    options: VllmOptions, *, logp_of: LogpOf, load_format: str, skip_tokenizer_init: bool
) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's EngineArgs; what is None is left to vLLM.

    Raises:
        EngineOptionError: `logp_of` is unknown.
    """
    if logp_of not in MODES:
        raise EngineOptionError(f"logp_of must be 'sampled' or 'raw'; got logp_of={logp_of!r}")
    left_out = {"for_training", "vllm_kwargs", "load_format"}
    if not options.enable_lora:
        left_out |= {"max_loras", "max_lora_rank"}
    given = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in left_out}
    return {
        **{name: value for name, value in given.items() if value is not None},
        "load_format": load_format,
        "logprobs_mode": MODES[logp_of],
        "skip_tokenizer_init": skip_tokenizer_init,
        "disable_log_stats": True,  # by vLLM's own loggers: the engine's get them all the same
        "generation_config": "vllm",  # else what a client leaves out would be the checkpoint's, and not neutral
        **options.vllm_kwargs,
    }


def nearest(name: str, known: Iterable[str]) -> str:
    """Return "; did you mean …?" with the known name that is most like `name`, or nothing."""
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoraAdapter:
    """An adapter on disk.

    Raises:
        EngineOptionError: The folder holds no adapter, or the number is not positive.
    """

    name: str
    """For logs and metrics."""

    number: int
    """Which adapter it is to vLLM, from 1 on: the same number means the same weights, so new weights need a new one."""

    path: str
    """Folder with `adapter_config.json` and the weights, as peft saves them."""

    def __post_init__(self) -> None:
        if self.number < 1:
            raise EngineOptionError(f"an adapter's number is at least 1; got number={self.number} for {self.name!r}")
        if not (Path(self.path) / "adapter_config.json").is_file():
            raise EngineOptionError(f"path={self.path!r} of adapter {self.name!r} holds no adapter_config.json")

    def request(self) -> Any:
        """Return it as a `vllm.lora.request.LoRARequest`."""
        from vllm.lora.request import LoRARequest

        name = f"{self.name}@{self.number}"  # vLLM caches prefixes by name
        return LoRARequest(name, self.number, self.path)


def check_lora(lora: object, options: VllmOptions) -> None:
    """Raise EngineOptionError where `lora` is no LoraAdapter, or an engine with these options takes none."""
    if not isinstance(lora, LoraAdapter):
        raise EngineOptionError(f"an adapter is a LoraAdapter(name=…, number=…, path=…); got {lora!r}")
    if not options.enable_lora:
        raise EngineOptionError(f"adapter {lora.name!r} needs an engine made with enable_lora=True")

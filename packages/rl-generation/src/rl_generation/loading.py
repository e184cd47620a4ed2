"""Any engine from a folder or a hub id. Does not know prompts, commands, or how engines work."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, cast, final

from rl_generation.checkpoints import ModelSource, load_config, load_model, load_tokenizer, stop_token_ids_of
from rl_generation.engine import Engine
from rl_generation.errors import EngineOptionError
from rl_generation.rollout import LogpOf

if TYPE_CHECKING:
    from rl_generation.transformers_engine import TransformersEngine
    from rl_generation.vllm import VllmOptions

ENGINES = ("transformers", "vllm")

FOREIGN = {
    "transformers": ("vllm_kwargs",),
    "vllm": ("device", "continuous_batching", "max_cache_tokens"),
}
"""Fields of a spec that mean nothing to an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BasicEngineSpec(ModelSource):
    """What `EngineSpec` and the command line alike say of an engine."""

    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None takes the one beside the model."""

    dtype: str = "auto"
    """Of the weights: a name of torch such as "bfloat16"; "auto" is the checkpoint's."""

    device: str | None = None
    """Of the transformers engine, as torch names it; None is the first GPU, or the CPU where there is none."""

    max_batch_size: int | None = None
    """Answers generated at once; more is faster until memory or computation is full. None leaves it to the engine."""

    logp_of: LogpOf = "sampled"
    """Which distribution the log-probabilities refer to."""

    continuous_batching: Literal["auto", "required", "off"] | None = None
    """Of the transformers engine: see there; None is "auto"."""

    max_cache_tokens: int | None = None
    """Of the transformers engine: tokens that its key/value cache holds; None leaves it to the engine."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec(BasicEngineSpec):
    """Which engine, over which model.

    Raises:
        EngineOptionError: The engine is unknown, or an option belongs to another one.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    engine: Literal["transformers", "vllm"] = "transformers"
    """What generates: transformers, in this process, or vLLM."""

    with_tokenizer: bool = True
    """False does without one: then there are no texts, no stop strings and no bad words."""

    vllm_kwargs: Mapping[str, object] = field(default_factory=dict)
    """Of vLLM: fields of `VllmOptions`, such as `tensor_parallel_size`, and any other arguments of its EngineArgs."""

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise EngineOptionError(f"engine must be one of {', '.join(ENGINES)}; got engine={self.engine!r}")
        for name in FOREIGN[self.engine]:
            value: object = getattr(self, name)
            if not (value is None or value is False or value == {}):  # 0 was given, if wrongly
                raise EngineOptionError(
                    f"{name}={value!r} means nothing to the engine {self.engine!r}: leave it out, or "
                    f"choose another engine"
                )
        if self.tokenizer is not None and not self.with_tokenizer:
            raise EngineOptionError(f"tokenizer={self.tokenizer!r} contradicts with_tokenizer=False")


def check_available(spec: EngineSpec) -> None:
    """Refuse what can be refused at once, before anything is loaded.

    Raises:
        EngineOptionError: vLLM is asked for and missing, or one of its options is impossible.
    """
    if spec.engine != "transformers":
        from rl_generation.vllm.preparing import check_runtime

        check_runtime()
        vllm_options_of(spec)


def load_engine(spec: EngineSpec, **others: Any) -> tuple[Engine, Any]:
    """Make the engine, and load its tokenizer; None stands for the tokenizer where the spec wants none.

    The embedded engine stops at the eos tokens of the generation config (of the config, where that has none) and at
    the tokenizer's. `others` are further arguments of `TransformersEngine` or `VllmEngine`.

    Raises:
        EngineOptionError: vLLM is missing or refuses an option; the dtype or the device is unknown.
        ModelError: The model or its tokenizer cannot be loaded or served.
    """
    if not isinstance(spec, EngineSpec):
        raise EngineOptionError(f"load_engine takes an EngineSpec, such as EngineSpec(model='tiny'); got {spec!r}")
    check_available(spec)
    # The config and the tokenizer first: they are refused at once, an engine after half a minute.
    load_config(spec)
    tokenizer = tokenizer_of(spec)
    others["logp_of"] = spec.logp_of
    if spec.engine == "vllm":
        from rl_generation.vllm import VllmEngine

        return VllmEngine(vllm_options_of(spec), **others), tokenizer
    from rl_generation.transformers_engine import TransformersEngine

    model = load_model(spec, dtype=spec.dtype, device=spec.device)
    stops = stop_token_ids_of(spec.model, model.config.to_dict(), tokenizer=tokenizer, revision=spec.revision)
    pads = (getattr(source, "pad_token_id", None) for source in (tokenizer, model.generation_config, model.config))
    pad = next((pad for pad in (*pads, *stops) if pad is not None), 0)
    for name in ("max_batch_size", "max_cache_tokens", "continuous_batching"):
        if (value := getattr(spec, name)) is not None:
            others[name] = value
    return TransformersEngine(model, stop_token_ids=stops, pad_token_id=pad, tokenizer=tokenizer, **others), tokenizer


def vllm_options_of(spec: EngineSpec) -> "VllmOptions":
    """Return the options of the vLLM engine that `spec` describes.

    Raises:
        EngineOptionError: A value is impossible, or stands twice.
    """
    from rl_generation.vllm import VllmOptions

    own = {each.name for each in fields(VllmOptions)} - {"vllm_kwargs"}
    given: dict[str, Any] = {name: value for name, value in spec.vllm_kwargs.items() if name in own}
    others = {name: value for name, value in spec.vllm_kwargs.items() if name not in own}
    if not spec.with_tokenizer:
        others["skip_tokenizer_init"] = True
    same = ("model", "tokenizer", "revision", "trust_remote_code", "dtype")
    ours: dict[str, Any] = {name: getattr(spec, name) for name in same} | {"max_num_seqs": spec.max_batch_size}
    ours = {name: value for name, value in ours.items() if value is not None and value is not False}
    for name in sorted(given.keys() & ours.keys()):
        raise EngineOptionError(f"vllm_kwargs sets {name}={given[name]!r}, which is given as {ours[name]!r} already")
    return VllmOptions(**ours, **given, vllm_kwargs=others)


def load_transformers_engine(model_name: str, **options: Any) -> "tuple[TransformersEngine, Any]":
    """`load_engine` of the embedded engine; `options` are of `EngineSpec` or of `TransformersEngine`."""
    own = {each.name for each in fields(EngineSpec)} & options.keys()
    spec = EngineSpec(model=model_name, **{name: options.pop(name) for name in own})
    return cast("tuple[TransformersEngine, Any]", load_engine(spec, **options))


def tokenizer_of(spec: EngineSpec) -> Any:
    """Load the tokenizer of `spec`, or return None where it wants none.

    Raises:
        ModelError: It cannot be loaded.
    """
    if not spec.with_tokenizer:
        return None
    if spec.tokenizer is None:
        return load_tokenizer(spec)
    return load_tokenizer(ModelSource(model=spec.tokenizer, trust_remote_code=spec.trust_remote_code))

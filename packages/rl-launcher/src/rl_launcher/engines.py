"""An engine and the sink that a refit fills it through, as a recipe asks for them: in this process, or in an actor's.

Knows no Ray and no training. An engine is made without weights and refuses to answer before the first refit: so nothing
but a verified refit can be what it serves.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from rl_backends import select_backend
from rl_launcher.schema import GenerationConfig, Recipe
from rl_launcher.schema.policy import VllmConfig
from rl_refit import ModuleSink, WeightSink

if TYPE_CHECKING:
    from rl_generation.vllm import VllmOptions

__all__ = ["EngineSpec", "MadeEngine", "dtypes_of", "engine_spec", "make_engine", "make_in_process", "vllm_options"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What one engine is made of. Crosses processes."""

    model: str
    """A Hugging Face folder or hub id. Of its weights nothing is used."""

    generation: GenerationConfig
    """The recipe's."""

    stop_token_ids: tuple[int, ...]
    """Tokens that end an answer."""

    pad_token_id: int
    """Any token; fills what nobody sees."""

    dtypes: Mapping[str, str] = field(default_factory=dict)
    """In which dtype the policy sends each tensor, as `float32`; see `dtypes_of`. Others keep the model's."""

    precision: str = "float32"
    """What the policy computes in; vLLM's, where the recipe says `auto`."""

    revision: str | None = None
    """Of a hub id."""

    trust_remote_code: bool = False
    """Run the model's own Python code."""

    device: str = "cpu"
    """Where it computes: `cpu` or `cuda`."""

    in_flight: bool = False
    """Take new weights in the middle of answers, which only vLLM's asynchronous engine does."""

    sleeps: bool = False
    """Share the device with the trainer: give its memory away between two calls."""

    seed: int = 0
    """Of answers without a seed of their own."""

    def __post_init__(self) -> None:
        if self.in_flight and not self.asynchronous:
            raise ValueError(
                "weights=in_flight asks for an engine that takes weights in the middle of answers; give "
                "policy.generation.backend=vllm and policy.generation.vllm_cfg.async_engine=true, or say "
                "weights=between_calls"
            )

    @property
    def asynchronous(self) -> bool:
        """Whether many callers are answered at once."""
        return self.generation.backend == "vllm" and self.generation.vllm_cfg.async_engine

    @property
    def dtype(self) -> str:
        """vLLM's, of weights and activations."""
        asked = self.generation.vllm_cfg.precision
        return self.precision if asked == "auto" else asked

    @property
    def casts(self) -> bool:
        """Whether the engine keeps tensors in another dtype than they are sent in."""
        return self.generation.backend == "vllm" and any(dtype != self.dtype for dtype in self.dtypes.values())

    def explain(self) -> str:
        """One line for people."""
        config = self.generation
        if config.backend == "transformers":
            return f"transformers engine on {self.device}, up to {config.max_batch_size} answers side by side"
        kind = "asynchronous" if self.asynchronous else "synchronous"
        ranks = config.ranks_per_engine
        sent = Counter(self.dtypes.values()).most_common(1)
        cast = f", cast from the {sent[0][0]} that the policy sends" if self.casts else ""
        return f"vLLM, {kind}, {ranks} rank{'s' if ranks > 1 else ''} on {self.device}, {self.dtype}{cast}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeEngine:
    """An engine, and the way into its weights."""

    engine: Any
    """Of rl_generation."""

    sink: WeightSink
    """Of rl_refit."""

    close: Callable[[], None]
    """End the engine and what was made for it."""


def engine_spec(
    recipe: Recipe,
    *,
    model_name: str,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    dtypes: Mapping[str, str],
    sleeps: bool = False,
) -> EngineSpec:
    """What each engine of `recipe` is made of.

    Raises:
        ValueError: asynchronous GRPO asks for what the engine cannot do.
    """
    config, asynchronous = recipe.policy, None if recipe.grpo is None else recipe.grpo.async_grpo
    backend = select_backend(config).config
    return EngineSpec(
        model=model_name,
        generation=config.generation,
        stop_token_ids=tuple(stop_token_ids),
        pad_token_id=pad_token_id,
        dtypes=dtypes,
        precision=backend.precision,
        revision=config.revision if model_name == config.model_name else None,
        trust_remote_code=config.trust_remote_code,
        device=backend.device,
        in_flight=asynchronous is not None and asynchronous.weights == "in_flight",
        sleeps=sleeps,
        seed=recipe.seed,
    )


def dtypes_of(shards: Any) -> dict[str, str]:
    """In which dtype each of a backend's `shards()` is sent."""
    return {shard.name: str(shard.local.dtype).removeprefix("torch.") for shard in shards}


def make_engine(spec: EngineSpec) -> MadeEngine:
    """The engine, in this process or with processes of its own; it refuses to answer until it was refitted.

    Raises:
        ValueError: whatever the engine refuses.
    """
    if spec.generation.backend == "vllm":
        return _vllm(spec, model=spec.model, own_process=spec.generation.ranks_per_engine > 1)
    return _transformers(spec, _without_weights(spec), fed=False)


def make_in_process(spec: EngineSpec, *, model: Any) -> MadeEngine:
    """The engine beside a policy of this process, which has a model of its own; vLLM gets a process beside this one.

    Args:
        spec: What it is made of.
        model: Taken over, with its weights; of one for vLLM, which makes its own, only the files are used.

    Raises:
        ValueError: whatever the engine refuses.
    """
    if spec.generation.backend == "transformers":
        return _transformers(spec, model, fed=True)
    with ExitStack() as kept:
        folder = spec.model
        if not _is_stored(folder):  # a function made it: vLLM reads folders
            folder = kept.enter_context(tempfile.TemporaryDirectory(prefix="rl-launcher-model-"))
            model.save_pretrained(folder)
        # In the policy's own process vLLM would take the trainer's default process group over.
        made = _vllm(spec, model=folder, own_process=True)
        kept.callback(made.close)
        return MadeEngine(engine=made.engine, sink=made.sink, close=kept.pop_all().close)


def vllm_options(spec: EngineSpec, *, model: str) -> "VllmOptions":
    """What rl_generation's vLLM engines are given.

    Raises:
        ValueError: an option is impossible.
    """
    from rl_generation.vllm import VllmOptions
    from rl_refit.vllm import WORKER_EXTENSION

    config: VllmConfig = spec.generation.vllm_cfg
    return VllmOptions(
        model=model,
        revision=spec.revision,
        trust_remote_code=spec.trust_remote_code,
        dtype=spec.dtype,
        for_training=True,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        enable_expert_parallel=config.enable_expert_parallel,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_memory_bytes,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=config.enable_prefix_caching,
        enable_sleep_mode=spec.sleeps and spec.device == "cuda",
        worker_extension_cls=WORKER_EXTENSION,
        seed=spec.seed,
        vllm_kwargs=dict(config.vllm_kwargs),
    )


def _vllm(spec: EngineSpec, *, model: str, own_process: bool) -> MadeEngine:
    from rl_generation.vllm import VllmAsyncEngine, VllmEngine
    from rl_refit.vllm import VllmSink

    options = vllm_options(spec, model=model)
    if spec.asynchronous:
        many = VllmAsyncEngine(options, stop_token_ids=spec.stop_token_ids)
        pause: Literal["keep", "wait"] = "keep" if spec.in_flight else "wait"
        sink = VllmSink(many.vllm, loop=many.loop, pause=pause, cast=spec.casts)
        many.ready = sink.check
        return MadeEngine(engine=many, sink=sink, close=many.close)
    engine = VllmEngine(
        options,
        own_process=own_process,
        stop_token_ids=spec.stop_token_ids,
        ready=lambda: sink.check(),  # noqa: PLW0108 - the sink is made of the engine
    )
    sink = VllmSink(engine.llm, cast=spec.casts)
    return MadeEngine(engine=engine, sink=sink, close=engine.close)


def _transformers(spec: EngineSpec, model: Any, *, fed: bool) -> MadeEngine:
    from rl_generation import ModelError, TransformersEngine

    def ready() -> None:
        sink.check()  # no answer from weights that a refit has left torn
        if not fed and sink.version is None:
            raise ModelError("the engine has no weights yet: no refit has been committed")

    engine: TransformersEngine = TransformersEngine(
        _in_dtypes(model, spec.dtypes).to(spec.device),
        stop_token_ids=spec.stop_token_ids,
        pad_token_id=spec.pad_token_id,
        max_batch_size=spec.generation.max_batch_size,
        seed=spec.seed,
        ready=ready,
    )
    sink = ModuleSink(engine.model, on_commit=engine.commit_version)
    return MadeEngine(engine=engine, sink=sink, close=engine.close)


def _without_weights(spec: EngineSpec) -> Any:
    """The model of zeros: what it would answer without a refit is nobody's."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM  # has type hints in some releases of transformers and none in others

    config = AutoConfig.from_pretrained(spec.model, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
    model = auto.from_config(config, dtype=torch.float32, trust_remote_code=spec.trust_remote_code)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def _in_dtypes(model: Any, dtypes: Mapping[str, str]) -> Any:
    """`model` with its parameters in the dtypes that they are sent in; buffers stay as they are."""
    import torch

    for name, parameter in model.named_parameters():
        if name in dtypes:
            parameter.data = parameter.data.to(getattr(torch, dtypes[name]))
    return model


def _is_stored(model: str) -> bool:
    from rl_launcher.user_code import is_import_string

    return not is_import_string(model)

"""The engine that a recipe describes, and the way of weights into it: `rl_generation` makes it, `rl_refit` feeds it.

An engine is made without weights and refuses to generate before its first refit, so that it serves nothing but verified
weights. The same code runs in this process and in an engine's actor on Ray.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_backends import select_backend
from rl_backends.backend import Backend
from rl_generation import ModelError, TrainingEngineSpec, make_training_engine
from rl_launcher.errors import Refusal
from rl_launcher.schema import Recipe
from rl_launcher.user_code import is_import_string
from rl_refit import EngineSink, ModuleSink, StateDictSource, WeightSink
from rl_refit.vllm import WORKER_EXTENSION, VllmSink

EXECUTOR = "distributed_executor_backend"
"""vLLM's argument for how the ranks of an engine are started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeEngine:
    """An engine, and the sink that its refits fill."""

    engine: Any
    """Of rl_generation."""

    sink: WeightSink | EngineSink
    """Of rl_refit."""

    close: Callable[[], None]
    """End the engine and remove what was made for it."""


def engine_spec(
    recipe: Recipe,
    *,
    model_name: str,
    stop_token_ids: Sequence[int],
    pad_token_id: int,
    dtypes: Mapping[str, str],
    sleeps: bool = False,
    executor: Literal["mp", "ray"] | None = None,
) -> TrainingEngineSpec:
    """What each engine of `recipe` is made of.

    Args:
        recipe: of the run.
        model_name: a folder or hub id; differs from the recipe's where a function made the model.
        stop_token_ids: tokens that end a response.
        pad_token_id: any token.
        dtypes: in which dtype the policy sends each tensor; see `dtypes_of`.
        sleeps: whether the engine shares its device with the trainer and releases its memory between calls.
        executor: how vLLM starts the ranks of an engine: "mp" as processes of its node, "ray" as Ray actors on several
            nodes. None leaves it to vLLM.

    Raises:
        ValueError: an option of vLLM is impossible, or the recipe names another executor.
    """
    policy, async_grpo = recipe.policy, None if recipe.grpo is None else recipe.grpo.async_grpo
    generation, backend = policy.generation, select_backend(policy).config
    if generation.backend == "vllm" and executor is not None:
        kwargs = generation.vllm_cfg.vllm_kwargs
        if (given := kwargs.get(EXECUTOR, executor)) != executor:
            where = "one node" if executor == "mp" else "several nodes"
            raise Refusal(
                f"policy.generation.vllm_cfg.vllm_kwargs.{EXECUTOR}={given}, and an engine of this run is on {where}, "
                f"where it must be {executor}; leave it out"
            )
        vllm = replace(generation.vllm_cfg, vllm_kwargs={**kwargs, EXECUTOR: executor})
        generation = replace(generation, vllm_cfg=vllm)
    return TrainingEngineSpec(
        config=generation,
        model=model_name,
        revision=policy.revision if model_name == policy.model_name else None,
        trust_remote_code=policy.trust_remote_code,
        device=backend.device,
        precision=backend.precision,
        dtypes=dtypes,
        stop_token_ids=tuple(stop_token_ids),
        pad_token_id=pad_token_id,
        seed=recipe.seed,
        sleeps=sleeps,
        in_flight=async_grpo is not None and async_grpo.weights == "in_flight",
        worker_extension=WORKER_EXTENSION,
    )


def dtypes_of(shards: Any) -> dict[str, str]:
    """The dtype of each of a backend's `shards()` by name, such as `float32`."""
    return {shard.name: str(shard.local.dtype).removeprefix("torch.") for shard in shards}


def weight_source(policy: Backend) -> StateDictSource:
    """The policy's shards as the source of refits.

    Where adapters are trained, the shards are merged copies; call `policy.shards()` before each refit to update them.
    """
    return StateDictSource.from_shards(policy.shards(), buffers=policy.skeleton_buffers())


def make_engine(spec: TrainingEngineSpec, *, model: Any = None, tokenizer: Any = None) -> MadeEngine:
    """Make the engine and its sink. Without `model` it refuses to generate before its first refit.

    Args:
        spec: what it is made of.
        model: for the transformers engine, a model with weights to take over.
        tokenizer: see `make_training_engine`.

    Raises:
        ValueError: what the engine refuses.
    """
    sink: Any = None

    def ready() -> None:
        sink.check()  # raises while a refit has left the weights torn
        if spec.vllm is None and model is None and sink.version is None:
            raise ModelError("the engine has no weights yet: no refit has been committed")

    engine = make_training_engine(spec, ready=ready, model=model, tokenizer=tokenizer)
    sink = make_sink(spec, engine)
    return MadeEngine(engine=engine, sink=sink, close=engine.close)


def make_sink(spec: TrainingEngineSpec, engine: Any) -> WeightSink | EngineSink:
    """What the refits of `engine` fill; a later one takes the engine from an earlier one."""
    if spec.vllm is None:
        return ModuleSink(engine.model, on_commit=engine.commit_version)
    return VllmSink(engine.vllm, loop=engine.loop, pause="keep" if spec.in_flight else "wait", cast=spec.casts)


def make_in_process(spec: TrainingEngineSpec, *, model: Any, tokenizer: Any) -> MadeEngine:
    """Make the engine for a policy of this process.

    Args:
        spec: what it is made of.
        model: taken over with its weights by the transformers engine. vLLM makes its own, from files that are saved
            here where a function made the model.
        tokenizer: of the model, for stop strings.

    Raises:
        ValueError: what the engine refuses.
    """
    if spec.vllm is None:
        return make_engine(spec, model=model, tokenizer=tokenizer)
    with ExitStack() as cleanup:
        if is_import_string(spec.model):
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="rl-launcher-model-"))
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
            spec = replace(spec, model=folder)
        made = make_engine(spec)
        cleanup.callback(made.close)
        return MadeEngine(engine=made.engine, sink=made.sink, close=cleanup.pop_all().close)

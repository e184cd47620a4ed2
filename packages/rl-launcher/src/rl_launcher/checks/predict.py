"""Predict the memory of ranks and engines, and what a refit moves, from a model without weights and without a GPU.

If the model cannot be opened, every prediction says so instead.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from rl_backends import MegatronConfig, ModelError, explain, open_model, select_backend
from rl_backends.least_memory import device_bytes, host_bytes, least_memory
from rl_backends.loading.skeleton import without_weights
from rl_backends.loading.source import local_folder
from rl_backends.lora.layers import AdapterSize
from rl_generation import EngineMemory, EngineOptionError, estimate_memory
from rl_launcher.build.models import adapters_of, copies_reference, learning_rate_hint, load_model
from rl_launcher.build.parts import NO_ENGINE
from rl_launcher.build.remote_engines import describe_remote
from rl_launcher.checks.gpu_budget import Budget, Gpu, Lengths, StepTimes, budget, step_times
from rl_launcher.ray.placement import Placement
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Texts for people, and the figures in them."""

    policy: str
    engine: str
    refit: str
    gpus: Budget | None = None
    """What the run takes of the GPUs that were asked about."""
    times: StepTimes | None = None
    """How long a step takes, as far as that can be calculated; None without the model."""
    figures: Mapping[str, Any] = field(default_factory=dict)


def predict_run(
    recipe: Recipe,
    placement: Placement,
    objects: Objects = NO_OBJECTS,
    *,
    gpu: Gpu | None = None,
    lengths: Lengths | None = None,
) -> Prediction:
    """Predict memory, refits and the time of a step.

    Args:
        recipe: of the run.
        placement: of its ranks and engines.
        objects: a `model` replaces the recipe's.
        gpu: replaces the GPUs of this machine.
        lengths: of the rows of a step, where they are known.

    Raises:
        ValueError: what the backend or the engine would refuse.
    """
    policy = recipe.policy
    try:
        if objects.model is not None:
            skeleton = without_weights(objects.model)
        elif is_import_string(policy.model_name):
            # Only the function knows what it builds, so it is called, and the weights are dropped.
            model, _ = load_model(
                policy, seed=recipe.seed, key="policy.model_name", padded_vocabulary=policy.padded_vocabulary
            )
            skeleton = without_weights(model)
        else:
            source = open_model(policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code)
            skeleton = source.skeleton()
    except ModelError as error:
        if is_import_string(policy.model_name) or local_folder(policy.model_name) is not None:
            raise
        why, unknown = f"unknown without the model: {error}", "unknown without the model, see Policy"
        return Prediction(policy=why, engine=unknown, refit=unknown, figures={"unknown": str(error)})
    adapters = adapters_of(policy, without_weights(skeleton))
    ranks = len(placement.ranks)
    text, peak = _policy(recipe, skeleton, adapters, ranks=ranks)
    beside = _companion_bytes(recipe, skeleton, ranks=ranks)
    if beside:
        names = " and ".join(beside)
        text += f"\n\nbeside it on each rank: {names}, {_size(sum(beside.values()))} at least"
        peak = None if peak is None else peak + sum(beside.values())

    def peak_with(**changes: Any) -> int | None:
        """The peak with fields of `policy.dtensor_cfg` changed; None where it would be refused."""
        changed = replace(policy, dtensor_cfg=replace(policy.dtensor_cfg, **changes))
        try:
            _, found = _policy(replace(recipe, policy=changed), skeleton, adapters, ranks=ranks)
        except ValueError:
            return None
        return None if found is None else found + sum(beside.values())

    engine, engine_memory = _engine(recipe, skeleton)
    engine_bytes = engine_memory.weight_bytes
    times = step_times(recipe, skeleton, placement, gpu=gpu, engine=engine_memory, lengths=lengths)
    gpus = None
    if gpu is not None:
        gpus = budget(
            recipe,
            skeleton,
            placement,
            gpu=gpu,
            rank_peak_bytes=peak,
            engine=engine_memory,
            adapters=adapters,
            peak_with=None if policy.megatron_cfg.enabled else peak_with,
            microbatch_rows=_microbatch_rows(recipe, skeleton),
            times=times,
        )
    on_gpu = placement.device == "cuda"
    device = (device_bytes() if gpu is None else gpu.memory_bytes) if on_gpu else host_bytes()
    owner = "a GPU" if on_gpu else "this machine, shared by all processes,"
    total = f"{owner} has {_size(device)}" if device else "the memory of a GPU is unknown on this machine"
    memory = f"memory: a rank needs {_size(peak)} at its peak"
    refit = "none: there is no engine"
    if placement.engines:
        alternate = placement.colocated and not placement.in_process
        memory += f", an engine {_size(engine_bytes)} for weights on each of its ranks; they hold it "
        memory += "in turn" if alternate else "at the same time"
        refit = _refit(recipe, skeleton, placement)
    else:
        remote, engine_bytes = recipe.policy.generation.remote, 0
        if remote is None or not recipe.generates:
            engine = f"none: {NO_ENGINE}"
        else:
            engine = f"none here: {describe_remote(remote)}" + (f", each\n{engine}" if remote.kind != "sglang" else "")
            refit = "from this process to each engine that has joined, in a transaction of its own"
            if remote.kind == "sglang":
                refit += (
                    f", and from there through {remote.folder} into SGLang (never tried with SGLang itself, only with "
                    f"a server that answers as it does)"
                )
    return Prediction(
        policy=f"{text}\n\n{memory}; {total}",
        engine=engine,
        refit=refit,
        gpus=gpus,
        times=times,
        figures={
            **({} if gpus is None else gpus.figures),
            "rank_peak_bytes": peak,
            "engine_weight_bytes": engine_bytes,
            "device_bytes": device,
            "trained_parameters": None if adapters is None else adapters.trainable,
        },
    )


def _policy(recipe: Recipe, skeleton: nn.Module, adapters: AdapterSize | None, *, ranks: int) -> tuple[str, int | None]:
    """Return how the policy is sharded, and the peak bytes of a rank in one step."""
    config = select_backend(recipe.policy).config
    if isinstance(config, MegatronConfig):
        from rl_backends.commands.megatron_layout import describe_layout

        text, _, peak = describe_layout(skeleton, lambda: recipe.policy.megatron_cfg, ranks=ranks)
        return text, peak
    stages = list(recipe.stages.values())
    explained = explain(
        skeleton,
        config,
        world_size=ranks,
        optimizer=stages[-1].optimizer if stages else None,
        length=_row_length(recipe, skeleton),
        reference=copies_reference(recipe),
    )
    text, peak = explained.text(), explained.dry_run.peak.num_bytes
    if adapters is None or peak is None:
        return text, peak
    lines = [adapters.explain()]
    stage = recipe.grpo or recipe.ppo or recipe.dpo
    if stage is not None and stage.keeps_reference and not copies_reference(recipe):
        lines.append("the reference is the policy with its adapters off, and takes no memory of its own")
    if hint := learning_rate_hint(recipe):
        lines.append(hint)
    # The weights that are merged for the engines are no part of the traced step.
    merged = adapters.merged_bytes * config.data_parallel_replicate_size // ranks
    return "\n".join([*lines, "", text]), peak + merged


def _companion_bytes(recipe: Recipe, skeleton: nn.Module, *, ranks: int) -> dict[str, int]:
    """The least bytes that each model beside the policy holds on a rank while the last stage runs, by its name."""
    stages = recipe.stages.values()
    needed = least_memory(
        select_backend(recipe.policy).config,
        parameters=sum(weight.numel() for weight in skeleton.parameters()),
        optimizers={stage.optimizer.name for stage in stages},
        ranks=ranks,
        adapters=None,
    )
    found: dict[str, int] = {}
    if recipe.ppo is not None:
        found["the critic with its gradients and optimizer"] = needed.trainer_bytes // ranks
    if recipe.is_judged_by_model:
        found["the reward model's weights"] = needed.weight_bytes // ranks
    elif recipe.reward_model is not None:
        found["the reward model with its gradients and optimizer"] = needed.trainer_bytes // ranks
    return found


def _engine(recipe: Recipe, skeleton: nn.Module) -> tuple[str, EngineMemory]:
    generation = recipe.policy.generation
    cfg = generation.vllm_cfg
    model_config: Any = skeleton.config
    trainer = select_backend(recipe.policy).config
    dtype: str = trainer.precision if generation.backend == "vllm" else "float32"
    dtype = dtype if cfg.precision == "auto" else cfg.precision
    sizes = cfg.sizes
    try:
        if generation.backend != "vllm":
            sizes["max_num_seqs"] = generation.max_batch_size
        elif trainer.device == "cpu" and cfg.kv_cache_memory_bytes is None:
            unsized = estimate_memory(model_config, dtype=dtype, **sizes)
            sizes["kv_cache_memory_bytes"] = unsized.default_cpu_cache_bytes
        sizes["max_model_len"] = cfg.max_model_len or _row_length(recipe, skeleton)
        memory = estimate_memory(model_config, dtype=dtype, **sizes)
    except EngineOptionError as error:
        raise EngineOptionError(f"policy.generation.vllm_cfg: {error}") from error
    head = (
        f"{generation.backend} engine, responses of at most {generation.max_new_tokens} tokens "
        f"at temperature {generation.temperature:g}"
    )
    return f"{head}\n{memory.explain()}", memory


def _refit(recipe: Recipe, skeleton: nn.Module, placement: Placement) -> str:
    """Describe what each refit moves: every weight once into each engine; tied weights count once."""
    weights, config = list(skeleton.parameters()), recipe.policy.refit
    selection = select_backend(recipe.policy)
    item = 2 if selection.config.precision == "bfloat16" else 4
    if selection.adapters is not None:
        item = selection.adapters.torch_base_dtype.itemsize  # merged weights have the dtype of the frozen ones
    num_bytes, engines = sum(weight.numel() for weight in weights) * item, len(placement.engines)
    if placement.in_process:
        route = "in this process, tensor by tensor"
    elif recipe.policy.generation.backend == "vllm":
        route = "from rank to rank, staged beside each engine's own until they are verified"
    elif placement.num_nodes > 1:
        route = "from rank to rank, nothing gathered"
    else:
        route = "over shared memory or CUDA IPC"
    by_batches = any(stage is not None for stage in (recipe.grpo, recipe.ppo, recipe.distill))
    when = "after every batch" if by_batches else "at the end of a stage and before each evaluation"
    to = f"{engines} engine{'s' * (engines > 1)}"
    return (
        f"{when}: {len(weights)} tensors, about {_size(num_bytes)}, into {to}, {route}\n"
        f"buckets of {config.bucket_bytes / 2**20:g} MiB x {config.buckets}, deadline {config.deadline_s:g} s\n"
        f"verify {config.verify}: prepare, transfer, verify, commit; if one of them fails the old weights stay"
    )


def _row_length(recipe: Recipe, skeleton: nn.Module) -> int:
    """Return the tokens of the longest row that is trained on, within the model's context."""
    context = getattr(skeleton.config, "max_position_embeddings", None) or 2**20
    length = recipe.policy.generation.vllm_cfg.max_model_len or 2 * recipe.policy.generation.max_new_tokens
    return int(min(length, context))


def _microbatch_rows(recipe: Recipe, skeleton: nn.Module) -> int:
    """Rows of a microbatch of the longest rows: its tokens may allow fewer than `micro_batch_size`."""
    config = select_backend(recipe.policy).config
    bound = config.micro_batch_size
    if config.micro_batch_tokens is not None:
        bound = min(bound, config.micro_batch_tokens // _row_length(recipe, skeleton))
    return max(1, bound)


def _size(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "an unknown amount"
    return f"{num_bytes / 2**20:.2f} MiB" if num_bytes < GIB else f"{num_bytes / GIB:.2f} GiB"

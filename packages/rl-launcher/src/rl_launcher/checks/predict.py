"""What a run will take, from a model without its weights: memory of ranks and engines, what a refit moves.

Needs no GPU. Where the model itself cannot be had, each figure says so in its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from rl_backends import DTensorConfig, ModelError, explain, open_model, select_backend
from rl_backends.lora import AdapterSize
from rl_backends.reference import without_weights
from rl_generation import EngineOptionError, estimate_memory
from rl_launcher.checks.preflight import device_bytes, host_bytes
from rl_launcher.load_model import adapters_of, copies_reference, learning_rate_hint, load_model
from rl_launcher.ray.placement import Placement
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string

__all__ = ["Prediction", "predict_run"]

GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Texts for people, and the figures in them."""

    policy: str
    engine: str
    refit: str
    figures: Mapping[str, Any] = field(default_factory=dict)


def predict_run(recipe: Recipe, placement: Placement, objects: Objects = NO_OBJECTS) -> Prediction:
    """Predict memory and refit of `recipe`.

    Raises:
        ValueError: what the backend or the engine would refuse.
    """
    try:
        skeleton = _skeleton(recipe, objects)
    except ModelError as error:
        if not is_hub_id(recipe.policy.model_name):
            raise
        other = "not known without the model, as above"
        return Prediction(
            policy=f"not known without the model: {error}",
            engine=other,
            refit=other,
            figures={"unknown": str(error)},
        )
    adapters = adapters_of(recipe.policy, without_weights(skeleton))
    policy, peak = _policy(recipe, skeleton, ranks=len(placement.ranks))
    if adapters is not None and peak is not None:
        policy, peak = _with_adapters(recipe, adapters, policy=policy, peak=peak, ranks=len(placement.ranks))
    engine, weight_bytes = _engine(recipe, skeleton)
    device = device_bytes() if placement.device == "cuda" else host_bytes()
    refit = _refit(recipe, skeleton, placement)
    return Prediction(
        policy=f"{policy}\n\n{_beside(peak, weight_bytes, device=device, placement=placement)}",
        engine=engine,
        refit=refit,
        figures={
            "rank_peak_bytes": peak,
            "engine_weight_bytes": weight_bytes,
            "device_bytes": device,
            "trained_parameters": None if adapters is None else adapters.trainable,
        },
    )


def is_hub_id(name: str) -> bool:
    """Whether `name` is neither a function nor a folder of this machine."""
    from rl_backends.loading.files import local_folder

    return not is_import_string(name) and local_folder(name) is None


def _skeleton(recipe: Recipe, objects: Objects) -> nn.Module:
    """The model without weights; a function's is made with its weights, since only the function knows the model."""
    policy = recipe.policy
    if objects.model is not None:
        return without_weights(objects.model)
    if is_import_string(policy.model_name):
        whole, _ = load_model(
            policy, seed=recipe.seed, key="policy.model_name", padded_vocabulary=policy.padded_vocabulary
        )
        return without_weights(whole)
    return open_model(
        policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code
    ).skeleton()


def _policy(recipe: Recipe, skeleton: nn.Module, *, ranks: int) -> tuple[str, int | None]:
    """How it is sharded, and what a step takes of each rank."""
    config = select_backend(recipe.policy).config
    if not isinstance(config, DTensorConfig):
        return _megatron(recipe, skeleton, ranks=ranks)
    stages = list(recipe.stages.values())
    explained = explain(
        skeleton,
        config,
        world_size=ranks,
        optimizer=stages[-1].optimizer if stages else None,
        length=_row_length(recipe, skeleton),
        reference=copies_reference(recipe),
    )
    return explained.text(), explained.dry_run.peak.num_bytes


def _with_adapters(recipe: Recipe, adapters: AdapterSize, *, policy: str, peak: int, ranks: int) -> tuple[str, int]:
    """How much trains, and the peak with the weights that are merged for engines, which a step knows nothing of."""
    hint = learning_rate_hint(recipe)
    kl = recipe.grpo is not None and recipe.grpo.objective.kl.weight > 0
    off = "the reference is the policy with its adapters off, without memory of its own"
    told = [adapters.explain(), off if kl and not copies_reference(recipe) else None, hint]
    config = recipe.policy.dtensor_cfg
    merged = adapters.merged_bytes * config.data_parallel_replicate_size // ranks
    return "\n".join([*filter(None, told), "", policy]), peak + merged


def _megatron(recipe: Recipe, skeleton: nn.Module, *, ranks: int) -> tuple[str, int | None]:
    from rl_backends.commands.megatron_layout import axes_of, readable_layout, stages_of
    from rl_backends.loading.shards_by_name import first_names

    wanted = recipe.policy.megatron_cfg
    model_config: Any = skeleton.config
    architecture, config = readable_layout(model_config, lambda: wanted, ranks=ranks)
    names = first_names(skeleton)
    shapes = {name: tuple(t.shape) for name, t in skeleton.state_dict().items() if names[name] == name}
    fullest = max(stages_of(architecture, shapes, config, ranks=ranks), key=lambda stage: stage.num_bytes)
    parts = {
        "weights": fullest.weight_bytes,
        "gradients": fullest.gradient_bytes,
        "optimizer": fullest.optimizer_bytes,
        "together": fullest.num_bytes,
    }
    lines = [f"Megatron backend of {type(skeleton).__name__} on {ranks} {config.device} rank{'s' * (ranks > 1)}"]
    lines += [f"  {axis.name:<4}{axis.size:>5}  {axis.does}" for axis in axes_of(config, ranks=ranks)]
    lines += ["memory of the fullest rank, without activations and communication"]
    lines += [f"  {name:<10}{_gib(size):>12}" for name, size in parts.items()]
    return "\n".join(lines), fullest.num_bytes


def _engine(recipe: Recipe, skeleton: nn.Module) -> tuple[str, int | None]:
    generation = recipe.policy.generation
    cfg = generation.vllm_cfg
    model_config: Any = skeleton.config
    precision: str = select_backend(recipe.policy).config.precision
    dtype: str = precision if generation.backend == "vllm" else "float32"
    if cfg.precision != "auto":
        dtype = cfg.precision
    head = f"{generation.backend} engine, answers of at most {generation.max_new_tokens} tokens"
    head += f" at temperature {generation.temperature:g}"
    try:
        memory = estimate_memory(
            model_config,
            dtype=dtype,
            tensor_parallel_size=cfg.tensor_parallel_size,
            max_model_len=cfg.max_model_len or _row_length(recipe, skeleton),
            max_num_seqs=cfg.max_num_seqs if generation.backend == "vllm" else generation.max_batch_size,
            kv_cache_memory_bytes=cfg.kv_cache_memory_bytes,
        )
    except EngineOptionError as error:
        raise EngineOptionError(f"policy.generation.vllm_cfg: {error}") from error
    return f"{head}\n{memory.explain()}", memory.weight_bytes


def _refit(recipe: Recipe, skeleton: nn.Module, placement: Placement) -> str:
    """What each refit moves: every weight once, ties counted once, into each engine."""
    weights = list(skeleton.parameters())
    config = recipe.policy.refit
    selection = select_backend(recipe.policy)
    item = 2 if selection.config.precision == "bfloat16" else 4
    if selection.adapters is not None:
        item = selection.adapters.torch_base_dtype.itemsize  # merged, they have the dtype of the frozen ones
    num_bytes = sum(weight.numel() for weight in weights) * item
    to = f"{len(placement.engines)} engine{'s' * (len(placement.engines) > 1)}"
    way = (
        "in this process, tensor by tensor"
        if placement.in_process
        else ("from rank to rank, nothing gathered" if placement.num_nodes > 1 else "over shared memory or CUDA IPC")
    )
    by_batches = recipe.grpo is not None or recipe.distill is not None
    when = "after every batch" if by_batches else "at the end of a stage, and for each evaluation before,"
    return "\n".join(
        [
            f"{when} {len(weights)} tensors, about {_gib(num_bytes)}, into {to}, {way}",
            f"buckets of {config.bucket_bytes / 2**20:g} MiB x {config.buckets}, deadline {config.deadline_s:g} s",
            f"verify {config.verify}: prepare, transfer, verify, commit, or the old weights stay",
        ]
    )


def _beside(peak: int | None, engine: int | None, *, device: int | None, placement: Placement) -> str:
    """The two of them next to what a slot has."""
    what = "GPU" if placement.device == "cuda" else "this machine, shared by all processes,"
    has = f"{what} has {_gib(device)}" if device else "how much memory a GPU has is not known on this machine"
    sharing = "take turns" if placement.colocated and not placement.in_process else "hold theirs at the same time"
    needs = f"a rank needs {_gib(peak)} at its peak, an engine {_gib(engine)} for weights on each of its ranks"
    return f"memory: {needs}; they {sharing}; {has}"


def _row_length(recipe: Recipe, skeleton: nn.Module) -> int:
    """Tokens of the longest row that is trained on, within the model's context."""
    model_config: Any = skeleton.config
    context = getattr(model_config, "max_position_embeddings", None) or 2**20
    length = recipe.policy.generation.vllm_cfg.max_model_len or 2 * recipe.policy.generation.max_new_tokens
    return int(min(length, context))


def _gib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "an unknown amount"
    if num_bytes < GIB:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"

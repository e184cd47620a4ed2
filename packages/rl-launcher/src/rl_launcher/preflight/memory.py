"""Whether the least that a run holds fits into what this machine has.

    in float32 by DTensor      weights 4, gradients 4, AdamW's moments 8         bytes a parameter
    in bfloat16 by Megatron    weights 2, gradients 4, moments and masters 12
    with adapters              the frozen weights, merged ones beside them, and 16 for each parameter of an adapter
    an engine                  its weights, in its own dtype

Activations, caches and working memory come on top and are left out: what is refused here cannot be run, and what is not
may still be too large. `explain` predicts the whole.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from rl_backends import DTensorConfig, MegatronConfig, select_backend
from rl_launcher.adapters import copies_reference
from rl_launcher.distributed.placement import Placement
from rl_launcher.errors import LauncherError
from rl_launcher.preflight.models import KnownModel
from rl_launcher.recipe_schema import Recipe

__all__ = ["Needs", "check_memory", "device_bytes", "host_bytes", "lacking_memory", "least_needed"]

GIB = 2**30
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The least that a run holds, on all its slots together."""

    trainer_bytes: int
    """Weights, gradients and optimizer state."""

    frozen_bytes: int
    """The reference, where there is one."""

    engine_bytes: int
    """Weights of all engines."""

    num_slots: int
    """GPUs, or processes, that share it."""

    @property
    def total(self) -> int:
        """All of it, where engine and trainer hold theirs at the same time."""
        return self.trainer_bytes + self.frozen_bytes + self.engine_bytes


def check_memory(
    recipe: Recipe, *, model: KnownModel, placement: Placement, available_bytes: int | None = None
) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone are more than this machine has.

    `available_bytes` is what all slots have together; None asks the machine, which knows nothing of other ones.

    Raises:
        LauncherError: saying what is needed, what there is, and which keys make it less.
    """
    lacking = lacking_memory(recipe, model=model, placement=placement, available_bytes=available_bytes)
    if lacking is not None:
        raise LauncherError(f"{lacking}; rl-launcher explain shows the whole")


def lacking_memory(
    recipe: Recipe, *, model: KnownModel, placement: Placement, available_bytes: int | None = None
) -> str | None:
    """Why `check_memory` would refuse, in words; None where it would not."""
    needs = least_needed(recipe, model=model, placement=placement)
    available = _available(recipe, placement) if available_bytes is None else available_bytes
    if available is None:
        return None
    # Engines that take turns with the trainer on GPUs have given their memory away by then.
    needed = needs.total if not _takes_turns(recipe, placement) else max(needs.trainer_bytes, needs.engine_bytes)
    if needed <= available:
        return None
    what = "GPU memory" if placement.device == "cuda" else "memory"
    return (
        f"policy.model_name={model.name} has {model.parameters / 1e9:.2f} billion parameters, and training it takes at "
        f"least {_gib(needed)} of {what}: weights, gradients and optimizer {_gib(needs.trainer_bytes)}, engine "
        f"{_gib(needs.engine_bytes)}"
        + (f", reference {_gib(needs.frozen_bytes)}" if needs.frozen_bytes else "")
        + f"; "
        f"this machine has {_gib(available)}. Take a smaller model, more GPUs or nodes (cluster.gpus_per_node, "
        f"cluster.num_nodes), {_less(recipe)}, or policy.dtensor_cfg.cpu_offload=true on a GPU"
    )


def _less(recipe: Recipe) -> str:
    adapters = recipe.policy.dtensor_cfg.lora_cfg
    if recipe.policy.megatron_cfg.enabled:
        return "policy.megatron_cfg.precision=bfloat16"
    if adapters is None:
        return "adapters alone to train (policy.dtensor_cfg.lora_cfg.rank=16)"
    return f"policy.dtensor_cfg.lora_cfg.base_dtype=bfloat16 (it is {adapters.base_dtype})"


def least_needed(recipe: Recipe, *, model: KnownModel, placement: Placement) -> Needs:
    """What weights, gradients, optimizer state, reference and engines take, by arithmetic."""
    config = select_backend(recipe.policy).config
    ranks = len(placement.ranks)
    copies = _copies(config, ranks)
    weights = _weight_bytes(config)
    state = 0
    if recipe.stages:
        state = 4 + _optimizer_bytes(recipe, config)  # gradients are float32 in both backends
    held, trained, merged = model.parameters * weights, model.parameters, 0
    if (size := model.adapters) is not None:
        held, trained, merged = size.frozen_bytes + size.trainable_bytes, size.trainable, size.merged_bytes
    engines = len(placement.engines)
    return Needs(
        trainer_bytes=(held + trained * state + merged) * copies,
        frozen_bytes=held * copies if copies_reference(recipe) else 0,
        engine_bytes=model.parameters * _engine_item(recipe, weights) * engines,
        num_slots=placement.num_nodes * placement.slots_per_node,
    )


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in, where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def device_bytes() -> int | None:
    """Memory of one GPU of this machine; None where it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _available(recipe: Recipe, placement: Placement) -> int | None:
    """None where the run is on machines that this one knows nothing of."""
    if recipe.cluster.address is not None or placement.num_nodes > 1:
        return None
    if placement.device == "cpu":
        return host_bytes()
    each = device_bytes()
    config = select_backend(recipe.policy).config
    if each is None or (isinstance(config, DTensorConfig) and config.cpu_offload):
        return None
    return each * placement.slots_per_node


def _weight_bytes(config: DTensorConfig | MegatronConfig) -> int:
    """Of one parameter that an engine gets."""
    if isinstance(config, MegatronConfig):
        return 2 if config.precision == "bfloat16" else 4
    return 4 if config.lora_cfg is None else config.lora_cfg.torch_base_dtype.itemsize


def _takes_turns(recipe: Recipe, placement: Placement) -> bool:
    return placement.colocated and placement.device == "cuda" and recipe.cluster.runtime == "ray"


def _copies(config: DTensorConfig | MegatronConfig, ranks: int) -> int:
    """How many whole copies of the state there are over all ranks, at least."""
    if isinstance(config, DTensorConfig):
        return config.data_parallel_replicate_size
    return max(1, ranks // config.data_multiple) if not config.use_distributed_optimizer else 1


def _optimizer_bytes(recipe: Recipe, config: DTensorConfig | MegatronConfig) -> int:
    if isinstance(config, MegatronConfig):
        return 12 if config.precision == "bfloat16" else 8
    names = {stage.optimizer.name for stage in recipe.stages.values()}
    return 8 if "adamw" in names else 2


def _engine_item(recipe: Recipe, policy_bytes: int) -> int:
    generation = recipe.policy.generation
    if generation.backend == "vllm" and generation.vllm_cfg.precision in {"bfloat16", "float16", "half"}:
        return 2
    return policy_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"

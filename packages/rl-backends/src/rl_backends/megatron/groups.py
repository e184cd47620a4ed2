"""The ranks of this run as Megatron arranges them: tensor, context, data and pipeline parallelism, experts within.

Megatron keeps its process groups in one place for the whole process, so every model in it has the same sizes.
"""

import gc
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron
from rl_backends.process_group import Membership, join_process_group
from rl_backends.rank_agreement import once_per_process_group


@dataclass(slots=True, eq=False)
class _Arrangement:
    """Megatron's process groups as this process has made them, and who has joined them; whoever is garbage has left."""

    world: dist.ProcessGroup
    sizes: dict[str, int]
    groups: tuple[dist.ProcessGroup, ...]
    members: "WeakSet[ParallelGroups]" = field(default_factory=WeakSet)


_arrangement: _Arrangement | None = None


class ParallelGroups:
    """Megatron's process groups, and this rank's place in each, from `join` until `leave`."""

    def __init__(self, config: MegatronConfig, arrangement: _Arrangement, membership: Membership) -> None:
        from megatron.core import parallel_state

        self.tp: dist.ProcessGroup = parallel_state.get_tensor_model_parallel_group()
        """Share each matrix multiplication."""
        self.cp: dist.ProcessGroup = parallel_state.get_context_parallel_group()
        """Share the tokens of each row."""
        self.pp: dist.ProcessGroup = parallel_state.get_pipeline_model_parallel_group()
        """Share the layers; the last one reads log-probabilities."""
        self.rows: dist.ProcessGroup = parallel_state.get_data_parallel_group()
        """Have rows of their own: data-parallel ranks, experts shared out among them or not."""
        self.tp_mesh: DeviceMesh | None = None
        """Of `tp`, with the one axis "tp"; None where it is one rank. Its group outlives an arrangement: DTensor
        remembers it."""
        if config.tensor_model_parallel_size > 1:
            meshes, key = _meshes(), (config.device, tuple(dist.get_process_group_ranks(self.tp)))
            if key not in meshes:
                meshes[key] = DeviceMesh.from_group(self.tp, config.device, mesh_dim_names=("tp",))
            self.tp_mesh = meshes[key]
        self.sizes = dict(arrangement.sizes)
        """Of every axis, for people and for checkpoints."""
        self._arrangement, self._membership = arrangement, membership
        arrangement.members.add(self)

    @classmethod
    def join(cls, config: MegatronConfig) -> "ParallelGroups":
        """Arrange all ranks by the sizes in `config`; each `join` needs a `leave`. If it raises, nothing has changed.

        Joins the process group of `torchrun`, or makes one of this process alone, where there is none.
        """
        require_megatron()
        if config.device == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "device='cpu' was asked for, and Megatron takes a GPU wherever torch sees one: choose device='cuda' "
                "(policy.megatron_cfg.device in a recipe), or hide the GPUs by CUDA_VISIBLE_DEVICES=''"
            )
        membership = join_process_group(config.device, timeout_s=config.timeout_s)
        try:
            with cpu_compat():
                arrangement = _arrange(sizes_of(config, dist.get_world_size()), config)
            return cls(config, arrangement, membership)
        except BaseException:
            if _arrangement is not None and not _arrangement.members:
                _dissolve(_arrangement)
            membership.leave()
            raise

    def leave(self, *, collect: bool = True) -> None:
        """Give the groups up; the last of the process to do so destroys them. Once is enough.

        Nothing is sent: a rank that is still in a collective of them may see it fail.

        collect: look for garbage among the others first, which takes a while.
        """
        if self.left:
            return
        members = self._arrangement.members
        members.discard(self)
        collected = bool(members) and collect
        if collected:
            gc.collect()  # models are cycles
        try:
            if not members:
                _dissolve(self._arrangement)
        finally:
            self._membership.leave(collect=collect and not collected)

    @property
    def left(self) -> bool:
        """Whether they were given up, and nothing can be computed any more."""
        return self._membership.left

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the last layers and the head."""
        return self.pp.rank() == self.pp.size() - 1


def sizes_of(config: MegatronConfig, num_ranks: int) -> dict[str, int]:
    """Ranks along every axis, of `num_ranks`; `vp` is of chunks that a stage holds. No Megatron is asked."""
    sizes = {
        "tensor_model_parallel_size": config.tensor_model_parallel_size,
        "context_parallel_size": config.context_parallel_size,
        "pipeline_model_parallel_size": config.pipeline_model_parallel_size,
    }
    named = " x ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
    if num_ranks % config.data_multiple:
        raise ValueError(
            f"{num_ranks} ranks cannot be cut into groups of {config.data_multiple} ({named}); start a multiple of "
            f"{config.data_multiple} ranks, or lower a size"
        )
    data, experts = num_ranks // config.data_multiple, config.expert_model_parallel_size
    sharing = num_ranks // config.pipeline_model_parallel_size
    if sharing % experts:
        raise ValueError(
            f"expert_model_parallel_size={experts} must divide the {sharing} ranks of a pipeline stage; start other "
            f"ranks, or change it"
        )
    axes = {
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
        "ep": experts,
        "dp": data,
        "pp": config.pipeline_model_parallel_size,
    }
    chunks = config.virtual_pipeline_model_parallel_size
    return axes if chunks is None else {**axes, "vp": chunks}


def _arrange(sizes: dict[str, int], config: MegatronConfig) -> _Arrangement:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    global _arrangement  # noqa: PLW0603 - Megatron has one a process
    world = dist.group.WORLD
    assert world is not None
    if _arrangement is not None and _arrangement.world is not world:
        _dissolve(_arrangement)  # the user has destroyed its process group
    if _arrangement is not None and sizes != _arrangement.sizes:
        gc.collect()  # models are cycles
        if not _arrangement.members:
            _dissolve(_arrangement)
    if _arrangement is not None:
        if sizes != _arrangement.sizes:
            raise ValueError(
                f"a model laid out as {_arrangement.sizes} lives in this process, and {sizes} was asked for: Megatron "
                f"has one layout a process; close() the other first"
            )
        return _arrangement
    if parallel_state.is_initialized():
        raise ValueError(
            "megatron's model parallelism is initialized in this process already, by somebody else: this backend "
            "arranges the ranks itself; call megatron.core.parallel_state.destroy_model_parallel() first"
        )
    before = set(_groups_of_process())
    try:
        minutes: int = config.timeout_s / 60  # type: ignore[assignment]  # which goes into a timedelta as it is
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=sizes["tp"],
            pipeline_model_parallel_size=sizes["pp"],
            virtual_pipeline_model_parallel_size=sizes.get("vp"),
            context_parallel_size=sizes["cp"],
            expert_model_parallel_size=sizes["ep"],
            expert_tensor_parallel_size=1,
            distributed_timeout_minutes=minutes,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(0, inference_rng_tracker=config.device == "cpu", force_reset_rng=True)
    except BaseException:
        _destroy([group for group in _groups_of_process() if group not in before])
        raise
    made = tuple(group for group in _groups_of_process() if group not in before)
    _arrangement = _Arrangement(world=world, sizes=sizes, groups=made)
    return _arrangement


def _dissolve(arrangement: _Arrangement) -> None:
    global _arrangement  # noqa: PLW0603
    if _arrangement is arrangement:
        _arrangement = None
        _destroy(arrangement.groups)
    arrangement.groups = ()


def _destroy(groups: Iterable[dist.ProcessGroup]) -> None:
    """Megatron forgets its groups and destroys none: each has threads and connections."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):  # what it forgets to forget
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    kept = [mesh.get_group() for mesh in _meshes().values()] if dist.is_initialized() else []
    for group in groups:
        if group in _groups_of_process() and group not in kept:
            dist.destroy_process_group(group)


def _groups_of_process() -> list[dist.ProcessGroup]:
    """All that there are, in the order in which they were made."""
    return list(dist.distributed_c10d._world.pg_map)  # noqa: SLF001 - no public one


def _meshes() -> dict[tuple[str, tuple[int, ...]], DeviceMesh]:
    return once_per_process_group("meshes of Megatron's tensor-parallel ranks", dict)

"""The ranks of this run as Megatron arranges them: tensor, context, data and pipeline parallelism, experts within.

Megatron keeps its process groups in one place for the whole process, so every model in it has the same sizes. Knows no
model.
"""

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from rl_backends.megatron.config import MegatronConfig
from rl_backends.megatron.cpu_compat import cpu_compat
from rl_backends.megatron.installed import require_megatron
from rl_backends.process_group import init_process_group

__all__ = ["ParallelGroups", "sizes_of"]


@dataclass(slots=True)
class _Joined:
    """Megatron's process groups as this process has made them, and how many models use them."""

    sizes: dict[str, int] = field(default_factory=dict)
    users: int = 0
    made_process_group: bool = False


_joined = _Joined()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """Megatron's process groups, and this rank's place in each."""

    tp: dist.ProcessGroup
    """Share each matrix multiplication."""
    cp: dist.ProcessGroup
    """Share the tokens of each row."""
    pp: dist.ProcessGroup
    """Share the layers; the last one reads log-probabilities."""
    rows: dist.ProcessGroup
    """Have rows of their own: data-parallel ranks, experts shared out among them or not."""
    tp_mesh: DeviceMesh | None
    """Of `tp`, with the one axis "tp"; None where it is one rank."""

    @classmethod
    def join(cls, config: MegatronConfig) -> "ParallelGroups":
        """Arrange all ranks by the sizes in `config`; each `join` needs a `leave`.

        Joins the process group of `torchrun`, or makes one of this process alone, where there is none.

        Raises:
            MissingDependencyError: megatron-core is absent, or another release.
            ValueError: `cuda` is asked for and absent, the ranks are not a multiple of the sizes, or a model of other
                sizes lives in this process.
        """
        require_megatron()
        if config.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(
                "device='cuda' was asked for, and torch sees no GPU here; choose device='cpu' "
                "(policy.megatron_cfg.device in a recipe)"
            )
        if config.device == "cpu" and torch.cuda.is_available():
            raise ValueError(
                "device='cpu' was asked for, and Megatron takes a GPU wherever torch sees one: choose device='cuda' "
                "(policy.megatron_cfg.device in a recipe), or hide the GPUs by CUDA_VISIBLE_DEVICES=''"
            )
        if not dist.is_initialized():
            init_process_group(config.device, timeout_s=config.timeout_s)
            _joined.made_process_group = True
        sizes = sizes_of(config, dist.get_world_size())
        with cpu_compat():
            _arrange(sizes, config)
        _joined.users += 1
        return _groups(config)

    def leave(self) -> None:
        """Give the groups up; the last model of the process to do so destroys them."""
        from megatron.core import parallel_state

        _joined.users -= 1
        if _joined.users == 0:
            parallel_state.destroy_model_parallel()
            _joined.sizes = {}
            if _joined.made_process_group and dist.is_initialized():
                dist.destroy_process_group()
            _joined.made_process_group = False

    @property
    def last_stage(self) -> bool:
        """Whether this rank holds the last layers and the head."""
        return self.pp.rank() == self.pp.size() - 1

    @property
    def sizes(self) -> dict[str, int]:
        """Of every axis, for people and for checkpoints."""
        return dict(_joined.sizes)


def sizes_of(config: MegatronConfig, num_ranks: int) -> dict[str, int]:
    """Ranks along every axis, of `num_ranks`. No Megatron is asked.

    Raises:
        ValueError: the ranks cannot be cut like this.
    """
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
    return {
        "tp": config.tensor_model_parallel_size,
        "cp": config.context_parallel_size,
        "ep": experts,
        "dp": data,
        "pp": config.pipeline_model_parallel_size,
    }


def _arrange(sizes: dict[str, int], config: MegatronConfig) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if _joined.users:
        if sizes != _joined.sizes:
            raise ValueError(
                f"a model laid out as {_joined.sizes} lives in this process, and {sizes} was asked for: Megatron has "
                f"one layout a process; close() the other first"
            )
        return
    if parallel_state.is_initialized():
        raise ValueError(
            "megatron's model parallelism is initialized in this process already, by somebody else: this backend "
            "arranges the ranks itself; call megatron.core.parallel_state.destroy_model_parallel() first"
        )
    minutes: int = config.timeout_s / 60  # type: ignore[assignment]  # which goes into a timedelta as it is
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=sizes["tp"],
        pipeline_model_parallel_size=sizes["pp"],
        context_parallel_size=sizes["cp"],
        expert_model_parallel_size=sizes["ep"],
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=minutes,
        create_gloo_process_groups=False,
    )
    on_cpu = config.device == "cpu"
    model_parallel_cuda_manual_seed(0, inference_rng_tracker=on_cpu, force_reset_rng=True)
    _joined.sizes = sizes


def _groups(config: MegatronConfig) -> ParallelGroups:
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_group()
    several = config.tensor_model_parallel_size > 1
    mesh = DeviceMesh.from_group(tp, config.device, mesh_dim_names=("tp",)) if several else None
    return ParallelGroups(
        tp=tp,
        cp=parallel_state.get_context_parallel_group(),
        pp=parallel_state.get_pipeline_model_parallel_group(),
        rows=parallel_state.get_data_parallel_group(),
        tp_mesh=mesh,
    )

"""The sections `cluster` and `checkpointing`: where a run runs and what it saves."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rl_algorithms.choices import check_fields
from rl_launcher.recipe_files.dataclass_schema import STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingConfig:
    """Checkpoints in `run_dir/checkpoints`; a run that ends early always writes one. The names are NeMo-RL's."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    save_period: int = 0
    """Optimizer steps between checkpoints, the most that a killed run loses; 0 writes one if the run ends early."""

    save_period_s: float | None = None
    """Seconds between checkpoints, checked after each step; null disables it."""

    checkpoint_must_save_by: str | None = None
    """`DD:HH:MM:SS` or `HH:MM:SS` after the start, at which the run writes a checkpoint and ends, to be resumed."""

    ft_keep_latest_k: int = 1
    """Number of newest checkpoints that are kept."""

    keep_top_k: int = 0
    """Number of best checkpoints, by `metric_name`, that are kept as well."""

    metric_name: str = "held_out_greedy"
    """Metric of the log that ranks checkpoints. A step that did not measure it takes the last value."""

    higher_is_better: bool = True
    """Whether a higher value of the metric is better."""

    def __post_init__(self) -> None:
        check_fields(
            self, at_least={"save_period": 0, "ft_keep_latest_k": 1, "keep_top_k": 0}, above={"save_period_s": 0}
        )
        if self.checkpoint_must_save_by is not None and self.must_save_after_s is None:
            raise ValueError(
                f"checkpoint_must_save_by={self.checkpoint_must_save_by} must be DD:HH:MM:SS or HH:MM:SS, as 03:45:00"
            )

    @property
    def must_save_after_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds, or None if it is not set."""
        text = self.checkpoint_must_save_by
        if text is None or not (match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", text)):
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many processes train and sample, and on which nodes."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    runtime: Literal["in_process", "ray"] = "in_process"
    """`in_process` keeps policy and engine in one process: one rank, no Ray, and breakpoints work. `ray` gives every
    rank and every engine an actor of its own, on one node or many."""

    address: str | None = None
    """Address of a Ray cluster: `host:port`, or `auto` for the one this node belongs to. Null starts one on this node
    and stops it at the end of the run."""

    num_nodes: int = 1
    """Nodes that the run uses."""

    gpus_per_node: int | tuple[int, ...] = 1
    """GPUs that it uses on each node; a list gives each node its own number. If the policy is on the CPU: processes on
    each node."""

    cpus_per_rank: int = 1
    """CPUs that Ray reserves for each rank and engine, also for data loading and copies."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank and engine, such as `NCCL_DEBUG`. Secret values are kept out of all files."""

    max_restarts: int = 0
    """How many times a run that lost a trainer rank restarts from its last checkpoint. Without
    `checkpointing.save_period` it restarts from the beginning."""

    start_timeout_s: float = 600.0
    """Seconds that actors may take to start and load models. After that the run is refused, naming those missing."""

    call_timeout_s: float = 3600.0
    """Seconds that one call of a rank or an engine may take. After that the run stops, naming those that hang."""

    hang_timeout_s: float = 600.0
    """Seconds without an answer after which the stacks of the trainer's ranks are read. If a rank stands still, or some
    wait in a collective for another, it is named, all ranks are ended, and the run restarts from its last checkpoint
    (`max_restarts`). A call of which the ranks are still computing goes on, up to `call_timeout_s`."""

    dashboard: bool = False
    """Serve Ray's dashboard on the loopback interface. Only for a cluster that the run starts itself."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            at_least={"num_nodes": 1, "cpus_per_rank": 1, "max_restarts": 0},
            above={"start_timeout_s": 0, "call_timeout_s": 0, "hang_timeout_s": 0},
            infinite={"start_timeout_s", "call_timeout_s", "hang_timeout_s"},
        )
        listed = self.gpus_per_node if isinstance(self.gpus_per_node, tuple) else (self.gpus_per_node,)
        if bad := [each for each in listed if isinstance(each, bool) or not isinstance(each, int) or each < 1]:
            raise ValueError(f"gpus_per_node={self._gpus_text} must be >= 1 on each node; {bad[0]!r} is not")
        if isinstance(self.gpus_per_node, tuple) and len(listed) != self.num_nodes:
            raise ValueError(
                f"gpus_per_node={self._gpus_text} lists {len(listed)} nodes, and num_nodes={self.num_nodes}; "
                f"set num_nodes={max(len(listed), 1)}"
            )
        if self.runtime == "in_process" and self.address is not None:
            raise ValueError(
                f"address={self.address} names a Ray cluster, and runtime=in_process uses none; set runtime=ray"
            )
        if self.runtime == "in_process" and self.num_ranks > 1:
            raise ValueError(
                f"num_nodes={self.num_nodes} and gpus_per_node={self._gpus_text} are more than one rank, and "
                f"runtime=in_process has one; set runtime=ray"
            )
        if self.runtime == "in_process" and self.max_restarts:
            raise ValueError(
                f"max_restarts={self.max_restarts} restarts the processes of ranks, and runtime=in_process has none"
            )

    @property
    def slots_of_nodes(self) -> tuple[int, ...]:
        """GPUs of each node, or processes if the policy is on the CPU."""
        if isinstance(self.gpus_per_node, tuple):
            return self.gpus_per_node
        return (self.gpus_per_node,) * self.num_nodes

    @property
    def num_ranks(self) -> int:
        """GPUs of the run, or processes if the policy is on the CPU."""
        return sum(self.slots_of_nodes)

    @property
    def _gpus_text(self) -> str:
        """As a recipe has it."""
        return str([*self.gpus_per_node] if isinstance(self.gpus_per_node, tuple) else self.gpus_per_node)

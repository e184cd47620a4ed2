"""How and where a run runs: cluster, checkpoints, health."""

import re
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rl_launcher.schema.strict import STRICT, refuse_below

__all__ = ["CheckpointingConfig", "ClusterConfig", "HealthConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingConfig:
    """Checkpoints in `run_dir/checkpoints`; a run that ends early leaves one in any case. The words are NeMo-RL's."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    save_period: int = 0
    """Optimizer steps between checkpoints; 0 saves none while all goes well. What a killed process loses at most."""

    save_period_s: float | None = None
    """Seconds between checkpoints, looked at after each step; null does not look at the clock."""

    checkpoint_must_save_by: str | None = None
    """`DD:HH:MM:SS` or `HH:MM:SS` after the start: then the run saves and ends, to be resumed."""

    ft_keep_latest_k: int = 1
    """The newest so many are kept, to go on from."""

    keep_top_k: int = 0
    """The best so many by `metric_name` are kept besides; 0 keeps none for its merit."""

    metric_name: str = "held_out_greedy"
    """Of the log: what makes a checkpoint good. A checkpoint of a step that did not measure it takes the last value."""

    higher_is_better: bool = True
    """Whether more of the metric is better."""

    def __post_init__(self) -> None:
        refuse_below(
            self, at_least={"save_period": 0, "ft_keep_latest_k": 1, "keep_top_k": 0}, above={"save_period_s": 0}
        )
        if self.checkpoint_must_save_by is not None and self.must_save_after_s is None:
            raise ValueError(
                f"checkpoint_must_save_by={self.checkpoint_must_save_by} must be DD:HH:MM:SS or HH:MM:SS, as 03:45:00"
            )

    @property
    def must_save_after_s(self) -> float | None:
        """`checkpoint_must_save_by` in seconds; None where there is none."""
        text = self.checkpoint_must_save_by
        if text is None or not (match := re.fullmatch(r"(?:(\d+):)?(\d+):(\d+):(\d+)", text)):
            return None
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """How many processes train and sample, and on which machines."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    runtime: Literal["in_process", "ray"] = "in_process"
    """`in_process` keeps policy and engine in the process that is started: breakpoints work, one rank, no Ray. `ray`
    gives every rank and every engine an actor of its own, on one machine or many."""

    address: str | None = None
    """Of a Ray cluster: `host:port`, or `auto` for the one that this machine belongs to. Null starts one on this
    machine and ends it with the run."""

    num_nodes: int = 1
    """Machines that the run takes."""

    gpus_per_node: int = 1
    """GPUs that it takes of each. Where the policy is on the CPU, processes: a rank then takes `cpus_per_rank` CPUs."""

    cpus_per_rank: int = 1
    """CPUs that Ray sets aside for each rank and engine. More gives data loading and copies room."""

    env_vars: dict[str, str] = field(default_factory=dict)
    """Environment variables of every rank and engine, as `NCCL_DEBUG`. Values of secrets are kept out of all files."""

    max_restarts: int = 0
    """How often a run that has lost a rank of its trainer goes on from its last checkpoint by itself. Needs
    `checkpointing.save_period`, or it begins anew."""

    start_timeout_s: float = 600.0
    """Seconds that actors may take to start, models included, before the run is refused with who was missing."""

    call_timeout_s: float = 3600.0
    """Seconds that one call of a rank or an engine may take before the run is stopped with who has not answered."""

    dashboard: bool = False
    """Serve Ray's dashboard, on loopback. Only for a cluster that the run starts itself."""

    def __post_init__(self) -> None:
        refuse_below(self, at_least={"num_nodes": 1, "gpus_per_node": 1, "cpus_per_rank": 1, "max_restarts": 0})
        refuse_below(self, above={"start_timeout_s": 0, "call_timeout_s": 0})
        if self.runtime == "in_process" and self.address is not None:
            raise ValueError(
                f"address={self.address} is of a Ray cluster, and runtime=in_process takes none; say runtime=ray"
            )
        if self.runtime == "in_process" and (self.num_nodes > 1 or self.gpus_per_node > 1):
            raise ValueError(
                f"num_nodes={self.num_nodes} and gpus_per_node={self.gpus_per_node} are more than one rank, and "
                f"runtime=in_process has one; say runtime=ray"
            )
        if self.runtime == "in_process" and self.max_restarts:
            raise ValueError(
                f"max_restarts={self.max_restarts} restarts ranks of their own process, and runtime=in_process has none"
            )

    @property
    def num_ranks(self) -> int:
        """Places that the run has: GPUs, or processes where there are none."""
        return self.num_nodes * self.gpus_per_node

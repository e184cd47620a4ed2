"""Where a run runs: in this process, or on a Ray cluster of so many nodes."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from rl_launcher.recipe_schema.strict import STRICT, refuse_below

__all__ = ["ClusterConfig"]


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

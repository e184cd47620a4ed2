"""A SLURM batch script: Ray on every node, the recipe on the first; at the time limit it saves and is requeued.

The script is `templates/slurm.sh.j2`; this module checks its values.
"""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rl_launcher.cluster_jobs.job import ClusterJob, RayPorts, check_least, environment, render
from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

# sbatch ends a directive at a blank, and no name on a cluster needs more than these characters.
DIRECTIVE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+/=-]*")
TIME = re.compile(r"(?:\d+-\d{1,2}(?::\d{1,2}){0,2}|\d+(?::\d{1,2}){0,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """Options of the SLURM job, besides the nodes and GPUs, which come from the recipe."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    time: str
    """Time limit, in the format of sbatch: `04:00:00`, `1-12:00:00`. The run saves `grace_s` seconds before it."""
    shared_dir: str
    """A folder that every node mounts at this path. The run works in it, so the recipe's relative paths start there."""
    name: str = "rl-launcher"
    """Name of the job and its log."""
    partition: str | None = None
    """Partition; None takes the cluster's default."""
    account: str | None = None
    """Account to charge; None takes the cluster's default."""
    directives: tuple[str, ...] = ()
    """Further sbatch directives, for example `--qos=high`."""
    exclusive: bool = True
    """Reserve entire nodes, with all of their memory. Otherwise a node's share is what the recipe needs; set
    `directives` such as `--cpus-per-task=16`, and `--mem=120G` for another size."""
    container: str | None = None
    """Container image, for the pyxis plugin; None runs what is installed."""
    mounts: tuple[str, ...] = ()
    """Further folders to mount in the container, as `host:container`; the shared one is always mounted."""
    setup: str = ""
    """Shell code that sets up the environment on each node, for example `source .venv/bin/activate`."""
    python: str = "python3"
    """The Python interpreter that has rl-launcher and Ray, after `setup`."""
    env: tuple[str, ...] = ()
    """`NAME=value` is written to the script; `NAME` alone must be set where the job is submitted and is passed on."""
    ports: RayPorts = field(default_factory=RayPorts)
    """Ray's ports on every node."""
    dashboard: bool = False
    """Serve Ray's dashboard on the first node's loopback; reach it with `ssh -L`."""
    join_timeout_s: int = 600
    """Seconds within which all nodes must join. Otherwise the job ends and names those that did."""
    grace_s: int = 300
    """Seconds before the limit at which the run is stopped and saves: more than one step and one checkpoint take."""
    max_requeues: int = 20
    """How often a run that reached its time limit is requeued and resumed; 0 never requeues it."""

    def __post_init__(self) -> None:
        if not TIME.fullmatch(self.time):
            raise Refusal(f"time={self.time!r} is not a time limit of sbatch; write it as 04:00:00 or 1-12:00:00")
        for name in ("name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not DIRECTIVE.fullmatch(value):
                raise Refusal(f"{name}={value!r} cannot follow #SBATCH: only letters, digits and _.,:@+/=- can")
        for directive in self.directives:
            if not directive.startswith("--") or not DIRECTIVE.fullmatch(directive[2:]):
                raise Refusal(f"directives: {directive!r} is not an sbatch directive; write it as --qos=high")
        if not Path(self.shared_dir).is_absolute():
            raise Refusal(f"shared_dir={self.shared_dir!r} must be absolute: nodes share no current directory")
        check_least(self, join_timeout_s=1, grace_s=1, max_requeues=0)
        if self.mounts and self.container is None:
            raise Refusal(f"mounts={list(self.mounts)} need a container, and there is none; set container")
        environment(self.env)


def render_slurm(job: ClusterJob, options: SlurmOptions, *, file: str = "run.sbatch") -> str:
    """Return the batch script; `file` is its name in its first lines.

    Raises:
        Refusal: a value that cannot stand in a shell script.
    """
    shared = Path(options.shared_dir)
    needed = None if job.memory_bytes is None else -(-job.memory_bytes // 2**30)
    memory = "0" if options.exclusive else None if needed is None else f"{needed}G"
    if any(directive.startswith("--mem") for directive in options.directives):
        memory = None
    variables = environment(options.env)
    return render(
        "slurm.sh.j2",
        job=job,
        options=options,
        file=file,
        shared=shared,
        memory=memory,
        needed=needed,
        run=RunDirectory(shared / os.path.expanduser(job.run_dir)),  # noqa: PTH111 - leaves the ~ of no user as it is
        mounts=",".join((f"{shared}:{shared}", *options.mounts)),
        required=[name for name, value in variables if value is None],
        exported=[(name, value) for name, value in variables if value is not None],
    )

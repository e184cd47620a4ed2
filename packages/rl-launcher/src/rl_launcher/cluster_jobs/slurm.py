"""A batch script for SLURM: Ray on every machine, the recipe on the first, saved and queued again at the limit.

`slurm.sh` beside this file is the script; here its values are checked and quoted. It does not know the cluster.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rl_launcher.cluster_jobs.job import ClusterJob, RayPorts, array, assignment, environment, fill
from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

__all__ = ["SlurmOptions", "render_slurm"]

# sbatch reads its directives word by word, and ends one at a blank; nothing that a cluster calls its own has more.
DIRECTIVE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@+/=-]*")
TIME = re.compile(r"(?:\d+-\d{1,2}(?::\d{1,2}){0,2}|\d+(?::\d{1,2}){0,2})")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """What SLURM is asked for besides the machines and GPUs, which the recipe names."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    time: str
    """Limit of the job, as sbatch reads it: `04:00:00`, `1-12:00:00`. The run saves `grace_s` before it."""

    shared_dir: str
    """A folder that every machine mounts under this path: the run works in it, and relative paths of the recipe are
    relative to it."""

    name: str = "rl-launcher"
    """What the job and its log are called."""

    partition: str | None = None
    """Where it is queued; None leaves it to the cluster."""

    account: str | None = None
    """Whom it is charged to; None leaves it to the cluster."""

    directives: tuple[str, ...] = ()
    """Further ones of your cluster, as `--qos=high`."""

    exclusive: bool = True
    """Take whole machines. Otherwise say what they need by `directives`, as `--cpus-per-task=16` and `--mem=120G`."""

    container: str | None = None
    """An image for every step, by the pyxis plugin; None runs what is installed."""

    mounts: tuple[str, ...] = ()
    """`host:container` of further folders in the container; the shared one is there."""

    setup: str = ""
    """Shell code that makes the environment on each machine, as `source .venv/bin/activate`."""

    python: str = "python3"
    """The interpreter that has rl-launcher and Ray, after `setup`."""

    env: tuple[str, ...] = ()
    """`NAME=value` is written into the script; `NAME` must be set where the job is submitted, and its value is not."""

    ports: RayPorts = field(default_factory=RayPorts)
    """Of Ray, on every machine."""

    dashboard: bool = False
    """Serve Ray's dashboard on the first machine's loopback; reach it by `ssh -L`."""

    join_timeout_s: int = 600
    """Seconds in which all machines must join, or the job ends with who did."""

    grace_s: int = 300
    """Seconds before the limit at which the run is told to save. Give it more than a step and a checkpoint take."""

    max_requeues: int = 20
    """How often a run that its limit ended is queued again, to be resumed; 0 leaves that to you."""

    def __post_init__(self) -> None:
        if not TIME.fullmatch(self.time):
            raise Refusal(f"time={self.time!r} is no limit of sbatch; write it as 04:00:00 or 1-12:00:00")
        for name in ("name", "partition", "account"):
            value = getattr(self, name)
            if value is not None and not DIRECTIVE.fullmatch(value):
                raise Refusal(f"{name}={value!r} cannot stand behind #SBATCH: letters, digits and _.,:@+/=-")
        for directive in self.directives:
            if not directive.startswith("--") or not DIRECTIVE.fullmatch(directive[2:]):
                raise Refusal(f"directives: {directive!r} is none of sbatch; write it as --qos=high")
        if not Path(self.shared_dir).is_absolute():
            raise Refusal(f"shared_dir={self.shared_dir!r} must be absolute: machines share no current directory")
        for name, least in (("join_timeout_s", 1), ("grace_s", 1), ("max_requeues", 0)):
            if getattr(self, name) < least:
                raise Refusal(f"{name}={getattr(self, name)} must be >= {least}")
        if self.mounts and self.container is None:
            raise Refusal(f"mounts={list(self.mounts)} are of a container, and there is none; give container")
        environment(self.env)


def render_slurm(job: ClusterJob, options: SlurmOptions, *, file: str = "run.sbatch") -> str:
    """Return the batch script; `file` is what its first lines call it.

    Raises:
        Refusal: a value that no shell can hold.
    """
    parts = {
        "DIRECTIVES": "\n".join(f"#SBATCH {directive}" for directive in _directives(job, options)),
        "FILE": shlex.quote(file) if file.isprintable() else "it",
        "VALUES": "\n".join(_values(job, options)),
    }
    return fill("slurm.sh", parts)


def _directives(job: ClusterJob, options: SlurmOptions) -> list[str]:
    wanted = {
        "job-name": options.name,
        "nodes": job.num_nodes,
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.gpus_per_node) if job.gpus_per_node else None,
        "time": options.time,
        "partition": options.partition,
        "account": options.account,
        "signal": f"B:USR1@{options.grace_s}",
        "output": "%x-%j.log",
        "open-mode": "append",
    }
    return [
        *(f"--{name}={value}" for name, value in wanted.items() if value is not None),
        *(["--exclusive"] if options.exclusive else []),
        "--requeue" if options.max_requeues else "--no-requeue",
        *options.directives,
    ]


def _values(job: ClusterJob, options: SlurmOptions) -> list[str]:
    shared = Path(options.shared_dir)
    run_dir = shared / Path(job.run_dir).expanduser()
    variables = environment(options.env)
    values: dict[str, str | int] = {
        "SHARED_DIR": str(shared),
        "RUN_DIR": str(run_dir),
        "RUN_RECIPE": str(RunDirectory(run_dir).recipe),
        "SETUP": options.setup,
        "PYTHON": options.python,
        "NUM_NODES": job.num_nodes,
        "GPUS_PER_NODE": job.gpus_per_node,
        "JOIN_TIMEOUT_S": options.join_timeout_s,
        "REQUEUE": "yes" if options.max_requeues else "no",
        "MAX_REQUEUES": options.max_requeues,
        "GCS_PORT": options.ports.gcs,
        "CLIENT_PORT": options.ports.client,
        "NODE_MANAGER_PORT": options.ports.node_manager,
        "OBJECT_MANAGER_PORT": options.ports.object_manager,
        "MIN_WORKER_PORT": options.ports.min_worker,
        "MAX_WORKER_PORT": options.ports.max_worker,
        "DASHBOARD": "true" if options.dashboard else "false",
        "DASHBOARD_PORT": options.ports.dashboard,
    }
    return [
        *(assignment(name, value) for name, value in values.items()),
        array("ARGUMENTS", job.arguments),
        array("CONTAINER", _container(options, shared)),
        array("REQUIRED_ENV", [name for name, value in variables if value is None]),
        *(f"export {assignment(name, value)}" for name, value in variables if value is not None),
    ]


def _container(options: SlurmOptions, shared: Path) -> list[str]:
    if options.container is None:
        return []
    mounts = ",".join((f"{shared}:{shared}", *options.mounts))
    return [
        f"--container-image={options.container}",
        f"--container-mounts={mounts}",
        f"--container-workdir={shared}",
    ]

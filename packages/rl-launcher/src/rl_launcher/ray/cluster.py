"""A Ray cluster for one run: started or found, waited for, divided into slots, and left as it was. Knows no trainer.

Of each node the run takes one bundle of a placement group, which holds all of its slots. Actors take no resources of
their own: which slots are whose is in the `Placement`, so that rank and engine can take turns on one GPU, and an engine
can have several. What Ray itself prints stays in its files.
"""

import contextlib
import os
import shutil
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl_launcher.errors import Refusal
from rl_launcher.ray.actors import Host, write_processes
from rl_launcher.ray.failures import RemoteError, Who
from rl_launcher.ray.placement import Placement
from rl_launcher.ray.remote_calls import Actor, Pending
from rl_launcher.run.signals import keep_signals
from rl_launcher.schema import ClusterConfig

__all__ = ["ClusterError", "Node", "Place", "RayRuntime", "Role"]

LOOPBACK = "127.0.0.1"

Role = Literal["trainer", "engine"]

Place = tuple[Role, int, int, tuple[int, ...]]
"""Role, index, node and slots of an actor."""

DRIVER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # An actor without GPUs of Ray's keeps its CUDA_VISIBLE_DEVICES, which is ours.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""Set before Ray is imported, unless the user has."""

LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For a cluster of this machine alone. The name hides what it does on any system: Ray's processes then listen on
loopback, and on no address that others reach."""


_uses: Counter[str] = Counter()
"""Of each actor's name, in this process, which is a namespace of Ray's."""


class ClusterError(Refusal):
    """Machines or processes that a run needs and that are not there in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A machine of the run."""

    index: int
    """As the placement numbers them."""

    name: str
    """Its host name."""

    ip: str
    """Where its processes are reached: 127.0.0.1 where the run has one machine, and nobody else needs to reach them."""

    gpus: tuple[str, ...]
    """Which of its GPUs the run has, by slot; empty on the CPU."""

    def __str__(self) -> str:
        """As errors name it."""
        return self.name if self.ip in {self.name, LOOPBACK} else f"{self.name}, {self.ip}"


class RayRuntime:
    """The cluster, as long as the run lasts; made by `start`."""

    def __init__(self, config: ClusterConfig, placement: Placement, *, run_dir: Path) -> None:
        self.config, self.placement = config, placement
        self.nodes: tuple[Node, ...] = ()
        """By number; filled by `start`."""
        self.oversubscribed = ""
        """That processes share CPUs, in words; empty where they do not."""
        self._run_dir = run_dir
        self._group: Any = None
        self._actors: dict[str, Actor] = {}
        self._starting: set[Actor] = set()
        self._keepers: list[Any] = []
        self._writing, self._closing = threading.Lock(), threading.Lock()
        self._temporary: str | None = None
        self._closed = False

    @classmethod
    def start(cls, config: ClusterConfig, placement: Placement, *, run_dir: Path) -> "RayRuntime":
        """Find or start the cluster, and take the run's nodes.

        Raises:
            ClusterError: Ray is absent, the cluster cannot be reached, or lacks what the run needs after
                `start_timeout_s`; nothing is left behind.
        """
        runtime = cls(config, placement, run_dir=run_dir)
        until = time.monotonic() + config.start_timeout_s
        try:
            runtime._connect()
            runtime._take_nodes(until=until)
        except BaseException:
            runtime.close()
            raise
        return runtime

    @property
    def run_dir(self) -> Path:
        """A folder that all machines must see."""
        return self._run_dir

    def start_actor(
        self,
        *,
        role: Role,
        index: int,
        node: int,
        slots: tuple[int, ...],
        threads: int = 1,
        sees: Literal["own", "all"] = "own",
    ) -> Actor:
        """A process on some slots of a node, into which `Actor.make` puts an object.

        Args:
            role: what it is for.
            index: which of those.
            node: its machine.
            slots: what it computes on.
            threads: how many of its methods may run at once.
            sees: which GPUs: those of its slots, or all that the run has on that machine.

        Raises:
            ClusterError: it did not come up in time, or the run has ended.
        """
        return self.start_actors([(role, index, node, slots)], threads=threads, sees=sees)[0]

    def start_actors(
        self,
        places: Sequence[Place],
        *,
        threads: int = 1,
        sees: Literal["own", "all"] = "own",
    ) -> list[Actor]:
        """Several, side by side: role, index, node and slots of each, as of `start_actor`.

        Raises:
            ClusterError: one did not come up in time, or the run has ended.
        """
        starting = [
            self._begin(role, index, node=node, slots=slots, threads=threads, sees=sees)
            for role, index, node, slots in places
        ]
        return [self._await(actor, started) for actor, started in starting]

    def _begin(
        self, role: Role, index: int, *, node: int, slots: tuple[int, ...], threads: int, sees: Literal["own", "all"]
    ) -> tuple[Actor, Pending]:
        import ray

        name, place = f"{role}-{index}", self.nodes[node]
        log = str(self._run_dir.absolute() / "logs" / f"{name}.log")
        who = Who(role=role, index=index, node=str(place), pid=None, log=log)
        gpus = place.gpus if sees == "all" else tuple(place.gpus[slot] for slot in slots if place.gpus)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if place.gpus else {}
        options: dict[str, Any] = {"name": _unused(name), "max_concurrency": threads}
        options |= {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0, "scheduling_strategy": self._on(node)}
        with self._closing:
            if self._closed:  # Ray would start a cluster of its own for it
                raise ClusterError(f"{name}: the run has ended, and starts no process any more")
            handle = ray.remote(Host).options(**options).remote({**self.config.env_vars, **visible}, log)
            actor = Actor(handle, who=who, name=name, ip=place.ip, place=self._on(node))
            self._starting.add(actor)
            return actor, Pending(actor, "its start", handle.about.remote(), key="cluster.start_timeout_s")

    def _await(self, actor: Actor, started: Pending) -> Actor:
        try:
            about = started.result(timeout_s=self.config.start_timeout_s)
            actor.who = replace(actor.who, pid=about["pid"])
            self._actors[actor.name] = actor
        except RemoteError as error:
            actor.kill()
            raise ClusterError(f"{actor.name} on {actor.who.node} did not come up: {error}") from error
        finally:
            self._starting.discard(actor)
        return actor

    def _on(self, node: int) -> Any:
        """Where Ray is to put a process."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=node)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """The newest of each name."""
        return tuple(self._actors.values())

    def write_processes(self) -> None:
        """Tell `processes.json` who is there now."""
        with self._writing:  # engines are replaced by threads of their own
            write_processes(self._run_dir, [actor.who for actor in self._actors.values() if actor.alive])

    def put(self, value: Any) -> Any:
        """Hand a value to the cluster once, for as many calls as like; the reference is an argument of these."""
        import ray

        return ray.put(value)

    def explain(self) -> str:
        """The placement, the machines by name, and who shares CPUs."""
        machines = [f"  node {node.index} is {node}" for node in self.nodes]
        return "\n".join([self.placement.explain(), *machines, *filter(None, [self.oversubscribed])])

    def close(self) -> None:
        """End every actor, give the nodes back, end a cluster that was started here. A second time does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for actor in (*self._starting, *self._actors.values()):
            actor.kill()
        with contextlib.suppress(ImportError):
            self._leave()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def _leave(self) -> None:
        import ray
        from ray.util import remove_placement_group

        if not ray.is_initialized():
            return
        for keeper in self._keepers:
            with contextlib.suppress(Exception):  # it is gone with its node
                ray.kill(keeper, no_restart=True)
        if self._group is not None:
            with contextlib.suppress(Exception):  # Ray itself may be what has failed
                remove_placement_group(self._group)
        if self._temporary is not None or self.config.address is not None:
            ray.shutdown()

    def _connect(self) -> None:
        for name, value in (DRIVER_ENV if self.config.address else DRIVER_ENV | LOOPBACK_ENV).items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise ClusterError(
                "cluster.runtime=ray needs Ray, which is not installed: pip install 'rl-launcher[ray]'; or say "
                "cluster.runtime=in_process"
            ) from error
        config = self.config
        if ray.is_initialized():
            if config.address is not None:
                raise ClusterError(f"cluster.address={config.address}: this process has a connection to Ray already")
            return  # of whoever has called us: it is theirs, and stays
        quiet: dict[str, Any] = {
            "logging_level": "ERROR",
            "log_to_driver": False,
            "namespace": f"run-{uuid.uuid4().hex[:8]}",
        }
        try:
            with keep_signals():
                if config.address is not None:
                    ray.init(address=config.address, **quiet)
                else:
                    self._start_cluster(ray.init, quiet)
            _mute(ray)
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            address = "null" if config.address is None else config.address
            where = "could not be started here" if config.address is None else "cannot be reached there"
            raise ClusterError(f"cluster.address={address}: a Ray cluster {where}: {error}") from error

    def _start_cluster(self, init: Callable[..., Any], quiet: dict[str, Any]) -> None:
        if self.config.num_nodes > 1:
            raise ClusterError(
                f"cluster.num_nodes={self.config.num_nodes}, and the cluster that a run starts has one node, this "
                f"machine; start Ray on all of them (ray start) and give cluster.address=auto"
            )
        # A short path: the sockets in it may have names of 107 bytes, and TMPDIR or a run directory may be anywhere.
        short = "/tmp" if os.access("/tmp", os.W_OK) else None  # noqa: S108 - a folder of our own is made in it
        self._temporary = tempfile.mkdtemp(prefix="rl-ray-", dir=short)
        here, needed = os.cpu_count() or 1, self._bundle()["CPU"]
        if self.placement.device == "cpu" and needed > here:
            self.oversubscribed = (
                f"{needed} processes' worth of CPUs were asked for, and this machine has {here}: shared"
            )
        init(
            "local",  # and not whatever RAY_ADDRESS or another's `ray start` names
            num_cpus=max(here, int(needed)) if self.placement.device == "cpu" else None,
            include_dashboard=self.config.dashboard,
            dashboard_host=LOOPBACK,
            _temp_dir=self._temporary,
            **quiet,
        )

    def _bundle(self) -> dict[str, float]:
        """What the run takes of each node."""
        slots = self.placement.slots_per_node
        gpus = {"GPU": float(slots)} if self.placement.device == "cuda" else {}
        return {"CPU": float(slots * self.config.cpus_per_rank), **gpus}

    def _take_nodes(self, *, until: float) -> None:
        import ray
        from ray.util import placement_group, placement_group_table

        count = self.placement.num_nodes
        self._group = placement_group([self._bundle()] * count, strategy="STRICT_SPREAD" if count > 1 else "PACK")
        if not self._group.wait(timeout_seconds=self._patience(until)):
            raise ClusterError(self._lacking())
        ids = placement_group_table(self._group)["bundles_to_node_id"]
        known = {node["NodeID"]: node for node in ray.nodes()}
        taken = [known[ids[index]] for index in range(count)]
        gpus = [self._gpus_of(index, until=until) for index in range(count)]
        self.nodes = tuple(
            Node(
                index=index,
                name=str(node.get("NodeManagerHostname") or node["NodeManagerAddress"]),
                ip=LOOPBACK if count == 1 else str(node["NodeManagerAddress"]),
                gpus=gpus[index],
            )
            for index, node in enumerate(taken)
        )

    def _patience(self, until: float) -> float:
        """A cluster started here will not grow: what it lacks now, it lacks."""
        left = max(1.0, until - time.monotonic())
        return min(left, 5.0) if self._temporary is not None and not self._could_fit() else left

    def _could_fit(self) -> bool:
        import ray

        there = ray.cluster_resources()
        return all(there.get(name, 0) >= amount for name, amount in self._bundle().items())

    def _gpus_of(self, index: int, *, until: float) -> tuple[str, ...]:
        """Which GPUs the bundle has: an actor takes them all, and keeps them for the run."""
        if self.placement.device == "cpu":
            return ()
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": self.placement.slots_per_node}
        keeper = ray.remote(Host).options(scheduling_strategy=self._on(index), **options).remote({}, None)
        self._keepers.append(keeper)
        try:
            found: list[str] = ray.get(keeper.accelerators.remote(), timeout=max(1.0, until - time.monotonic()))
        except ray.exceptions.RayError as error:
            raise ClusterError(f"the GPUs of node {index} could not be found out: {error}") from error
        return tuple(found)

    def _lacking(self) -> str:
        """What was asked of Ray, and what is there."""
        import ray

        wanted = " and ".join(f"{amount:g} {name}s" for name, amount in self._bundle().items())
        there = [
            f"{node.get('NodeManagerHostname') or node['NodeManagerAddress']} has "
            + " and ".join(f"{node['Resources'].get(name, 0):g} {name}s" for name in self._bundle())
            for node in ray.nodes()
            if node["Alive"]
        ]
        config = self.config
        return (
            f"the run needs {self.placement.num_nodes} {'node' if self.placement.num_nodes == 1 else 'nodes'} with "
            f"{wanted} each (cluster.num_nodes={config.num_nodes}, gpus_per_node={config.gpus_per_node}, "
            f"cpus_per_rank={config.cpus_per_rank}), and after at most start_timeout_s={config.start_timeout_s:g} "
            f"seconds the Ray cluster has: {'; '.join(there) or 'no node'}. Other runs may hold part of it "
            f"(ray status); lower these, or bring more"
        )


def _unused(name: str) -> str:
    """`name`, or numbered: Ray frees a name some time after its actor has died, and a successor wants one at once."""
    _uses[name] += 1
    return name if _uses[name] == 1 else f"{name}-{_uses[name]}"


def _mute(ray: Any) -> None:
    """Keep Ray from printing, amid the run's own output, that a process has died: the run tells it itself.

    It does so whatever `log_to_driver` says; this is the switch that its debugger uses.
    """
    ray._private.worker._worker_logs_enabled = False  # noqa: SLF001 - no public one

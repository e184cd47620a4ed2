"""The Ray cluster of a run: found or started, waited for, divided into slots, and left as it was.

Of each node the run reserves one bundle of a placement group, which holds all of its slots. Actors reserve no resources
themselves: the `Placement` says which slots they use, so that a rank and an engine can share one GPU, and an engine can
use several. What Ray itself prints stays in its files.

If an engine is on several nodes, vLLM starts its ranks as actors of its own, each in a bundle with one GPU. Ray has no
way to ask for bundles that are together on some node, so the nodes are found with one bundle for each, and are then
reserved anew with one bundle for each slot, bound to the nodes that were found.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rl_backends.checkpoints.folders import write_text
from rl_generation.vllm.processes import remove_abandoned
from rl_launcher.errors import Refusal
from rl_launcher.ray.actor_host import ActorHost, accelerators
from rl_launcher.ray.node_memory import MeasureNode, NodeMemory, measure_node
from rl_launcher.ray.placement import (
    NodeResources,
    Placement,
    PlacementError,
    Slot,
    match_nodes,
    needs_of_nodes,
)
from rl_launcher.ray.remote_calls import Actor, Pending
from rl_launcher.ray.worker_failures import ProcessInfo, RemoteError
from rl_launcher.run.signals import keep_signals
from rl_launcher.schema import ClusterConfig

LOOPBACK = "127.0.0.1"

Role = Literal["trainer", "engine"]

Place = tuple[Role, int, int, tuple[int, ...]]
"""Role, index, node and slots on that node of an actor."""

BUNDLES_ENV = "VLLM_RAY_BUNDLE_INDICES"
"""Tells vLLM's Ray executor which bundles of the placement group its ranks take, in the order of the ranks."""

SOCKETS_ENV = "VLLM_RPC_BASE_PATH"
"""The folder in which vLLM's processes of a node make their sockets."""

NODE_LABEL = "ray.io/node-id"
"""A label that Ray gives each node."""

DRIVER_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # An actor without GPUs of Ray's keeps its CUDA_VISIBLE_DEVICES, which is ours.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""Set before Ray is imported, unless the user has set them."""

LOOPBACK_ENV = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""For a cluster of this machine alone. The name hides what it does on any system: Ray's processes then listen on
loopback, and on no address that others reach."""

SERVICES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}
"""Ray's own processes of a node, by Ray's name."""

FOLDER_PREFIX, OWNER = "rl-ray-", "owner"

_name_uses: Counter[str] = Counter()
"""How often each actor name was used by this process, which has a Ray namespace of its own."""


class ClusterError(Refusal):
    """Nodes or processes that a run needs and that were not there in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node of the run."""

    index: int
    name: str
    """Its host name."""
    ip: str
    """Where its processes are reached: 127.0.0.1 if the run has one node."""
    gpus: tuple[str, ...]
    """Which of its GPUs the run has, by slot; empty on the CPU."""

    def __str__(self) -> str:
        """As errors name it."""
        return self.name if self.ip in {self.name, LOOPBACK} else f"{self.name}, {self.ip}"


class RayRuntime:
    """The cluster for the duration of a run; made by `start`."""

    def __init__(self, config: ClusterConfig, placement: Placement, *, run_dir: Path) -> None:
        self.config, self.placement, self.run_dir = config, placement, run_dir
        """`run_dir` is a folder that all nodes must see."""
        self.nodes: tuple[Node, ...] = ()
        """By index; filled by `start`."""
        self.oversubscribed = ""
        """A sentence if processes share CPUs, otherwise empty."""
        self._node_ids: tuple[str, ...] = ()
        """Ray's, of `nodes`."""
        self._group: Any = None
        self._bundles: dict[Slot, int] = {}
        """The index in the group of the bundle that holds a slot."""
        self._actors: dict[str, Actor] = {}
        self._starting: set[Actor] = set()
        self._writing, self._closing = threading.Lock(), threading.Lock()
        self._folder: _TemporaryFolder | None = None
        self._services: tuple[ProcessInfo, ...] = ()
        """Ray's raylet and GCS, where they were started here."""
        self._closed = False
        self._ray: Any = None
        """The module, once it is imported."""

    @classmethod
    def start(cls, config: ClusterConfig, placement: Placement, *, run_dir: Path) -> "RayRuntime":
        """Find or start the cluster, and reserve the run's nodes.

        Raises:
            ClusterError: Ray is not installed, the cluster cannot be reached or started, or lacks what the run needs
                after `start_timeout_s`; nothing is left behind.
        """
        runtime = cls(config, placement, run_dir=run_dir)
        until = time.monotonic() + config.start_timeout_s
        try:
            runtime._connect(until=until)
            runtime._take_nodes(until=until)
        except BaseException:
            runtime.close()
            raise
        return runtime

    # -- Actors -------------------------------------------------------------------------------------------------------

    def start_actor(
        self,
        *,
        role: Role,
        index: int,
        node: int,
        slots: tuple[int, ...],
        threads: int = 1,
        ranks: Sequence[Slot] = (),
    ) -> Actor:
        """One actor; see `start_actors`."""
        return self.start_actors([(role, index, node, slots)], threads=threads, ranks=ranks)[0]

    def start_actors(
        self,
        places: Sequence[Place],
        *,
        threads: int = 1,
        sees: Literal["own", "all"] = "own",
        ranks: Sequence[Slot] = (),
    ) -> list[Actor]:
        """Start processes in parallel, into which `Actor.make` puts an object.

        Args:
            places: of the processes.
            threads: how many methods of each may run at the same time.
            sees: which GPUs: those of its slots, or all that the run has on that node.
            ranks: of an engine on several nodes, the slots in which vLLM is to start its ranks, in their order.

        Raises:
            ClusterError: one did not start in time, or the run has ended.
        """
        starting = [self._begin(place, threads=threads, sees=sees, ranks=ranks) for place in places]
        for actor, started in starting:
            try:
                about = started.result(timeout_s=self.config.start_timeout_s)
                actor.who = replace(actor.who, pid=about["pid"])
                self._actors[actor.name] = actor
            except RemoteError as error:
                actor.kill()
                raise ClusterError(f"{actor.name} on {actor.who.node} did not start: {error}") from error
            finally:
                self._starting.discard(actor)
        return [actor for actor, _ in starting]

    def _begin(
        self, place: Place, *, threads: int, sees: Literal["own", "all"], ranks: Sequence[Slot]
    ) -> tuple[Actor, Pending]:
        import ray

        role, index, node_index, slots = place
        name, node = f"{role}-{index}", self.nodes[node_index]
        log = str(self.run_dir.absolute() / "logs" / f"{name}.log")
        who = ProcessInfo(role=role, index=index, node=str(node), pid=None, log=log)
        gpus = node.gpus if sees == "all" else tuple(node.gpus[slot] for slot in slots if node.gpus)
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if node.gpus else {}
        # Ray frees a name some time after its actor has died, and a replacement wants one at once.
        _name_uses[name] += 1
        unused = name if _name_uses[name] == 1 else f"{name}-{_name_uses[name]}"
        strategy = self._strategy(self._bundles[node_index, slots[0]])
        options: dict[str, Any] = {"name": unused, "max_concurrency": threads, "scheduling_strategy": strategy}
        options |= {"num_cpus": 0, "max_restarts": 0, "max_task_retries": 0}
        env = dict(self.config.env_vars)
        if ranks:
            env[BUNDLES_ENV] = ",".join(str(self._bundles[slot]) for slot in ranks)
            # vLLM hands the environment of the engine to its ranks, except for variables that these have already, and
            # its own runtime environment. The folder of the engine's sockets is on its node alone.
            options["runtime_env"] = {"env_vars": {SOCKETS_ENV: "/tmp"}}  # noqa: S108 - vLLM's own default
        with self._closing:
            if self._closed:  # otherwise Ray would start a cluster of its own for it
                raise ClusterError(f"{name}: the run has ended, and starts no process any more")
            handle = ray.remote(ActorHost).options(**options).remote({**env, **visible}, log)
            actor = Actor(handle, who=who, name=name, ip=node.ip, strategy=strategy, dead_service=self.dead_service)
            self._starting.add(actor)
            return actor, Pending(actor, "its start", handle.about.remote(), key="cluster.start_timeout_s")

    def _strategy(self, bundle: int) -> Any:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return PlacementGroupSchedulingStrategy(placement_group=self._group, placement_group_bundle_index=bundle)

    @property
    def actors(self) -> tuple[Actor, ...]:
        """The newest of each name."""
        return tuple(self._actors.values())

    def measure_nodes(self, measure: MeasureNode = measure_node) -> list[NodeMemory]:
        """Ask every node for its memory, by a task beside the ranks that it will have.

        Args:
            measure: what the task does; another one stands in for nodes that are larger, smaller or other than real.

        Raises:
            ClusterError: a node did not answer.
        """
        import ray

        options = {"num_cpus": 0, "max_retries": 1}
        asked = [
            ray.remote(measure)
            .options(**options, scheduling_strategy=self._strategy(self._bundles[node.index, 0]))
            .remote(node_id)
            for node, node_id in zip(self.nodes, self._node_ids, strict=True)
        ]
        until = time.monotonic() + self.config.start_timeout_s
        found: list[NodeMemory] = []
        for node, reference in zip(self.nodes, asked, strict=True):
            try:
                found.append(ray.get(reference, timeout=max(1.0, until - time.monotonic())))
            except ray.exceptions.RayError as error:
                said = " ".join(str(error).split())[:400]
                raise ClusterError(
                    f"node {node.index} of the run ({node}) could not be asked for its memory: {type(error).__name__}: "
                    f"{said}; it could hold no rank either. Look into Ray's logs of that node"
                ) from error
        return found

    def write_processes(self) -> None:
        """Write to `processes.json` the processes that are alive: this one, the driver, Ray's own of this node, all."""
        driver = ProcessInfo(role="driver", index=0, node=socket.gethostname(), pid=os.getpid())
        with self._writing:  # engines are replaced by threads
            alive = (driver, *self._services, *(actor.who for actor in self._actors.values() if actor.alive))
            entries = [{"role": who.role, "index": who.index, "node": who.node, "pid": who.pid} for who in alive]
            write_text(self.run_dir / "processes.json", json.dumps(entries, indent=2))

    def put(self, value: Any) -> Any:
        """Put a value into Ray's object store; the reference can be an argument of any number of calls."""
        import ray

        return ray.put(value)

    def explain(self) -> str:
        """The placement, the nodes by name, and whether processes share CPUs."""
        nodes = [f"  node {node.index} is {node}" for node in self.nodes]
        return "\n".join([self.placement.explain(), *nodes, *filter(None, [self.oversubscribed])])

    # -- Start and end ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Kill every actor, release the nodes, and end a cluster that was started here. A second time does nothing."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
        for actor in (*self._starting, *self._actors.values()):
            actor.kill()
        # What a signal has interrupted the import of is not imported anew: it would be there in part.
        if (ray := self._ray) is not None and ray.is_initialized():
            if self._group is not None:
                with contextlib.suppress(Exception):  # Ray itself may be what has failed
                    from ray.util import remove_placement_group

                    remove_placement_group(self._group)
            if self._folder is not None or self.config.address is not None:
                ray.shutdown()
        if self._folder is not None:
            self._folder.remove()

    def _connect(self, *, until: float) -> None:
        config = self.config
        for name, value in (DRIVER_ENV if config.address else DRIVER_ENV | LOOPBACK_ENV).items():
            os.environ.setdefault(name, value)
        try:
            import ray
        except ImportError as error:
            raise ClusterError(
                "cluster.runtime=ray needs Ray, which is not installed: pip install 'rl-launcher[ray]'; or set "
                "cluster.runtime=in_process"
            ) from error
        self._ray = ray
        if ray.is_initialized():
            if config.address is not None:
                raise ClusterError(f"cluster.address={config.address}: this process is connected to Ray already")
            return  # it belongs to our caller, and stays
        if config.address is None and config.num_nodes > 1:
            raise ClusterError(
                f"cluster.num_nodes={config.num_nodes}, and the cluster that a run starts has one node, this machine; "
                f"start Ray on all of them (ray start) and set cluster.address=auto"
            )
        quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
        quiet["namespace"] = f"run-{uuid.uuid4().hex[:8]}"
        try:
            with keep_signals():
                if config.address is None:
                    self._start_local(ray, quiet, until=until)
                else:
                    ray.init(address=config.address, **quiet)
        except Exception as error:  # Ray raises bare Exceptions, too
            address = "null" if config.address is None else config.address
            where = "could not be started here" if config.address is None else "cannot be reached there"
            raise ClusterError(f"cluster.address={address}: a Ray cluster {where}: {error}") from error
        # Ray would print, amid the run's own output and whatever `log_to_driver` says, that a process has died; the run
        # reports that itself. There is no public switch; this one is what Ray's debugger uses.
        ray._private.worker._worker_logs_enabled = False  # noqa: SLF001
        node, here = getattr(ray._private.worker, "_global_node", None), socket.gethostname()  # noqa: SLF001
        self._services = tuple(
            ProcessInfo(role=kind, index=index, node=here, pid=each.process.pid)
            for kind in SERVICES
            for index, each in enumerate(getattr(node, "all_processes", {}).get(kind, ()))
        )
        self.write_processes()

    def dead_service(self) -> str:
        """Which of Ray's own processes of this node has died, for the message of what died with it; empty if none."""
        return " and ".join(
            f"{SERVICES[each.role]} (pid {each.pid})" for each in self._services if not is_running(each.pid)
        )

    def _start_local(self, ray: Any, quiet: dict[str, Any], *, until: float) -> None:
        here, needed = os.cpu_count() or 1, self._bundle(self.placement.num_slots[0])["CPU"]
        on_cpu = self.placement.device == "cpu"
        if on_cpu and needed > here:
            self.oversubscribed = f"processes share CPUs: this run needs {needed:g}, and this node has {here}"
        attempt = 0
        while True:  # Ray gives its node 30 seconds to start, which cannot be configured; a busy machine needs more
            attempt += 1
            self._folder = _TemporaryFolder()
            try:
                ray.init(
                    "local",  # and not whatever RAY_ADDRESS or another `ray start` names
                    num_cpus=max(here, int(needed)) if on_cpu else None,
                    include_dashboard=self.config.dashboard,
                    dashboard_host=LOOPBACK,
                    _temp_dir=self._folder.path,
                    **quiet,
                )
            except Exception as error:
                ray.shutdown()
                self._folder.remove()
                slow = "timed out" in str(error)  # "The current node timed out during startup"
                if not slow:
                    raise
                if time.monotonic() > until:
                    limit = f"cluster.start_timeout_s={self.config.start_timeout_s:g}"
                    raise RuntimeError(f"{error} (attempt {attempt}; no other begins after {limit} seconds)") from error
            else:
                return

    def _bundle(self, slots: int) -> dict[str, float]:
        """What the run reserves for so many slots of a node."""
        gpus = {"GPU": float(slots)} if self.placement.device == "cuda" else {}
        return {"CPU": float(slots * self.config.cpus_per_rank), **gpus}

    def _take_nodes(self, *, until: float) -> None:
        import ray
        from ray.util import remove_placement_group

        num_slots = self.placement.num_slots
        bundles = [self._bundle(slots) for slots in num_slots]
        patience_s = max(1.0, until - time.monotonic())
        there = ray.cluster_resources()
        if self._folder is not None and any(there.get(name, 0) < amount for name, amount in bundles[0].items()):
            patience_s = min(patience_s, 5.0)  # a cluster that was started here will not grow
        ids = self._reserve(bundles, patience_s=patience_s)
        slots = [(node, slot) for node, count in enumerate(num_slots) for slot in range(count)]
        self._bundles = {slot: slot[0] for slot in slots}
        if self.placement.spans_nodes:
            remove_placement_group(self._group)
            self._group, self._bundles = None, {slot: index for index, slot in enumerate(slots)}
            patience_s = max(1.0, until - time.monotonic())
            self._reserve([self._bundle(1)] * len(slots), nodes=[ids[node] for node, _ in slots], patience_s=patience_s)
        gpus = self._gpus_of(slots, until=until)
        self._node_ids = tuple(ids)
        known = {node["NodeID"]: node for node in ray.nodes()}
        for index, node_id in enumerate(ids):
            node = known[node_id]
            address = str(node["NodeManagerAddress"])
            name = str(node.get("NodeManagerHostname") or address)
            own = tuple(gpus[slot] for slot in slots if slot[0] == index and gpus)
            self.nodes += (Node(index=index, name=name, ip=LOOPBACK if len(ids) == 1 else address, gpus=own),)

    def _reserve(
        self, bundles: list[dict[str, float]], *, nodes: Sequence[str] | None = None, patience_s: float
    ) -> list[str]:
        """Reserve bundles, each on the node with the given id, or each on another node; return the id of each one's.

        Raises:
            ClusterError: there is no room for them within `patience_s`.
        """
        import ray
        from ray.util import placement_group, placement_group_table

        strategy = "STRICT_SPREAD" if len(bundles) > 1 and nodes is None else "PACK"
        selector = None if nodes is None else [{NODE_LABEL: node} for node in nodes]
        self._group = placement_group(bundles, strategy=strategy, bundle_label_selector=selector)
        if not self._group.wait(timeout_seconds=patience_s):
            raise ClusterError(self._explain_lack(nodes_of_cluster(ray)))
        ids = placement_group_table(self._group)["bundles_to_node_id"]
        return [str(ids[index]) for index in range(len(bundles))]

    def _gpus_of(self, slots: Sequence[Slot], *, until: float) -> dict[Slot, str]:
        """Which GPU each slot is: a bundle has the same ones as long as it is reserved, and a task in it sees them."""
        if self.placement.device == "cpu":
            return {}
        import ray

        in_bundle = {
            bundle: [slot for slot in slots if self._bundles[slot] == bundle] for bundle in set(self._bundles.values())
        }
        found = {
            bundle: ray.remote(accelerators)
            .options(num_cpus=0, num_gpus=len(held), scheduling_strategy=self._strategy(bundle))
            .remote()
            for bundle, held in in_bundle.items()
        }
        gpus: dict[Slot, str] = {}
        for bundle, held in in_bundle.items():
            try:
                numbers: list[str] = ray.get(found[bundle], timeout=max(1.0, until - time.monotonic()))
            except ray.exceptions.RayError as error:
                raise ClusterError(f"which GPUs node {held[0][0]} has could not be found out: {error}") from error
            gpus.update(zip(held, numbers, strict=True))
        return gpus

    def _explain_lack(self, there: Sequence[NodeResources]) -> str:
        """Say which node of the run the cluster lacks, and what it has."""
        config = self.config
        try:
            match_nodes(needs_of_nodes(self.placement, cpus_per_rank=config.cpus_per_rank), there)
            lacking = "the nodes of the run are there, and other runs hold part of them (ray status)"
        except PlacementError as error:
            lacking = f"{error}. Other runs may hold part of it, too (ray status)"
        return (
            f"the run needs {_nodes_text(self.placement, config)}, and after at most start_timeout_s="
            f"{config.start_timeout_s:g} seconds {lacking}. The Ray cluster has: "
            f"{'; '.join(map(str, there)) or 'no node'}. Lower these, or add nodes"
        )


def nodes_of_cluster(ray: Any) -> list[NodeResources]:
    """The living nodes of the cluster that this process is connected to, with all that they have."""
    return [
        NodeResources(
            name=str(node.get("NodeManagerHostname") or node["NodeManagerAddress"]),
            gpus=node["Resources"].get("GPU", 0.0),
            cpus=node["Resources"].get("CPU", 0.0),
            # What was free when Ray started there: it divides that into these two.
            memory_bytes=node["Resources"].get("memory", 0.0) + node["Resources"].get("object_store_memory", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def look_at_cluster(config: ClusterConfig) -> list[NodeResources]:
    """The nodes of the running cluster that `cluster.address` names; nothing is reserved, and nothing stays connected.

    Raises:
        ClusterError: it names none, Ray is not installed, or the cluster cannot be reached.
    """
    if config.runtime != "ray" or config.address is None:
        raise ClusterError(
            f"cluster.runtime={config.runtime} with cluster.address={config.address or 'null'} names no running Ray "
            f"cluster to look at; set cluster.runtime=ray and cluster.address=auto, or host:port"
        )
    for name, value in DRIVER_ENV.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise ClusterError(f"{error}: Ray is not installed: pip install 'rl-launcher[ray]'") from error
    was_connected = ray.is_initialized()
    try:
        if not was_connected:
            ray.init(address=config.address, logging_level="ERROR", log_to_driver=False)
        return nodes_of_cluster(ray)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ClusterError(
            f"cluster.address={config.address}: a Ray cluster cannot be reached there: {error}"
        ) from error
    finally:
        if not was_connected:
            ray.shutdown()


def _nodes_text(placement: Placement, config: ClusterConfig) -> str:
    """The nodes of a run in words, with the keys that say so."""
    what = "GPUs" if placement.device == "cuda" else "processes"
    sizes = Counter(placement.num_slots)
    nodes = " and ".join(
        f"{count} node{'' if count == 1 else 's'} with {size} {what} and {size * config.cpus_per_rank} CPUs each"
        for size, count in sizes.items()
    )
    given = config.gpus_per_node if isinstance(config.gpus_per_node, int) else [*config.gpus_per_node]
    keys = f"cluster.num_nodes={config.num_nodes}, gpus_per_node={given}, cpus_per_rank={config.cpus_per_rank}"
    return f"{nodes} ({keys})"


def is_running(pid: int | None) -> bool:
    """Whether a process of this machine exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self/stat").exists()  # without /proc nothing is known, and nothing is blamed


class _TemporaryFolder:
    """The folder of a cluster that this process starts, locked while the process lives.

    A driver that is killed cannot remove it; the next run finds it unlocked, and does.
    """

    def __init__(self) -> None:
        # A short path, wherever TMPDIR is: the names of the sockets in it may have 107 bytes.
        parent = "/tmp" if os.access("/tmp", os.W_OK) else tempfile.gettempdir()  # noqa: S108 - mkdtemp makes our own
        remove_abandoned_folders(Path(parent))
        remove_abandoned()
        self.path = tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent)
        # Locked before it gets its name: an unlocked file of that name means that the owner is gone.
        unlocked = Path(self.path, f"{OWNER}.new")
        self._lock = unlocked.open("w")
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unlocked.rename(Path(self.path, OWNER))

    def remove(self) -> None:
        """Remove it; a second time does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def abandoned_folders(parent: Path) -> list[Path]:
    """The folders of clusters whose driver is gone."""
    found = []
    for owner in parent.glob(f"{FOLDER_PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError), owner.open("r+") as file:  # another user's, or locked by its living owner
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(owner.parent)
    return found


def remove_abandoned_folders(parent: Path) -> None:
    """Remove the folders of clusters whose driver is gone."""
    for folder in abandoned_folders(parent):
        shutil.rmtree(folder, ignore_errors=True)

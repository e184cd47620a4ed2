"""A manifest for Kubernetes: a KubeRay `RayJob` (ray.io/v1) and the ConfigMap with the script that it starts.

The fields are those of KubeRay's API reference: https://ray-project.github.io/kuberay/reference/api/. The manifest
contains no secret, only references to Kubernetes Secrets.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import yaml

from rl_launcher.cluster_jobs.job import ClusterJob, RayPorts, array, assignment, check_text, environment, fill
from rl_launcher.errors import Refusal
from rl_launcher.recipe_files.yaml_source import RecipeDumper
from rl_observe import RunDirectory

__all__ = ["KubernetesOptions", "render_kubernetes"]

# KubeRay appends 6 characters for the RayCluster and up to 10 for its services, and Kubernetes allows 63.
LONGEST_NAME = 47
NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
SECRET = re.compile(r"(?P<variable>[A-Za-z_][A-Za-z0-9_]*)=(?P<secret>[a-z0-9][a-z0-9.-]*):(?P<key>[A-Za-z0-9._-]+)")
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")
SCRIPT_FOLDER = "/etc/rl-launcher"
SCRIPT = "drive.sh"
WIDTH = 1000  # so that long values are not folded


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Options of the Kubernetes job, besides the nodes and GPUs, which come from the recipe."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    image: str
    """The container image, with Python, Ray, rl-launcher and what the recipe needs."""
    claim: str
    """The PersistentVolumeClaim that every pod mounts; several nodes need ReadWriteMany."""
    shared_dir: str = "/shared"
    """Where the claim is mounted. The run works in it; the recipe and the run directory must be in it."""
    name: str = "rl-launcher"
    """Name of the RayJob; its ConfigMap is called `<name>-script`."""
    namespace: str | None = None
    """Namespace of both; None leaves it to kubectl."""
    ray_version: str = "2.60.0"
    """Version of Ray in the image. With `token`, KubeRay needs 2.52 or newer."""
    cpu: str = "8"
    """CPUs of each pod."""
    memory: str = "64Gi"
    """Memory of each pod, including its /dev/shm."""
    shm: str = "16Gi"
    """Size of each pod's /dev/shm, which Ray's object store and NCCL use; the default of 64 MiB is too small."""
    gpu_resource: str = "nvidia.com/gpu"
    """The resource name of a GPU."""
    env: tuple[str, ...] = ()
    """Environment variables of every pod, as `NAME=value`."""
    secret_env: tuple[str, ...] = ()
    """Variables whose values are in a Secret, as `NAME=secret:key`."""
    ports: RayPorts = field(default_factory=RayPorts)
    """Ray's ports in every pod."""
    token: bool = True
    """Admit only processes with a token, which KubeRay creates and keeps in a Secret. Needs KubeRay 1.5. Without it,
    anyone who reaches the pods' ports can run code in them."""
    python: str = "python3"
    """The Python interpreter of the image that has rl-launcher."""
    retries: int = 3
    """How often a new cluster is created to resume a run that failed."""
    join_timeout_s: int = 1800
    """Seconds within which all pods must join, images pulled. Otherwise the job fails and names those that did."""
    grace_s: int = 300
    """Seconds that a run has for saving when it is stopped."""
    keep_s: int = 600
    """Seconds that the pods stay after the end, so that their logs can be read."""

    def __post_init__(self) -> None:
        for name in ("name", "namespace", "claim"):
            value = getattr(self, name)
            if value is not None and (len(value) > LONGEST_NAME or not NAME.fullmatch(value)):
                raise Refusal(
                    f"{name}={value!r} is not a Kubernetes name: lower-case letters, digits and -, a letter first, "
                    f"at most {LONGEST_NAME} characters"
                )
        for name in ("cpu", "memory", "shm"):
            if not QUANTITY.fullmatch(getattr(self, name)):
                raise Refusal(
                    f"{name}={getattr(self, name)!r} is not a Kubernetes quantity; write it as 8, 500m or 64Gi"
                )
        if not self.image.strip() or not self.image.isprintable():
            raise Refusal(f"image={self.image!r} is not the name of an image")
        if not PurePosixPath(self.shared_dir).is_absolute() or ":" in self.shared_dir:
            raise Refusal(
                f"shared_dir={self.shared_dir!r} must be absolute and contain no `:`, since it is a mount path"
            )
        for name, least in (("retries", 0), ("join_timeout_s", 1), ("grace_s", 1), ("keep_s", 0)):
            if getattr(self, name) < least:
                raise Refusal(f"{name}={getattr(self, name)} must be >= {least}")
        _variables(self)


def render_kubernetes(job: ClusterJob, options: KubernetesOptions) -> str:
    """Return the manifest, for `kubectl apply -f`.

    Raises:
        Refusal: the recipe or its run directory is not in the shared directory.
    """
    subject = "What the recipe reads" if job.shipped else "The recipe, and everything that it reads,"
    head = f"# Written by `rl-launcher render kubernetes`. {subject} must be in the claim {options.claim} already.\n"
    if job.shipped:
        head += f"# The recipe is the {job.recipe} that the image's own rl-launcher ships.\n"
    documents = [_config_map(job, options), _ray_job(job, options)]
    texts = [yaml.dump(each, Dumper=_Manifest, sort_keys=False, allow_unicode=True, width=WIDTH) for each in documents]
    return head + "---\n".join(texts)


class _Manifest(RecipeDumper):
    """Quotes what YAML 1.1, which Kubernetes reads, would take for a number, and writes scripts as readable blocks."""

    def represent_script(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Manifest.add_representer(str, _Manifest.represent_script)


def _ray_job(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "rayVersion": options.ray_version,
        "headGroupSpec": {"rayStartParams": _ray_start(job, options, head=True), "template": _pod(job, options)},
    }
    if options.token:
        cluster["authOptions"] = {"mode": "token"}
    if job.num_nodes > 1:
        workers = job.num_nodes - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "workers",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": _ray_start(job, options, head=False),
                "template": _pod(job, options, head=False),
            }
        ]
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": _metadata(options),
        "spec": {
            # Without quotes: KubeRay splits this at blanks and Ray joins it again.
            "entrypoint": f"bash {SCRIPT_FOLDER}/{SCRIPT}",
            "submissionMode": "K8sJobMode",
            "backoffLimit": options.retries,
            "submitterConfig": {"backoffLimit": 0},  # submitting twice would run it twice
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": options.keep_s,
            "rayClusterSpec": cluster,
        },
    }


def _ray_start(job: ClusterJob, options: KubernetesOptions, *, head: bool) -> dict[str, str]:
    ports = options.ports
    parameters = {
        "num-gpus": job.gpus_per_node,
        "node-manager-port": ports.node_manager,
        "object-manager-port": ports.object_manager,
        "min-worker-port": ports.min_worker,
        "max-worker-port": ports.max_worker,
        "disable-usage-stats": "true",
    }
    if head:
        # KubeRay submits and watches the job through the dashboard, from another pod.
        parameters |= {
            "port": ports.gcs,
            "ray-client-server-port": ports.client,
            "dashboard-port": ports.dashboard,
            "dashboard-host": "0.0.0.0",  # noqa: S104 - within the network of the pods
        }
    return {name: str(value) for name, value in parameters.items()}


def _pod(job: ClusterJob, options: KubernetesOptions, *, head: bool = True) -> dict[str, Any]:
    resources = {"cpu": options.cpu, "memory": options.memory}
    if job.gpus_per_node:
        resources[options.gpu_resource] = str(job.gpus_per_node)
    mounts = [{"name": "shared", "mountPath": options.shared_dir}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108
    volumes: list[dict[str, Any]] = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": options.claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": options.shm}},
    ]
    container: dict[str, Any] = {
        "name": "ray-head" if head else "ray-worker",
        "image": options.image,
        "workingDir": options.shared_dir,
        "resources": {"limits": resources, "requests": dict(resources)},
        "env": _variables(options),
        "volumeMounts": mounts,
    }
    if head:
        mounts.append({"name": "script", "mountPath": SCRIPT_FOLDER})
        volumes.append({"name": "script", "configMap": {"name": f"{options.name}-script"}})
        names = {"gcs-server": options.ports.gcs, "dashboard": options.ports.dashboard}
        container["ports"] = [{"containerPort": port, "name": name} for name, port in names.items()]
    return {
        "spec": {
            "containers": [container],
            "volumes": volumes,
            "terminationGracePeriodSeconds": options.grace_s,
        }
    }


def _variables(options: KubernetesOptions) -> list[dict[str, Any]]:
    variables: list[dict[str, Any]] = [{"name": "RAY_JOB_STOP_WAIT_TIME_S", "value": str(options.grace_s)}]
    for name, value in environment(options.env):
        if value is None:
            raise Refusal(
                f"env {name} has no value, and a pod inherits none; write {name}=value, or use secret_env with "
                f"{name}=secret:key"
            )
        variables.append({"name": name, "value": value})
    for text in options.secret_env:
        found = SECRET.fullmatch(text)
        if found is None:
            raise Refusal("secret_env takes a Secret and its key, as HF_TOKEN=hugging-face:token")
        reference = {"name": found["secret"], "key": found["key"]}
        variables.append({"name": found["variable"], "valueFrom": {"secretKeyRef": reference}})
    return variables


def _config_map(job: ClusterJob, options: KubernetesOptions) -> dict[str, Any]:
    run_dir = _inside(job.run_dir, options, what="run_dir")
    recipe = job.recipe if job.shipped else _inside(job.recipe, options, what="the recipe")
    values: dict[str, str | int] = {
        "SHARED_DIR": options.shared_dir,
        "RUN_DIR": run_dir,
        "RUN_RECIPE": str(RunDirectory(Path(run_dir)).recipe),
        "PYTHON": options.python,
        "NUM_NODES": job.num_nodes,
        "GPUS_PER_NODE": job.gpus_per_node,
        "JOIN_TIMEOUT_S": options.join_timeout_s,
    }
    lines = [assignment(name, value) for name, value in values.items()]
    lines.append(array("ARGUMENTS", (recipe, *job.arguments[1:])))
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(options, suffix="-script"),
        "data": {SCRIPT: fill(SCRIPT, {"VALUES": "\n".join(lines)})},
    }


def _inside(path: str, options: KubernetesOptions, *, what: str) -> str:
    check_text(path)
    shared = PurePosixPath(options.shared_dir)
    absolute = shared / path
    if ".." in absolute.parts or shared not in absolute.parents:
        raise Refusal(f"{what} is {path}, but pods only share {shared}; put it there, or set shared_dir to its folder")
    return str(absolute)


def _metadata(options: KubernetesOptions, *, suffix: str = "") -> dict[str, Any]:
    return {"name": options.name + suffix} | ({"namespace": options.namespace} if options.namespace else {})

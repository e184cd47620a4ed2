"""A manifest for Kubernetes: a KubeRay `RayJob` (ray.io/v1) and the ConfigMap with the script that it starts.

Both are in `templates/kubernetes.yaml.j2`, with the fields of KubeRay's API reference:
https://ray-project.github.io/kuberay/reference/api/. The manifest contains references to Secrets, and no secret.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import ClassVar

from rl_launcher.cluster_jobs.job import ClusterJob, RayPorts, check_least, check_text, environment, render
from rl_launcher.errors import Refusal
from rl_observe import RunDirectory

# KubeRay appends 6 characters for the RayCluster and up to 10 for its services, and Kubernetes allows 63.
LONGEST_NAME = 47
NAME = re.compile(r"[a-z](?:[a-z0-9-]*[a-z0-9])?")
SECRET = re.compile(r"(?P<variable>[A-Za-z_][A-Za-z0-9_]*)=(?P<secret>[a-z0-9][a-z0-9.-]*):(?P<key>[A-Za-z0-9._-]+)")
UNITS = {
    "": 1.0, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15,
    "Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50,
}  # fmt: skip
QUANTITY = re.compile(r"\d+(?:\.\d+)?(?:m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """Options of the Kubernetes job, besides the nodes and GPUs, which come from the recipe."""

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

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
    memory: str | None = None
    """Memory of each pod, including its /dev/shm; by default what the recipe needs, and at least 64Gi."""
    shm: str | None = None
    """Size of each pod's /dev/shm, which refits, Ray's object store and NCCL use; by default what the recipe needs, and
    at least 16Gi."""
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
            if (value := getattr(self, name)) is not None and not QUANTITY.fullmatch(value):
                raise Refusal(
                    f"{name}={getattr(self, name)!r} is not a Kubernetes quantity; write it as 8, 500m or 64Gi"
                )
        if not self.image.strip() or not self.image.isprintable():
            raise Refusal(f"image={self.image!r} is not the name of an image")
        if not PurePosixPath(self.shared_dir).is_absolute() or ":" in self.shared_dir:
            raise Refusal(
                f"shared_dir={self.shared_dir!r} must be absolute and contain no `:`, since it is a mount path"
            )
        check_least(self, retries=0, join_timeout_s=1, grace_s=1, keep_s=0)
        _variables(self)


def render_kubernetes(job: ClusterJob, options: KubernetesOptions) -> str:
    """Return the manifest, for `kubectl apply -f`.

    Raises:
        Refusal: the recipe or its run directory is not in the shared directory, or a given size of memory is less than
            the recipe needs.
    """
    options = replace(
        options,
        memory=_at_least("memory", options.memory, job.memory_bytes, default_gib=64),
        shm=_at_least("shm", options.shm, job.shm_bytes, default_gib=16),
    )
    run = RunDirectory(Path(_inside(job.run_dir, options, what="run_dir")))
    recipe = job.recipe if job.shipped else _inside(job.recipe, options, what="the recipe")
    script = render("drive.sh.j2", job=job, options=options, run=run, arguments=(recipe, *job.arguments[1:]))
    variables, secrets = _variables(options)
    return render("kubernetes.yaml.j2", job=job, options=options, script=script, variables=variables, secrets=secrets)


def _at_least(name: str, given: str | None, needed: int | None, *, default_gib: int) -> str:
    """The size of `memory` or `shm` as a Kubernetes quantity, which is enough for the recipe."""
    gib = -(-(needed or 0) // 2**30)
    if given is None:
        return f"{max(gib, default_gib)}Gi"
    number, unit = re.fullmatch(r"([\d.]+)(\D*)", given).groups()  # type: ignore[union-attr]  # checked by the options
    if float(number) * UNITS.get(unit, 1.0) < (needed or 0):
        raise Refusal(f"{name}={given} is less than the {gib}Gi that the recipe needs on each node; leave {name} out")
    return given


def _variables(options: KubernetesOptions) -> tuple[list[tuple[str, str]], list[dict[str, str]]]:
    """The variables with a value, and those of Secrets as their `variable`, `secret` and `key`."""
    variables, secrets = [], []
    for name, value in environment(options.env):
        if value is None:
            raise Refusal(
                f"env {name} has no value, and a pod inherits none; write {name}=value, or use secret_env with "
                f"{name}=secret:key"
            )
        variables.append((name, value))
    for text in options.secret_env:
        if (found := SECRET.fullmatch(text)) is None:
            raise Refusal("secret_env takes a Secret and its key, as HF_TOKEN=hugging-face:token")
        secrets.append(found.groupdict())
    return variables, secrets


def _inside(path: str, options: KubernetesOptions, *, what: str) -> str:
    check_text(path)
    shared = PurePosixPath(options.shared_dir)
    absolute = shared / path
    if ".." in absolute.parts or shared not in absolute.parents:
        raise Refusal(f"{what} is {path}, but pods only share {shared}; put it there, or set shared_dir to its folder")
    return str(absolute)

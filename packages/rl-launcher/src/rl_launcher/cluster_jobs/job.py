"""What a cluster job starts, on any scheduler: one recipe, its run directory, its nodes and Ray's ports."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import yaml

from rl_launcher.errors import Refusal

if TYPE_CHECKING:
    from rl_launcher.schema import Recipe

SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")
HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A recipe that runs on several nodes."""

    recipe: str
    """The recipe's file, by its path on the cluster; only its name if `shipped`."""
    run_dir: str
    """The run directory on the cluster; relative to the shared directory."""
    num_nodes: int
    gpus_per_node: int
    """GPUs of each node; 0 if the policy is on the CPU."""
    overrides: tuple[str, ...] = ()
    """`section.key=value` for `rl-launcher run`, after the recipe."""
    shipped: bool = False
    """Whether the recipe is one that every installation of rl-launcher has under this name."""
    memory_bytes: int | None = None
    """Host memory that the recipe needs of a node, its /dev/shm included; None where the model is not known."""
    shm_bytes: int | None = None
    """Of /dev/shm, where the weights of refits are staged."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 0:
            raise Refusal(
                f"num_nodes={self.num_nodes} must be >= 1 and gpus_per_node={self.gpus_per_node} must be >= 0"
            )
        for text in (self.recipe, self.run_dir, *self.overrides):
            check_text(text)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The arguments of `rl-launcher run`."""
        return (self.recipe, *self.overrides, "cluster.address=auto")


def cluster_job(
    recipe: "Recipe", file: str | Path, overrides: Sequence[str] = (), *, shipped: bool = False
) -> ClusterJob:
    """Return the job that a recipe describes.

    Args:
        recipe: the resolved recipe.
        file: its path on the cluster, or the name of a shipped recipe.
        overrides: those that it was resolved with, which `rl-launcher run` gets again.
        shipped: whether `file` is the name of a shipped recipe.

    Raises:
        Refusal: it runs in one process, or names a Ray cluster that already exists.
    """
    cluster, policy = recipe.cluster, recipe.policy
    if cluster.runtime != "ray":
        raise Refusal(
            f"cluster.runtime={cluster.runtime} needs no cluster: start it with `rl-launcher run {file}`; for a "
            f"cluster set cluster.runtime=ray, cluster.num_nodes and cluster.gpus_per_node"
        )
    if cluster.address not in {None, "auto"}:
        raise Refusal(
            f"cluster.address={cluster.address} is an existing Ray cluster, but a cluster job starts its own; "
            f"leave it out, or start the recipe with `rl-launcher run {file}`"
        )
    if len(set(cluster.slots_of_nodes)) > 1:
        raise Refusal(
            f"cluster.gpus_per_node={[*cluster.slots_of_nodes]} asks for nodes of different sizes, and a job asks the "
            f"scheduler for equal ones; start Ray on the nodes yourself (ray start), and the recipe on one of them "
            f"with `rl-launcher run {file} cluster.address=auto`"
        )
    from rl_launcher.checks.gpu_budget import node_needs

    backend = policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg
    needs = node_needs(recipe)
    memory, shm = (None, None) if needs is None else max(needs)
    return ClusterJob(
        recipe=str(file),
        run_dir=recipe.run_dir,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.slots_of_nodes[0] if backend.device == "cuda" else 0,
        overrides=tuple(overrides),
        shipped=shipped,
        memory_bytes=memory,
        shm_bytes=shm,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPorts:
    """Ray's ports: fixed, so that a firewall between nodes can open exactly these.

    `torch.distributed`, NCCL and the engines use further free ports.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    gcs: int = 6379
    """The head's port, through which every node joins."""
    node_manager: int = 6380
    """Port of each node's raylet; 0 takes any free one."""
    object_manager: int = 6381
    """Port through which nodes exchange objects; 0 takes any free one."""
    client: int = 10001
    """Port of Ray Client on the head. Nothing here uses it, but Ray starts it if it is installed."""
    min_worker: int = 10002
    """First port for actors. Each process takes one."""
    max_worker: int = 10999
    """Last port for actors."""
    dashboard: int = 8265
    """The head's dashboard; on SLURM only on loopback."""

    def __post_init__(self) -> None:
        ports: dict[str, int] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, port in ports.items():
            may_be_free = name in {"node_manager", "object_manager"}
            if not 1024 <= port <= HIGHEST_PORT and not (may_be_free and port == 0):
                raise Refusal(f"ports.{name}={port} must be from {'0, or ' * may_be_free}1024 to {HIGHEST_PORT}")
        single = {name: port for name, port in ports.items() if port and "worker" not in name}
        if self.min_worker >= self.max_worker:
            raise Refusal(
                f"ports.min_worker={self.min_worker} must be below ports.max_worker={self.max_worker}: each actor "
                f"takes one"
            )
        if len(set(single.values())) < len(single):
            raise Refusal(f"ports {single} are not all different; each has one service")
        for name, port in single.items():
            if self.min_worker <= port <= self.max_worker:
                raise Refusal(
                    f"ports.{name}={port} is among the workers', {self.min_worker} to {self.max_worker}; move either"
                )


def check_least(options: object, **least: int) -> None:
    """Refuse an option that is less than it must be."""
    for name, number in least.items():
        if getattr(options, name) < number:
            raise Refusal(f"{name}={getattr(options, name)} must be >= {number}")


def environment(variables: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Parse `NAME=value`, and `NAME` alone (value None); refuse a value for a name that looks like a secret."""
    parsed: list[tuple[str, str | None]] = []
    for text in variables:
        name, given, value = text.partition("=")
        if not name.isascii() or not name.isidentifier():
            raise Refusal(f"{text!r} is no environment variable; write NAME=value, or NAME to pass yours on")
        if given and any(word in name.upper() for word in SECRET_WORDS):
            raise Refusal(
                f"{name} is a secret by its name, and its value would be in a file; pass it on by name alone: {name}"
            )
        check_text(value)
        parsed.append((name, value if given else None))
    return tuple(parsed)


def check_text(text: str) -> None:
    """Refuse text that cannot stand in a script: NUL, or half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{text!r} is not UTF-8, and a script must be; rename it") from error
    if "\0" in text:
        raise Refusal(f"{text!r} contains NUL, which no path may; rename it")


def render(template: str, **values: Any) -> str:
    """Fill a file of `templates/`: `sh` quotes a value as one shell word, `yaml` as a YAML scalar in the given style.

    Raises:
        Refusal: a value for the shell contains what a script cannot.
    """
    import jinja2

    environment = jinja2.Environment(  # noqa: S701 - scripts and manifests, not HTML
        loader=jinja2.PackageLoader("rl_launcher.cluster_jobs"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="{##",  # bash has ${#array[@]}
        comment_end_string="##}",
    )
    environment.filters |= {"sh": _shell_word, "yaml": _yaml}
    return environment.get_template(template).render(**values)


def _shell_word(value: object) -> str:
    check_text(str(value))
    return shlex.quote(str(value))


def _yaml(value: object, style: str = '"') -> str:
    text: str = yaml.safe_dump(value, default_style=style, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n")

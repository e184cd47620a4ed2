"""What a cluster job starts: one recipe, its run directory, its nodes and ports.

It does not know any scheduler.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rl_launcher.errors import Refusal

if TYPE_CHECKING:
    from rl_launcher.schema import Recipe

__all__ = ["ClusterJob", "RayPorts", "array", "assignment", "check_words", "cluster_job", "environment", "fill"]

ON_THE_CLUSTER = "cluster.address=auto"
SECRET_WORDS = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "ACCESS_KEY", "CREDENTIAL")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterJob:
    """A recipe for several machines."""

    recipe: str
    """The recipe's file, as the machines of the cluster see it; the name alone where `shipped`."""

    run_dir: str
    """Where the run goes, as they see it; relative to the shared directory."""

    num_nodes: int
    """Machines."""

    gpus_per_node: int
    """GPUs of each; 0 where the policy is on the CPU."""

    overrides: tuple[str, ...] = ()
    """`section.key=value` for `rl-launcher run`, after the recipe."""

    shipped: bool = False
    """Whether the recipe came with the package: each machine's own rl-launcher has it under that name."""

    def __post_init__(self) -> None:
        if self.num_nodes < 1 or self.gpus_per_node < 0:
            raise Refusal(
                f"num_nodes={self.num_nodes} must be >= 1 and gpus_per_node={self.gpus_per_node} must be >= 0"
            )
        for word in (self.recipe, self.run_dir, *self.overrides):
            check_words(word)

    @property
    def arguments(self) -> tuple[str, ...]:
        """All that follows `rl-launcher run`."""
        return (self.recipe, *self.overrides, ON_THE_CLUSTER)


def cluster_job(
    recipe: "Recipe", file: str | Path, overrides: Sequence[str] = (), *, shipped: bool = False
) -> ClusterJob:
    """Read from a recipe what it asks of a cluster.

    Args:
        recipe: resolved.
        file: where it was read from, as the cluster sees it; the name of a shipped one.
        overrides: those that it was resolved with, to be given to `rl-launcher run` again.
        shipped: whether `file` is a name that rl-launcher itself knows.

    Raises:
        Refusal: it runs in one process, or names the cluster that it is to run on.
    """
    cluster = recipe.cluster
    if cluster.runtime != "ray":
        raise Refusal(
            f"cluster.runtime={cluster.runtime} needs no cluster: start it with `rl-launcher run {file}`; for one "
            f"give cluster.runtime=ray, and cluster.num_nodes and cluster.gpus_per_node"
        )
    if cluster.address not in {None, "auto"}:
        raise Refusal(
            f"cluster.address={cluster.address} is a Ray cluster that is already there, and a template starts its own; "
            f"leave it out, or start the recipe with `rl-launcher run {file}`"
        )
    policy = recipe.policy
    backend = policy.megatron_cfg if policy.megatron_cfg.enabled else policy.dtensor_cfg
    return ClusterJob(
        recipe=str(file),
        run_dir=recipe.run_dir,
        num_nodes=cluster.num_nodes,
        gpus_per_node=cluster.gpus_per_node if backend.device == "cuda" else 0,
        overrides=tuple(overrides),
        shipped=shipped,
    )


def check_words(word: str) -> None:
    """Refuse what no file of a cluster can hold.

    Raises:
        Refusal: NUL, or half of a surrogate pair.
    """
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise Refusal(f"{word!r} is not UTF-8, and a script is; rename it") from error
    if "\0" in word:
        raise Refusal(f"{word!r} holds a NUL, and no path does; rename it")


def environment(names: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read `NAME=value`, and `NAME` alone for a variable whose value is not written down.

    Raises:
        Refusal: no name, or a value of what is a secret by its name.
    """
    variables: list[tuple[str, str | None]] = []
    for text in names:
        name, given, value = text.partition("=")
        if not name.isascii() or not name.isidentifier():
            raise Refusal(f"{text!r} is no environment variable; write NAME=value, or NAME to pass yours on")
        if given and any(word in name.upper() for word in SECRET_WORDS):
            raise Refusal(
                f"the value of {name} is a secret by its name, and would be in a file; pass it on by name alone: {name}"
            )
        check_words(value)
        variables.append((name, value if given else None))
    return tuple(variables)


HIGHEST_PORT = 65535


@dataclass(frozen=True, slots=True, kw_only=True)
class RayPorts:
    """Fixed, so that a firewall between machines can be opened for them and for nothing else.

    `torch.distributed`, NCCL and engines take free ports of their own beside these.
    """

    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid", "use_attribute_docstrings": True}

    gcs: int = 6379
    """The head's, by which every machine joins."""

    node_manager: int = 6380
    """Of each machine's raylet; 0 takes any free one."""

    object_manager: int = 6381
    """By which machines exchange objects; 0 takes any free one."""

    client: int = 10001
    """Of Ray Client on the head, which nothing here uses, and Ray starts where it is installed."""

    min_worker: int = 10002
    """First of those that actors listen on. One is taken by each process."""

    max_worker: int = 10999
    """Last of those that actors listen on."""

    dashboard: int = 8265
    """The head's dashboard; on SLURM on loopback only."""

    def __post_init__(self) -> None:
        for field in fields(self):
            port = getattr(self, field.name)
            least = 0 if field.name in {"node_manager", "object_manager"} else 1024
            if not least <= port <= HIGHEST_PORT or 0 < port < 1024:
                raise Refusal(f"ports.{field.name}={port} must be from {least or '0, or 1024'} to {HIGHEST_PORT}")
        if self.min_worker >= self.max_worker:
            raise Refusal(
                f"ports.min_worker={self.min_worker} must be below ports.max_worker={self.max_worker}: each actor "
                f"takes one"
            )
        self._refuse_overlap()

    def _refuse_overlap(self) -> None:
        single = {
            name: port
            for name in ("gcs", "node_manager", "object_manager", "client", "dashboard")
            if (port := getattr(self, name))
        }
        if len(set(single.values())) < len(single):
            raise Refusal(f"ports {single} are not all different; each serves one thing")
        for name, port in single.items():
            if self.min_worker <= port <= self.max_worker:
                raise Refusal(
                    f"ports.{name}={port} is among the workers', {self.min_worker} to {self.max_worker}; move either"
                )


def assignment(name: str, value: str | int) -> str:
    """Return `name=value`, quoted.

    Raises:
        Refusal: a value that no shell can hold.
    """
    check_words(str(value))
    return f"{name}={shlex.quote(str(value))}"


def array(name: str, words: Sequence[str]) -> str:
    """Return `name=(a b …)`, each word quoted.

    Raises:
        Refusal: a word that no shell can hold.
    """
    for word in words:
        check_words(word)
    return f"{name}=({' '.join(map(shlex.quote, words))})"


def fill(script: str, parts: Mapping[str, str]) -> str:
    """Return a script of this folder with each `@@NAME@@` replaced, once: what a part holds stays as it is."""
    text = files("rl_launcher.cluster_jobs").joinpath(script).read_text(encoding="utf-8")
    return re.sub("@@([A-Z]+)@@", lambda found: parts[found[1]], text)

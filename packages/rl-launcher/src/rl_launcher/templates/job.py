"""What a template starts: one recipe, where its run goes, and how many machines it takes.

It does not know any scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rl_launcher.errors import LauncherError

if TYPE_CHECKING:
    from rl_launcher.recipe_schema import Recipe

__all__ = ["ClusterJob", "check_words", "cluster_job", "environment"]

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
            raise LauncherError(
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
        LauncherError: it runs in one process, or names the cluster that it is to run on.
    """
    cluster = recipe.cluster
    if cluster.runtime != "ray":
        raise LauncherError(
            f"cluster.runtime={cluster.runtime} needs no cluster: start it with `rl-launcher run {file}`; for one "
            f"give cluster.runtime=ray, and cluster.num_nodes and cluster.gpus_per_node"
        )
    if cluster.address not in {None, "auto"}:
        raise LauncherError(
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
        LauncherError: NUL, or half of a surrogate pair.
    """
    try:
        word.encode()
    except UnicodeEncodeError as error:
        raise LauncherError(f"{word!r} is not UTF-8, and a script is; rename it") from error
    if "\0" in word:
        raise LauncherError(f"{word!r} holds a NUL, and no path does; rename it")


def environment(names: Sequence[str]) -> tuple[tuple[str, str | None], ...]:
    """Read `NAME=value`, and `NAME` alone for a variable whose value is not written down.

    Raises:
        LauncherError: no name, or a value of what is a secret by its name.
    """
    variables: list[tuple[str, str | None]] = []
    for text in names:
        name, given, value = text.partition("=")
        if not name.isascii() or not name.isidentifier():
            raise LauncherError(f"{text!r} is no environment variable; write NAME=value, or NAME to pass yours on")
        if given and any(word in name.upper() for word in SECRET_WORDS):
            raise LauncherError(
                f"the value of {name} is a secret by its name, and would be in a file; pass it on by name alone: {name}"
            )
        check_words(value)
        variables.append((name, value if given else None))
    return tuple(variables)

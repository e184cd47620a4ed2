"""Where `rl-backends convert` keeps Megatron checkpoints of Hugging Face models: the environment says it."""

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "NRL_MEGATRON_CHECKPOINT_DIR"
SUBFOLDER = "nemo_rl"


def megatron_checkpoint_dir(environment: Mapping[str, str] | None = None) -> Path:
    """`NRL_MEGATRON_CHECKPOINT_DIR`, else `$HF_HOME/nemo_rl`, else `~/.cache/huggingface/nemo_rl`.

    A variable that is empty counts as not set.

    Args:
        environment: None for the one of this process.
    """
    return _chosen(environment)[0]


def explain_megatron_checkpoint_dir(environment: Mapping[str, str] | None = None) -> str:
    """That folder, and which rule gave it, in one line."""
    folder, reason = _chosen(environment)
    return f"{folder} ({reason})"


def _chosen(environment: Mapping[str, str] | None) -> tuple[Path, str]:
    given = os.environ if environment is None else environment
    if own := given.get(VARIABLE):
        return Path(own).expanduser(), f"{VARIABLE} says so"
    if home := given.get("HF_HOME"):
        return Path(home).expanduser() / SUBFOLDER, f"HF_HOME is {home}, and {VARIABLE} is not set"
    return Path("~/.cache/huggingface").expanduser() / SUBFOLDER, f"neither {VARIABLE} nor HF_HOME is set"

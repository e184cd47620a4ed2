"""Which backend a command is about, and a flag for each field of its configuration."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from rl_backends.commands.config_flags import add_config_flags, config_of, one_of
from rl_backends.dtensor.config import DTensorConfig
from rl_backends.kernels import KernelsConfig
from rl_backends.megatron.config import MegatronConfig

CONFIGS: Mapping[str, type[Any]] = {"dtensor": DTensorConfig, "megatron": MegatronConfig}
SHORT: Mapping[str, Mapping[str, str]] = {
    "dtensor": {
        "tensor_parallel_size": "--tp",
        "context_parallel_size": "--cp",
        "expert_parallel_size": "--ep",
        "data_parallel_replicate_size": "--dp-replicate",
    },
    "megatron": {
        "tensor_model_parallel_size": "--tp",
        "pipeline_model_parallel_size": "--pp",
        "context_parallel_size": "--cp",
        "expert_model_parallel_size": "--ep",
    },
}
"""Field -> a shorter flag."""

NO_FLAG = ("enabled", "lora_cfg", "kernels", "optimizer", "scheduler")
KERNELS_PREFIX = "kernels_"
"""What is chosen by --backend, and what is no single value."""


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model, the ranks and the backend."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, a hub id, or a type such as qwen3")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the whole run (default %(default)s)")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    _add_backend(parser)


def chosen_backend(given: Sequence[str]) -> str:
    """The backend that a command line asks for; it decides which other flags there are.

    An unknown one ends the process, as other misuse does.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    _add_backend(parser)
    try:
        backend: str = parser.parse_known_args(given)[0].backend
    except argparse.ArgumentError:  # refused in words by the command's own parser
        return "dtensor"
    return backend


def add_backend_flags(parser: argparse.ArgumentParser, backend: str, *, leave_out: Sequence[str] = ()) -> None:
    """Declare the fields of the backend's configuration."""
    config = CONFIGS[backend]
    names = {field.name for field in dataclasses.fields(config)}
    left_out = [name for name in (*NO_FLAG, *leave_out) if name in names]
    add_config_flags(parser, config, leave_out=left_out, short=SHORT[backend], title=f"{backend} backend")
    if "kernels" in names:
        add_config_flags(parser, KernelsConfig, prefix=KERNELS_PREFIX, title="kernels")


def chosen_config(arguments: argparse.Namespace, **others: Any) -> Any:
    """The configuration of the chosen backend; `others` go before its defaults, and flags before them."""
    config = CONFIGS[arguments.backend]
    if "kernels" in {field.name for field in dataclasses.fields(config)}:
        others = {"kernels": config_of(KernelsConfig, arguments, prefix=KERNELS_PREFIX), **others}
    return config_of(config, arguments, enabled=True, **others)


def _add_backend(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--backend",
        type=one_of(tuple(CONFIGS), "--backend"),
        default="dtensor",
        metavar="|".join(CONFIGS),
        help="which has flags of its own (default %(default)s)",
    )

"""`rl-backends explain`: mesh, plan, dtypes, batch, collectives and predicted memory of a model that is nowhere loaded.

Exit codes: 0 explained, and within `--device-memory-gib` where that was given; 1 beyond it; 2 refused.
"""

import argparse
from typing import Any, get_args, get_type_hints

from rl_backends.commands.config_flags import add_config_flags, config_of, one_of
from rl_backends.commands.console import CommandError, show, show_json
from rl_backends.dtensor.config import DTensorConfig

__all__ = ["SHORT", "add_arguments", "add_model_arguments", "run"]

GIB = 2**30
SHORT = {
    "tensor_parallel_size": "--tp",
    "context_parallel_size": "--cp",
    "expert_parallel_size": "--ep",
    "data_parallel_replicate_size": "--dp-replicate",
}
"""Field of DTensorConfig -> a shorter flag."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    add_model_arguments(parser)
    group = parser.add_argument_group("step")
    group.add_argument("--rows", type=int, metavar="N", help="of the whole batch (default: two microbatches a rank)")
    group.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a row (default %(default)s)")
    group.add_argument(
        "--optimizer",
        type=one_of((*_optimizers(), "none"), "--optimizer"),
        default="adamw",
        metavar="|".join((*_optimizers(), "none")),
        help="whose state and step count (default %(default)s)",
    )
    group.add_argument("--lora-rank", type=int, metavar="N", help="train adapters on all linear layers (default: no)")
    group.add_argument("--reference", action="store_true", help="keep a frozen copy of the policy")
    group.add_argument("--offload-reference", action="store_true", help="keep that copy in host memory")
    group.add_argument("--device-memory-gib", type=float, metavar="X", help="of one device: exit 1 if it does not fit")
    group.add_argument("--no-plan", action="store_true", help="leave out which rule shards which parameter")
    group.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")
    add_config_flags(parser, DTensorConfig, leave_out=("enabled",), short=SHORT, title="backend")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the model and the ranks."""
    parser.add_argument("model", metavar="MODEL", help="a folder, a config.json, a hub id, or a type such as qwen3")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of the whole run (default %(default)s)")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")


def run(arguments: argparse.Namespace) -> int:
    """Explain, and return the exit code."""
    from rl_backends.dry_run.document import answer_here
    from rl_backends.dry_run.explanation import Explanation

    if (given := arguments.device_memory_gib) is not None and not given > 0:
        raise CommandError(f"--device-memory-gib must be above 0; got {given}")
    # This process has nothing to keep: no other one need be started.
    explanation = Explanation(answer_here({"what": "explain", **_request(arguments)}))
    show(explanation.text(plan=not arguments.no_plan))
    peak = explanation.dry_run.peak.num_bytes
    holds = given is None or peak <= given * GIB
    if given is not None:
        show(f"\nit {'fits' if holds else 'does not fit'}: {peak / GIB:.2f} GiB of {given:g} GiB")
    if arguments.json:
        show_json({**explanation.document, "holds": holds})
    return 0 if holds else 1


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    from rl_backends.dry_run.predict import request_of, step_asked
    from rl_backends.lora import LoraConfig
    from rl_backends.optimizers import OptimizerConfig

    config = config_of(DTensorConfig, arguments)
    name = arguments.optimizer
    asked = step_asked(
        config,
        world_size=arguments.ranks,
        optimizer=None if name == "none" else OptimizerConfig(lr=1e-6, name=name),
        lora=None if arguments.lora_rank is None else LoraConfig(rank=arguments.lora_rank),
        rows=arguments.rows,
        length=arguments.length,
        lengths=None,
        temperature=1.0,
        reference=arguments.reference or arguments.offload_reference,
        offload_reference=arguments.offload_reference,
    )
    return request_of(
        arguments.model,
        config,
        asked,
        world_size=arguments.ranks,
        revision=arguments.revision,
        trust_remote_code=arguments.trust_remote_code,
    )


def _optimizers() -> tuple[str, ...]:
    from rl_backends.optimizers import OptimizerConfig

    return get_args(get_type_hints(OptimizerConfig)["name"])

"""`rl-backends explain`: mesh, plan, dtypes, batch, collectives and predicted memory of a model that is nowhere loaded.

Of the Megatron backend: layout, stages, and memory without activations.
Exit codes: 0 explained, and within `--device-memory-gib` where that was given; 1 beyond it; 2 refused.
"""

import argparse
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from rl_backends.commands.flags import add_backend_flags, add_model_arguments, chosen_config
from rl_backends.commands.megatron_layout import describe_layout
from rl_backends.config import LoraConfig
from rl_backends.dry_run.explanation import explain, skeleton_of
from rl_backends.optimizers.config import OptimizerConfig

GIB = 2**30
OPTIMIZERS = (*get_args(get_type_hints(OptimizerConfig)["name"]), "none")


def add_arguments(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Declare what the command takes, with the flags of the backend that is asked for."""
    backend = add_model_arguments(parser, given)
    group = parser.add_argument_group("answer")
    group.add_argument("--device-memory-gib", type=float, metavar="X", help="of one device: exit 1 if it does not fit")
    if backend == "megatron":
        add_backend_flags(parser, backend, leave_out=("peak_flops_per_s", "timeout_s"))
        return
    group = parser.add_argument_group("step")
    group.add_argument("--rows", type=int, metavar="N", help="of the whole batch (default: two microbatches a rank)")
    group.add_argument("--length", type=int, default=2048, metavar="N", help="tokens of a row (default %(default)s)")
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        metavar="|".join(OPTIMIZERS),
        help="whose state and step count (default %(default)s)",
    )
    group.add_argument("--lora-rank", type=int, metavar="N", help="train adapters on all linear layers (default: no)")
    add_backend_flags(parser, backend)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Explain; it holds what fits."""
    if (given := arguments.device_memory_gib) is not None and not given > 0:
        raise ValueError(f"--device-memory-gib must be above 0; got {given}")
    source = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    if arguments.backend == "megatron":
        skeleton = skeleton_of(arguments.model, **source)
        text, document, peak = describe_layout(skeleton, lambda: chosen_config(arguments), ranks=arguments.ranks)
    else:
        rank, name = arguments.lora_rank, arguments.optimizer
        explanation = explain(
            arguments.model,
            chosen_config(arguments, lora_cfg=None if rank is None else LoraConfig(rank=rank)),
            world_size=arguments.ranks,
            optimizer=None if name == "none" else OptimizerConfig(lr=1e-6, name=name),
            rows=arguments.rows,
            length=arguments.length,
            **source,
        )
        text, document = explanation.text(), dict(explanation.document)
        peak = explanation.dry_run.peak.num_bytes
    print(text)
    holds = given is None or peak <= given * GIB
    if given is not None:
        print(f"\nit {'fits' if holds else 'does not fit'}: {peak / GIB:.2f} GiB of {given:g} GiB")
    return {**document, "holds": holds}

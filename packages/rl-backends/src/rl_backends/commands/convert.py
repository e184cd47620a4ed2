"""`rl-backends convert`: the conversion of a model to a Megatron checkpoint, made where there is none.

In one process, which holds the whole model, or under torchrun, whose ranks share it out. Any layout reads what any
other wrote. Exit codes: 0 it is there; 1 it cannot be written; 2 refused.
"""

import argparse
from typing import Any

from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir
from rl_backends.commands.console import CommandError, say, show, show_json
from rl_backends.errors import MissingDependencyError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    where = explain_megatron_checkpoint_dir().replace("%", "%%")
    parser.add_argument("--dir", metavar="FOLDER", help=f"where conversions lie (default: {where})")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a hub id")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that comes with the model")
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="ranks that share the layers")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts")
    parser.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="S", help="to wait for another writer (default %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON that holds every figure")


def run(arguments: argparse.Namespace) -> int:
    """Convert, or find what was converted, and return the exit code."""
    import torch.distributed as dist

    from rl_backends.loading import open_model
    from rl_backends.megatron.config import MegatronConfig

    config = MegatronConfig(
        tensor_model_parallel_size=arguments.tp,
        sequence_parallel=arguments.tp > 1,  # experts need it, and it cuts no weight otherwise
        pipeline_model_parallel_size=arguments.pp,
        expert_model_parallel_size=arguments.ep,
        checkpoint_dir=arguments.dir,
        timeout_s=arguments.timeout_s,
    )
    try:
        groups = _join(config)
    except MissingDependencyError as absent:
        raise CommandError(str(absent)) from absent
    try:
        from rl_backends.megatron.loading import conversion_of

        # the model's name comes after the ranks have joined: what a branch means is told to all by one of them
        source = open_model(arguments.model, revision=arguments.revision, trust_remote_code=arguments.trust_remote_code)
        conversion = conversion_of(source, config, progress=say)
        speaks = dist.get_rank() == 0
    finally:
        groups.leave()
    if speaks:
        show(conversion.explain())
        if arguments.json:
            show_json({**conversion.figures(), "holds": True})
    return 0


def _join(config: Any) -> Any:
    from rl_backends.megatron.groups import ParallelGroups

    return ParallelGroups.join(config)

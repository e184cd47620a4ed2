"""`rl-backends convert`: a Hugging Face model as a distributed checkpoint of Megatron-LM.

Training does not need it: the Megatron backend reads Hugging Face files. In one process, which holds the whole model,
or under torchrun, whose ranks share it; any layout reads what any other wrote. Exit codes: 0 it is there, complete and
checked; 1 it cannot be written, or the one that is there is damaged; 2 refused.
"""

import argparse
import functools
import json
import sys
from collections.abc import Sequence

from rl_backends.commands.flags import add_common_flags
from rl_backends.errors import MissingDependencyError
from rl_backends.megatron.config import MegatronConfig, explain_megatron_checkpoint_dir


def add_arguments(parser: argparse.ArgumentParser, _given: Sequence[str]) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    where = explain_megatron_checkpoint_dir().replace("%", "%%")
    parser.add_argument("--dir", metavar="FOLDER", help=f"where conversions lie (default: {where})")
    add_common_flags(parser)
    parser.add_argument("--tp", type=int, default=1, metavar="N", help="ranks that share each matrix")
    parser.add_argument("--pp", type=int, default=1, metavar="N", help="ranks that share the layers")
    parser.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts")


def run(arguments: argparse.Namespace) -> int:
    """Convert, or check the conversion that is there, and return the exit code."""
    import torch.distributed as dist

    from rl_backends.loading import open_model
    from rl_backends.megatron.groups import ParallelGroups

    config = MegatronConfig(
        tensor_model_parallel_size=arguments.tp,
        sequence_parallel=arguments.tp > 1,  # experts need it, and it shards no weight otherwise
        pipeline_model_parallel_size=arguments.pp,
        expert_model_parallel_size=arguments.ep,
    )
    try:
        groups = ParallelGroups.join(config)
    except MissingDependencyError as absent:
        raise ValueError(str(absent)) from absent
    try:
        from rl_backends.megatron.conversion import convert

        # Opened after the ranks have joined: what a branch of the Hub means is told to all by one of them.
        source = open_model(arguments.model, revision=arguments.revision, trust_remote_code=arguments.trust_remote_code)
        progress = functools.partial(print, file=sys.stderr)
        conversion = convert(source, config, directory=arguments.dir, progress=progress)
        speaks = dist.get_rank() == 0
    finally:
        groups.leave()
    if speaks:
        print(conversion.explain())
        if arguments.json:
            print(json.dumps(conversion.figures(), allow_nan=False))
    return 0

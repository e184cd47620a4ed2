"""`rl-backends convert`: a Hugging Face model as a distributed checkpoint of Megatron-LM.

Training does not need it: the Megatron backend reads Hugging Face files. In one process, which holds the whole model;
any layout reads it. Exit codes: 0 it is there, complete and checked; 1 it cannot be written, or the one that is there
is damaged; 2 refused.
"""

import argparse
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

from rl_backends.commands.flags import add_common_flags
from rl_backends.loading.source import open_model
from rl_backends.megatron.config import explain_megatron_checkpoint_dir
from rl_backends.megatron.conversion import convert
from rl_backends.megatron.installed import require_megatron


def add_arguments(parser: argparse.ArgumentParser, _given: Sequence[str]) -> None:
    """Declare what the command takes."""
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    where = explain_megatron_checkpoint_dir().replace("%", "%%")
    parser.add_argument("--dir", metavar="FOLDER", help=f"where conversions lie (default: {where})")
    add_common_flags(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Convert, or check the conversion that is there."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a model is converted by one process: start the command by itself, without torchrun")
    require_megatron()
    source = open_model(arguments.model, revision=arguments.revision, trust_remote_code=arguments.trust_remote_code)
    conversion = convert(source, directory=arguments.dir, progress=functools.partial(print, file=sys.stderr))
    print(conversion.explain())
    figures = {**conversion.about, "folder": str(conversion.folder), "files": len(conversion.about["files"])}
    return {**figures, "num_bytes": conversion.num_bytes, "found": conversion.found, "holds": True}

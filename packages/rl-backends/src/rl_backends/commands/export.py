"""`rl-backends export`: a Hugging Face folder of a checkpoint of either backend, in one process.

It never holds the whole model.

Exit codes: 0 written; 1 it could not be written, or the checkpoint cannot be read; 2 refused.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_backends.checkpoints.contents import TorchContents
from rl_backends.checkpoints.folders import check_file, in_threads
from rl_backends.checkpoints.shards import WEIGHTS, whole_tensor
from rl_backends.checkpoints.storage import (
    DAMAGED,
    Manifest,
    check_model,
    plan_reads,
    read_boxes,
    read_index,
    read_manifest,
)
from rl_backends.commands.flags import add_common_flags
from rl_backends.export import export_pretrained
from rl_backends.loading.source import TOKENIZER_FILES, load_tokenizer, open_model

GIB = 2**30
DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser, _given: Sequence[str]) -> None:
    """Declare what the command takes."""
    parser.add_argument("checkpoint", metavar="FOLDER", help="that save_checkpoint has written")
    parser.add_argument("--model", required=True, metavar="SOURCE", help="folder or hub id that training began from")
    parser.add_argument("--to", required=True, metavar="FOLDER", help="where to; it must not exist")
    parser.add_argument("--dtype", choices=DTYPES, metavar="|".join(DTYPES), help="default: the checkpoint's own")
    add_common_flags(parser)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Export."""
    checkpoint, target = Path(arguments.checkpoint), Path(arguments.to)
    manifest = read_manifest(checkpoint)
    asked = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    source = open_model(arguments.model, **asked)
    tokenizer = None
    if any((source.folder / name).is_file() for name in TOKENIZER_FILES):
        tokenizer = load_tokenizer(source.model_name, **asked)
    else:
        print(f"{source.model_name} has no tokenizer, so the folder gets none", file=sys.stderr)
    skeleton = source.skeleton()
    names, _ = TorchContents(skeleton, None).describe(optimizers=False, saved=None)
    check_model(checkpoint, manifest.model, names)
    in_threads(lambda file: check_file(checkpoint / file[0], file[1], remedy=DAMAGED), manifest.files.items())
    export_pretrained(
        skeleton,
        target,
        dtype=None if arguments.dtype is None else getattr(torch, arguments.dtype),
        tokenizer=tokenizer,
        tensors=_tensors(checkpoint, manifest, dtype=arguments.dtype),
    )
    version, tensors = manifest.version, len(manifest.model)
    written = sum(path.stat().st_size for path in target.iterdir())
    print(f"{target}: {tensors} tensors of version {version}, {written / GIB:.3f} GiB")
    return {"folder": str(target), "version": version, "tensors": tensors, "bytes": written, "holds": True}


def _tensors(checkpoint: Path, manifest: Manifest, *, dtype: str | None) -> Iterator[tuple[str, Tensor]]:
    """Each weight of a checkpoint, whole, in the model's order; read when its turn comes."""
    index = read_index(checkpoint, manifest)
    for name in manifest.model:
        key = f"{WEIGHTS}{name}"
        tensor = torch.empty(index[key]["shape"], dtype=getattr(torch, index[key]["dtype"]))
        read_boxes(checkpoint, plan_reads(checkpoint, index, [whole_tensor(tensor, key)]))
        asked = None if dtype is None or not tensor.is_floating_point() else getattr(torch, dtype)
        yield name, tensor.to(asked)

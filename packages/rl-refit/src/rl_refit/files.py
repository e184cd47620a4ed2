"""A version of the weights in safetensors files, for a trainer and an engine that never meet.

Each rank of the source writes one file with its own boxes, under a name that says of how many it is one; it appears
under that name when it is whole. The header has the manifest, the boxes and their digests. A reader plans as a refit
does, maps the files, and compares digests before it commits.

    directory/version-7/rank-0-of-2.safetensors
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_refit.contracts import WeightSink, WeightSource
from rl_refit.digest import digest_tensor
from rl_refit.errors import DigestError, RefitError
from rl_refit.layout import Region
from rl_refit.manifest import Manifest, merge_manifests
from rl_refit.plan import plan_refit

__all__ = ["complete_versions", "read_version", "write_version"]

_FORMAT = "rl-refit 1"
_NAME = re.compile(r"rank-(\d+)-of-(\d+)\.safetensors")


def write_version(
    source: WeightSource, directory: Path | str, version: int, *, rank: int = 0, num_ranks: int = 1
) -> Path:
    """Write what this rank of `source` holds; every rank calls it. Needs safetensors. Returns the file.

    Raises:
        RefitError: This version has been written by another number of ranks.
    """
    from safetensors.torch import save_file

    folder = Path(directory) / f"version-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    if foreign := [name for name, (_, ranks) in _files(folder).items() if ranks != num_ranks]:
        raise RefitError(f"{folder} has {foreign[0]}, and this is one of {num_ranks} ranks; write to another directory")
    manifest = source.manifest().on_rank(rank)
    tensors: dict[str, Tensor] = {}
    boxes: dict[str, list[Any]] = {}
    for region, tensor in source.shards([meta.name for meta in manifest.tensors if meta.tied_to is None]):
        key = f"{region.name} {len(boxes)}"
        tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
        boxes[key] = [region.name, region.offsets, region.shape, digest_tensor(tensors[key])]
    header = {"format": _FORMAT, "manifest": manifest.to_json(), "boxes": json.dumps(boxes)}
    path = folder / f"rank-{rank}-of-{num_ranks}.safetensors"
    partial = folder / f".{path.name}.{os.getpid()}"
    try:
        save_file(tensors, partial, metadata=header)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def complete_versions(directory: Path | str) -> tuple[int, ...]:
    """The versions of which every rank's file is there, ascending."""
    folders = {
        int(found[1]): folder
        for folder in Path(directory).iterdir()
        if (found := re.fullmatch(r"version-(\d+)", folder.name))
    }
    return tuple(version for version, folder in sorted(folders.items()) if _is_complete(_files(folder)))


def read_version(sink: WeightSink, directory: Path | str, version: int, *, rank: int = 0) -> None:
    """Bring a version into this rank of `sink`, as a refit does: all of it, verified, or the old weights stay.

    Raises:
        CoverageError: The files and the sink do not hold the same tensors.
        DigestError: A box is not what was written.
        RefitError: Files are missing or foreign, or the sink refuses the version.
    """
    from safetensors import safe_open

    folder = Path(directory) / f"version-{version}"
    files = _files(folder) if folder.is_dir() else {}
    if not _is_complete(files):
        raise RefitError(f"{folder} is not complete: it has {sorted(files) or 'no files'}")
    opened: dict[int, Any] = {number: safe_open(folder / name, framework="pt") for name, (number, _) in files.items()}
    headers = {number: file.metadata() or {} for number, file in opened.items()}
    if foreign := [number for number, header in headers.items() if header.get("format") != _FORMAT]:
        raise RefitError(f"{folder}: the file of rank {foreign[0]} is not of the format {_FORMAT!r}")
    manifests = [Manifest.from_json(headers[number]["manifest"]) for number in sorted(headers)]
    source = merge_manifests(manifests)
    boxes: dict[tuple[int, str], list[tuple[str, Region, str]]] = {}
    for number, header in headers.items():
        for key, (name, offsets, shape, digest) in json.loads(header["boxes"]).items():
            box = Region(name, tuple(offsets), tuple(shape))
            boxes.setdefault((number, name), []).append((key, box, digest))
    try:
        needed = sink.prepare(source).sink
        for route in plan_refit(source, needed).routes:
            if rank not in route.sink_ranks:
                continue
            for key, box, digest in boxes[route.source_rank, route.region.name]:
                if box.intersect(route.region) == route.region:
                    whole: Tensor = opened[route.source_rank].get_tensor(key)
                    if digest_tensor(whole) != digest:
                        raise DigestError(f"{box} in its file is not what was written", tensors=(box.name,))  # noqa: TRY301
                    sink.stage(route.region, whole[route.region.index_within(box)])
                    break
        sink.commit(version)
    except BaseException:
        sink.abort()
        raise


def _files(folder: Path) -> dict[str, tuple[int, int]]:
    """The files of a version: name → rank and number of ranks."""
    found = (_NAME.fullmatch(path.name) for path in folder.iterdir())
    return {match[0]: (int(match[1]), int(match[2])) for match in found if match}


def _is_complete(files: dict[str, tuple[int, int]]) -> bool:
    ranks = {number for number, _ in files.values()}
    return bool(files) and {count for _, count in files.values()} == {len(ranks)}

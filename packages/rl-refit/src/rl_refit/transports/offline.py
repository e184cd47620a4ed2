"""A version on a disk without a rendezvous: written at one place and time, read at another.

`write_version` leaves the same files as the transport `Files`, and `read_version` reads the files of both.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from torch import Tensor

from rl_refit.contracts import Coverage, WeightSink, WeightSource
from rl_refit.digest import Digest, digest_regions, digest_tensor
from rl_refit.errors import DigestError, RefitError
from rl_refit.layout import Layout, Region, this_rank
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import RefitPlan, plan_refit
from rl_refit.refit import RefitReport
from rl_refit.schedule import make_schedule
from rl_refit.transports.base import PATIENCE_S, Outbox, Watch
from rl_refit.transports.safetensors_file import SafetensorsFile
from rl_refit.transports.version_directory import Marker, VersionDirectory
from rl_refit.transports.version_file import Origin, write_whole_file

__all__ = ["complete_versions", "read_version", "write_version"]

_PATIENT = 7 * 24 * 3600.0  # nobody waits for the writer, whose disk may be slow
_MARKER = re.compile(r"source-(\d+)-of-(\d+)\.COMPLETE")


def write_version(
    source: WeightSource,
    directory: str | Path,
    version: int,
    *,
    rank: int | None = None,
    manifest: Manifest | None = None,
) -> Path:
    """Write what this rank of `source` holds as `version`, every element once over all ranks; return its directory.

    Every rank of the source calls it; none waits for another.

    Args:
        source: This process's rank of it.
        directory: Of one run.
        version: Number of optimizer steps that the weights have seen.
        rank: This process's rank of the source; its `torch.distributed` rank where left out.
        manifest: Of all ranks, where the source's own knows this rank alone: see `merge_manifests`.

    Raises:
        RefitError: The version is there already, since a version is written once; or the disk is full, or fails.
    """
    rank = this_rank() if rank is None else rank
    manifest = manifest or source.manifest()
    to_disk = [dataclasses.replace(meta, layout=Layout.whole(), feeding="fed") for meta in manifest.tensors]
    schedule = make_schedule(plan_refit(manifest, Manifest(tuple(to_disk))), routing="multicast", bucket_bytes=None)
    target = VersionDirectory(Path(directory), num_sources=max(manifest.ranks, default=0) + 1)
    if target.marker_path(version, rank).exists():
        raise RefitError(f"{target.marker_path(version, rank)} is there already, and a version is written once")
    watch = Watch(deadline_s=_PATIENT)
    outbox = Outbox(source, schedule, watch, version=version, refit=0)
    for stream in schedule.of_source(rank):
        origin = Origin(version=version, run="", refit=0, source=rank)
        write_whole_file(target, outbox, stream, origin=origin, watch=watch)
    return target.path(version)


def read_version(
    sink: WeightSink, directory: str | Path, version: int, *, rank: int | None = None, timeout_s: float = 0.0
) -> RefitReport:
    """Bring `version` into this rank of `sink` as a transaction: verified byte by byte and committed, or aborted.

    The ranks of a sink do so each for itself; whoever wants all or none of them uses a `Refit`.

    Args:
        sink: This process's rank of it.
        directory: What `write_version`, or the transport `Files`, was given.
        version: Which one.
        rank: This process's rank of the sink; its `torch.distributed` rank where left out.
        timeout_s: Seconds to wait for the version to be complete.

    Raises:
        RefitError: The version is not complete, its files do not belong together, it is no newer than the sink's, or a
            file is partial or foreign.
        CoverageError: The files do not hold what the sink needs.
        DigestError: A file, or what was staged of it, is not what was written; names the tensors.
    """
    watch = Watch(deadline_s=_PATIENT)
    with watch.phase("prepare"):
        stored = _Stored.find(Path(directory), version, timeout_s=timeout_s)
    try:
        with watch.phase("prepare"):
            coverage = sink.prepare(stored.manifest)
            _require_newer(version, coverage)
            plan = plan_refit(stored.layout(), coverage.sink)
            views = _views(plan, stored, this_rank() if rank is None else rank)
        with watch.phase("transfer"):
            for region, tensor in views.items():
                sink.stage(region, tensor, stays=True)
        with watch.phase("verify"):
            stored.verify(views)
            expected = digest_regions(views, views.__getitem__)
            _compare(expected, sink.digest(tuple(views)))
        with watch.phase("commit"):
            sink.commit(version)
    except BaseException:
        sink.abort()
        raise
    return RefitReport(
        version=version,
        transport="files",
        tensors=sum(meta.travels for meta in plan.sink.tensors),
        bytes=sum(tensor.nbytes for tensor in views.values()),
        buckets=len(stored.files),
        seconds=watch.seconds,
        verified="every byte",
        digest=expected.hex,
        same_as=None,
        kept=tuple(m.name for m in plan.sink.tensors if m.feeding != "fed" and m.name in plan.source.by_name),
        unreadable=(),
        manifest_hash=stored.manifest.hash(),
        extra_bytes=0,
    )


def complete_versions(directory: str | Path) -> tuple[int, ...]:
    """The versions in `directory` that `read_version` would find complete, ascending."""
    numbers = (re.fullmatch(r"version-(\d+)", path.name) for path in Path(directory).glob("version-*"))
    versions = sorted(int(number[1]) for number in numbers if number)
    return tuple(version for version in versions if not isinstance(_markers(Path(directory), version), str))


@dataclass(frozen=True)
class _Stored:
    """A version whose files are all there."""

    manifest: Manifest
    """Of the source that wrote it."""

    markers: dict[int, Marker]
    files: dict[int, SafetensorsFile]

    @classmethod
    def find(cls, root: Path, version: int, *, timeout_s: float) -> _Stored:
        end = time.monotonic() + timeout_s
        while isinstance(found := _markers(root, version), str):
            if time.monotonic() >= end:
                raise RefitError(found, phase="prepare")
            time.sleep(PATIENCE_S)
        directory, markers = found
        files = {source: directory.open_data(marker) for source, marker in markers.items()}
        for source, marker in markers.items():
            path = directory.data_path(version, source)
            if marker.base:
                raise RefitError(f"{path} is a delta against {marker.base}; it is of use to DeltaFiles alone")
            if set(marker.parts) != set(files[source].entries):
                raise RefitError(f"{path}: foreign: it does not hold the tensors that its marker names")
        return cls(Manifest.from_json(markers[min(markers)].manifest), markers, files)

    def layout(self) -> Manifest:
        """The tensors as they lie in the files: rank i is source i."""

        def placed(meta: TensorMeta) -> TensorMeta:
            name = meta.tied_to or meta.name
            held = {source: [box for _, box in self.parts.get((source, name), ())] for source in self.markers}
            return dataclasses.replace(meta, layout=Layout.from_boxes(held))

        return Manifest(tuple(map(placed, self.manifest.tensors)))

    @cached_property
    def parts(self) -> dict[tuple[int, str], list[tuple[str, Region]]]:
        """By source and tensor, what its parts are called in the file, and their boxes."""
        parts: dict[tuple[int, str], list[tuple[str, Region]]] = {}
        for source, marker in self.markers.items():
            for key, part in marker.parts.items():
                parts.setdefault((source, part.name), []).append((key, part.region))
        return parts

    def verify(self, regions: Iterable[Region]) -> None:
        """Compare every part that holds any of `regions` with its digest."""
        names = {region.name for region in regions}
        wrong: dict[str, str] = {}
        for source, marker in self.markers.items():
            for key, part in marker.parts.items():
                if part.name in names and digest_tensor(self.files[source].tensor(key)) != part.digest:
                    wrong[part.name] = f"\n  {key} in {self.files[source].path}"
        if wrong:
            raise DigestError(
                f"{len(wrong)} tensors are not what was written:{''.join(wrong.values())}", tensors=tuple(wrong)
            )


def _markers(root: Path, version: int) -> tuple[VersionDirectory, dict[int, Marker]] | str:
    """All markers of a version; or why it is not complete."""
    path = root / f"version-{version}"
    found = [match for match in (_MARKER.fullmatch(file.name) for file in path.glob("*.COMPLETE")) if match]
    counts = {int(match[2]) for match in found}
    if len(counts) != 1:
        return f"{path}: not complete: it has markers of {len(counts)} sizes of a source: {sorted(counts)}"
    directory = VersionDirectory(root, num_sources=counts.pop())
    read = {int(match[1]): directory.read_marker(version, int(match[1])) for match in found}
    markers = {source: marker for source, marker in sorted(read.items()) if marker is not None}
    kinds = {(m.run, m.refit, m.manifest_hash, m.sources) for m in markers.values()}
    if len(kinds) != 1 or tuple(markers) != next(iter(kinds))[3]:
        said = next(iter(kinds))[3] if kinds else ()
        return (
            f"{path}: not complete: it needs source ranks {list(said)} of one refit and has markers of {list(markers)}"
        )
    return directory, markers


def _views(plan: RefitPlan, stored: _Stored, rank: int) -> dict[Region, Tensor]:
    views: dict[Region, Tensor] = {}
    for route in plan.routes:
        if rank in route.sink_ranks:
            held = stored.parts[route.source_rank, route.region.name]
            key, box = next((key, box) for key, box in held if box.intersect(route.region) == route.region)
            tensor = stored.files[route.source_rank].tensor(key)
            views[route.region] = tensor[route.region.index_within(box)]
    return views


def _require_newer(version: int, coverage: Coverage) -> None:
    if coverage.version is not None and version <= coverage.version:
        raise RefitError(
            f"version {version} is not newer than the sink's {coverage.version}; "
            f"a version is the number of optimizer steps that the weights have seen"
        )


def _compare(written: Digest, staged: Digest) -> None:
    differing = written.differing(staged)
    if differing:
        raise DigestError(f"not staged as it was written: {', '.join(differing)}", tensors=differing)

"""Versions written at one time and read at another; writers that are killed; disks that are full."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from files_parties import Parties, StateSink, StateSource, manifest_of, new_weights

from rl_refit import CoverageError, DigestError, ModuleSink, ModuleSource, RefitError
from rl_refit.transports.files import Files
from rl_refit.transports.offline import complete_versions, read_version, write_version

PROGRAMS = Path(__file__).parent / "programs"
LAYOUTS = {
    "one to one": ((1, None), (1, None)),
    "rows to columns": ((4, 0), (3, 1)),
    "replicas to rows": ((2, None), (2, 0)),
}


def write(directory, layout, version):
    manifest, weights = manifest_of(*layout), new_weights(version)
    for rank in manifest.ranks:
        write_version(StateSource(manifest, rank, weights), directory, version, rank=rank)
    return weights


@pytest.mark.parametrize(("source", "sink"), LAYOUTS.values(), ids=LAYOUTS)
def test_what_one_layout_wrote_another_reads(tmp_path, source, sink):
    weights, manifest = write(tmp_path, source, 5), manifest_of(*sink)
    total = sum(tensor.nbytes for tensor in weights.values())
    assert sum(path.stat().st_size for path in tmp_path.glob("version-5/*.safetensors")) < total + 4 * 2000
    for rank in manifest.ranks:
        mine = StateSink(manifest, rank)
        report = read_version(mine, tmp_path, 5, rank=rank)
        assert mine.has(weights)
        assert mine.version == report.version == 5
        assert report.bytes == sum(box.nbytes for box in mine.boxes.values())


def test_modules_with_ties_and_buffers_make_the_trip(tmp_path):
    def model():
        module = nn.Sequential(nn.Embedding(20, 8), nn.BatchNorm1d(8), nn.Linear(8, 20, bias=False))
        module[2].weight = module[0].weight
        return module

    policy, engine, told = model(), model(), []
    write_version(ModuleSource(policy), tmp_path, 3)
    sink = ModuleSink(engine, on_commit=told.append)
    report = read_version(sink, tmp_path, 3)
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, engine.state_dict()[name]), name
    assert (told, report.verified, engine[2].weight is engine[0].weight) == ([3], "every byte", True)
    with pytest.raises(RefitError, match="version 3 is not newer than the sink's 3"):
        read_version(sink, tmp_path, 3)
    sink.prepare(ModuleSource(policy).manifest())  # none is open


def test_what_the_transport_wrote_can_be_read_by_hand(tmp_path):
    source, sink = manifest_of(3, 0), manifest_of(2, 1)
    Parties(lambda: Files(tmp_path), source, sink, new_weights(0)).commit(7, new_weights(7))
    mine = StateSink(manifest_of(4, 0), 1)
    read_version(mine, tmp_path, 7, rank=1)
    assert mine.has(new_weights(7))
    assert complete_versions(tmp_path) == (7,)


def test_a_version_is_written_once_and_complete_once_all_ranks_have(tmp_path):
    manifest, weights = manifest_of(2, 0), new_weights(1)
    write_version(StateSource(manifest, 0, weights), tmp_path, 1, rank=0)
    with pytest.raises(RefitError, match="is there already, and a version is written once"):
        write_version(StateSource(manifest, 0, weights), tmp_path, 1, rank=0)
    assert complete_versions(tmp_path) == ()
    with pytest.raises(RefitError, match=r"not complete: it needs source ranks \[0, 1\] of one refit and has .* \[0\]"):
        read_version(StateSink(manifest, 0), tmp_path, 1, rank=0, timeout_s=0.1)
    write_version(StateSource(manifest, 1, weights), tmp_path, 1, rank=1)
    assert complete_versions(tmp_path) == (1,)
    (tmp_path / "version-1/source-0-of-3.COMPLETE").write_text("{}")
    with pytest.raises(RefitError, match=r"markers of 2 sizes of a source: \[2, 3\]"):
        read_version(StateSink(manifest, 0), tmp_path, 1, rank=0)


def test_files_of_two_refits_are_not_mixed(tmp_path):
    source, sink = manifest_of(2, 0), manifest_of(1, None)
    Parties(lambda: Files(tmp_path / "a"), source, sink, new_weights(1)).commit(1, new_weights(1))
    Parties(lambda: Files(tmp_path / "b"), source, sink, new_weights(2)).commit(1, new_weights(2))
    for path in (tmp_path / "b/version-1").glob("source-1-*"):
        path.replace(tmp_path / "a/version-1" / path.name)
    assert complete_versions(tmp_path / "a") == ()
    with pytest.raises(RefitError, match="not complete"):
        read_version(StateSink(sink, 0), tmp_path / "a", 1, rank=0)


@pytest.mark.parametrize("place", [-1, -40, -100])
def test_a_bit_that_flipped_on_the_disk_is_found_and_the_sink_keeps_its_weights(tmp_path, place):
    write(tmp_path, (1, None), 1)
    weights = write(tmp_path, (1, None), 2)
    sink = StateSink(manifest_of(1, None), 0)
    read_version(sink, tmp_path, 1, rank=0)
    (path,) = tmp_path.glob("version-2/*.safetensors")
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with pytest.raises(DigestError, match="1 tensors are not what was written") as caught:
        read_version(sink, tmp_path, 2, rank=0)
    assert caught.value.tensors[0] in weights
    assert sink.has(new_weights(1))
    assert sink.version == 1


def test_a_sink_with_another_tensor_is_told_which(tmp_path):
    write(tmp_path, (1, None), 1)
    engine = nn.Linear(2, 2)
    with pytest.raises(CoverageError, match="weight"):
        read_version(ModuleSink(engine), tmp_path, 1)


def test_a_writer_that_is_killed_anywhere_leaves_a_whole_version_or_none(tmp_path):
    """Killed before each of its acts: every write, flush, rename and removal."""
    subprocess.run([sys.executable, str(PROGRAMS / "files_writer.py"), str(tmp_path)], check=True, timeout=120)
    outcomes = []
    for directory in sorted(tmp_path.iterdir(), key=lambda path: int(path.name)):
        sink = StateSink(manifest_of(1, None), 0)
        outcomes.append(complete_versions(directory))
        if not outcomes[-1]:
            with pytest.raises(RefitError, match="not complete"):
                read_version(sink, directory, 1, rank=0)
            assert sink.version is None
            write(directory, (1, None), 1)  # nothing is in the way of the next
        read_version(sink, directory, 1, rank=0)
        assert sink.has(new_weights(1))
    assert len(outcomes) > 10
    assert outcomes == sorted(outcomes)
    assert (outcomes[0], outcomes[-3:]) == ((), [(1,), (1,), (1,)])


def left_over(directory):
    return [path for path in directory.rglob("*") if path.is_file() or path.is_symlink()]


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_behind(tmp_path):
    (tmp_path / "version-1").mkdir()
    (tmp_path / "version-1/source-0-of-1.safetensors.partial").symlink_to("/dev/full")
    with pytest.raises(RefitError, match=r"cannot write .*source-0-of-1.safetensors.partial: No space left on device"):
        write(tmp_path, (1, None), 1)
    assert left_over(tmp_path) == []
    (tmp_path / "version-1/source-0-of-1.COMPLETE.partial").symlink_to("/dev/full")
    with pytest.raises(RefitError, match="No space left on device"):
        write(tmp_path, (1, None), 1)
    assert [path.name for path in left_over(tmp_path)] == ["source-0-of-1.safetensors"]
    with pytest.raises(RefitError, match="not complete"):
        read_version(StateSink(manifest_of(1, None), 0), tmp_path, 1)
    write(tmp_path, (1, None), 1)
    read_version(StateSink(manifest_of(1, None), 0), tmp_path, 1)


@pytest.mark.parametrize("limit", [0, 100, 500])
def test_a_limit_on_the_size_of_files_is_such_a_disk(tmp_path, limit):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with pytest.raises(RefitError, match=r"cannot write .*: File too large"):
            write(tmp_path, (1, None), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert left_over(tmp_path) == []


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "version-1").write_text("a file")
    with pytest.raises(RefitError, match=f"cannot write in {tmp_path}/version-1: File exists"):
        write(tmp_path, (1, None), 1)

"""Weights through a directory: parties in threads, each with a transport and a channel of its own."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from files_parties import Parties, manifest_of, new_weights
from safetensors.torch import load_file

from rl_refit import DeadlineError, RefitError, digest_tensor
from rl_refit.errors import AbortedError
from rl_refit.transports.files import Files

LAYOUTS = {
    "one to one": ((1, None), (1, None)),
    "one to two": ((1, None), (2, 0)),
    "two to one": ((2, 0), (1, None)),
    "rows to columns": ((4, 0), (3, 1)),
    "columns to rows": ((3, 1), (4, 0)),
    "replicas to replicas": ((2, None), (3, None)),
    "more ranks than rows": ((8, 0), (2, 1)),
}


def parties(tmp_path, layouts=((2, 0), (2, 1)), *, keep=2, weights=None, deadline_s=60.0):
    source, sink = (manifest_of(*layout) for layout in layouts)
    return Parties(lambda: Files(tmp_path, keep=keep), source, sink, weights or new_weights(0), deadline_s=deadline_s)


def raised(errors):
    """The one error that is not a party's answer to another's."""
    (error,) = [error for error in errors if error is not None and not isinstance(error, AbortedError)]
    return error


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_arrives_bit_for_bit(tmp_path, layouts):
    refit = parties(tmp_path, layouts)
    for version in (1, 2, 5):
        refit.commit(version, new_weights(version))


def test_the_files_are_safetensors_that_hold_every_element_once(tmp_path):
    refit, weights = parties(tmp_path, ((4, 0), (2, 1))), new_weights(3)
    refit.commit(3, weights)
    files = [load_file(path) for path in sorted(tmp_path.glob("version-3/*.safetensors"))]
    assert len(files) == 4  # 9 rows over 4 ranks: 3, 3, 3 and none; 6 rows: 2, 2, 2 and none; the rest is balanced
    names = [name for file in files for name in file]
    assert len(names) == len(set(names))
    assert sum(tensor.nbytes for file in files for tensor in file.values()) == sum(t.nbytes for t in weights.values())
    assert torch.equal(
        next(file["wide[2:4,0:3]"] for file in files if "wide[2:4,0:3]" in file), weights["wide"][2:4, :3]
    )


def test_a_rank_that_has_nothing_to_send_writes_nothing_and_is_not_waited_for(tmp_path):
    one_tensor = {"tall": (torch.float32, (9, 2))}
    refit = Parties(
        lambda: Files(tmp_path),
        manifest_of(5, 0, one_tensor),
        manifest_of(2, 0, one_tensor),
        new_weights(0, one_tensor),
    )
    refit.commit(1, new_weights(1, one_tensor))
    names = sorted(path.name for path in tmp_path.glob("version-1/*"))
    assert names == [f"source-{r}-of-5.{kind}" for r in range(5) for kind in ("COMPLETE", "safetensors")]
    refit = Parties(
        lambda: Files(tmp_path / "x"),
        manifest_of(6, 0, one_tensor),
        manifest_of(2, 0, one_tensor),
        new_weights(0, one_tensor),
    )
    refit.commit(1, new_weights(1, one_tensor))
    assert not list(tmp_path.glob("x/version-1/source-5-*"))  # 9 rows over 6 ranks: 2, 2, 2, 2, 1 and none


def test_a_marker_says_sizes_manifest_and_digests(tmp_path):
    refit, weights = parties(tmp_path, ((1, None), (2, 0))), new_weights(4)
    refit.commit(4, weights)
    marker = json.loads((tmp_path / "version-4/source-0-of-1.COMPLETE").read_text())
    assert marker["nbytes"] == (tmp_path / "version-4/source-0-of-1.safetensors").stat().st_size
    assert marker["manifest_hash"] == refit.schedule.plan.source.hash()
    assert (marker["version"], marker["refit"], marker["source"], marker["sources"]) == (4, 1, 0, [0])
    assert marker["parts"]["mask[0:2,0:3]"]["digest"] == digest_tensor(weights["mask"][:2])


def test_two_versions_are_kept_and_older_ones_go_when_a_refit_is_over(tmp_path):
    refit = parties(tmp_path)
    for version in (1, 2, 3, 7):
        refit.commit(version, new_weights(version))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-3", "version-7"]
    with pytest.raises(ValueError, match="keep must be at least 1"):
        Files(tmp_path, keep=0)


def test_what_another_run_left_in_the_directory_is_never_taken(tmp_path):
    """Same version, same manifest, complete: but of weights that are long gone."""
    parties(tmp_path, weights=new_weights(9)).commit(1, new_weights(9))
    refit = parties(tmp_path)
    for _ in range(3):  # sinks look while sources write
        refit.commit(1, new_weights(1))
        refit = parties(tmp_path)


def test_a_version_that_is_tried_again_is_written_again(tmp_path):
    refit = parties(tmp_path)
    refit.give(new_weights(1))
    assert refit.refit(1, fail_after_transfer=True) == [None] * 4
    refit.commit(1, new_weights(2))


def test_a_sink_that_waits_in_vain_says_for_whom_and_what_it_found(tmp_path):
    parties(tmp_path).commit(1, new_weights(1))
    refit = parties(tmp_path)
    refit.sources.clear()
    refit.sinks.pop()
    refit.deadline_s = 0.3
    (error,) = refit.refit(1)
    assert isinstance(error, DeadlineError)
    assert error.peer == "source 0"
    assert str(error).startswith("phase prepare, waiting for source 0: ")
    assert str(error).endswith(f"{tmp_path}/version-1/source-0-of-2.COMPLETE: a marker of refit 1 of another run")


def test_a_sink_does_not_take_what_an_aborted_refit_left(tmp_path):
    refit = parties(tmp_path, ((1, None), (1, None)))
    sinks, refit.sinks = refit.sinks, []
    assert refit.refit(1) == [None]
    refit.sources, refit.sinks, refit.deadline_s = [], sinks, 0.3
    (error,) = refit.refit(1)
    assert str(error).endswith("COMPLETE: a marker of refit 1 of this run")


def damaged(tmp_path, monkeypatch, damage):
    """What a sink says when `damage` is done to a directory between the marker and its eyes."""
    refit = parties(tmp_path, ((1, None), (1, None)))
    transport, sink = refit.sources[0].transport, refit.sinks[0]
    write = type(transport).transfer

    def transfer(self, outbox, inbox, watch):
        write(self, outbox, inbox, watch)
        if outbox is not None:
            damage(tmp_path / "version-1")

    monkeypatch.setattr(Files, "transfer", transfer)
    refit.sinks = []
    assert refit.refit(1) == [None]
    refit.sources, refit.sinks, refit.refits = [], [sink], 0
    return raised(refit.refit(1))


def rewrite(path, change):
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


DATA, MARKER = "source-0-of-1.safetensors", "source-0-of-1.COMPLETE"
DAMAGE = {
    "cut": (lambda d: (d / DATA).write_bytes((d / DATA).read_bytes()[:-1]), "partial or foreign: .* its marker says"),
    "gone": (lambda d: (d / DATA).unlink(), "complete, says its marker, and cannot be read: No such file"),
    "other version": (
        lambda d: rewrite(d / MARKER, lambda m: m | {"version": 2}),
        "the marker of version 2 of source 0",
    ),
    "other manifest": (lambda d: rewrite(d / MARKER, lambda m: m | {"manifest_hash": "abc"}), "stale: .* manifest abc"),
    "no marker": (lambda d: (d / MARKER).write_text("{}"), "no marker: KeyError: 'format'"),
    "no json": (lambda d: (d / MARKER).write_text("hello"), "no marker: Expecting value"),
    "renamed tensor": (
        lambda d: (d / DATA).write_bytes((d / DATA).read_bytes().replace(b'"tall"', b'"tale"')),
        "foreign: for 'tall' the plan has Entry.*, the file None",
    ),
    "header of another version": (
        lambda d: (d / DATA).write_bytes((d / DATA).read_bytes().replace(b'"version":"1"', b'"version":"2"')),
        "foreign: its version is '2', not '1'",
    ),
    "garbage": (lambda d: (d / DATA).write_bytes(b"\xff" * (d / DATA).stat().st_size), "or another format"),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGE.values(), ids=DAMAGE)
def test_a_file_that_is_not_the_one_is_refused_by_name(tmp_path, monkeypatch, damage, message):
    with pytest.raises(RefitError, match=message) as caught:
        raise damaged(tmp_path, monkeypatch, damage)
    assert str(tmp_path / "version-1/source-0-of-1") in str(caught.value)
    assert caught.value.peer == "source 0" or "another format" in message


def test_a_full_disk_is_noticed_before_the_first_byte(tmp_path, monkeypatch):
    refit = parties(tmp_path, ((1, None), (2, 0)))
    refit.commit(1, new_weights(1))
    usage = __import__("shutil").disk_usage
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(path)._replace(free=300))
    refit.give(new_weights(2))
    error = raised(refit.refit(2))
    assert str(error).startswith(f"{tmp_path}/version-2 has 300 bytes available, and ")
    assert not list(tmp_path.glob("version-2/*"))
    monkeypatch.undo()
    refit.commit(2, new_weights(2))


def test_mappings_and_descriptors_do_not_grow(tmp_path):
    refit = parties(tmp_path, ((2, 0), (1, None)))
    gc.collect()  # what earlier tests left open closes now
    counts = []
    for version in range(30):
        refit.commit(version, new_weights(version % 3))
        maps = Path("/proc/self/maps").read_text().count(str(tmp_path))
        counts.append((maps, len(list(Path("/proc/self/fd").iterdir()))))
    assert counts[-1][0] == counts[5][0] == 0
    assert counts[-1][1] <= counts[5][1]

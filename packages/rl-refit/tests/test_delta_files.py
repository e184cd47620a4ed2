"""Deltas through a directory: what goes over the wire, and that no failure leaves two ends with different bases."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent / "programs"))

from files_parties import Parties, manifest_of, new_weights, trained

from rl_refit import DigestError, RefitError
from rl_refit.delta import codec
from rl_refit.delta import transport as delta_transport
from rl_refit.delta.base_copy import BaseCopy
from rl_refit.delta.transport import DeltaFiles
from rl_refit.errors import AbortedError
from rl_refit.transports.base import Watch
from rl_refit.transports.offline import read_version
from rl_refit.transports.safetensors_file import SafetensorsFile

LAYOUTS = {
    "one to one": ((1, None), (1, None)),
    "one to two": ((1, None), (2, 0)),
    "rows to columns": ((3, 0), (2, 1)),
    "replicas to replicas": ((2, None), (3, None)),
    "more ranks than rows": ((8, 0), (2, 1)),
}


def parties(tmp_path, layouts=((2, 0), (2, 1)), *, weights=None, deadline_s=60.0):
    source, sink = (manifest_of(*layout) for layout in layouts)
    return Parties(lambda: DeltaFiles(tmp_path), source, sink, weights or new_weights(0), deadline_s=deadline_s)


def bases(refit):
    return [party.transport.traffic.base for party in refit.sources]


def raised(errors):
    (error,) = [error for error in errors if error is not None and not isinstance(error, AbortedError)]
    return error


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
def test_the_first_version_goes_whole_and_the_others_as_deltas_of_the_last(tmp_path, layouts):
    refit, weights = parties(tmp_path, layouts), new_weights(0)
    for number, version in enumerate((1, 2, 3, 8)):
        weights = trained(weights, number)
        refit.commit(version, weights)
        expected = None if number == 0 else f"version {(1, 2, 3)[number - 1]} (refit {number})"
        assert set(bases(refit)) == {expected}


def test_a_source_asks_only_the_sink_ranks_that_take_from_it(tmp_path):
    """Rows to the same rows: each rank of the sink needs one source, and says nothing to the other."""
    rows = {"tall": (torch.float32, (9, 2))}
    refit = Parties(
        lambda: DeltaFiles(tmp_path), manifest_of(3, 0, rows), manifest_of(3, 0, rows), new_weights(0, rows)
    )
    for version in (1, 2):
        refit.commit(version, new_weights(version, rows))
    assert bases(refit) == ["version 1 (refit 1)"] * 3


def test_an_unchanged_version_costs_headers_only_and_a_new_one_no_more_than_whole(tmp_path):
    big = {"w": (torch.bfloat16, (300, 1000))}
    refit = Parties(
        lambda: DeltaFiles(tmp_path), manifest_of(1, None, big), manifest_of(2, 0, big), new_weights(0, big)
    )
    refit.commit(1, new_weights(1, big))
    traffic = refit.sources[0].transport
    whole = traffic.traffic.file_bytes
    refit.commit(2, new_weights(1, big))
    assert traffic.traffic.file_bytes < 800
    assert (traffic.traffic.changed, traffic.traffic.unchanged_segments) == (0, 2)
    refit.commit(3, new_weights(2, big))
    assert traffic.traffic.file_bytes < whole + 800
    assert (traffic.traffic.dense_segments, traffic.traffic.sparse_segments) == (2, 0)
    assert traffic.traffic.tensor_bytes == 600_000


def test_both_ends_hold_one_copy_and_the_sink_has_no_other_stage(tmp_path):
    refit, weights = parties(tmp_path, ((1, None), (2, 0))), new_weights(1)
    refit.commit(1, weights)
    sizes = [sum(box.nbytes for box in party.sink.boxes.values()) for party in refit.sinks]
    assert [party.transport.extra_bytes for party in refit.sinks] == sizes
    assert refit.sources[0].transport.extra_bytes == sum(tensor.nbytes for tensor in weights.values())
    sink = refit.sinks[0]
    sink.sink.prepare(refit.schedule.plan.source)
    staged = []
    stage, sink.sink.stage = sink.sink.stage, lambda *a, stays=False: (staged.append(stays), stage(*a, stays=stays))
    refit.commit(2, trained(weights, 1))
    assert set(staged) == {True}


def test_after_an_abort_the_next_delta_is_against_what_all_still_have(tmp_path):
    """All took version 2 before it was aborted: no need to go back."""
    refit, weights = parties(tmp_path), new_weights(1)
    refit.commit(1, weights)
    refit.give(trained(weights, 1))
    assert refit.refit(2, fail_after_transfer=True) == [None] * 4
    refit.commit(3, trained(weights, 2))
    assert set(bases(refit)) == {"version 2 (refit 2)"}


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", range(1, 6))
def test_after_a_failure_at_one_sink_rank_the_others_go_back(tmp_path, monkeypatch, victim, step):
    """Sink rank `victim` fails before its n-th delta, when its peer may have taken all of its own."""
    refit, weights = parties(tmp_path), new_weights(1)
    refit.commit(1, weights)
    copies = refit.sinks[victim].transport._taken
    steps, original = [], BaseCopy.step

    def fail(self, key, delta):
        if self in copies.values():
            steps.append(key)
            if len(steps) == step:
                raise OSError("the memory is on fire")
        return original(self, key, delta)

    monkeypatch.setattr(BaseCopy, "step", fail)
    refit.give(trained(weights, 1))
    error = raised(refit.refit(2))
    assert isinstance(error, OSError)
    monkeypatch.undo()
    assert all(party.sink.has(weights) and party.sink.version == 1 for party in refit.sinks)
    refit.commit(2, trained(weights, 2))
    assert set(bases(refit)) <= {"version 1 (refit 1)", "version 2 (refit 2)"}
    assert "version 1 (refit 1)" in bases(refit)


def test_a_source_that_fails_while_it_writes_keeps_its_base(tmp_path, monkeypatch):
    refit, weights = parties(tmp_path, ((2, 0), (1, None))), new_weights(1)
    refit.commit(1, weights)
    (tmp_path / "version-2").mkdir()
    (tmp_path / "version-2/source-1-of-2.safetensors.partial").symlink_to("/dev/full")
    refit.give(trained(weights, 1))
    error = raised(refit.refit(2))
    assert "No space left on device" in str(error)
    assert not list(tmp_path.glob("version-2/*.partial"))
    assert refit.sinks[0].sink.has(weights)
    refit.commit(2, trained(weights, 2))
    assert bases(refit)[1] == "version 1 (refit 1)"


def test_a_sink_that_was_restarted_is_sent_all_and_then_deltas_again(tmp_path):
    refit, weights = parties(tmp_path, ((1, None), (2, 0))), new_weights(1)
    refit.commit(1, weights)
    newcomer = refit.sinks[1].transport = DeltaFiles(tmp_path)
    newcomer.open(refit.sinks[1].channel, Watch(deadline_s=60.0))
    for version, base in [(2, None), (3, "version 2 (refit 2)")]:
        weights = trained(weights, version)
        refit.commit(version, weights)
        assert bases(refit) == [base]


def test_a_copy_that_rotted_is_noticed_named_and_replaced(tmp_path):
    refit, weights = parties(tmp_path, ((1, None), (1, None))), new_weights(1)
    refit.commit(1, weights)
    refit.sinks[0].transport._taken[0].tensors["tall"].view(torch.int32)[3, 1] ^= 1
    refit.give(trained(weights, 1))
    error = raised(refit.refit(2))
    assert isinstance(error, DigestError)
    assert str(error).startswith("tall: this is not the base of the delta")
    assert refit.sinks[0].sink.has(weights)
    refit.commit(2, trained(weights, 2))
    assert bases(refit) == [None]


def test_a_copy_that_was_torn_in_the_middle_of_a_box_is_sent_whole_again(tmp_path, monkeypatch):
    refit, weights = parties(tmp_path, ((1, None), (1, None))), new_weights(1)
    refit.commit(1, weights)
    mine = {tensor.data_ptr() for tensor in refit.sinks[0].transport._taken[0].tensors.values()}
    exchange = codec._exchange_segment

    def interrupted(words, payload, segment):
        exchange(words, payload, segment)
        if words.data_ptr() in mine:
            raise OSError("the process was shaken")

    monkeypatch.setattr(codec, "_exchange_segment", interrupted)
    refit.give(trained(weights, 1))
    assert isinstance(raised(refit.refit(2)), OSError)
    monkeypatch.undo()
    refit.commit(2, trained(weights, 2))
    assert bases(refit) == [None]


def test_a_delta_against_a_version_that_is_not_held_is_refused_by_name(tmp_path, monkeypatch):
    refit, weights = parties(tmp_path, ((1, None), (1, None))), new_weights(1)
    refit.commit(1, weights)
    refit.sinks[0].transport._taken[0].end("version 0 (refit 9)")  # what it holds is called otherwise
    monkeypatch.setattr(delta_transport.Bases, "common", lambda *_arguments, **_options: "version 1 (refit 1)")
    refit.give(trained(weights, 1))
    error = raised(refit.refit(2))
    assert str(error) == (
        "a delta against version 1 (refit 1) is of no use here: the versions held are version 0 (refit 9)"
    )
    assert refit.sinks[0].sink.has(weights)


def test_a_broken_delta_is_refused_and_the_same_base_serves_the_next(tmp_path, monkeypatch):
    refit, weights = parties(tmp_path, ((1, None), (1, None))), new_weights(1)
    refit.commit(1, weights)
    tensor = SafetensorsFile.tensor

    def broken(self, name):
        delta = tensor(self, name).clone()
        delta[-1] ^= 64
        return delta

    monkeypatch.setattr(SafetensorsFile, "tensor", broken)
    refit.give(trained(weights, 1))
    errors = [error for error in refit.refit(2) if error is not None and not isinstance(error, AbortedError)]
    assert {"truncated or corrupted" in str(error) for error in errors} == {True}
    monkeypatch.undo()
    assert refit.sinks[0].sink.has(weights)
    refit.commit(2, trained(weights, 2))
    assert bases(refit) == ["version 1 (refit 1)"]


OUTCOMES = ["commit", "abort", "sink 0 fails", "sink 1 fails", "source 0 fails", "source 1 fails", "sink 0 restarts"]


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from(OUTCOMES), st.integers(1, 8)), min_size=1, max_size=8))
def test_whatever_fails_and_whenever_the_next_refit_arrives_bit_for_bit(tmp_path_factory, outcomes):
    """Every sequence of commits, aborts, failures at the n-th box of a party, and restarts."""
    directory = tmp_path_factory.mktemp("any")
    refit, weights, version = parties(directory), new_weights(1), 0
    for outcome, place in outcomes:
        weights, version = trained(weights, place), version + 1
        refit.give(weights)
        if outcome == "sink 0 restarts":
            refit.sinks[0].transport = DeltaFiles(directory)
            refit.sinks[0].transport.open(refit.sinks[0].channel, Watch(deadline_s=60.0))
        with pytest.MonkeyPatch.context() as patch:
            if outcome.endswith("fails"):
                side, rank, _ = outcome.split()
                transport = {"sink": refit.sinks, "source": refit.sources}[side][int(rank)].transport
                fail_at(patch, [transport._given, *transport._taken.values()], place)
            errors = refit.refit(version, fail_after_transfer=outcome == "abort")
        assert all(error is None or isinstance(error, OSError | AbortedError) for error in errors)
        if not any(errors) and outcome != "abort":
            assert all(party.sink.has(weights) for party in refit.sinks)
    refit.commit(version + 1, trained(weights, 3))


def fail_at(patch, copies, place):
    """Have one party fail before the n-th box that it takes."""
    seen = []

    def failing(original):
        def method(self, *arguments):
            if any(self is copy for copy in copies):
                seen.append(self)
                if len(seen) == place:
                    raise OSError("on fire")
            return original(self, *arguments)

        return method

    patch.setattr(BaseCopy, "step", failing(BaseCopy.step))
    patch.setattr(BaseCopy, "put", failing(BaseCopy.put))


def test_files_do_not_pile_up(tmp_path):
    refit, weights = parties(tmp_path), new_weights(1)
    for version in range(1, 6):
        weights = trained(weights, version)
        refit.commit(version, weights)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["version-4", "version-5"]
    with pytest.raises(RefitError, match=r"against version 4 \(refit 4\); it is of use to DeltaFiles alone"):
        read_version(refit.sinks[0].sink, tmp_path, 5)

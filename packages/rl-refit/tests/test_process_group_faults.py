"""Transports over torch.distributed when something goes wrong: an error that names it, in time, on every survivor."""

import importlib.util
import itertools
from pathlib import Path

import pytest

TRANSPORTS = ("messages", "ring", "hosts")
PARTIES = ("source 0", "sink 0", "sink 1")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    path = Path(__file__).parent / "programs" / "pg_world.py"
    spec = importlib.util.spec_from_file_location("pg_world", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    running = module.World(tmp_path_factory.mktemp("world"))
    yield running
    running.close()


# -- Deaths, through Refit: no case takes as long as its deadline, and the helper ends what hangs -----


DEATHS = list(itertools.product([("kill", 1), ("kill", 16), ("stop", 7)], PARTIES, TRANSPORTS))


@pytest.mark.parametrize(
    ("deed", "at", "victim", "transport"),
    [  # of 27, seven in which each deed, each party and each transport is met twice at least
        pytest.param(*deed, victim, transport, marks=pytest.mark.slow if number % 4 else ())
        for number, (deed, victim, transport) in enumerate(DEATHS)
    ],
)
def test_a_party_that_dies_or_stops_is_named_and_old_weights_are_intact(world, transport, victim, deed, at):
    number = PARTIES.index(victim)
    found = world.run("death", processes=3, dying=[number], transport=transport, victim=victim, deed=deed, at=at)
    survivors = [process for process in found if process is not None]
    assert [process["party"] for process in survivors] == [party for party in PARTIES if party != victim]
    for process in survivors:
        kind, message, peer = process["errors"][0]  # the refit in which it happens
        assert (kind, peer) == ("PeerError", victim), message
        assert "dead" in message
        assert len(process["errors"]) == 2  # nor does the next one hang
        assert process["party"] == "source 0" or process["wrong"] == []


# -- Without a rendezvous: what the transports see themselves -----------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("victim", PARTIES[:2])
@pytest.mark.parametrize("at", [pytest.param(0, marks=pytest.mark.slow), 4, pytest.param(9, marks=pytest.mark.slow)])
def test_a_lost_connection_names_who_was_at_its_other_end(world, transport, victim, at):
    dying = PARTIES.index(victim)
    found = world.run("bare", processes=2, dying=[dying], transport=transport, victim=victim, deed="kill", at=at)
    ((party, errors),) = [process for process in found if process is not None]
    kind, message, peer, bucket = errors[0]
    assert (kind, peer) == ("PeerError", victim)
    assert (
        f"lost the connection to {victim} at bucket {bucket}" in message or f"{victim} is gone: its process" in message
    )
    assert party != victim


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_silence_ends_at_the_deadline_and_names_who_was_waited_for(world, transport):
    found = world.run("bare", processes=2, dying=[1], transport=transport, victim="sink 0", deed="stop", at=3)
    kind, message, peer, _ = found[0][1][0]
    assert (kind, peer) == ("DeadlineError", "sink 0")
    assert "waiting for sink 0" in message


@pytest.mark.parametrize("victim", PARTIES)
def test_who_gives_up_is_not_taken_for_dead_and_messages_under_way_break_the_transport(world, victim):
    found = world.run("bare", processes=3, transport="messages", victim=victim, deed="raise", at=2)
    for party, errors in found:
        # A sink whose stream was through before its neighbour gave up hears of it in the next transfer.
        assert len(errors) == 2 or party == "sink 0"
        assert {kind for kind, *_ in errors} <= {"AbortedError", "RefitError"}
        assert all("the disk is full" in message for _, message, *_ in errors)
        assert party != victim or "make a new Refit" in errors[1][1]


@pytest.mark.parametrize(("fault", "expected", "got"), [("drop", 4, 5), ("duplicate", 5, 4), ("delay", 4, 5)], ids=str)
def test_a_bucket_that_is_dropped_duplicated_or_overtaken_is_noticed(world, fault, expected, got):
    found = world.run("bare", processes=2, transport="messages", fault=fault, at=4)
    kind, message, peer, bucket = found[1][1][0]
    assert (kind, peer, bucket) == ("RefitError", "source 0", expected)
    assert f"expected refit 1, stream 0, bucket {expected}" in message
    assert f"got refit 1, stream 0, bucket {got}" in message
    assert "make a new Refit" in found[1][1][1][1]

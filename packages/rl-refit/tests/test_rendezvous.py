"""Where parties meet: what is refused before, and whom an error names."""

import json
import os
import socket
import sys
from pathlib import Path

import pytest
from torch.distributed import FileStore, HashStore, PrefixStore

from rl_refit import Rendezvous
from rl_refit.errors import DeadlineError, PeerError, RefitError
from rl_refit.transaction.control import Control
from rl_refit.transaction.liveness import this_process

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from transaction_world import all_well, controls, rendezvous, together, watch

# Loopback addresses of this process alone: there no other process takes a port between its being found and its being
# used, and since connections come from 127.0.0.1, none of this process connects to itself.
OWN, OTHER = (f"127.{64 + os.getpid() % 128}.{os.getpid() // 128 % 256}.{last}" for last in (251, 252))


def free_port():
    """Of `OWN`."""
    with socket.socket() as taken:
        taken.bind((OWN, 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source_rank": 2}, "source_rank=2 is no rank of num_sources=2"),
        ({"sink_rank": -1}, "sink_rank=-1 is no rank of num_sinks=1"),
        ({}, "a party has a source_rank, a sink_rank, or both; got neither"),
        ({"source_rank": 0, "num_sinks": 0}, "num_sinks=0"),
        ({"source_rank": 0, "liveness_s": 0}, "liveness_s and timeout_s must be positive; got 0"),
        ({"source_rank": 0, "address": "127.0.0.1:29500"}, "neither tcp://host:port nor file:///path, nor a store"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rendezvous(**{"address": "tcp://127.0.0.1:29500", "num_sources": 2, "num_sinks": 1} | arguments)


def test_parties_are_named_by_side_and_rank():
    met = rendezvous(HashStore(), sources=2, sinks=2, source_rank=1, sink_rank=0)
    assert met.parties == ("source 0", "source 1", "sink 0", "sink 1")
    assert met.mine == ("source 1", "sink 0")
    assert not met.leads
    assert met.leader == "source 0"


@pytest.mark.parametrize("kind", ["tcp", "file", "store"])
def test_parties_meet_at_every_kind_of_address(tmp_path, kind):
    address = {"tcp": f"tcp://{OWN}:{free_port()}", "file": f"file://{tmp_path}/store", "store": HashStore()}[kind]
    with controls([address] * 3, sources=1, sinks=2) as made:
        assert [list(control.processes) for control in made] == [["source 0", "sink 0", "sink 1"]] * 3


def test_the_store_listens_at_its_address_and_nowhere_else():
    port = free_port()
    met = rendezvous(f"tcp://{OWN}:{port}", sink_rank=0)
    met.connect()
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex((OTHER, port)) != 0


def test_a_store_that_nobody_hosts_is_named_with_who_should():
    met = Rendezvous(
        f"tcp://{OWN}:{free_port()}", num_sources=1, num_sinks=1, source_rank=0, timeout_s=1.0, name="test"
    )
    with pytest.raises(
        RefitError, match=r"source 0 cannot reach the store at tcp://127[.\d]+:\d+: .*; sink 0 hosts it"
    ):
        met.connect()


def test_a_port_that_is_taken_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        met = rendezvous(f"tcp://127.0.0.1:{taken.getsockname()[1]}", sink_rank=0)
        with pytest.raises(RefitError, match=r"sink 0 cannot host the store at .* in use"):
            met.connect()


def test_parties_that_were_told_of_other_numbers_are_named():
    store = HashStore()
    trainer = Control(rendezvous(store, sources=1, sinks=1, source_rank=0))
    engine = Control(rendezvous(store, sources=1, sinks=3, sink_rank=0))
    for error in together(*(lambda made=made: made.meet(watch(made)) for made in (trainer, engine))):
        assert isinstance(error, PeerError)
        assert "give all parties the same num_sources and num_sinks" in str(error)
    trainer.close()
    engine.close()


def test_a_party_that_never_comes_is_named():
    control = Control(rendezvous(HashStore(), sinks=2, sink_rank=0))
    with pytest.raises(DeadlineError, match="waiting for source 0"):
        control.meet(watch(control, deadline_s=0.2))
    control.close()


def test_a_name_that_a_dead_process_had_is_not_taken_over(tmp_path):
    path = tmp_path / "store"
    with controls([FileStore(str(path), 4) for _ in range(2)], sources=1, sinks=1) as made:
        party = made[0].store.read("party/source 0")
        made[0].store.write("party/source 0", {**party, "pid": 2**22 + 1})
        after_a_restart = Control(rendezvous(FileStore(str(path), 4), source_rank=0))
        with pytest.raises(PeerError, match="before; give every party its own rank"):
            after_a_restart.meet(watch())
        after_a_restart.close()
    stores = [FileStore(str(path), 4) for _ in range(2)]
    with controls(stores, sources=1, sinks=1, name="another"):
        pass


def test_meeting_again_after_a_wait_in_vain_works():
    store = HashStore()
    early, late = Control(rendezvous(store, sink_rank=0)), Control(rendezvous(store, source_rank=0))
    with pytest.raises(DeadlineError):
        early.meet(watch(early, deadline_s=0.1))
    all_well(together(lambda: early.meet(watch(early)), lambda: late.meet(watch(late))))
    early.close()
    late.close()


def test_a_party_that_dies_before_all_have_met_is_seen():
    store = HashStore()
    dead = {**this_process(), "pid": 2**22 + 1, "numbers": "2 sources and 1 sinks", "hosts": False, "refit": "another"}
    for key, value in {"alive/source 0": "0", "party/source 0": json.dumps(dead)}.items():
        PrefixStore("test", store).set(key, value)
    waiting = Control(rendezvous(store, sources=2, sink_rank=0))
    with pytest.raises(PeerError, match="source 0 is dead: its process 4194305 on this host is gone"):
        waiting.meet(watch(waiting))  # source 1 has not come yet
    waiting.close()


def test_a_listener_that_says_nothing_is_told_from_a_store():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        # Long enough for torch to connect, since it has as long for that.
        meeting = Rendezvous(address, num_sources=1, num_sinks=1, source_rank=0, timeout_s=5.0)
        with pytest.raises(RefitError, match="something listens there, and is no store of torch"):
            meeting.connect()

"""Signs of life: of processes, of counts in a store, and of the store itself."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import HashStore

from rl_refit.errors import PeerError
from rl_refit.stores import BoundedStore, Line
from rl_refit.transaction.liveness import Heartbeat, Peers, this_process

HERE = this_process()


def peers(store, processes, *, liveness_s):
    bounded = BoundedStore(store, Line(60.0, PeerError))
    return Peers(bounded, processes, listen_to=list(processes), liveness_s=liveness_s)


def looks(peers_, *, seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        peers_.check()
        time.sleep(0.01)


def child():
    return subprocess.Popen([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(60)"], stdout=-1)


def as_party(process):
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return {"host": HERE["host"], "pid": process.pid, "started": fields[19]}


def test_a_party_that_counts_is_alive():
    store = HashStore()
    heart = Heartbeat(store, ("source 0", "sink 0"), liveness_s=0.4)
    watched = peers(store, {"source 0": HERE, "sink 0": HERE}, liveness_s=60.0)
    while int(store.get("alive/source 0")) < 3:
        looks(watched, seconds=0.1)
    heart.stop()


def test_a_party_that_stops_counting_is_silent_and_named():
    store = HashStore()
    store.set("alive/sink 1", "7")
    elsewhere = {"host": "node7 1234", "pid": 5, "started": "1"}
    with pytest.raises(PeerError, match=r"sink 1 \(process 5 on node7\) has shown no sign of life for") as caught:
        looks(peers(store, {"sink 1": elsewhere}, liveness_s=0.3), seconds=120)
    assert caught.value.peer == "sink 1"


def test_a_party_that_leaves_says_so():
    store = HashStore()
    heart = Heartbeat(store, ("sink 0",), liveness_s=0.4)
    heart.stop()
    heart._thread.join()  # stop() itself waits a second at most
    with pytest.raises(PeerError, match="sink 0 has left: it closed its Refit"):
        looks(peers(store, {"sink 0": HERE}, liveness_s=0.4), seconds=120)


@pytest.mark.parametrize("reaped", [True, False], ids=["reaped", "zombie"])
def test_a_dead_process_of_this_host_is_seen_at_once(reaped):
    store = HashStore()
    store.set("alive/source 0", "0")
    process = child()
    process.stdout.readline()
    watched = peers(store, {"source 0": as_party(process)}, liveness_s=1000.0)
    watched.check()
    os.kill(process.pid, signal.SIGKILL)
    if reaped:
        process.wait()
    with pytest.raises(PeerError, match=f"source 0 is dead: its process {process.pid} on this host is gone"):
        looks(watched, seconds=120)
    process.wait()
    process.stdout.close()


def test_a_process_id_that_another_process_has_now_is_not_alive():
    watched = peers(HashStore(), {"source 0": {**HERE, "started": "1"}}, liveness_s=1000.0)
    with pytest.raises(PeerError, match="source 0 is dead"):
        watched.check()


def test_a_stopped_process_is_there_but_silent():
    store = HashStore()
    store.set("alive/source 0", "0")
    process = child()
    process.stdout.readline()
    party = as_party(process)
    os.kill(process.pid, signal.SIGSTOP)
    watched = peers(store, {"source 0": party}, liveness_s=0.3)
    watched.check()
    with pytest.raises(PeerError, match="no sign of life"):
        looks(watched, seconds=120)
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_store_that_is_silent_is_an_error_and_what_was_asked_of_it_is_done_when_it_is_back():
    store = HashStore()
    store.set_timeout(timedelta(seconds=120))
    line = Line(60.0, PeerError)
    bounded = BoundedStore(store, line)
    bounded.set("known", "1")
    line._limit_s = 0.2
    with pytest.raises(PeerError, match=r"no answer within 0.2 s: its host is stopped or cut off"):
        bounded.get("missing")  # waits, as a stopped host would have it wait
    with pytest.raises(PeerError, match=r"still no answer"):
        bounded.set("asked of a silent store", "1")
    store.set("missing", "now it is here")
    while not store.check(["asked of a silent store"]):
        time.sleep(0.01)
    line._limit_s = 60.0
    assert bounded.get("known") == b"1"
    assert bounded.compare_set("decision", "", "commit") == b"commit"
    assert bounded.compare_set("decision", "", "abort") == b"commit"
    assert bounded.delete_key("decision")
    assert not bounded.check(["decision"])
    bounded.close()


def test_a_bounded_store_that_is_closed_ends_its_thread():
    before = threading.active_count()
    bounded = BoundedStore(HashStore(), Line(60.0, PeerError))
    bounded.set("known", "1")
    bounded.close()
    while threading.active_count() > before:
        time.sleep(0.01)


def test_who_has_not_listened_for_long_does_not_call_others_silent():
    store = HashStore()
    store.set("alive/source 0", "7")
    watched = peers(store, {"source 0": HERE}, liveness_s=0.2)
    for _ in range(3):  # as after SIGCONT
        watched.check()
        time.sleep(0.3)
    with pytest.raises(PeerError, match="no sign of life"):
        looks(watched, seconds=120)

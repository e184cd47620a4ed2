"""Replicas of an engine that come, go, die and return, each refitted by a transaction of its own; real processes."""

import signal
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from replicas_world import World, free_address

NAMES = ["a", "b", "c"]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("replicas"))
    yield world
    world.close()


@pytest.fixture
def world(program):
    yield program
    program.clear()


def start(world, names=NAMES, *, from_peers=True, **options):
    """A trainer, and replicas that have joined it and receive."""
    address = free_address()
    trainer = world.trainer(address=address, **options)
    replicas = {name: serving(world, name, address, from_peers=from_peers) for name in names}
    assert trainer.do("await_joined", names=names) == {"joined": dict.fromkeys(names)}
    return trainer, replicas


def serving(world, name, trainer, **options):
    replica = world.replica(name, trainer=trainer, **options)
    replica.do("serve")
    return replica


def held(replicas, until=None):
    """The version of the weights that each replica has, bit for bit, and says that it has."""
    states = {name: replica.do("state", until=until) for name, replica in replicas.items()}
    torn = {
        name: state
        for name, state in states.items()
        if state["poisoned"] or state["held"] != (-1 if state["version"] is None else state["version"])
    }
    assert torn == {}
    return {name: state["version"] for name, state in states.items()}


def test_every_replica_gets_every_version_and_the_report_says_so(world):
    trainer, replicas = start(world)
    for version in (3, 4, 10):
        report = trainer.do("refit", version=version)
        assert report["versions"] == held(replicas) == dict.fromkeys(NAMES, version)
        assert report["failures"] == {}
        assert report["refits"] == dict.fromkeys(NAMES, version)
        assert report["digests"] == 1
        assert report["metrics"]["refit_replicas"] == 3


@pytest.mark.parametrize("point", ["prepare", "stage", "digest", "commit"])
def test_a_replica_that_is_killed_in_the_middle_of_a_refit_is_named_and_the_others_commit(world, point):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    replicas["b"].do("arm", point=point, action="kill")
    report = trainer.do("refit", version=2)
    living = {name: replicas[name] for name in ("a", "c")}
    assert report["versions"] == {"a": 2, "b": None, "c": 2}
    assert held(living) == {"a": 2, "c": 2}
    assert list(report["failures"]) == ["b"]
    assert f"replica b is dead: its process {replicas['b'].pid} on this host is gone" in report["failures"]["b"]
    assert "b failed, and its version is not known" in report["text"]
    assert trainer.do("refit", version=3)["versions"] == held(living) == {"a": 3, "c": 3}


def test_a_replica_that_dies_between_two_refits_is_named_in_the_next_report_alone(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    replicas["a"].kill()
    report = trainer.do("refit", version=2)
    assert report["versions"] == {"a": None, "b": 2, "c": 2}
    assert f"replica a is dead: its process {replicas['a'].pid} on this host is gone" in report["failures"]["a"]
    assert trainer.do("refit", version=3)["versions"] == {"b": 3, "c": 3}


def test_a_replica_that_refuses_keeps_its_old_weights_and_takes_part_in_the_next_refit(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    replicas["c"].do("arm", point="stage", action="raise", nth=2)
    report = trainer.do("refit", version=2)
    assert report["versions"] == {"a": 2, "b": 2, "c": None}
    assert "OSError: a fault of the test" in report["failures"]["c"]
    assert held(replicas) == {"a": 2, "b": 2, "c": 1}
    assert trainer.do("refit", version=3)["versions"] == held(replicas) == dict.fromkeys(NAMES, 3)


def test_a_replica_that_is_stopped_is_given_up_after_its_silence_and_returns_when_it_goes_on(world):
    trainer, replicas = start(world, liveness_s=6.0)  # a slow machine may be silent for seconds
    trainer.do("refit", version=1)
    assert trainer.do("await_joined", names=NAMES, versions=dict.fromkeys(NAMES, 1))["joined"]
    replicas["b"].do("arm", point="stage", action="stop")
    report = trainer.do("refit", version=2)
    assert report["versions"] == {"a": 2, "b": None, "c": 2}
    assert "dead, stopped or cut off" in report["failures"]["b"]
    replicas["b"].kill(signal.SIGCONT)
    assert trainer.do("await_joined", names=NAMES, versions={"a": 2, "b": 1, "c": 2})["joined"]
    assert trainer.do("refit", version=3)["versions"] == held(replicas) == dict.fromkeys(NAMES, 3)


def test_a_call_that_is_interrupted_ends_and_the_next_reaches_all(world):
    trainer, replicas = start(world, from_peers=False)
    trainer.do("refit", version=1)
    replicas["b"].do("arm", point="stage", action="stop")
    trainer.begin("refit", version=2)
    assert held({name: replicas[name] for name in ("a", "c")}, until=2) == {"a": 2, "c": 2}
    replicas["b"].await_stop()
    trainer.kill(signal.SIGINT)
    replicas["b"].kill(signal.SIGCONT)
    assert trainer.answer()["error"] == "KeyboardInterrupt"
    there = held(replicas)
    assert there in ({"a": 2, "b": 1, "c": 2}, {"a": 2, "b": 2, "c": 2})  # it may go on before it hears of it
    assert trainer.do("await_joined", names=NAMES, versions=there)["joined"]
    assert trainer.do("catch_up")["refits"] == ({"b": 2} if there["b"] == 1 else {})
    assert trainer.do("refit", version=3)["versions"] == held(replicas) == dict.fromkeys(NAMES, 3)


def test_a_newcomer_catches_up_with_the_committed_version_and_nothing_else_moves(world):
    trainer, replicas = start(world, NAMES[:2])
    trainer.do("refit", version=5)
    replicas["late"] = serving(world, "late", trainer.address, from_peers=False)
    trainer.do("await_joined", names=[*replicas])
    report = trainer.do("catch_up")
    assert report["refits"] == {"late": 5}
    assert report["versions"] == held(replicas) == dict.fromkeys(replicas, 5)
    assert "a has version 5 already" in report["text"]
    assert trainer.do("catch_up")["refits"] == {}
    assert trainer.do("refit", version=6)["versions"] == held(replicas) == dict.fromkeys(replicas, 6)


def test_a_source_that_has_trained_on_is_no_source_of_the_committed_version(world):
    trainer, replicas = start(world, NAMES[:1])
    assert "nothing to catch up with" in trainer.do("catch_up")["message"]
    trainer.do("refit", version=5)
    trainer.do("train", version=6)
    replicas["late"] = serving(world, "late", trainer.address, from_peers=False)
    trainer.do("await_joined", names=[*replicas])
    said = trainer.do("catch_up")
    assert "the source has changed since version 5 was committed (0." in said["message"]
    assert held(replicas) == {"a": 5, "late": None}
    assert trainer.do("refit", version=6)["versions"] == held(replicas) == dict.fromkeys(replicas, 6)


def test_a_replica_leaves_and_returns_under_its_name(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    replicas["b"].do("leave")
    report = trainer.do("refit", version=2)
    assert report["versions"] == {"a": 2, "c": 2}
    assert report["failures"] == {}
    replicas["b"] = serving(world, "b", trainer.address)
    trainer.do("await_joined", names=NAMES)
    assert trainer.do("refit", version=3)["versions"] == held(replicas) == dict.fromkeys(NAMES, 3)


def test_a_replica_that_was_killed_is_replaced_under_its_name_at_once(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    replicas["b"].kill()
    replicas["b"] = serving(world, "b", trainer.address, from_peers=False)
    trainer.do("await_joined", names=NAMES, versions={"a": 1, "b": None, "c": 1})
    report = trainer.do("refit", version=2)
    assert report["versions"] == held(replicas) == dict.fromkeys(NAMES, 2)
    assert report["failures"] == {}


def test_of_two_living_replicas_of_one_name_the_first_is_told(world):
    trainer, replicas = start(world, ["a"])
    trainer.do("refit", version=1)
    second = serving(world, "a", trainer.address, from_peers=False)
    trainer.do("await_joined", names=["a"], versions={"a": None})
    assert trainer.do("refit", version=2)["versions"] == held({"a": second}) == {"a": 2}
    said = replicas["a"].do("state")["log"][-1]
    assert said["error"] == "RefitError"
    assert f"process {second.pid} on" in said["message"]
    assert "has taken its name; give every replica a name of its own" in said["message"]


def test_a_resumed_trainer_with_an_older_version_is_told_what_to_do_and_nothing_is_touched(world):
    trainer, replicas = start(world)
    for version in (7, 9):
        trainer.do("refit", version=version)
    trainer.kill()
    resumed = world.trainer(address=trainer.address)
    resumed.do("await_joined", names=NAMES, versions=dict.fromkeys(NAMES, 9))
    for version in (8, 9):
        said = resumed.do("refit", version=version)
        assert said["error"] == "RefitError"
        assert f"version {version} is not newer than what replicas have: a has 9, b has 9, c has 9" in said["message"]
        assert "rollback=True" in said["message"]
    assert held(replicas) == dict.fromkeys(NAMES, 9)
    assert resumed.do("refit", version=8, rollback=True)["versions"] == held(replicas) == dict.fromkeys(NAMES, 8)
    said = resumed.do("refit", version=8)
    assert "call catch_up() to bring it to the replicas that lack it" in said["message"]
    assert resumed.do("refit", version=9)["versions"] == held(replicas) == dict.fromkeys(NAMES, 9)

    # One that fails when all go back has weights of a past that does not count any more, and is told apart by them.
    replicas["c"].do("arm", point="stage", action="raise")
    assert resumed.do("refit", version=7, rollback=True)["versions"] == {"a": 7, "b": 7, "c": None}
    assert "c has 9" in resumed.do("refit", version=8)["message"]
    resumed.do("train", version=7)
    assert resumed.do("catch_up")["refits"] == {"c": 7}
    report = resumed.do("refit", version=8)
    assert report.get("versions") == held(replicas) == dict.fromkeys(NAMES, 8), report


def test_a_version_that_nobody_committed_is_not_what_newcomers_catch_up_with(world):
    trainer, replicas = start(world, ["a"])
    trainer.do("refit", version=1)
    replicas["a"].do("arm", point="ready", action="raise")
    assert "OSError: a fault of the test" in trainer.do("refit", version=2)["message"]
    said = trainer.do("catch_up")["message"]
    assert "the source was to be version 2 since version 1 was committed" in said
    assert "call again with version=2" in said
    assert held(replicas) == {"a": 1}
    assert trainer.do("refit", version=2)["versions"] == held(replicas) == {"a": 2}


def test_replicas_outlive_their_trainer_and_join_the_next_at_its_address(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    trainer.do("arm", point="shards", action="kill")
    assert "dead" in trainer.do("refit", version=2)
    assert held(replicas) == dict.fromkeys(NAMES, 1)
    resumed = world.trainer(address=trainer.address)
    resumed.do("await_joined", names=NAMES, versions=dict.fromkeys(NAMES, 1))
    assert resumed.do("refit", version=2)["versions"] == held(replicas) == dict.fromkeys(NAMES, 2)


def test_a_trainer_that_closes_leaves_its_address_to_the_next_of_the_same_process(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=5)
    for _ in range(2):
        trainer.do("close")
        assert trainer.do("make") == {}
        trainer.do("await_joined", names=NAMES)
        report = trainer.do("refit", version=3, rollback=True)
        assert report["versions"] == held(replicas, until=3) == dict.fromkeys(NAMES, 3)
        trainer.do("refit", version=5)


def test_a_replica_whose_trainer_has_gone_leaves_without_waiting_for_it(world):
    trainer, replicas = start(world)
    trainer.do("refit", version=1)
    trainer.do("close")
    began = time.monotonic()
    assert [replica.do("leave") for replica in replicas.values()] == [{}] * len(NAMES)
    assert time.monotonic() - began < 30.0  # torch's own client would try for up to a minute


def test_a_call_waits_for_at_least_as_many_replicas_and_names_how_to_start_them(world):
    trainer = world.trainer(address=free_address(), at_least=2, deadline_s=1.0)
    said = trainer.do("refit", version=1)
    assert said["error"] == "DeadlineError"
    assert (
        "0 replicas have joined within deadline_s=1, and at_least=2 are to; start engines with Replica"
        in said["message"]
    )


def test_a_call_that_nobody_commits_raises_why(world):
    trainer, replicas = start(world, ["a"])
    replicas["a"].do("arm", point="commit", action="raise")
    said = trainer.do("refit", version=1)
    assert said["error"] == "RefitError"
    assert "OSError: a fault of the test" in said["message"]
    assert any("0 replicas have version 1, and at_least=1 must" in note for note in said["notes"])


def test_a_replica_without_a_trainer_says_where_it_looked(world):
    replica = world.replica("a", trainer=free_address(), liveness_s=0.5)
    assert "no trainer is at tcp://127.0.0.1:" in replica.do("receive", timeout_s=0.0)["message"]
    said = replica.do("receive", timeout_s=None)
    assert said["error"] == "PeerError"
    assert "it makes Replicas(" in said["message"]


def test_ranks_of_a_trainer_and_of_replicas_each_with_their_rows(world):
    address = free_address()
    trainers = [world.trainer(address=address, rank=rank, ranks=2) for rank in range(2)]
    where = {name: free_address() for name in "ab"}
    ranks = {
        (name, rank): serving(world, name, address, rank=rank, ranks=num, address=where[name])
        for name, num in (("a", 2), ("b", 4))
        for rank in range(num)
    }
    trainers[0].do("await_joined", names=["a", "b"])

    def refit(version):
        for trainer in trainers:
            trainer.begin("refit", version=version)
        reports = [trainer.answer() for trainer in trainers]
        assert not any("error" in report for report in reports), reports
        assert reports[0]["versions"] == reports[1]["versions"]
        assert reports[0]["failures"] == reports[1]["failures"]
        return reports[0]

    for version in (1, 2):
        assert refit(version)["versions"] == {"a": version, "b": version}
        assert set(held(ranks).values()) == {version}
    ranks["b", 3].do("arm", point="stage", action="raise")
    assert refit(3)["versions"] == {"a": 3, "b": None}
    assert held(ranks) == {key: 3 if key[0] == "a" else 2 for key in ranks}
    trainers[0].do("await_joined", names=["a", "b"], versions={"a": 3, "b": 2})
    assert refit(4)["versions"] == {"a": 4, "b": 4}

    # A rank of a replica dies, and is started anew; rank 0 lives.
    ranks["b", 2].kill()
    assert refit(5)["versions"] == {"a": 5, "b": None}
    ranks["b", 2] = serving(world, "b", address, rank=2, ranks=4, address=where["b"])
    trainers[0].do("await_joined", names=["a", "b"], versions={"a": 5, "b": 4})
    assert refit(6)["versions"] == {"a": 6, "b": 6}
    assert set(held(ranks).values()) == {6}

    # A rank of the trainer dies: every replica keeps what it has, and the other rank says who is dead.
    trainers[1].do("arm", point="shards", action="kill")
    for trainer in trainers:
        trainer.begin("refit", version=7)
    said = trainers[0].answer()
    assert said["error"] == "PeerError"
    assert f"source 1 is dead: its process {trainers[1].pid} on this host is gone" in said["message"]
    assert set(held(ranks).values()) == {6}
    trainers[0].kill()
    trainers = [world.trainer(address=address, rank=rank, ranks=2, at_least=2) for rank in range(2)]
    assert refit(7)["versions"] == {"a": 7, "b": 7}
    assert set(held(ranks).values()) == {7}


def test_ranks_of_a_trainer_that_differ_in_what_they_ask_for_are_refused_and_nothing_moves(world):
    address = free_address()
    trainers = [world.trainer(address=address, rank=rank, ranks=2) for rank in range(2)]
    replicas = {"a": serving(world, "a", address)}
    trainers[0].do("await_joined", names=["a"])
    trainers[0].begin("refit", version=1)
    trainers[1].begin("refit", version=2)
    said = [trainer.answer()["message"] for trainer in trainers]
    assert all("source 1 is called with {'version': 2, 'rewind': False}, and source 0 with" in text for text in said)
    assert held(replicas) == {"a": None}
    for trainer in trainers:
        trainer.begin("refit", version=2)
    assert [trainer.answer()["versions"] for trainer in trainers] == 2 * [{"a": 2}]


def test_a_newcomer_takes_the_committed_version_from_a_living_peer_while_the_trainer_trains_on(world):
    trainer, replicas = start(world, NAMES[:2])
    trainer.do("refit", version=5)
    trainer.do("train", version=6)
    replicas["late"] = serving(world, "late", trainer.address)
    assert held(replicas, until=5) == dict.fromkeys(replicas, 5)
    assert trainer.do("await_joined", names=[*replicas], versions=dict.fromkeys(replicas, 5))["joined"]
    assert trainer.do("catch_up")["refits"] == {}
    report = trainer.do("refit", version=6)
    assert report["versions"] == held(replicas) == dict.fromkeys(replicas, 6)
    assert all(state["log"][-1] == {"version": 6} for state in (each.do("state") for each in replicas.values()))


def test_a_peer_that_dies_while_it_gives_costs_a_newcomer_nothing_but_another_peer(world):
    trainer, replicas = start(world, NAMES[:2])
    trainer.do("refit", version=5)
    replicas["a"].do("arm", point="weights", action="kill")
    newcomers = {}
    while not replicas["a"].is_gone:  # it is asked by chance
        assert len(newcomers) < 20
        name = f"late {len(newcomers)}"
        newcomers[name] = serving(world, name, trainer.address)
        assert held({name: newcomers[name]}, until=5) == {name: 5}
    assert trainer.do("refit", version=6)["versions"] == {"a": None, "b": 6} | dict.fromkeys(newcomers, 6)


def test_a_peer_of_two_ranks_gives_to_a_newcomer_of_four(world):
    trainer, ranks = start(world, [])

    def join(name, num_ranks):
        address = free_address()
        for rank in range(num_ranks):
            ranks[name, rank] = serving(world, name, trainer.address, rank=rank, ranks=num_ranks, address=address)

    join("a", 2)
    trainer.do("await_joined", names=["a"])
    trainer.do("refit", version=3)
    join("b", 4)
    assert set(held(ranks, until=3).values()) == {3}
    assert trainer.do("refit", version=4)["versions"] == {"a": 4, "b": 4}
    assert set(held(ranks).values()) == {4}


def test_refits_failures_and_returns_leave_no_descriptor_and_no_thread_behind(world):
    trainer, replicas = start(world, ["a", "b"])
    parties = [trainer, *replicas.values()]

    def rounds(first, last):
        for version in range(first, last):
            if version % 2:
                replicas["b"].do("arm", point="stage", action="raise")
            assert trainer.do("await_joined", names=[*replicas])["joined"]  # a slow machine may take a while
            report = trainer.do("refit", version=version)
            assert report["versions"] == {"a": version, "b": None if version % 2 else version}
        return [party.do("measure") for party in parties]

    before = rounds(1, 9)
    after = rounds(9, 33)
    for one, other in zip(before, after, strict=True):
        assert other["threads"] <= one["threads"] + 1
        assert other["descriptors"] <= one["descriptors"] + 4

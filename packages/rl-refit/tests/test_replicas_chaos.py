"""Random kills, stops and returns of replicas and of their trainer: nothing torn, no hang, the others go on."""

import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "programs"))
from replicas_world import PATIENCE_S, World, free_address

MODES = {"a": "staged", "b": "swap", "c": "swap", "d": "staged"}
POINTS = ["prepare", "stage", "digest", "ready", "commit"]
CASES = 20
LIVENESS_S = 4.0  # whoever is not stopped must show a sign of life within it, however busy the machine is


class Fleet:
    """Four replicas and their trainer; whoever is gone is started anew, at the same address and under its name."""

    def __init__(self, world):
        self.world, self.address, self.version = world, free_address(), 0
        self.trainer, self.replicas = None, {}

    def mend(self):
        """Have all of them there."""
        if self.trainer is None or self.trainer.is_gone:
            self.trainer = self.world.trainer(address=self.address, liveness_s=LIVENESS_S)
            assert self.trainer.made == {}
        for name, mode in MODES.items():
            if name not in self.replicas or self.replicas[name].is_gone:
                self.replicas[name] = self.world.replica(name, trainer=self.address, mode=mode, liveness_s=LIVENESS_S)
                self.replicas[name].do("serve")
            self.replicas[name].kill(signal.SIGCONT)
            self.replicas[name].do("disarm")
        self.trainer.do("disarm")
        until = time.monotonic() + PATIENCE_S
        while self.versions() != (said := self.trainer.do("await_joined", names=[*MODES])).get("joined"):
            assert time.monotonic() < until, (said, self.states())

    def versions(self):
        return {name: None if state["poisoned"] else state["version"] for name, state in self.states().items()}

    def states(self):
        return {name: replica.do("state") for name, replica in self.replicas.items()}

    def strike(self, chance):
        """Arrange for what goes wrong; the replicas that it happens to, or all of them."""
        kind = chance.choices(["replicas", "trainer", "outside"], [6, 1, 3])[0]
        if kind == "trainer":
            self.trainer.do("arm", point="shards", action=chance.choice(["kill", "raise"]), nth=chance.randrange(8))
            return set(MODES)
        struck = set(chance.sample(sorted(MODES), chance.choice([1, 1, 2, 3])))
        for name in struck:
            replica = self.replicas[name]
            if kind == "replicas":
                point, action = chance.choice(POINTS), chance.choices(["kill", "raise", "stop"], [5, 3, 1])[0]
                replica.do("arm", point=point, action=action, nth=chance.randrange(8 if point == "stage" else 2))
                continue
            number = chance.choices([signal.SIGKILL, signal.SIGSTOP], [4, 1])[0]
            threading.Timer(chance.uniform(0, 0.1), replica.kill, [number], {"wait": False}).start()
        return struck


@pytest.fixture
def fleet(tmp_path):
    world = World(tmp_path)
    try:
        yield Fleet(world)
    finally:
        world.close()


@pytest.mark.parametrize("first", [0, *(pytest.param(CASES * block, marks=pytest.mark.slow) for block in range(1, 15))])
def test_whoever_is_not_struck_gets_every_version_and_nobody_serves_what_is_torn(fleet, first):
    for seed in range(first, first + CASES):
        chance = random.Random(seed)
        fleet.mend()
        before = {name: state["version"] for name, state in fleet.states().items()}
        struck = fleet.strike(chance)
        fleet.version += 1
        report = fleet.trainer.do("refit", version=fleet.version)
        time.sleep(0.2)  # who was to be killed from outside is, by now
        for replica in fleet.replicas.values():
            replica.kill(signal.SIGCONT)
        for name, replica in fleet.replicas.items():
            state = {"dead": ""} if replica.is_gone else replica.do("state")
            if "dead" in state:  # on a busy machine a kill from outside may come as late as this
                assert name in struck, (seed, report)
                continue
            if not state["poisoned"]:  # else it refuses to be used; what it holds may be anything
                assert state["held"] == (-1 if state["version"] is None else state["version"]), (seed, name, state)
                assert state["version"] in {before[name], fleet.version}, (seed, name, state)
            if name not in struck:
                assert (state["version"], state["poisoned"]) == (fleet.version, False), (seed, name, state, report)
                assert report["versions"][name] == fleet.version, (seed, name, report)
            elif "versions" in report and report["versions"].get(name) == fleet.version:
                assert state["version"] == fleet.version, (seed, name, state, report)
        # The next refit reaches everybody.
        fleet.mend()
        fleet.version += 1
        report = fleet.trainer.do("refit", version=fleet.version)
        assert report.get("versions") == dict.fromkeys(MODES, fleet.version), (seed, report)
        assert all(state["held"] == fleet.version for state in fleet.states().values()), seed

"""Engines over Ray that are stopped while one of them is being replaced leave no process behind."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import threading

from launched_run import gone
from ray_setup import ENV, PATIENCE_S, in_thread, kill, wait_until

from rl_generation import EngineConfig, TrainingEngineSpec
from rl_launcher.errors import Refusal
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.ray.cluster import LOOPBACK, ClusterError, RayRuntime
from rl_launcher.ray.engine_pool import EnginePool
from rl_launcher.ray.placement import EnginePlace, Placement
from rl_launcher.schema import ClusterConfig


@pytest.fixture
def runtime(ray_cluster, tmp_path):
    """One place, for an engine."""
    place = EnginePlace(engine=0, slots=((0, 0),))
    placement = Placement(num_slots=(1,), device="cpu", colocated=False, ranks=(), engines=(place,))
    config = ClusterConfig(runtime="ray", env_vars=ENV, start_timeout_s=PATIENCE_S)
    runtime = RayRuntime.start(config, placement, run_dir=tmp_path)
    yield runtime
    runtime.close()


class Starting:
    """Starts actors; the second of them only once it is told to. It remembers them all."""

    def __init__(self, runtime):
        self.runtime, self.actors = runtime, []
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self, index):
        if self.actors:
            self.begun.set()
            assert self.go.wait(PATIENCE_S)
        self.actors.append(self.runtime.start_actor(role="engine", index=index, node=0, slots=(0,), threads=4))
        return self.actors[-1]


@pytest.fixture
def replacing(runtime, tmp_path):
    """A group of one engine, which has died, and how its successor is started: that has just begun."""
    model, tokenizer = build(0)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = EngineConfig(max_new_tokens=8)
    spec = TrainingEngineSpec(config=config, model=str(tmp_path / "model"), stop_token_ids=(2,), pad_token_id=0)
    limits = {"max_restarts": 1, "start_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S}
    starting = Starting(runtime)
    engines = EnginePool(spec=spec, start_actor=starting, hosts=[LOOPBACK], **limits)
    engines.start()
    (engine,) = engines.all()
    kill(engine.process().who.pid)
    assert engines.is_dead(engine)
    assert starting.begun.wait(PATIENCE_S)
    yield engines, starting
    starting.go.set()


def is_closed(engines):
    try:
        engines.serving()
    except Refusal:
        return True
    return False


def test_a_successor_that_comes_up_while_its_group_is_ended_is_ended_with_it(replacing):
    engines, starting = replacing
    closed = in_thread(engines.close)
    wait_until(lambda: is_closed(engines))
    starting.go.set()
    closed()
    wait_until(lambda: len(starting.actors) == 2)
    assert gone([actor.who.pid for actor in starting.actors]) == []


def test_nobody_is_started_once_the_run_has_left_its_cluster(replacing, runtime):
    _, starting = replacing
    runtime.close()
    starting.go.set()
    with pytest.raises(ClusterError, match="engine-0: the run has ended"):
        runtime.start_actor(role="engine", index=0, node=0, slots=(0,))
    assert gone([actor.who.pid for actor in starting.actors]) == []

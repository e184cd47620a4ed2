"""A trainer and an engine on the same devices: a real backend refuses to work while offloaded, which proves the order.

Nothing is freed on a CPU, but the backend's own refusals hold there as well. The engine is real, in a worker of this
process. That memory is freed is a claim about GPUs.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

from rl_backends import DTensorBackend, DTensorConfig, MegatronConfig, OptimizerConfig, select_backend
from rl_generation import EngineConfig, Sampling, TrainingEngineSpec
from rl_generation.seeding import CallSeeds
from rl_launcher.build.engines import weight_source
from rl_launcher.build.parts import RunEngine
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.ray.colocation import ColocatedModel, Colocation
from rl_launcher.ray.dispatch import RayEngine
from rl_launcher.ray.engine_pool import EnginePool
from rl_launcher.ray.engine_worker import EngineWorker
from rl_refit import CountedRefit, Refit, RefitError

pytestmark = pytest.mark.filterwarnings(  # megatron-core 0.16 says so to its own layers
    "ignore:Warning. tp_group is None, using default tp group:DeprecationWarning"
)


class Answered:
    """A call that has ended."""

    def __init__(self, value):
        self._value = value

    def done(self, *, within_s=0.0):
        return True

    def result(self, *, timeout_s):
        assert timeout_s > 0
        return self._value


class ActorHere:
    """What an actor is to its group, with the worker in this process; it keeps what it was asked."""

    who = "engine 0 (this process)"

    def __init__(self):
        self.asked = []

    def make(self, kind, *arguments, timeout_s, **options):
        assert timeout_s > 0
        self.worker = kind(*arguments, **options)

    def submit(self, method, *arguments):
        self.asked.append((method, *arguments))
        return Answered(getattr(self.worker, method)(*arguments))

    def call(self, method, *arguments, timeout_s):
        return self.submit(method, *arguments).result(timeout_s=timeout_s)

    def kill(self):
        self.worker = None

    kill_on_its_node = kill  # it is this node

    def close(self):
        self.worker.close()

    def moves(self):
        """Its calls that free or allocate memory, since the last look."""
        asked, self.asked = self.asked, []
        return [each for each in asked if each[0] in ("sleep", "wake_up")]


class World:
    def __init__(self, folder, make):
        model, tokenizer = build(0)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        self.backend = make(model)
        spec = TrainingEngineSpec(
            config=EngineConfig(max_new_tokens=8),
            model=str(folder),
            stop_token_ids=(2,),
            pad_token_id=0,
        )
        self.actor = ActorHere()
        engines = EnginePool(
            spec=spec,
            start_actor=lambda _: self.actor,
            hosts=["127.0.0.1"],
            max_restarts=0,
            start_timeout_s=60,
            call_timeout_s=60,
        )
        self.colocation = Colocation(self.backend, engines, moves=True)
        self.colocation.make_room()
        engines.start()
        worker: EngineWorker = self.actor.worker
        inner = CountedRefit(Refit(weight_source_of(self.backend), worker._made.sink))

        def refit(*, version):
            self.colocation.enter("refitting")
            report = inner(version=version)
            engines.serve(engines.all())
            return report

        self.engines, self.sync = engines, refit
        self.policy = ColocatedModel(self.backend, self.colocation)
        self.engine = RunEngine(
            RayEngine(engines), seeds=CallSeeds(0), enter_generating=lambda: self.colocation.enter("generating")
        )


def weight_source_of(backend):
    backend.onload()
    source = weight_source(backend)
    backend.offload()
    return source


@dataclass(frozen=True)
class Rows:
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor = field(default_factory=lambda: torch.arange(3, 13).view(2, 5))
    lengths: torch.Tensor = field(default_factory=lambda: torch.tensor([5, 5]))
    trainable: torch.Tensor = field(default_factory=lambda: torch.tensor([[False, True, True, True, True]] * 2))


def on_dtensor(model):
    return DTensorBackend(model, DTensorConfig())


def on_megatron(model):
    pytest.importorskip("megatron.core")
    return select_backend(OnMegatron()).make(model)


@dataclass(frozen=True)
class OnMegatron:
    dtensor_cfg: DTensorConfig = field(default_factory=DTensorConfig)
    megatron_cfg: MegatronConfig = field(default_factory=lambda: MegatronConfig(enabled=True))


@pytest.fixture(params=[on_dtensor, on_megatron])
def world(tmp_path, request):
    world = World(tmp_path, request.param)
    yield world
    world.engine.close()
    world.backend.onload()
    world.backend.close()


SAMPLING = Sampling(max_new_tokens=4, seed=0)


def test_a_loop_has_each_side_there_when_it_works_and_away_when_it_does_not(world):
    backend, rows = world.backend, Rows()
    with pytest.raises(RuntimeError, match="onload"):
        backend.logp(rows)  # the engine has started, on an empty device
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=2)
    assert world.actor.moves() == [("sleep",)]
    world.sync(version=0)
    assert world.actor.moves() == [("wake_up", ("weights",))]
    backend.shards()  # the weights are there
    with pytest.raises(RuntimeError, match="optimizer state"):
        backend.optim_step()
    for version in (1, 2):
        rollouts = world.engine.generate([[1, 5, 9]], SAMPLING)
        assert rollouts[0].version == version - 1
        assert world.actor.moves() == [("wake_up", ("kv_cache",))]
        with pytest.raises(RuntimeError, match="weights"):
            backend.shards()
        world.policy.logp(rows)
        assert world.actor.moves() == [("sleep",)]
        world.policy.forward_backward(rows, lambda logp, part: (-(logp * part.trainable).sum() / 8, {}))
        world.policy.optim_step()
        assert world.actor.moves() == []  # the phase is entered once
        assert world.policy.version == version
        assert world.sync(version=version).same_as is None
        assert world.actor.moves() == [("wake_up", ("weights",))]


def test_the_engine_is_wide_awake_before_it_sleeps(world):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    world.sync(version=0)
    world.actor.moves()
    world.policy.logp(Rows())  # a refit, and training goes on at once
    assert world.actor.moves() == [("wake_up", ("kv_cache",)), ("sleep",)]


def test_two_calls_enter_the_phase_once_and_use_the_same_weights(world):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    world.sync(version=0)
    first = world.engine.generate([[1, 5, 9]], SAMPLING)
    world.actor.moves()
    assert world.engine.generate([[1, 5, 9]], SAMPLING)[0].tokens == first[0].tokens
    assert world.actor.moves() == []
    world.policy.logp(Rows())
    assert world.engine.generate([[1, 5, 9]], SAMPLING)[0].tokens == first[0].tokens
    assert world.actor.moves() == [("sleep",), ("wake_up",)]


def test_an_engine_heals_beside_the_policys_weights_and_nothing_else(world):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    world.sync(version=0)
    world.engine.generate([[1, 5, 9]], SAMPLING)
    with world.colocation.healing():
        world.backend.shards()
        with pytest.raises(RuntimeError, match="optimizer state"):
            world.backend.optim_step()
    with pytest.raises(RuntimeError, match="weights"):
        world.backend.shards()


def test_colocation_explains_what_it_moves(world):
    assert "host memory" in world.policy.explain()
    assert "nothing is moved" in Colocation(world.backend, world.engines, moves=False).explain()


def test_an_engine_does_not_heal_while_the_phase_changes_and_neither_waits_for_the_other(world):
    def heal():
        with world.colocation.healing():
            pass

    with (
        world.colocation._lock,
        ThreadPoolExecutor(1) as other,
        pytest.raises(RefitError, match="just exchanging the devices"),
    ):
        other.submit(heal).result(timeout=60)


class Successor:
    """The actor that replaces the engine, whose start has begun, and goes on when it is told to."""

    def __init__(self, world):
        self.actor, self.begun, self.go = ActorHere(), threading.Event(), threading.Event()
        self.engines = world.engines
        self.engines.max_restarts = 1
        self.engines.start_actor = self.start

    def start(self, _):
        self.begun.set()
        assert self.go.wait(60)
        return self.actor

    def needed(self):
        (engine,) = self.engines.all()
        self.engines.lost(engine, "killed", owed="it owes nothing")


def test_an_engine_that_was_starting_when_training_began_sleeps_before_the_policy_takes_the_memory(world, monkeypatch):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    world.sync(version=0)
    world.engine.generate([[1, 5, 9]], SAMPLING)
    successor, onload, asked_before = Successor(world), world.backend.onload, []

    def taken(**options):
        asked_before.append(successor.actor.moves())
        return onload(**options)

    monkeypatch.setattr(world.backend, "onload", taken)
    successor.needed()
    assert successor.begun.wait(60)
    with ThreadPoolExecutor(1) as other:
        training = other.submit(world.policy.logp, Rows())
        while world.colocation._may_start and not training.done():
            time.sleep(0.01)
        successor.go.set()
        training.result(timeout=60)
    assert asked_before == [[("sleep",)]]
    assert world.colocation.phase == "training"


def test_no_engine_is_started_while_the_policy_trains_nor_after_the_end(world):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    successor = Successor(world)
    successor.needed()
    (healing,) = world.engines._replacing
    world.engine.close()
    healing.join(60)
    assert not healing.is_alive()
    assert not successor.begun.is_set()


def test_no_engine_is_healed_while_it_sleeps(world):
    world.policy.start_training(OptimizerConfig(lr=1e-3), num_steps=1)
    with pytest.raises(RefitError, match="the engines sleep while the policy trains"), world.colocation.healing():
        pass

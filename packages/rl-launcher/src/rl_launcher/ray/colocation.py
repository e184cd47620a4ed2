"""Colocation: a trainer and engines on the same devices, of which one at a time has the memory.

    generating   the policy is offloaded to host memory, the engines are awake
    refitting    the weights of both are on the device, but no gradients, optimizer state or caches
    training     the policy is on the device; the engines sleep, with their weights in host memory

Phases are entered on demand: a method of the policy enters the one that its row of `POLICY_METHODS` names, a call of
the engine enters `generating`, a refit `refitting`. On a CPU nothing is moved, since there is only one memory; what
remains is that the two do not compute at the same time.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from rl_backends.backend import TrainingBackend
from rl_backends.offload import Part
from rl_launcher.errors import Refusal
from rl_launcher.ray.engine_pool import EnginePool
from rl_launcher.ray.remote_methods import POLICY_METHODS, Phase
from rl_launcher.schema import Recipe
from rl_refit import RefitError

WEIGHTS: tuple[Part, ...] = ("weights",)
NOT_WEIGHTS: tuple[Part, ...] = ("gradients", "optimizer")


def check_colocation(recipe: Recipe) -> None:
    """Refuse asynchronous GRPO on devices that engines and trainer share."""
    asynchronous = recipe.grpo is not None and recipe.grpo.async_grpo is not None
    if asynchronous and recipe.cluster.runtime == "ray" and recipe.policy.generation.colocated.enabled:
        raise Refusal(
            "grpo.async_grpo samples while the policy trains, and with policy.generation.colocated.enabled=true only "
            "one of the two has the devices at a time; give the engines devices of their own: set "
            "colocated.enabled=false and colocated.resources.gpus_per_node=1 or more"
        )


class Colocation:
    """Which side has the devices. A phase is changed under a lock, by the thread that needs another one.

    `moves` tells whether there is memory to free, as on GPUs; the engines must not be started yet.
    """

    def __init__(self, policy: TrainingBackend, engines: EnginePool, *, moves: bool) -> None:
        self._policy, self._engines, self._moves = policy, engines, moves
        self._lock = threading.RLock()
        self._may_start, self._starting = True, 0
        self._companions: list[Any] = []
        self.phase: Phase = "training"
        engines.startup_slot = self._startup_slot

    def add(self, model: Any) -> None:
        """Move a model that trains beside the policy as the policy is moved, until it is closed."""
        with self._lock:
            self._companions.append(model)

    def remove(self, model: Any) -> None:
        """Leave a model alone from now on."""
        with self._lock:
            self._companions = [each for each in self._companions if each is not model]

    def make_room(self) -> None:
        """Offload the policy, so that the engines can start; the first phase is `generating`."""
        with self._lock:
            if self._moves:
                self._policy.offload()
            self.phase = "generating"

    def enter(self, phase: Phase) -> None:
        """Have on the devices what `phase` needs, and nothing else."""
        with self._lock:
            if phase == self.phase:
                return
            {"training": self._train, "generating": self._generate, "refitting": self._refit}[phase]()
            self.phase = phase

    def _train(self) -> None:
        if self._moves:
            self._set_may_start(may_start=False)
        if self.phase == "refitting":  # vLLM's sleep() needs the engine fully awake
            self._on_every_engine("wake_up", ("kv_cache",))
        self._on_every_engine("sleep")
        if self._moves:
            self._policy.onload()
            for model in self._companions:
                model.onload()

    def _generate(self) -> None:
        if self._moves:
            self._policy.offload()
            self._offload_companions()
        self._set_may_start(may_start=True)
        self._on_every_engine("wake_up", *((("kv_cache",),) if self.phase == "refitting" else ()))

    def _refit(self) -> None:
        if self._moves and self.phase == "training":
            self._offload_companions()
            self._policy.offload(parts=NOT_WEIGHTS)
            if any(engine.state == "starting" for engine in self._engines.all()):
                # A replacement of an engine that died starts first: it needs an empty device.
                self._policy.offload()
                self._set_may_start(may_start=True)
                self._engines.settled()
                self._policy.onload(parts=WEIGHTS)
        elif self._moves:
            self._on_every_engine("sleep")
            self._policy.onload(parts=WEIGHTS)
        self._set_may_start(may_start=True)
        self._on_every_engine("wake_up", WEIGHTS)

    def _offload_companions(self) -> None:
        if self.phase == "training":  # in every other phase they are away
            for model in self._companions:
                model.offload()

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """Have the policy's weights on the device beside engines that generate, to refit one that was restarted.

        Raises:
            RefitError: the phase is just changing, or the engines sleep. It does not wait for that: whoever changes the
                phase may be waiting for the engine that is healed.
        """
        if not self._lock.acquire(blocking=False):
            raise RefitError("engines and trainer are just exchanging the devices")
        try:
            if self._moves and self.phase == "training":
                raise RefitError("the engines sleep while the policy trains")
            offloaded = self._moves and self.phase == "generating"
            if offloaded:
                self._policy.onload(parts=WEIGHTS)
            try:
                yield
            finally:
                if offloaded:
                    self._policy.offload(parts=WEIGHTS)
        finally:
            self._lock.release()

    def explain(self) -> str:
        """What is moved when."""
        if not self._moves:
            return "engines and trainer work alternately; on a CPU they share one memory, and nothing is moved"
        return (
            "engines and trainer share the GPUs alternately: while one works, the other's weights, and the policy's "
            "gradients and optimizer state, are in host memory"
        )

    def _on_every_engine(self, method: str, *arguments: Any) -> None:
        present = [engine for engine in self._engines.all() if engine.state in ("waiting", "serving")]
        pendings = [(engine, engine.process().submit(method, *arguments)) for engine in present]
        for engine, pending in pendings:
            self._engines.await_call(engine, pending)

    def _set_may_start(self, *, may_start: bool) -> None:
        """Allow or forbid that a replacement starts; forbidding waits for those that have begun."""
        changed = self._engines.changed
        with changed:
            self._may_start = may_start
            changed.notify_all()
            changed.wait_for(lambda: may_start or not self._starting)  # each start has a deadline of its own

    @contextlib.contextmanager
    def _startup_slot(self) -> Iterator[None]:
        """Wait until an engine may start on these devices, or the pool is closed."""
        changed = self._engines.changed
        with changed:
            changed.wait_for(lambda: self._may_start or self._engines.closed)
            self._starting += 1
        try:
            yield
        finally:
            with changed:
                self._starting -= 1
                changed.notify_all()


class ColocatedModel:
    """A policy, or a model beside it, on shared devices: its methods enter the phase of their row first.

    What the table does not name is passed through. `offload_references` keeps references in host memory between their
    calls.
    """

    def __init__(self, model: Any, colocation: Colocation, *, offload_references: bool = False) -> None:
        self._model, self._colocation, self._offload_references = model, colocation, offload_references

    def __getattr__(self, name: str) -> Any:
        """The model's attribute; a method of the table enters its phase when it is called."""
        attribute = getattr(self._model, name)
        row = POLICY_METHODS.get(name)
        if row is None or row.phase is None:
            return attribute
        phase, returns_model = row.phase, row.returns.endswith("model")

        def call(*arguments: Any, **options: Any) -> Any:
            self._colocation.enter(phase)
            # The base model under adapters is the policy's own and needs no memory; a copy of the policy does.
            if name == "freeze_reference" and self._offload_references and not options.get("without_adapters"):
                options["offload"] = True
            result = attribute(*arguments, **options)
            if name == "load_companion":
                self._colocation.add(result)
            return ColocatedModel(result, self._colocation) if returns_model else result

        return call

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rate: float = self._model.learning_rate
        return rate

    def close(self) -> None:
        """Close the model, which is moved no more."""
        self._colocation.remove(self._model)
        self._model.close()

    @property
    def version(self) -> int:
        """Optimizer steps that the policy's weights have seen."""
        version: int = self._model.version
        return version

    @version.setter
    def version(self, version: int) -> None:
        self._model.version = version

    def explain(self) -> str:
        """How the policy is sharded, and that it shares its devices."""
        return f"{self._model.explain()}\n{self._colocation.explain()}"

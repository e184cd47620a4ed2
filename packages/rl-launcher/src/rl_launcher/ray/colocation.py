"""Engines and a trainer on the same devices: whoever's turn it is has their memory, and the other gives its own away.

    generating   the policy is in the host's memory, the engines are awake
    refitting    the policy's weights and the engines' are there, but no gradients, optimizer state or caches
    training     the policy is there, the engines sleep: their weights are in the host's memory

A turn is taken by asking: a method of the policy begins training, `generate` begins generating, a refit is a refit. On
a CPU nothing is moved, since there is one memory; what is left is that the two do not compute at once.
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Tensor

from rl_backends import OptimizerConfig
from rl_generation import Rollout, Sampling
from rl_launcher.errors import Refusal
from rl_launcher.ray.engines import EngineGroup
from rl_launcher.run_parts import WeightSync
from rl_launcher.schema import Recipe
from rl_refit import RefitError, RefitReport

__all__ = ["TurnEngine", "TurnModel", "TurnPolicy", "TurnSync", "Turns", "check_turns"]

WEIGHTS = ("weights",)
NOT_WEIGHTS = ("gradients", "optimizer")

Turn = Literal["generating", "refitting", "training"]


class Movable(Protocol):
    """A policy that can give its devices' memory away."""

    def offload(self, *, parts: Sequence[str] | None = None) -> Any:
        """All of it, or "weights", "gradients", "optimizer"."""

    def onload(self, *, parts: Sequence[str] | None = None) -> Any:
        """Take it back."""


def check_turns(recipe: Recipe) -> None:
    """Refuse what cannot take turns.

    Raises:
        Refusal: asynchronous GRPO on devices that engines and trainer share.
    """
    asynchronous = recipe.grpo is not None and recipe.grpo.async_grpo is not None
    if asynchronous and recipe.cluster.runtime == "ray" and recipe.policy.generation.colocated.enabled:
        raise Refusal(
            "grpo.async_grpo samples while the policy trains, and policy.generation.colocated.enabled=true has them "
            "take turns; give engines places of their own: colocated.enabled=false and "
            "colocated.resources.gpus_per_node=1, or more"
        )


class Turns:
    """Whose turn it is. A change is made under a lock, by who asks for it.

    Args:
        policy: What trains.
        engines: What samples; begins with its turn: it starts while the policy is away.
        moves: Whether there is memory to give away: on GPUs.
    """

    def __init__(self, policy: Movable, engines: EngineGroup, *, moves: bool) -> None:
        self._policy, self._engines, self._moves = policy, engines, moves
        self._lock = threading.RLock()
        self._free, self._starting = True, 0
        self.turn: Turn = "training"
        engines.room = self._room

    def begin(self) -> None:
        """Make room for the engines to start."""
        with self._lock:
            if self._moves:
                self._policy.offload()
            self.turn = "generating"

    def train(self) -> None:
        """The policy's turn."""
        with self._lock:
            if self.turn == "training":
                return
            if self._moves:
                self._let_start(free=False)
            if self.turn == "refitting":  # vLLM goes to sleep from being wide awake only
                self._everywhere("wake_up", ("kv_cache",))
            self._everywhere("sleep")
            if self._moves:
                self._policy.onload()
            self.turn = "training"

    def generate(self) -> None:
        """The engines' turn."""
        with self._lock:
            if self.turn == "generating":
                return
            if self._moves:
                self._policy.offload()
            self._let_start(free=True)
            self._everywhere("wake_up", *((("kv_cache",),) if self.turn == "refitting" else ()))
            self.turn = "generating"

    def refit(self) -> None:
        """Both sides' weights, and nothing else. An engine that died meanwhile starts first, on an empty device."""
        with self._lock:
            if self.turn == "refitting":
                return
            if self._moves and self.turn == "training":
                self._policy.offload(parts=NOT_WEIGHTS)
                if any(engine.state == "starting" for engine in self._engines.all()):
                    self._policy.offload()
                    self._let_start(free=True)
                    self._engines.settled()
                    self._policy.onload(parts=WEIGHTS)
            elif self._moves:
                self._everywhere("sleep")
                self._policy.onload(parts=WEIGHTS)
            self._let_start(free=True)
            self._everywhere("wake_up", WEIGHTS)
            self.turn = "refitting"

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """The policy's weights, beside engines that generate: for one among them that was started anew.

        Raises:
            RefitError: a turn is changing just now, or the engines sleep. Never waits: who changes it may wait for what
                heals.
        """
        if not self._lock.acquire(blocking=False):
            raise RefitError("engines and trainer are changing turns")
        try:
            if self._moves and self.turn == "training":
                raise RefitError("the engines sleep while the policy trains")
            away = self._moves and self.turn == "generating"
            if away:
                self._policy.onload(parts=WEIGHTS)
            try:
                yield
            finally:
                if away:
                    self._policy.offload(parts=WEIGHTS)
        finally:
            self._lock.release()

    def explain(self) -> str:
        """What is moved when."""
        if not self._moves:
            return "engines and trainer take turns; on a CPU they share one memory, and nothing is moved"
        return (
            "engines and trainer take turns: while one works, the other's weights, and the policy's gradients and "
            "optimizer state, are in the host's memory"
        )

    def _everywhere(self, method: str, *arguments: Any) -> None:
        limit_s = self._engines.limits.call_timeout_s
        there = [engine for engine in self._engines.all() if engine.state in ("waiting", "serving")]
        pending = [(engine, engine.process().submit(method, *arguments)) for engine in there]
        for engine, each in pending:
            self._engines.waited(engine, each, timeout_s=limit_s)

    def _let_start(self, *, free: bool) -> None:
        """Say whether an engine may start now; if none may, wait for those that had begun: then they can be asked."""
        changed = self._engines.changed
        with changed:
            self._free = free
            changed.notify_all()
            changed.wait_for(lambda: free or not self._starting)  # each of them has a deadline of its own

    @contextlib.contextmanager
    def _room(self) -> Iterator[None]:
        """An engine's start: once the devices are free, or nobody waits for it any more."""
        changed = self._engines.changed
        with changed:
            changed.wait_for(lambda: self._free or self._engines.closed)
            self._starting += 1
        try:
            yield
        finally:
            with changed:
                self._starting -= 1
                changed.notify_all()


class TurnModel:
    """A model of the trainer's that nothing trains, a reference or a teacher, in its turn."""

    def __init__(self, model: Any, turns: Turns) -> None:
        self._model, self._turns = model, turns

    def logp(self, examples: Any) -> Tensor:
        """As the model's."""
        self._turns.train()
        logp: Tensor = self._model.logp(examples)
        return logp

    def topk_logits(self, examples: Any, k: int) -> Any:
        """As the model's."""
        self._turns.train()
        return self._model.topk_logits(examples, k)


class TurnPolicy:
    """A `TrainedPolicy` that takes its turn before it computes. What else the policy has, it has, too."""

    def __init__(self, policy: Any, turns: Turns, *, offload_reference: bool = False) -> None:
        self._policy, self._turns, self._offload_reference = policy, turns, offload_reference

    @property
    def version(self) -> int:
        """Optimizer steps that the weights have seen."""
        version: int = self._policy.version
        return version

    @version.setter
    def version(self, version: int) -> None:
        self._policy.version = version

    @property
    def learning_rate(self) -> float:
        """Of the next step."""
        rate: float = self._policy.learning_rate
        return rate

    def start_training(self, optimizer: OptimizerConfig, *, num_steps: int, temperature: float = 1.0) -> None:
        """Begin a stage with a fresh optimizer."""
        self._turns.train()
        self._policy.start_training(optimizer, num_steps=num_steps, temperature=temperature)

    def logp(self, examples: Any) -> Tensor:
        """As the policy's, like all that follow."""
        self._turns.train()
        logp: Tensor = self._policy.logp(examples)
        return logp

    def forward_backward(self, examples: Any, loss: Any, *, output: Any = "logp") -> dict[str, Tensor]:
        """Accumulate the gradient."""
        self._turns.train()
        sums: dict[str, Tensor] = self._policy.forward_backward(examples, loss, output=output)
        return sums

    def optim_step(self) -> float:
        """Update."""
        self._turns.train()
        norm: float = self._policy.optim_step()
        return norm

    def freeze_reference(self, *, without_adapters: bool = False) -> TurnModel:
        """The policy as it is now, frozen; where memory is given away, kept in the host's.

        without_adapters: what its adapters were put into, which has no memory of its own.
        """
        self._turns.train()
        options = {"offload": True} if self._offload_reference else {}
        if without_adapters:
            options = {"without_adapters": True}
        return TurnModel(self._policy.freeze_reference(**options), self._turns)

    def load_teacher(self, model_name: str, **options: Any) -> TurnModel:
        """Another model of the trainer's."""
        self._turns.train()
        return TurnModel(self._policy.load_teacher(model_name, **options), self._turns)

    def save_adapter(self, folder: str | Path, *, base_model_name: str) -> None:
        """Write the adapters in PEFT's format."""
        self._turns.train()
        self._policy.save_adapter(folder, base_model_name=base_model_name)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face model folder."""
        self._turns.train()
        self._policy.save_pretrained(folder)

    def save_checkpoint(self, folder: str | Path, *, weights: bool = True, **options: Any) -> Any:
        """Write optimizer, schedule and weights."""
        self._turns.train()
        return self._policy.save_checkpoint(folder, weights=weights, **options)

    def load_checkpoint(self, folder: str | Path, *, weights: bool = True, **options: Any) -> Any:
        """Go on from what `save_checkpoint` wrote."""
        self._turns.train()
        return self._policy.load_checkpoint(folder, weights=weights, **options)

    def explain(self) -> str:
        """How it is sharded, and that it takes turns."""
        return f"{self._policy.explain()}\n{self._turns.explain()}"

    def close(self) -> None:
        """End it."""
        self._policy.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


class TurnEngine:
    """A `ServingEngine` that takes its turn before it answers."""

    def __init__(self, engine: Any, turns: Turns) -> None:
        self._engine, self._turns = engine, turns

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling | Sequence[Sampling]) -> Sequence[Rollout]:
        """As the engine's."""
        self._turns.generate()
        rollouts: Sequence[Rollout] = self._engine.generate(prompts, sampling)
        return rollouts

    def metrics(self) -> dict[str, float]:
        """As the engine's."""
        metrics: dict[str, float] = self._engine.metrics()
        return metrics

    def explain(self) -> str:
        """As the engine's."""
        text: str = self._engine.explain()
        return text

    def close(self) -> None:
        """End it."""
        self._engine.close()


class TurnSync:
    """A `WeightSync` that has both sides' weights on the devices, and nothing else."""

    def __init__(self, sync: WeightSync, turns: Turns) -> None:
        self._sync, self._turns = sync, turns
        self.count = 0
        """Refits that were verified and committed."""
        self.last: RefitReport | None = None
        """The report of the latest of them."""

    def __call__(self, *, version: int) -> RefitReport:
        """As the other's."""
        self._turns.refit()
        self.last = report = self._sync(version=version)
        self.count += 1
        return report

    def metrics(self) -> dict[str, float]:
        """As the other's."""
        return self._sync.metrics()

    def explain(self) -> str:
        """As the other's, and that the two take turns."""
        return f"{self._sync.explain()}\n{self._turns.explain()}"

"""Progress of a run between two optimizer steps: everything a resumed run needs besides weights and optimizer.

Weights, optimizer and schedule are the backend's own affair. The orders of data and the seeds of calls depend on the
recipe's seed and on the numbers here alone.

{"groups": [{"ticket": 3, "tokens": Tensor}]}  ->  {"groups": [{"ticket": 3, "tokens": {"$tensor": "state/0"}}]}
                                                   {"state/0": Tensor}
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rl_launcher.checkpoints.folders import POLICY
from rl_launcher.errors import Refusal
from rl_launcher.run_parts import Parts

__all__ = ["NUMBER_FIELDS", "Progress", "data_digest", "pack", "unpack"]

NUMBER_FIELDS = (
    "stage",
    "step",
    "total",
    "version",
    "order",
    "calls",
    "before",
    "wall_s",
    "reward_errors",
    "refits",
    "metric",
    "restarts",
    "logs",
    "data",
    "code",
    "cwd",
)


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come. The recorder moves it on after every step."""

    stage: str | None = None
    """The stage of the last step; None before the first."""

    step: int = 0
    """Optimizer steps that this stage has gone through."""

    total: int = 0
    """As `step`, over all stages: what a checkpoint is called by."""

    version: int = 0
    """Optimizer steps that the weights have seen: less than `total` where a batch had nothing to train on."""

    order: dict[str, int] | None = None
    """Where in the order of the prompts the stage stands, if its step alone does not say."""

    calls: int = 0
    """Calls of the engine that were given a seed so far."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What the stage made at its start and cannot make again, as DPO's pairs."""

    state: Any = None
    """What the stage's loop keeps besides, as the replay buffer; only of a run that was loaded."""

    before: dict[str, float] | None = None
    """Held-out figures before the stage that the run is about."""

    wall_s: float = 0.0
    """Seconds that the run took before this process went on with it."""

    reward_errors: int = 0
    """Answers that could not be judged so far."""

    refits: int = 0
    """Refits so far."""

    metric: float | None = None
    """The last value of `checkpointing.metric_name`."""

    restarts: int = 0
    """How often the run went on by itself after it had lost a process."""

    logs: dict[str, int] = field(default_factory=dict)
    """Bytes of each file of the log that belong to the steps so far."""

    data: str = ""
    """Fingerprint of the data, which a resumed run must find unchanged."""

    code: dict[str, str] = field(default_factory=dict)
    """Digest of the file of each function that the recipe names, by key: a resumed run tells which is another."""

    cwd: str = ""
    """Where the run was started: its recipe's paths are relative to it."""

    folder: Path | None = None
    """The checkpoint that it was loaded from; None for a run from its beginning."""

    keep_state: Callable[[], Any] | None = None
    """Gives what becomes `state` when a checkpoint is saved."""

    @property
    def numbers(self) -> dict[str, Any]:
        """What goes into `progress.json`."""
        return {name: getattr(self, name) for name in NUMBER_FIELDS}

    @property
    def weights(self) -> Path:
        """Where the backend's part of the checkpoint lies that this was loaded from.

        Raises:
            ValueError: it was loaded from none.
        """
        if self.folder is None:
            raise ValueError("a run from its beginning was loaded from no checkpoint")
        return self.folder / POLICY

    def steps_of(self, stage: str) -> int:
        """Steps of `stage` that are already done when the run goes on there; 0 if it begins there."""
        return self.step if self.stage == stage else 0

    def reach(self, stage: str, step: int, *, parts: Parts, order: Mapping[str, int] | None = None) -> None:
        """Note that `step` of `stage` is done."""
        self.total += step - self.steps_of(stage)
        self.stage, self.step, self.version = stage, step, parts.policy.version
        self.order = None if order is None else dict(order)
        self.calls = parts.engine.seeds.calls
        self.reward_errors, self.refits = parts.environment.errors, parts.weight_sync.count

    def restore(self, parts: Parts) -> None:
        """Give the parts of a new process the weights and the counts that the run has reached."""
        if self.folder is not None:
            parts.policy.load_checkpoint(self.weights, optimizer=False)
        parts.policy.version, parts.engine.seeds.calls = self.version, self.calls
        parts.environment.errors, parts.weight_sync.count = self.reward_errors, self.refits

    def check(self, parts: Parts) -> None:
        """Hold a run that goes on to the place and the data that it began with.

        Raises:
            Refusal: it was started elsewhere, or the data have changed since.
        """
        if self.folder is None:
            return
        if self.cwd != str(Path.cwd()):
            raise Refusal(
                f"the run was started in {self.cwd}, and its recipe's paths are relative to it; resume it there"
            )
        if self.data != data_digest(parts):
            raise Refusal(
                f"the data are no longer those that the run in {self.folder.parents[1]} began with, so it cannot go "
                f"on as if it had not stopped; bring them back, or start anew from its weights: "
                f"rl-launcher export {self.folder} FOLDER, then policy.model_name=FOLDER"
            )


def data_digest(parts: Parts) -> str:
    """A fingerprint of all prompts, demonstrations and pairs in their order, with what a reward may read."""
    digest = hashlib.sha256()
    for items in (parts.prompts, parts.held_out, parts.demonstrations, parts.held_out_demonstrations):
        digest.update(b"%d\n" % len(items))
        for item in items:
            digest.update(json.dumps([item.tokens, _plain(getattr(item.row, "columns", {}))]).encode() + b"\n")
    if parts.pairs is not None:
        digest.update(parts.pairs.digest().encode())
    return digest.hexdigest()


def _plain(value: object) -> Any:
    """A value of a column, the same in every process; of what is named by its address, only its type."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {
            "mapping": sorted(([repr(key), _plain(inner)] for key, inner in value.items()), key=lambda pair: pair[0])
        }
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    text = repr(value)
    return {"type": type(value).__qualname__, "text": "" if " at 0x" in text else text}


TENSOR, TUPLE, SEVERAL = "$tensor", "$tuple", "$mapping"


def pack(value: Any, *, prefix: str) -> tuple[Any, dict[str, Tensor]]:
    """Split `value` into what JSON holds and what safetensors holds; tensors are copied to the CPU.

    Raises:
        TypeError: it holds something that is neither a tensor nor text, a number, a boolean, None, a list, a tuple or
            a mapping by text: no object is pickled.
    """
    tensors: dict[str, Tensor] = {}
    return _packed(value, tensors, prefix), tensors


def unpack(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """What `pack` was given; mappings come back as dicts.

    Raises:
        KeyError: a tensor is missing.
    """
    if isinstance(value, list):
        return [unpack(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {TENSOR}:
        return tensors[value[TENSOR]]
    if value.keys() == {TUPLE}:
        return tuple(unpack(item, tensors) for item in value[TUPLE])
    inner = value[SEVERAL] if value.keys() == {SEVERAL} else value
    return {name: unpack(item, tensors) for name, item in inner.items()}


def _packed(value: Any, tensors: dict[str, Tensor], prefix: str) -> Any:
    if torch.is_tensor(value):
        name = f"{prefix}/{len(tensors)}"
        tensors[name] = value.detach().to("cpu", copy=True).contiguous()
        return {TENSOR: name}
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, tuple):
        return {TUPLE: [_packed(item, tensors, prefix) for item in value]}
    if isinstance(value, list):
        return [_packed(item, tensors, prefix) for item in value]
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        inner = {name: _packed(item, tensors, prefix) for name, item in value.items()}
        # A mapping that looks like one of the marks is wrapped, so that it comes back as it was.
        return {SEVERAL: inner} if len(inner) == 1 and next(iter(inner)) in {TENSOR, TUPLE, SEVERAL} else inner
    raise TypeError(
        f"state of type {type(value).__name__} cannot be saved: give tensors, text, numbers, booleans, None, lists, "
        f"tuples and mappings by text"
    )

"""Where a run stands between two optimizer steps, saved beside its weights and found again.

    interrupted/   model and tokenizer (a Hugging Face folder), optimizer.*, progress.json, progress.safetensors

Everything else that a run needs is in its recipe: data order and shuffles depend on the seed and the step alone.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_launcher.building import Parts
from rl_launcher.errors import LauncherError
from rl_launcher.observe import RunDirectory

__all__ = ["Progress", "load_progress", "save_progress"]

NUMBERS, TENSORS, ENGINE_RNG = "progress.json", "progress.safetensors", "engine_rng"
NUMBER_FIELDS = ("stage", "step", "version", "before", "wall_s", "reward_errors", "refits")


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come. The recorder moves it on after every step."""

    stage: str | None = None
    """The stage of the last step; None before the first."""

    step: int = 0
    """Optimizer steps that this stage has gone through."""

    version: int = 0
    """Optimizer steps that the weights have seen, over all stages."""

    engine_rng: Tensor | None = None
    """State of the engine's generator after the last step."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What the stage made at its start and cannot make again, as DPO's pairs."""

    before: dict[str, float] | None = None
    """Held-out figures before the stage that the run is about."""

    wall_s: float = 0.0
    """Seconds that the run took before this process went on with it."""

    reward_errors: int = 0
    """Answers that could not be judged so far."""

    refits: int = 0
    """Refits so far."""

    folder: Path | None = None
    """Where it was loaded from; None for a run from its beginning."""

    def steps_of(self, stage: str) -> int:
        """Steps of `stage` that are already done when the run goes on there; 0 if it begins there."""
        return self.step if self.stage == stage else 0

    def reach(self, stage: str, step: int, *, parts: Parts) -> None:
        """Note that `step` of `stage` is done."""
        self.stage, self.step, self.version = stage, step, parts.policy.version
        self.engine_rng = parts.engine.get_rng_state()
        self.reward_errors, self.refits = parts.environment.errors, parts.weight_sync.count

    def restore(self, parts: Parts) -> None:
        """Give the parts of a new process the counts that the run has reached."""
        parts.policy.version = self.version
        parts.environment.errors, parts.weight_sync.count = self.reward_errors, self.refits

    def is_exact(self, parts: Parts) -> bool:
        """Whether the weights are those of the last step; not so in the middle of a batch of rollouts."""
        return self.version == parts.policy.version


def save_progress(progress: Progress, parts: Parts, directory: RunDirectory) -> None:
    """Write weights, optimizer and progress; what an earlier interruption left is replaced only when they are whole.

    Where the weights are not those of the last step, only they are written: nothing could go on from there exactly.
    """
    unfinished = directory.interrupted.with_name("interrupted.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    parts.policy.save_pretrained(unfinished)
    parts.tokenizer.save_pretrained(unfinished)
    if progress.is_exact(parts):
        _write_state(progress, parts, unfinished)
    shutil.rmtree(directory.interrupted, ignore_errors=True)
    unfinished.rename(directory.interrupted)


def _write_state(progress: Progress, parts: Parts, folder: Path) -> None:
    if progress.stage is not None:
        parts.policy.save_training_state(folder)
    generator = {} if progress.engine_rng is None else {ENGINE_RNG: progress.engine_rng}
    save_file({**progress.tensors, **generator}, folder / TENSORS)
    numbers = {name: getattr(progress, name) for name in NUMBER_FIELDS}
    (folder / NUMBERS).write_text(json.dumps(numbers), encoding="utf-8")


def load_progress(directory: RunDirectory) -> Progress:
    """Find where an interrupted run stands.

    Raises:
        LauncherError: the run has finished, or ended in the middle of a step, from where it cannot go on exactly.
    """
    folder = directory.interrupted
    if not (folder / NUMBERS).is_file():
        why = "it has finished" if directory.model.exists() else f"{folder} holds no {NUMBERS}"
        raise LauncherError(f"{directory.path} has nothing to resume: {why}")
    tensors = load_file(folder / TENSORS)
    numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    return Progress(**numbers, engine_rng=tensors.pop(ENGINE_RNG, None), tensors=tensors, folder=folder)

"""Where a run stands between two optimizer steps, saved beside its weights and found again.

    interrupted/   model and tokenizer (a Hugging Face folder), optimizer/, progress.json, progress.safetensors

Everything else that a run needs is in its recipe: data order and shuffles depend on the seed and the step alone.
"""

import hashlib
import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rl_launcher.building import Parts
from rl_launcher.errors import LauncherError
from rl_launcher.observe import RunDirectory

__all__ = ["OPTIMIZER", "Progress", "load_progress", "save_model", "save_progress"]

NUMBERS, TENSORS, ENGINE_RNG = "progress.json", "progress.safetensors", "engine_rng"
OPTIMIZER = "optimizer"
"""The checkpoint of the training backend, without weights: those are beside it."""

NUMBER_FIELDS = ("stage", "step", "version", "before", "wall_s", "reward_errors", "refits", "data", "cwd")


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

    data: str = ""
    """Fingerprint of the prompts, which a resumed run must find unchanged."""

    cwd: str = ""
    """Where the run was started: its recipe's paths are relative to it."""

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

    def check(self, parts: Parts) -> None:
        """Hold a resumed run to the prompts that it began with.

        Raises:
            LauncherError: the data have changed since.
        """
        if self.data != data_digest(parts):
            raise LauncherError(
                f"the prompts are no longer those that the run in {self.folder} began with, so it cannot go on as if "
                f"it had not stopped; bring the data back, or start from its weights: policy.model_name={self.folder}"
            )


def data_digest(parts: Parts) -> str:
    """A fingerprint of all prompts and demonstrations, in their order."""
    tokens = [[item.tokens for item in items] for items in (parts.prompts, parts.held_out, parts.demonstrations)]
    return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()


def save_model(parts: Parts, folder: Path) -> None:
    """Write model and tokenizer as one Hugging Face folder, whole or not at all."""
    unfinished = folder.with_name(folder.name + ".saving")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        parts.policy.save_pretrained(unfinished)
        parts.tokenizer.save_pretrained(unfinished)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def save_progress(progress: Progress, parts: Parts, directory: RunDirectory, *, exact: bool) -> None:
    """Write weights, optimizer and progress; what an earlier interruption left is replaced only when they are whole.

    Where the weights are not those of the last step (`exact` is False), only they are written: nothing could go on from
    there as if the run had not stopped.
    """
    unfinished = directory.interrupted.with_name("interrupted.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        save_model(parts, unfinished)
        if exact:
            progress.data, progress.cwd = data_digest(parts), str(Path.cwd())
            _write_state(progress, parts, unfinished)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    shutil.rmtree(directory.interrupted, ignore_errors=True)
    unfinished.rename(directory.interrupted)


def _write_state(progress: Progress, parts: Parts, folder: Path) -> None:
    if progress.stage is not None:
        parts.policy.save_checkpoint(folder / OPTIMIZER, weights=False)
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
    try:
        tensors = load_file(folder / TENSORS)
        numbers = json.loads((folder / NUMBERS).read_text(encoding="utf-8"))
    except (OSError, ValueError, SafetensorError) as error:
        raise LauncherError(f"{folder} cannot be resumed from: {error}") from error
    if set(numbers) != set(NUMBER_FIELDS):
        raise LauncherError(f"{folder / NUMBERS} must have {', '.join(NUMBER_FIELDS)}; it has {', '.join(numbers)}")
    if numbers["cwd"] != str(Path.cwd()):
        raise LauncherError(
            f"the run was started in {numbers['cwd']}, and its recipe's paths are relative to it; resume it there"
        )
    return Progress(**numbers, engine_rng=tensors.pop(ENGINE_RNG, None), tensors=tensors, folder=folder)

"""The progress of a run: everything that a resumed run needs besides weights, optimizer and schedule.

Those three are saved by the backend. The order of the data and the seeds of generation calls follow from the recipe's
seed and the numbers here.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from rl_algorithms.chat import Prompt
from rl_algorithms.tokenized_data import Imitated, rows_digest
from rl_launcher.build.parts import Parts
from rl_launcher.checkpoints.folders import POLICY
from rl_launcher.errors import Refusal


@dataclass(slots=True, kw_only=True)
class Progress:
    """How far a run has come. The recorder advances it after every step."""

    stage: str | None = None
    """The stage of the last step, or None before the first step."""
    step: int = 0
    """Steps of this stage so far."""
    total: int = 0
    """Steps over all stages so far; the name of a checkpoint."""
    version: int = 0
    """Optimizer steps that the policy's weights have seen: fewer than its share of `total` if a batch had nothing to
    train on."""
    versions: list[int] = field(default_factory=lambda: [0])
    """The same of every model that the current stage trains, the policy's first."""
    reward_model_steps: int = 0
    """Those of `total` that trained the reward model."""
    order: dict[str, int] | None = None
    """The stage's position in the order of prompts, if it does not follow from `step`."""
    calls: int = 0
    """Engine calls that used a seed so far."""
    before: dict[str, float] | None = None
    """The held-out figures before the main stage."""
    wall_s: float = 0.0
    """Seconds that the run took in earlier processes."""
    reward_errors: int = 0
    """Responses whose reward failed so far."""
    refits: int = 0
    """Refits so far."""
    metric: float | None = None
    """The last value of `checkpointing.metric_name`."""
    restarts: int = 0
    """How often the run restarted by itself after it lost a process."""
    logs: dict[str, int] = field(default_factory=dict)
    """The bytes of each log file that belong to the steps so far."""
    data: str = ""
    """A digest of the data, which must be unchanged when the run is resumed."""
    code: dict[str, str] = field(default_factory=dict)
    """A digest of the file of each function in the recipe, by key, to report which ones changed."""
    cwd: str = ""
    """The directory that the run was started in, and its recipe's paths are relative to."""

    # These are not in progress.json.
    tensors: dict[str, Tensor] = field(default_factory=dict)
    """What the stage computed at its start and cannot compute again, such as DPO's reference log-probabilities."""
    state: Any = None
    """Further state of the stage's loop, such as the replay buffer; set when a checkpoint is loaded."""
    folder: Path | None = None
    """The checkpoint that it was loaded from, or None for a new run."""
    keep_state: Callable[[], Any] | None = None
    """Returns the value of `state` when a checkpoint is saved."""

    @property
    def numbers(self) -> dict[str, Any]:
        """The content of `progress.json`."""
        return {name: getattr(self, name) for name in NUMBER_FIELDS}

    def weights(self, model: str = POLICY) -> Path:
        """The folder of a model in the checkpoint that this was loaded from; a new run has none."""
        if self.folder is None:
            raise ValueError("a new run has no checkpoint to load weights from")
        return self.folder / model

    @property
    def skipped(self) -> int:
        """Steps of the policy that were left out because their batch had nothing to train on."""
        return self.total - self.reward_model_steps - self.version

    def steps_of(self, stage: str) -> int:
        """Return the steps of `stage` that are already done: 0 if the run did not stop within it."""
        return self.step if self.stage == stage else 0

    def reach(self, stage: str, step: int, *, parts: Parts, order: Mapping[str, int] | None = None) -> None:
        """Record that `step` of `stage` is done."""
        taken = step - self.steps_of(stage)
        self.total += taken
        if stage == "reward_model":
            self.reward_model_steps += taken
        self.stage, self.step, self.version, self.versions = stage, step, parts.policy.version, parts.versions
        self.order = None if order is None else dict(order)
        self.calls = parts.engine.seeds.calls
        self.reward_errors, self.refits = parts.reward_errors, parts.weight_sync.count

    def restore(self, parts: Parts) -> None:
        """Set the weights and counters of a new process to those that the run has reached."""
        if self.folder is not None:
            parts.policy.load_checkpoint(self.weights(), optimizer=False)
        parts.policy.version, parts.engine.seeds.calls = self.version, self.calls
        parts.environment.errors, parts.weight_sync.count = self.reward_errors, self.refits

    def check(self, parts: Parts) -> None:
        """Check that a resumed run has the directory and the data that it started with.

        Raises:
            Refusal: it was started in another directory, or the data have changed.
        """
        if self.folder is None:
            return
        if self.cwd != str(Path.cwd()):
            raise Refusal(
                f"the run was started in {self.cwd}, and its recipe's paths are relative to it; resume it there"
            )
        if self.data != data_digest(parts):
            raise Refusal(
                f"the data have changed since the run in {self.folder.parents[1]} started, so it cannot continue as "
                f"if it had not stopped; restore them, or start a new run from its weights: "
                f"rl-launcher export {self.folder} FOLDER, then policy.model_name=FOLDER"
            )


NUMBER_FIELDS = tuple(
    each.name for each in fields(Progress) if each.name not in {"tensors", "state", "folder", "keep_state"}
)
"""The fields in `progress.json`."""


def data_digest(parts: Parts) -> str:
    """Return a digest of all prompts, demonstrations and pairs in order, with the columns that a reward may read."""
    data = parts.data
    rows: list[Sequence[Prompt | Imitated]] = [data.prompts, data.held_out]
    rows += [data.demonstrations, data.held_out_demonstrations, *parts.validation.values()]
    return rows_digest(rows, parts.data.pairs, parts.data.labelled, parts.reward_pairs)

"""Models that are trained beside the policy: a reward model and a critic, each with a head of one number.

They start from the policy's weights, so they are made when their stage begins, in the processes that train the policy.
While they train, every checkpoint holds them beside the policy. A reward model that has finished is a Hugging Face
folder in the run directory; it is loaded from there to score responses, so that a resumed run scores the same.
"""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from rl_algorithms.chat import Chat
from rl_algorithms.contracts import ScoreModel, ValueModel
from rl_algorithms.environments.counted_environment import CountedEnvironment
from rl_algorithms.environments.judges import RewardModelJudge
from rl_backends.backend import TrainingBackend
from rl_backends.checkpoints.folders import atomic_folder
from rl_observe import RunDirectory

REWARD_MODEL = "reward_model"
"""The folder of a finished reward model in the run directory."""

LoadCompanion = Callable[..., TrainingBackend]
"""`(folder, *, new_head, seed)`: a model with a head of one number, over the weights in a Hugging Face folder. With
`new_head` the folder is a language model's, and the head is drawn from `seed`."""


@dataclass(slots=True, kw_only=True)
class Companions:
    """The reward model and the critic of a run, as far as there are any by now."""

    load: LoadCompanion
    """Loads one, laid out over ranks as the policy is, without its adapters."""

    trained: dict[str, TrainingBackend] = field(default_factory=dict)
    """Those that the current stage trains, by the name of their folder in a checkpoint."""

    judge: CountedEnvironment | None = None
    """Scores responses with the reward model of this recipe, once that is trained."""

    _frozen: TrainingBackend | None = None

    def make(self, name: str, *, policy: TrainingBackend, folder: Path, seed: int) -> TrainingBackend:
        """Make the model that a stage trains, with the policy's weights and a new head.

        Args:
            name: of its folder in a checkpoint.
            policy: whose weights it starts with.
            folder: where these weights are written and read again, and then removed; all ranks see it.
            seed: of the head.
        """
        shutil.rmtree(folder, ignore_errors=True)  # of a start that was killed
        folder.parent.mkdir(parents=True, exist_ok=True)
        policy.save_pretrained(folder)
        try:
            self.trained[name] = self.load(folder, new_head=True, seed=seed)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return self.trained[name]

    def make_from(self, name: str, folder: Path) -> TrainingBackend:
        """Make the model that a stage trains from a folder that has a head of one number already."""
        self.trained[name] = self.load(folder, new_head=False, seed=0)
        return self.trained[name]

    def finish(self, name: str, folder: Path, *, tokenizer: Any) -> None:
        """Save a model that has been trained, and free it."""
        model = self.trained[name]
        with atomic_folder(folder) as unfinished:
            write_model(unfinished, model=model, tokenizer=tokenizer)
        del self.trained[name]
        model.close()

    def judge_with(self, folder: Path, *, chat: Chat) -> None:
        """Score responses with the reward model in `folder` from now on."""
        self._frozen = self.load(folder, new_head=False, seed=0)
        model: Any = self._frozen
        self.judge = CountedEnvironment(RewardModelJudge(model=model, chat=chat))

    def scoring(self, name: str) -> ScoreModel:
        """One of `trained` as what scores whole rows."""
        model: Any = self.trained[name]  # its `forward_backward` takes further outputs
        return cast("ScoreModel", model)

    def valuing(self, name: str) -> ValueModel:
        """One of `trained` as what values states."""
        model: Any = self.trained[name]
        return cast("ValueModel", model)

    def close(self) -> None:
        """Free all of them. A second time does nothing."""
        models, self.trained = [*self.trained.values()], {}
        if self._frozen is not None:
            models.append(self._frozen)
            self._frozen = None
        for model in models:
            model.close()


def reward_model_folder(run: RunDirectory) -> Path:
    """Where a reward model is once it is trained."""
    return run.path / REWARD_MODEL


def write_model(folder: Path, *, model: TrainingBackend, tokenizer: Any) -> None:
    """Write a model and its tokenizer to an existing, empty folder."""
    weights = folder / "weights"  # a backend refuses a folder that exists
    model.save_pretrained(weights)
    for path in weights.iterdir():
        path.rename(folder / path.name)
    weights.rmdir()
    tokenizer.save_pretrained(folder)

"""The model that a distillation learns from, sharded and computed as the policy is. Trains nothing."""

from dataclasses import dataclass
from typing import Any

from rl_algorithms.contracts import TokenBatch, TopKLogp
from rl_algorithms.distill import require_same_tokenizer
from rl_backends import BackendSelection
from rl_backends.selection import Backend
from rl_launcher.errors import LauncherError
from rl_launcher.loading_policy import load_model
from rl_launcher.recipe_schema import Recipe, TeacherConfig

__all__ = ["FrozenTeacher", "load_teacher"]


@dataclass(frozen=True, slots=True)
class FrozenTeacher:
    """A backend that is only asked; satisfies `rl_algorithms.contracts.Teacher`."""

    backend: Backend

    def topk_logits(self, examples: TokenBatch, k: int) -> TopKLogp:
        """The `k` most probable words in each trainable token's place, at the policy's temperature."""
        return self.backend.topk_logits(examples, k)

    def close(self) -> None:
        """Free its memory."""
        self.backend.close()


def load_teacher(recipe: Recipe, *, selection: BackendSelection, tokenizer: Any) -> FrozenTeacher | None:
    """The teacher of the distill stage; None without such a stage.

    Raises:
        ValueError: there is no such model, or its tokenizer means other words by the same ids.
    """
    if recipe.distill is None:
        return None
    config = recipe.distill.teacher
    model, theirs = load_model(config, seed=recipe.seed, key="distill.teacher.model_name", padded_vocabulary=True)
    check_teacher(config, student=tokenizer, teacher=theirs)
    backend = selection.without_adapters().make(model)
    # The temperature is set by starting; nothing is stepped, so that AdamW never makes its moments.
    backend.start_training(
        recipe.distill.optimizer,
        num_steps=recipe.distill.max_num_steps,
        temperature=recipe.policy.generation.temperature,
    )
    return FrozenTeacher(backend)


def check_teacher(config: TeacherConfig, *, student: Any, teacher: Any) -> None:
    """Refuse a teacher of another vocabulary.

    Raises:
        LauncherError: naming the key.
    """
    try:
        require_same_tokenizer(student, teacher)
    except ValueError as error:
        raise LauncherError(f"distill.teacher.model_name={config.model_name}: {error}") from error

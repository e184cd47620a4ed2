"""Load the policy, its tokenizer and the teacher that a recipe names.

Knows counts and the recipe; injects nothing that is trained, and knows no mesh.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from rl_algorithms.contracts import TokenBatch, TopKLogp
from rl_algorithms.distill import require_same_tokenizer
from rl_backends import (
    BackendSelection,
    ModelError,
    check_generation_config,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    select_backend,
)
from rl_backends.lora import AdapterSize, LoraConfig, adapter_size, add_lora
from rl_backends.selection import Backend
from rl_launcher.errors import Refusal
from rl_launcher.schema import PolicyConfig, Recipe, TeacherConfig
from rl_launcher.user_code import NO_OBJECTS, Objects, call, is_import_string

__all__ = [
    "FrozenTeacher",
    "NamedModel",
    "adapters_of",
    "copies_reference",
    "is_base",
    "learning_rate_hint",
    "load_model",
    "load_policy",
    "load_teacher",
    "named_by_key",
    "stop_token_ids",
]


class NamedModel(Protocol):
    """What names a model: a recipe's `policy`, or its `distill.teacher`."""

    @property
    def model_name(self) -> str:
        """A folder, a hub id, or a function."""

    @property
    def revision(self) -> str | None:
        """Of a hub id."""

    @property
    def trust_remote_code(self) -> bool:
        """Whether code that comes with it is run."""


def load_policy(config: PolicyConfig, *, seed: int, objects: Objects = NO_OBJECTS) -> tuple[Any, Any]:
    """The model and the tokenizer that `model_name` names, whole, in this process.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer is of another vocabulary.
    """
    return load_model(
        config, seed=seed, key="policy.model_name", padded_vocabulary=config.padded_vocabulary, objects=objects
    )


def load_model(
    named: NamedModel, *, seed: int, key: str, padded_vocabulary: bool, objects: Objects = NO_OBJECTS
) -> tuple[Any, Any]:
    """As `load_policy`, of any model that a recipe names under `key`.

    Raises:
        ValueError: as there.
    """
    if objects.model is not None:
        model, tokenizer = objects.model, objects.tokenizer
        check_generation_config(model)
    elif is_import_string(named.model_name):
        model, tokenizer = _built(named.model_name, seed, key)
    else:
        origin, trust = named.revision, named.trust_remote_code
        tokenizer = load_tokenizer(named.model_name, revision=origin, trust_remote_code=trust)
        model = load_causal_lm(named.model_name, revision=origin, trust_remote_code=trust)
    if objects.tokenizer is not None:
        tokenizer = objects.tokenizer
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    return model, tokenizer


def stop_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The tokens that end an answer: the tokenizer's end of sequence, then those of the model's generation config."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    several = configured if isinstance(configured, list) else [configured]
    return tuple(dict.fromkeys(token for token in (tokenizer.eos_token_id, *several) if token is not None))


def _built(text: str, seed: int, key: str) -> tuple[Any, Any]:
    built = call(text, seed, wanted=f"a function that builds a model ({key})")
    if not isinstance(built, tuple) or len(built) != 2:
        raise Refusal(f"{key}={text} returned {type(built).__name__}; it must return (model, tokenizer)")
    check_generation_config(built[0])
    return built


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
        Refusal: naming the key.
    """
    try:
        require_same_tokenizer(student, teacher)
    except ValueError as error:
        raise Refusal(f"distill.teacher.model_name={config.model_name}: {error}") from error


KEY = "policy.dtensor_cfg.lora_cfg"
OF_ADAPTERS = ("target_modules: ", "modules_to_save: ")
"""How a refusal begins that is about a field of `LoraConfig`."""

LOW_LR = 1e-5
"""Below it a learning rate is one for all weights of a model."""


def adapters_of(policy: PolicyConfig, skeleton: nn.Module) -> AdapterSize | None:
    """The adapters that the policy trains, counted; None where it trains all weights.

    skeleton: without weights; taken over.

    Raises:
        Refusal: peft is not installed, or the recipe names modules that cannot be adapted.
    """
    selection = select_backend(policy)
    if selection.adapters is None:
        return None
    try:
        selection.require_installed()
    except ModelError as error:
        raise Refusal(f"{KEY}: {error}") from error
    with named_by_key():
        return adapter_size(add_lora(skeleton, selection.adapters))


@contextmanager
def named_by_key() -> Iterator[None]:
    """What a backend refuses of adapters, under the key that asked for it; all else as it is.

    Raises:
        Refusal: with the key.
    """
    try:
        yield
    except ModelError as error:
        if not str(error).startswith(OF_ADAPTERS):
            raise
        raise Refusal(f"{KEY}.{error}") from error


def is_base(adapters: LoraConfig | None, *, steps_before: int) -> bool:
    """Whether a stage's reference is the policy with its adapters off, which takes no memory: nothing has trained yet.

    steps_before: optimizer steps of the run before the stage.
    """
    return adapters is not None and not adapters.modules_to_save and steps_before == 0


def copies_reference(recipe: Recipe) -> bool:
    """Whether a second copy of the weights is held, frozen, beside those that train."""
    if recipe.grpo is None or recipe.grpo.objective.kl.weight == 0:
        return False
    is_first = next(iter(recipe.stages)) == "grpo"
    return not is_base(select_backend(recipe.policy).adapters, steps_before=0 if is_first else 1)


def learning_rate_hint(recipe: Recipe) -> str | None:
    """Which stages have a learning rate that moves adapters little; None where all of them have another."""
    low = [name for name, stage in recipe.stages.items() if stage.optimizer.lr < LOW_LR]
    if select_backend(recipe.policy).adapters is None or not low:
        return None
    told = ", ".join(f"{name}.optimizer.lr={recipe.stages[name].optimizer.lr:g}" for name in low)
    return f"{told}: a rate for all weights; adapters begin at B = 0 and usually take about ten times as much"

"""The models of a recipe: the policy with its tokenizer, and the teacher; and what it takes to adapt one with LoRA."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from rl_algorithms.distill import require_same_tokenizer
from rl_backends import (
    BackendSelection,
    ModelError,
    check_generation_config,
    check_vocabulary,
    load_causal_lm,
    load_tokenizer,
    open_model,
    select_backend,
)
from rl_backends.backend import Backend
from rl_backends.checkpoints.folders import atomic_folder
from rl_backends.lora.inject import add_lora
from rl_backends.lora.layers import AdapterSize, adapter_size, is_base
from rl_launcher.errors import Refusal
from rl_launcher.schema import PolicyConfig, Recipe, TeacherConfig
from rl_launcher.user_code import NO_OBJECTS, Objects, call, is_import_string

NamedModel: TypeAlias = PolicyConfig | TeacherConfig
"""A section of a recipe that names a model."""


def load_policy(config: PolicyConfig, *, seed: int, objects: Objects = NO_OBJECTS) -> tuple[Any, Any]:
    """Load the model and the tokenizer of `policy.model_name`, unsharded, in this process.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer has another vocabulary.
    """
    return load_model(
        config, seed=seed, key="policy.model_name", padded_vocabulary=config.padded_vocabulary, objects=objects
    )


def load_model(
    named: NamedModel, *, seed: int, key: str, padded_vocabulary: bool, objects: Objects = NO_OBJECTS
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, unsharded, in this process.

    Args:
        named: the section that names it.
        seed: of weights that a function draws.
        key: of the name in the recipe, for messages.
        padded_vocabulary: accept more embeddings than tokens; None takes the policy's setting.
        objects: a model, and its tokenizer, instead.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer has another vocabulary.
    """
    if objects.model is not None:
        model, tokenizer = objects.model, objects.tokenizer
        check_generation_config(model)
    elif is_import_string(named.model_name):
        built = call(named.model_name, seed, wanted=f"a function that builds a model ({key})")
        if not isinstance(built, tuple) or len(built) != 2:
            raise Refusal(
                f"{key}={named.model_name} returned {type(built).__name__}; it must return (model, tokenizer)"
            )
        model, tokenizer = built
        check_generation_config(model)
    else:
        origin, trust = named.revision, named.trust_remote_code
        tokenizer = load_tokenizer(named.model_name, revision=origin, trust_remote_code=trust)
        model = load_causal_lm(named.model_name, revision=origin, trust_remote_code=trust)
    if objects.tokenizer is not None:
        tokenizer = objects.tokenizer
    if tokenizer is None:
        raise Refusal("model is a Python object without a tokenizer; give tokenizer, too")
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    return model, tokenizer


class ModelSkeleton(NamedTuple):
    """The model of a recipe without its weights, and a name that other processes can load."""

    name: str
    """What they load: a folder, or a hub id."""
    revision: str | None
    """Of a hub id."""
    model: Any
    """With its configurations; its weights may be on the meta device."""
    tokenizer: Any


def read_skeleton(
    named: NamedModel,
    *,
    seed: int,
    key: str,
    padded_vocabulary: bool,
    folder: Path,
    objects: Objects = NO_OBJECTS,
) -> ModelSkeleton:
    """Read the model that a section of the recipe names; `key` is for errors.

    A model that a function makes (from `seed`), or that is given as an object, is saved in `folder` for others; what an
    earlier start left there is replaced. `padded_vocabulary` accepts more embeddings than tokens.

    Raises:
        ValueError: there is no such model, its function fails, or the tokenizer has another vocabulary.
    """
    model: Any
    if objects.model is not None or is_import_string(named.model_name):
        model, tokenizer = load_model(named, seed=seed, key=key, padded_vocabulary=padded_vocabulary, objects=objects)
        with atomic_folder(folder) as unfinished:
            model.save_pretrained(unfinished)
            tokenizer.save_pretrained(unfinished)
        return ModelSkeleton(name=str(folder.absolute()), revision=None, model=model, tokenizer=tokenizer)
    options: dict[str, Any] = {"revision": named.revision, "trust_remote_code": named.trust_remote_code}
    tokenizer = objects.tokenizer
    if tokenizer is None:  # an object may be falsy: a tokenizer has a length
        tokenizer = load_tokenizer(named.model_name, **options)
    model = open_model(named.model_name, **options).skeleton()
    check_vocabulary(
        model_vocab_size=model.get_input_embeddings().num_embeddings,
        tokenizer_size=len(tokenizer),
        allow_padded=padded_vocabulary,
    )
    path = Path(named.model_name).expanduser()
    name = str(path.absolute()) if path.is_dir() else named.model_name
    return ModelSkeleton(name=name, revision=named.revision, model=model, tokenizer=tokenizer)


# -- The teacher ---------------------------------------------------------------------------------------------------


def load_teacher(recipe: Recipe, *, selection: BackendSelection, tokenizer: Any) -> Backend | None:
    """Load the teacher of the distill stage, which is queried and never trained; None without such a stage.

    Raises:
        ValueError: there is no such model, or its tokenizer gives the same ids other meanings.
    """
    if recipe.distill is None:
        return None
    config = recipe.distill.teacher
    model, teacher_tokenizer = load_model(
        config, seed=recipe.seed, key="distill.teacher.model_name", padded_vocabulary=True
    )
    check_teacher(config, student=tokenizer, teacher=teacher_tokenizer)
    backend = selection.without_adapters().make(model)
    # Starting sets the temperature. No step is taken, so AdamW never allocates its moments.
    backend.start_training(
        recipe.distill.optimizer,
        num_steps=recipe.distill.max_num_steps,
        temperature=recipe.policy.generation.temperature,
    )
    return backend


def check_teacher(config: TeacherConfig, *, student: Any, teacher: Any) -> None:
    """Refuse a teacher with another tokenizer.

    Raises:
        Refusal: naming the key.
    """
    try:
        require_same_tokenizer(student, teacher)
    except ValueError as error:
        raise Refusal(f"distill.teacher.model_name={config.model_name}: {error}") from error


# -- Adapters ------------------------------------------------------------------------------------------------------

LOW_LR = 1e-5
"""A learning rate below it is one for all weights of a model, not for adapters."""


def lora_key(policy: PolicyConfig) -> str:
    """The key of the adapters of the backend that trains."""
    return f"policy.{'megatron_cfg' if policy.megatron_cfg.enabled else 'dtensor_cfg'}.lora_cfg"


def adapters_of(policy: PolicyConfig, skeleton: nn.Module) -> AdapterSize | None:
    """The size of the adapters that the policy trains; None where it trains all weights.

    Args:
        policy: of the recipe.
        skeleton: the model on the meta device; adapters are added to it.

    Raises:
        Refusal: peft is not installed, or the recipe names modules that cannot be adapted.
    """
    selection = select_backend(policy)
    if selection.adapters is None:
        return None
    try:
        selection.require_installed()
    except ModelError as error:
        raise Refusal(f"{lora_key(policy)}: {error}") from error
    with named_by_key(policy):
        return adapter_size(add_lora(skeleton, selection.adapters))


def bytes_of(policy: PolicyConfig, model: nn.Module) -> int:
    """Bytes of the weights as a checkpoint has them: float32, or under adapters the dtype of the frozen ones."""
    adapters = select_backend(policy).adapters
    item = 4 if adapters is None else adapters.torch_base_dtype.itemsize
    return item * sum(weight.numel() for weight in model.parameters())


@contextmanager
def named_by_key(policy: PolicyConfig) -> Iterator[None]:
    """Put the recipe key before what a backend refuses of a `LoraConfig`; other errors pass.

    Raises:
        Refusal: with the key.
    """
    try:
        yield
    except ModelError as error:
        if not str(error).startswith(("target_modules: ", "modules_to_save: ")):  # the fields that need the model
            raise
        raise Refusal(f"{lora_key(policy)}.{error}") from error


def copies_reference(recipe: Recipe) -> bool:
    """Whether a frozen copy of the weights is kept beside those that train."""
    stage = recipe.grpo or recipe.ppo or recipe.dpo
    if stage is None or not stage.keeps_reference:
        return False
    is_first = next(iter(recipe.stages)) in {"grpo", "ppo", "dpo"}
    return not is_base(select_backend(recipe.policy).adapters, steps_before=0 if is_first else 1)


def learning_rate_hint(recipe: Recipe) -> str | None:
    """A warning about stages whose learning rate is too low for adapters; None if there are none."""
    low = [f"{name}.optimizer.lr={s.optimizer.lr:g}" for name, s in recipe.stages.items() if s.optimizer.lr < LOW_LR]
    if select_backend(recipe.policy).adapters is None or not low:
        return None
    return f"{', '.join(low)}: a rate for all weights; adapters start at B = 0 and usually need about ten times as much"

"""What adapters change of a run: how much trains, what a checkpoint weighs, and what the reference is.

Knows counts and the recipe; injects nothing that is trained, and knows no mesh.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rl_backends import ModelError, select_backend
from rl_backends.lora import AdapterSize, LoraConfig, adapter_size, add_lora
from rl_launcher.errors import LauncherError
from rl_launcher.recipe_schema import PolicyConfig, Recipe

__all__ = ["adapters_of", "copies_reference", "is_base", "learning_rate_hint", "named_by_key"]

KEY = "policy.dtensor_cfg.lora_cfg"
OF_ADAPTERS = ("target_modules: ", "modules_to_save: ")
"""How a refusal begins that is about a field of `LoraConfig`."""

LOW_LR = 1e-5
"""Below it a learning rate is one for all weights of a model."""


def adapters_of(policy: PolicyConfig, skeleton: nn.Module) -> AdapterSize | None:
    """The adapters that the policy trains, counted; None where it trains all weights.

    skeleton: without weights; taken over.

    Raises:
        LauncherError: peft is not installed, or the recipe names modules that cannot be adapted.
    """
    selection = select_backend(policy)
    if selection.adapters is None:
        return None
    try:
        selection.require_installed()
    except ModelError as error:
        raise LauncherError(f"{KEY}: {error}") from error
    with named_by_key():
        return adapter_size(add_lora(skeleton, selection.adapters))


@contextmanager
def named_by_key() -> Iterator[None]:
    """What a backend refuses of adapters, under the key that asked for it; all else as it is.

    Raises:
        LauncherError: with the key.
    """
    try:
        yield
    except ModelError as error:
        if not str(error).startswith(OF_ADAPTERS):
            raise
        raise LauncherError(f"{KEY}.{error}") from error


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

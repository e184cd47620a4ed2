"""What a run would do, in text: the recipe with the origin of each value, the sharding, the engine, the refit."""

from rl_backends import BackendSelection, DTensorConfig, MegatronConfig
from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir
from rl_launcher.building import build
from rl_launcher.recipe import Resolved
from rl_launcher.recipe_schema import Recipe

__all__ = ["describe_backend", "explain"]


def explain(resolved: Resolved[Recipe]) -> str:
    """Build every part of the run, train nothing, and let each part say what it would do.

    Raises:
        ValueError: what the run itself would refuse before training.
    """
    parts = build(resolved.value)
    data = (
        f"{len(parts.prompts)} prompts to learn from, {len(parts.held_out)} held out, "
        f"{len(parts.demonstrations)} demonstrations"
    )
    sections = {
        "Recipe": resolved.explain(),
        "Data": data,
        "Backend": describe_backend(resolved.value, parts.selection) + _conversions(parts.selection.config),
        "Policy": parts.policy.explain(),
        "Engine": parts.engine.explain(),
        "Refit": parts.weight_sync.explain(),
    }
    return "\n\n".join(f"{title}\n{'=' * len(title)}\n{text}" for title, text in sections.items())


def describe_backend(recipe: Recipe, selection: BackendSelection) -> str:
    """Which backend trains, why, and what the recipe says in vain."""
    text = f"{selection.backend} trains the policy: {selection.reason}"
    if not isinstance(selection.config, MegatronConfig) or selection.config.optimizer is None:
        return text
    stages = {"sft": recipe.sft, "grpo": recipe.grpo, "dpo": recipe.dpo}
    theirs = ", ".join(f"{name}.optimizer" for name, stage in stages.items() if stage is not None)
    return f"{text}; megatron_cfg.optimizer takes the place of {theirs}"


def _conversions(config: DTensorConfig | MegatronConfig) -> str:
    """Where Megatron's conversions lie, of which a run in one process needs none."""
    if not isinstance(config, MegatronConfig):
        return ""
    own = config.checkpoint_dir
    folder = explain_megatron_checkpoint_dir() if own is None else f"{own} (megatron_cfg.checkpoint_dir says so)"
    return f"\nconversions lie in {folder}; this run loads the model itself, and makes none"

"""What a run would do, in text: the recipe with the origin of each value, the sharding, the engine, the refit."""

from rl_backends import MegatronConfig, Selection, explain_megatron_checkpoint_dir
from rl_launcher.building import build
from rl_launcher.recipe import Resolved
from rl_launcher.recipe_schema import Recipe

__all__ = ["explain"]


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
        "Backend": _describe(parts.selection),
        "Policy": parts.policy.explain(),
        "Engine": parts.engine.explain(),
        "Refit": parts.weight_sync.explain(),
    }
    return "\n\n".join(f"{title}\n{'=' * len(title)}\n{text}" for title, text in sections.items())


def _describe(selection: Selection) -> str:
    """Which backend and why; for Megatron, where its conversions lie, of which a run in one process needs none."""
    chosen = f"{selection.backend}: {selection.reason}"
    if not isinstance(selection.config, MegatronConfig):
        return chosen
    own = selection.config.checkpoint_dir
    folder = explain_megatron_checkpoint_dir() if own is None else f"{own} (megatron_cfg.checkpoint_dir says so)"
    return f"{chosen}\nconversions lie in {folder}; this run fills Megatron from the model as it is loaded, and makes none"

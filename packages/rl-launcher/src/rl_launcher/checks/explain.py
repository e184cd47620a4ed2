"""What a run would do, in text and figures: keys with their origins, placement, sharding, memory, engine, refit, loss.

Loads no weights of a folder or a hub id, starts nothing, and needs no GPU.
"""

from dataclasses import dataclass
from typing import Any

from rl_backends import BackendSelection, DTensorConfig, MegatronConfig, select_backend
from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir
from rl_launcher.recipe_files import Resolved
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects

__all__ = ["Explained", "describe_backend", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """What `explain` says."""

    sections: dict[str, str]
    """By title, in their order."""

    figures: dict[str, Any]
    """Plain values: `--json` prints them."""

    refusal: str | None
    """Why a run would be refused for want of memory; None where it would not."""

    def text(self) -> str:
        """For people."""
        return "\n\n".join(f"{title}\n{'=' * len(title)}\n{text}" for title, text in self.sections.items())


def explain(resolved: Resolved[Recipe], objects: Objects = NO_OBJECTS) -> Explained:
    """Let each part of the run report what it would do.

    Args:
        resolved: the recipe with the origins of its keys.
        objects: what is given as a Python object instead of a string of the recipe.

    Raises:
        ValueError: what the run itself would refuse before training, but for memory: that is in `refusal`.
    """
    from rl_algorithms import dpo
    from rl_launcher.checks import preflight
    from rl_launcher.checks.predict import predict_run
    from rl_launcher.ray.placement import plan_placement

    recipe = resolved.value
    refusal = preflight.explained(recipe)
    placement, selection = plan_placement(recipe), select_backend(recipe.policy)
    predicted = predict_run(recipe, placement, objects)
    sections = {
        "Recipe": _keys(resolved),
        "Data": _data(recipe, objects),
        "Placement": placement.explain(),
        "Backend": describe_backend(recipe, selection) + _conversions(selection.config),
        "Policy": predicted.policy,
        "Engine": predicted.engine,
        "Refit": predicted.refit,
    }
    if recipe.grpo is not None:
        sections["Objective"] = recipe.grpo.objective.explain()
    if recipe.dpo is not None:
        sections["Objective"] = dpo.explain(recipe.dpo)
    if recipe.distill is not None:
        sections["Objective"] = recipe.distill.explain()
    figures = {
        "stages": [*recipe.stages],
        "backend": selection.backend,
        "ranks": len(placement.ranks),
        "engines": len(placement.engines),
        "refusal": refusal,
        **predicted.figures,
    }
    return Explained(sections=sections, figures=figures, refusal=refusal)


def describe_backend(recipe: Recipe, selection: BackendSelection) -> str:
    """Which backend trains, why, and what the recipe says in vain."""
    text = f"{selection.backend} trains the policy: {selection.reason}"
    if not isinstance(selection.config, MegatronConfig) or selection.config.optimizer is None:
        return text
    theirs = ", ".join(f"{name}.optimizer" for name in recipe.stages)
    return f"{text}; megatron_cfg.optimizer takes the place of {theirs}"


def _keys(resolved: Resolved[Recipe]) -> str:
    """Every key, credentials left out: what is printed ends in logs."""
    from rl_launcher.recipe_files.dataclass_schema import to_plain
    from rl_observe import Secrets, redact

    secrets = Secrets.of(to_plain(resolved.value))
    return secrets.scrub(resolved.explain(hide=redact))


def _data(recipe: Recipe, objects: Objects) -> str:
    """How many rows there are; a data set of the hub is left where it is."""
    from pathlib import Path

    from rl_launcher.inputs import ConversationData, PreferenceData, load_dataset
    from rl_launcher.user_code import is_import_string

    source = recipe.data.source
    if objects.data is None and not is_import_string(source) and not Path(source).expanduser().exists():
        return f"{source} is read from the hub when the run starts"
    dataset, skipped = load_dataset(recipe, objects)
    lines = [f"{len(dataset.train)} prompts to learn from, {len(dataset.held_out)} held out"]
    if isinstance(dataset, ConversationData):
        measured_by = len(dataset.held_out_demonstrations)
        lines = [f"{len(dataset.demonstrations)} conversations to learn from, {measured_by} held out"]
    elif isinstance(dataset, PreferenceData):
        lines = [f"{len(dataset.pairs)} pairs to learn from, {len(dataset.held_out_pairs)} held out"]
        lines[0] += f", {len(dataset.demonstrations)} chosen answers to imitate first" * (recipe.sft is not None)
    elif recipe.sft is not None:
        lines[0] += f", {len(dataset.demonstrations)} demonstrations"
    if recipe.env is None:
        measures = "loss" if recipe.dpo is None else "margin"
        lines.append(f"nobody judges answers (env is null): what is held out measures the {measures}, and no reward")
    return "\n".join([*lines, *[str(skipped)] * bool(skipped.count)])


def _conversions(config: DTensorConfig | MegatronConfig) -> str:
    """Where Megatron's conversions lie."""
    if not isinstance(config, MegatronConfig):
        return ""
    own = config.checkpoint_dir
    folder = explain_megatron_checkpoint_dir() if own is None else f"{own} (megatron_cfg.checkpoint_dir says so)"
    return f"\nconversions lie in {folder}"

"""`rl-launcher explain`: what a run would do, as text and figures, section by section.

It loads no weights of a folder or a hub id, starts nothing and needs no GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_algorithms import dpo, kto, orpo, ppo, reward_model
from rl_algorithms.data import ConversationData, LabelledData, PreferenceData
from rl_backends import BackendSelection, select_backend
from rl_launcher.build.inputs import load_dataset
from rl_launcher.checks import preflight
from rl_launcher.checks.gpu_budget import Gpu, node_needs
from rl_launcher.checks.predict import predict_run
from rl_launcher.ray.placement import (
    NodeResources,
    Placement,
    PlacementError,
    match_nodes,
    needs_of_nodes,
    plan_placement,
)
from rl_launcher.recipe_files import Resolved
from rl_launcher.recipe_files.dataclass_schema import to_plain
from rl_launcher.schema import Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string
from rl_observe import Secrets, redact


@dataclass(frozen=True, slots=True, kw_only=True)
class Explained:
    """The result of `explain`."""

    sections: dict[str, str]
    """Text by title, in the order of printing."""
    figures: dict[str, Any]
    """The figures for `--json`."""
    refusal: str | None
    """Why a run would be refused for lack of memory, or of nodes in a running cluster, or None."""

    def text(self) -> str:
        """Return all sections, with underlined titles."""
        return "\n\n".join(f"{title}\n{'=' * len(title)}\n{text}" for title, text in self.sections.items())


def explain(
    resolved: Resolved[Recipe],
    objects: Objects = NO_OBJECTS,
    *,
    gpu: Gpu | None = None,
    there: Sequence[NodeResources] | None = None,
) -> Explained:
    """Explain a resolved recipe.

    Args:
        resolved: the recipe with the origins of its keys.
        objects: Python objects that replace strings of the recipe.
        gpu: the GPUs that the run would have, where they are not those of this machine.
        there: the nodes of a running cluster, on which the run would be; see `rl_launcher.ray.cluster`.

    Raises:
        ValueError: what the run itself would refuse before training. A lack of memory, or of nodes in the cluster, is
            in `refusal` instead.
    """
    recipe = resolved.value
    refusal = preflight.check_all_but_memory(recipe)
    placement, selection = plan_placement(recipe), select_backend(recipe.policy)
    predicted = predict_run(recipe, placement, objects, gpu=gpu)
    located: Located | None = None if there is None else locate(recipe, placement, there)
    backend = f"{describe_backend(selection)}\n{_logged(selection)}"
    sections = {
        # Credentials are left out, since what is printed ends up in logs.
        "Recipe": Secrets.of(to_plain(recipe)).scrub(resolved.explain(hide=redact)),
        "Data": _data(recipe, objects),
        "Placement": "\n".join([placement.explain(), *([] if located is None else [located.text])]),
        "Backend": backend,
        "Policy": predicted.policy,
        "Engine": predicted.engine,
        "Refit": predicted.refit,
    }
    if predicted.gpus is not None:
        sections["GPUs"] = predicted.gpus.text
        refusal = predicted.gpus.refusal
    if located is not None:
        refusal = refusal or located.refusal
    if recipe.reward_model is not None:
        sections["Reward model"] = reward_model.explain(recipe.reward_model)
    if recipe.grpo is not None:
        sections["Objective"] = recipe.grpo.objective.explain()
    if recipe.ppo is not None:
        sections["Objective"] = ppo.explain(recipe.ppo)
    if recipe.dpo is not None:
        sections["Objective"] = dpo.explain(recipe.dpo)
    if recipe.kto is not None:
        sections["Objective"] = kto.explain(recipe.kto)
    if recipe.orpo is not None:
        sections["Objective"] = orpo.explain(recipe.orpo)
    if recipe.distill is not None:
        sections["Objective"] = recipe.distill.explain()
    figures = {
        "stages": [*recipe.stages],
        "backend": selection.backend,
        "ranks": len(placement.ranks),
        "engines": len(placement.engines),
        "placement": placement.figures(),
        "hosts": None if located is None else located.hosts,
        "refusal": refusal,
        **predicted.figures,
    }
    return Explained(sections=sections, figures=figures, refusal=refusal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """On which nodes of a running cluster a run would be."""

    text: str
    hosts: list[str] | None
    """The host of each node of the run; None if the cluster has not room for all."""
    refusal: str | None
    """What is lacking, or None."""


def locate(recipe: Recipe, placement: Placement, there: Sequence[NodeResources]) -> Located:
    """Find the nodes of a running cluster for a placement, by GPUs, CPUs and, where the model is known, host memory.

    Ray decides when the run starts: of nodes that are alike it may take another one, and other runs may hold some.
    """
    memory = node_needs(recipe)
    needs = needs_of_nodes(
        placement,
        cpus_per_rank=recipe.cluster.cpus_per_rank,
        memory_bytes=None if memory is None else [host for host, _ in memory],
    )
    has = f"the cluster has {'; '.join(map(str, there)) or 'no node'}"
    try:
        found = match_nodes(needs, there)
    except PlacementError as error:
        sizes = [int(node.gpus) for node in sorted(there, key=lambda node: -node.gpus) if node.gpus]
        remedy = "add nodes, or ask for less by cluster.num_nodes, gpus_per_node and cpus_per_rank"
        if placement.device == "cuda" and sizes:
            remedy += f"; all GPUs of this cluster are num_nodes={len(sizes)} with gpus_per_node={sizes}"
        return Located(text=f"{has}: {error}", hosts=None, refusal=f"{error}; {remedy}")
    hosts = [there[found[node]].name for node in range(len(needs))]
    lines = [f"  node {node} can be {there[found[node]]}" for node in range(len(needs))]
    return Located(text="\n".join([has, *lines]), hosts=hosts, refusal=None)


def describe_backend(selection: BackendSelection) -> str:
    """Return which backend trains the policy, why, and which settings it ignores."""
    return f"{selection.backend} trains the policy: {selection.reason}"


def _logged(selection: BackendSelection) -> str:
    """Say which figures of the trainer every step logs."""
    figures, config = ["padding_share", "load_balance"], selection.config
    if config.device == "cuda":
        *figures, last = ["mfu", *figures, "memory_trainer_peak_bytes"]
        return f"every step logs its {', '.join(figures)} and {last}; mfu where the GPU's peak is known"
    if config.peak_flops_per_s is not None:
        return f"every step logs its mfu, {' and '.join(figures)}"
    return (
        f"every step logs its {' and '.join(figures)}; no mfu, since nobody states the peak of a CPU (peak_flops_per_s "
        f"of policy.{selection.backend}_cfg does)"
    )


def _data(recipe: Recipe, objects: Objects) -> str:
    """Count the rows; a data set on the hub is not downloaded."""
    source = recipe.data.source
    if objects.data is None and not is_import_string(source) and not Path(source).expanduser().exists():
        return f"{source} is read from the hub when the run starts"
    dataset, skipped = load_dataset(recipe, objects)
    lines = [f"{len(dataset.train)} prompts to train on, {len(dataset.held_out)} held out"]
    if isinstance(dataset, ConversationData):
        held_out = len(dataset.held_out_demonstrations)
        lines = [f"{len(dataset.demonstrations)} conversations to train on, {held_out} held out"]
    elif isinstance(dataset, PreferenceData):
        lines = [f"{len(dataset.pairs)} pairs to train on, {len(dataset.held_out_pairs)} held out"]
        lines[0] += f", {len(dataset.demonstrations)} chosen responses for sft" * (recipe.sft is not None)
    elif isinstance(dataset, LabelledData):
        lines = [f"{len(dataset.labelled)} responses to train on, {len(dataset.held_out_labelled)} held out"]
    elif recipe.sft is not None:
        lines[0] += f", {len(dataset.demonstrations)} demonstrations"
    if recipe.env is None:
        judge = "the reward model scores them" if recipe.is_judged_by_model else None
        measured = "loss" if recipe.form is None else "margin"
        lines.append(f"no reward (env is null): {judge or f'the held-out rows measure the {measured} only'}")
    if recipe.reward_model is not None and recipe.reward_model.data is not None:
        lines.append(f"reward_model learns from the pairs of {recipe.reward_model.data.source}")
    return "\n".join([*lines, *[str(skipped)] * bool(skipped.count)])

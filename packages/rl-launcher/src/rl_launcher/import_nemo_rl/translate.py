"""Translate one NeMo-RL recipe into ours; every key of theirs is translated, or noted with a reason.

    file -> the files it inherits -> ${…} resolved -> rules, section by section -> key_map.yaml for what no rule took

The result is checked against our schema before it is returned.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launcher.import_nemo_rl import algorithm as algorithms
from rl_launcher.import_nemo_rl import data_and_cluster, policy
from rl_launcher.import_nemo_rl.read import Kind, NemoRLError, Note, Source, interpolate, key_map, read
from rl_launcher.recipe_files.yaml_source import dump

ALGORITHMS = ("grpo", "ppo", "sft", "dpo", "rm", "distillation")
STAGES = {"distillation": "distill", "rm": "reward_model"}
"""Ours of another name."""
MOST_STEPS = 10**9
"""The steps of a stage that is measured in epochs alone, for what is compared with them."""
HEADINGS: dict[Kind, str] = {
    "fill_in": "to fill in, or to check",
    "untranslated": "not translated: the run differs from theirs in",
    "dropped": "without effect here",
}
VISION = re.compile(r"(?i)(^|[-_/.\d])(vlm?|vision|llava|smolvlm|pixtral|omni)([-_/.\d]|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A recipe, and what became of every key that is not in it."""

    source: Path
    """The file that was translated."""

    recipe: dict[str, Any]
    """Our recipe, as plain data."""

    notes: tuple[Note, ...]
    """What has to be filled in, what is not translated, and what has no effect here."""

    problems: tuple[str, ...]
    """What our schema refuses; empty if the recipe is valid."""

    framework: str = "NeMo-RL"
    """Whose recipe it was."""

    command: str = "import-nemo-rl"
    """The command that translates it."""

    def of(self, kind: Kind) -> tuple[Note, ...]:
        """Return the notes of one kind."""
        return tuple(note for note in self.notes if note.kind == kind)

    @property
    def yaml(self) -> str:
        """The recipe as a file, with what has to be done about it in comments at the top."""
        lines = [f"# Translated from {self.source.name} of {self.framework} by `rl-launcher {self.command}`."]
        for kind in ("fill_in", "untranslated"):
            if notes := self.of(kind):
                lines += ["#", f"# {HEADINGS[kind].capitalize()}:", *(f"#   {note}" for note in notes)]
        return "\n".join(lines) + "\n" + dump(self.recipe)

    def report(self, *, verbose: bool = False) -> str:
        """Return what became of their keys; those without effect are only counted unless `verbose`."""
        lines = []
        for kind, heading in HEADINGS.items():
            notes, listed = self.of(kind), verbose or kind != "dropped"
            lines.append(f"{len(notes)} {heading}" + (":" if notes and listed else ""))
            lines += [f"  {note}" for note in notes if listed]
        if self.problems:
            lines += [f"{len(self.problems)} refused by our schema:", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def translate(file: str | Path) -> Translation:
    """Translate one file.

    Raises:
        NemoRLError: it cannot be read, or is for an algorithm or for images, which a recipe does not support.
    """
    path = Path(file)
    resolved, failures = interpolate(read(path))
    source = Source(resolved)
    for key, reason in failures.items():
        source.note("untranslated", key, f"it could not be resolved: {reason}")
    recipe = _recipe(source, path)
    _account_for_the_rest(source)
    return Translation(source=path, recipe=recipe, notes=tuple(source.notes), problems=problems_of(recipe))


def problems_of(recipe: dict[str, Any]) -> tuple[str, ...]:
    """What our schema refuses of a translated recipe."""
    from rl_launcher.recipe_files import RecipeError, load_recipe
    from rl_launcher.schema import Recipe

    try:
        load_recipe(recipe, schema=Recipe)
    except RecipeError as error:
        return tuple(f"{problem.key}: {problem.message}" for problem in error.problems)
    return ()


def _recipe(source: Source, path: Path) -> dict[str, Any]:
    algorithm = _algorithm(source, path)
    if source.peek("policy.model_name") is None:
        raise NemoRLError(f"{path} names no model at policy.model_name, so it is no recipe; name a file that does")
    _refuse_images(source, path)
    name = STAGES.get(algorithm, algorithm)
    steps = algorithms.steps_per_generation(source, algorithm) if algorithm in {"grpo", "distillation", "ppo"} else 1
    stage = getattr(algorithms, "reward_model" if algorithm == "rm" else algorithm)(source)
    steps = stage.get("steps_per_generation", steps)
    stage["optimizer"] = policy.optimizer(source, steps=stage.get("max_num_steps", MOST_STEPS))
    if algorithm == "ppo":
        reason = "theirs is in the section value; ours starts with the policy's"
        source.note("fill_in", "ppo.critic.optimizer.lr", reason, value=stage["optimizer"]["lr"])
        stage["critic"] = {"optimizer": dict(stage["optimizer"])}
    sets = data_and_cluster.validation(source, algorithm)
    held_out = sets if algorithm in {"sft", "dpo", "rm"} else {}
    measured = {**policy.evaluation_sampling(source), **({"sets": sets} if sets and not held_out else {})}
    recipe = {
        "run_dir": str(source.take("checkpointing.checkpoint_dir") or f"runs/{path.stem}"),
        "seed": source.take(f"{algorithm}.seed", 0),
        "policy": {**policy.model(source), "generation": policy.generation(source)},
        "data": {**data_and_cluster.data(source, algorithm, folder=path.parent), **held_out},
        **data_and_cluster.environment(source, algorithm),
        "evaluation": {**data_and_cluster.evaluation(source, algorithm, steps=steps), **measured},
        "cluster": data_and_cluster.cluster(source),
        "checkpointing": data_and_cluster.checkpointing(source, steps=steps),
        "logger": data_and_cluster.logger(source),
    }
    return {**recipe, name: stage}


def _algorithm(source: Source, path: Path) -> str:
    if source.peek("teachers") is not None or source.peek("token_aligner") is not None:
        raise NemoRLError(f"{path} distils between tokenizers, and a recipe's teacher has the policy's tokenizer")
    found = [name for name in ALGORITHMS if isinstance(source.peek(name), dict)]
    if len(found) != 1:
        raise NemoRLError(f"{path} has {' and '.join(found) or 'none'} of {', '.join(ALGORITHMS)}; one is translated")
    return found[0]


def _refuse_images(source: Source, path: Path) -> None:
    """Refuse recipes about images or audio, and vision-language models."""
    train = source.peek("data.train")
    sections = [source.peek("data") or {}, *(train if isinstance(train, list) else [train or {}])]
    names = [*(source.peek("env") or {}), *(str(section.get("dataset_name")) for section in sections)]
    if found := [name for name in key_map()["images"] if name in names]:
        raise NemoRLError(f"{path} trains on images or audio ({', '.join(found)}), and a recipe supports text only")
    if source.peek("policy.is_vlm"):
        raise NemoRLError(f"{path} has policy.is_vlm, a vision-language model, and a recipe supports text only")
    if VISION.search(model := str(source.peek("policy.model_name"))):
        raise NemoRLError(f"{path} trains {model}, a vision-language model, and a recipe supports text only")


def _account_for_the_rest(source: Source) -> None:
    """Give every key that no rule took a reason: off, without effect, or not translated."""
    table = key_map()
    reasons: dict[str, tuple[Kind, str]] = {key: ("dropped", text) for key, text in table["dropped"].items()}
    reasons |= {key: ("untranslated", text) for key, text in table["untranslated"].items()}
    for key, value in [*source.left()]:
        noted = next((section for section in table["whole"] if f"{key}.".startswith(f"{section}.")), key)
        if any(note.key == noted for note in source.notes):
            continue  # as the section that it is in
        parents = [key.rsplit(".", count)[0] for count in range(1, key.count(".") + 1)]
        section = next((name for name in (key, *parents) if name in reasons), "")
        rest = key.removeprefix(section).removeprefix(".")
        if rest and not any(f"{rest}.".startswith(f"{name}.") for name in table["only"].get(section, [rest])):
            section = ""
        is_below_off = any(source.peek(f"{parent}.enabled") is False for parent in parents)
        if key in table["fixed"] and not is_below_off:
            fixed = table["fixed"][key]
            if value not in fixed.get("is", [value]):
                source.untranslated(key, fixed["otherwise"].format(value=value))
            continue
        is_off = value in (None, False, 0, "", "none", "None", [], {})
        if is_off or is_below_off:
            source.note("dropped", key, "it is off in the file", value=value)
        elif key.rpartition(".")[2] in table["evaluation"]:
            source.note("dropped", key, "a run is always evaluated before and after", value=value)
        elif section:
            kind, reason = reasons[section]
            source.note(kind, noted, reason, value=source.peek(noted))
        else:
            source.note("untranslated", key, "no rule of the translation knows this key", value=value)

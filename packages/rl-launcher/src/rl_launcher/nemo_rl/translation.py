"""`translate`: one file of NeMo-RL as a recipe of ours, every key of theirs accounted for.

    file -> what it inherits -> ${…} worked out -> rules, section by section -> what no rule took, with reasons

The recipe is held against our schema before it is returned. It does not write files.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_launcher.nemo_rl import generation, grpo, policy, surroundings
from rl_launcher.nemo_rl.interpolating import interpolate
from rl_launcher.nemo_rl.leftovers import account
from rl_launcher.nemo_rl.notes import Kind, Note
from rl_launcher.nemo_rl.reading import NemoRLError, read
from rl_launcher.nemo_rl.source import Source
from rl_launcher.recipe.yaml_dialect import dump

__all__ = ["Translation", "translate"]

ALGORITHMS = ("grpo", "sft", "dpo", "distillation")
HEADINGS: dict[Kind, str] = {
    "fill_in": "to fill in, or to check",
    "untranslated": "not translated: the run differs from theirs in",
    "dropped": "without meaning here",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation:
    """A recipe, and what became of every key that is not in it."""

    source: Path
    """The file that was translated."""

    recipe: dict[str, Any]
    """Ours, as plain data."""

    notes: tuple[Note, ...]
    """What is to fill in, what is not translated, what means nothing here."""

    problems: tuple[str, ...]
    """What our schema refuses of it; none where it is valid."""

    def of(self, kind: Kind) -> tuple[Note, ...]:
        """Return the notes of one kind."""
        return tuple(note for note in self.notes if note.kind == kind)

    @property
    def yaml(self) -> str:
        """The recipe as a file, headed by what is to be done about it."""
        lines = [f"# Translated from {self.source.name} of NeMo-RL by `rl-launcher import-nemo-rl`."]
        for kind in ("fill_in", "untranslated"):
            if notes := self.of(kind):
                lines += ["#", f"# {HEADINGS[kind].capitalize()}:", *(f"#   {_line(note)}" for note in notes)]
        return "\n".join(lines) + "\n" + dump(self.recipe)

    def report(self, *, verbose: bool = False) -> str:
        """Return what became of their keys; those without meaning only counted, unless `verbose`."""
        lines = []
        for kind, heading in HEADINGS.items():
            notes = self.of(kind)
            lines.append(f"{len(notes)} {heading}" + (":" if notes and (verbose or kind != "dropped") else ""))
            if verbose or kind != "dropped":
                lines += [f"  {_line(note)}" for note in notes]
        if self.problems:
            lines += [f"{len(self.problems)} refused by our schema:", *(f"  {problem}" for problem in self.problems)]
        return "\n".join(lines)


def translate(file: str | Path) -> Translation:
    """Translate one file.

    Raises:
        NemoRLError: it cannot be read, or is of an algorithm that has no stage here.
    """
    path = Path(file)
    worked_out, failures = interpolate(read(path))
    source = Source(worked_out)
    for key, reason in failures.items():
        source.note("untranslated", key, f"it could not be worked out: {reason}")
    recipe = _recipe(source, path)
    account(source)
    return Translation(source=path, recipe=recipe, notes=tuple(source.notes), problems=_problems(recipe))


def _recipe(source: Source, path: Path) -> dict[str, Any]:
    algorithm = _algorithm(source, path)
    if source.peek("policy.model_name") is None:
        raise NemoRLError(f"{path} names no model at policy.model_name, so it is no recipe; name a file that does")
    steps = grpo.steps_per_generation(source, algorithm) if algorithm in {"grpo", "distillation"} else 1
    stage = _stage(source, algorithm)
    stage["optimizer"] = policy.optimizer(source, steps=stage["max_num_steps"])
    recipe = {
        "run_dir": str(source.take("checkpointing.checkpoint_dir") or f"runs/{path.stem}"),
        "seed": source.take(f"{algorithm}.seed", 0),
        "policy": {**policy.model(source), "generation": generation.generation(source)},
        "data": surroundings.data(source, algorithm),
        **surroundings.environment(source, algorithm),
        "evaluation": surroundings.evaluation(source, algorithm, steps=steps),
        "cluster": surroundings.cluster(source),
        "checkpointing": surroundings.checkpointing(source, steps=steps),
        "logger": surroundings.logger(source),
    }
    return {**recipe, "distill" if algorithm == "distillation" else algorithm: stage}


def _algorithm(source: Source, path: Path) -> str:
    for other in ("ppo", "rm", "value"):
        if isinstance(source.peek(other), dict):
            raise NemoRLError(
                f"{path} has a section {other}, and a recipe has no such stage: rl_algorithms.ppo and "
                f"rl_algorithms.reward_model are for loops of your own"
            )
    if source.peek("teachers") is not None or source.peek("token_aligner") is not None:
        raise NemoRLError(f"{path} distils between tokenizers, and a recipe's teacher has the policy's own")
    found = [name for name in ALGORITHMS if isinstance(source.peek(name), dict)]
    if len(found) != 1:
        raise NemoRLError(f"{path} has {' and '.join(found) or 'none'} of {', '.join(ALGORITHMS)}; one is translated")
    return found[0]


def _stage(source: Source, algorithm: str) -> dict[str, Any]:
    match algorithm:
        case "grpo":
            return grpo.grpo(source)
        case "distillation":
            return grpo.distillation(source)
        case "sft":
            return _sft(source)
        case _:
            return _dpo(source)


def _sft(source: Source) -> dict[str, Any]:
    source.untranslated("sft.max_num_epochs", "ours ends after max_num_steps, theirs after so many passes too")
    return {
        "train_on": "last_turn" if source.take("sft.only_unmask_final") else "assistant",
        "max_num_steps": source.take("sft.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
    }


def _dpo(source: Source) -> dict[str, Any]:
    source.untranslated("dpo.max_num_epochs", "ours ends after max_num_steps, theirs after so many passes too")
    if source.take("dpo.preference_loss_weight", 1) != 1:
        source.untranslated("dpo.preference_loss_weight", "it is 1: scale the learning rate, and dpo.nll_weight")
    source.take("dpo.sft_average_log_probs")
    return {
        "pairs": "data",
        "max_num_steps": source.take("dpo.max_num_steps"),
        "batch_size": source.take("policy.train_global_batch_size"),
        "beta": source.take("dpo.reference_policy_kl_penalty", 0.1),
        "loss": "sigmoid_norm" if source.take("dpo.preference_average_log_probs") else "sigmoid",
        "nll_weight": source.take("dpo.sft_loss_weight", 0.0),
    }


def _problems(recipe: dict[str, Any]) -> tuple[str, ...]:
    from rl_launcher.recipe import RecipeError, load_recipe
    from rl_launcher.recipe_schema import Recipe

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        file.write_text(dump(recipe), encoding="utf-8")
        try:
            load_recipe(file, schema=Recipe)
        except RecipeError as error:
            return tuple(f"{problem.key}: {problem.message}" for problem in error.problems)
    return ()


def _line(note: Note) -> str:
    return str(note)

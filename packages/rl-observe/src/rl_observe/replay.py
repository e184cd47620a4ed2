"""Replay a recorded step: compute each stage again, compare it with what was recorded, and name the first difference.

    prompt      the chat template, from the data row to token ids
    reward      the reward function, from the response to a number
    advantage   rewards compared within groups
    logp_old    the engine samples again, with the same weights and seeds
    logp        the trainer's forward pass, on the first update
    loss        of each token, or of the step where the loss is not one of tokens
    gradient    its norm

Advantages and losses of plain GRPO are computed here, by formulas written out once more. What needs a model, a template
or a reward function is computed by the program that has them: it passes functions to `replay`, or registers them under
the entry point `rl_observe.recompute`. Each stage starts from the recorded inputs, so that an error of one stage does
not show in the next: the first stage that differs is where it began.

On the same machine every number is the same bit for bit. On another machine or dtype it is within `BOUNDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.layers import first_layer_that_differs
from rl_observe.recorded_steps import RecordedStep

__all__ = [
    "BOUNDS",
    "STAGES",
    "NotReplayable",
    "Recompute",
    "Replay",
    "StageResult",
    "plain_advantages",
    "plain_losses",
    "replay",
]

LAYER_BOUND = 1e-4
"""How far the norm of what a layer puts out may be off before it is named, if log-probabilities differ."""

Array: TypeAlias = NDArray[Any]
Recompute: TypeAlias = Callable[[RecordedStep], Array]
"""Computes a stage of a step again: an array like the recorded one, NaN (or -1 for tokens) where it has no value."""

STAGES = ("prompt", "reward", "advantage", "logp_old", "logp", "loss", "gradient")
"""The stages in the order in which they depend on one another."""

BOUNDS: dict[str, dict[str, float]] = {
    "float32": {"advantage": 1e-5, "logp_old": 1e-3, "logp": 1e-3, "loss": 1e-4, "gradient": 1e-2},
    "bfloat16": {"advantage": 1e-5, "logp_old": 0.15, "logp": 0.15, "loss": 2e-2, "gradient": 0.1},
}
"""How far a stage may be off on another machine, relative to numbers above 1 and absolute below. Tokens and rewards
must be equal."""


class NotReplayable(ValueError):  # noqa: N818 - it is a result, and no failure of the replay
    """A stage that cannot be computed again, with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResult:
    """One stage, recorded and recomputed."""

    stage: str
    """One of `STAGES`."""

    outcome: str
    """`same` bit for bit, `within` the bound, `differs`, or `not replayed`."""

    compared: int = 0
    """Numbers that were compared."""

    largest: float = 0.0
    """The largest difference."""

    row: int | None = None
    """The first rollout that differs beyond the bound."""

    token: int | None = None
    """The first token of it that does."""

    layer: str | None = None
    """Of `logp` that is not the same: the first layer of the model whose output is another one, if that is known."""

    recorded: float | None = None
    """The value there."""

    recomputed: float | None = None
    """The value there, computed again."""

    reason: str = ""
    """Why it was not replayed."""

    def __str__(self) -> str:
        """The result in one line."""
        if self.outcome == "not replayed":
            return f"{self.stage:<10} not replayed: {self.reason}"
        line = f"{self.stage:<10} {self.outcome}, {self.compared} numbers, largest difference {self.largest:.3g}"
        if self.outcome == "within" and self.layer:
            line += f", in layer {self.layer} first"
        if self.outcome == "differs":
            places = [f"{name} {place}" for name in ("row", "token") if (place := getattr(self, name)) is not None]
            where = f" first at {', '.join(places)}" if places else ""
            where += f"{',' if where else ''} in layer {self.layer}," if self.layer else ""
            line += f":{where} recorded {self.recorded:.8g}, recomputed {self.recomputed:.8g}"
        return line


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """All stages of one step."""

    step: int
    """Which step it was."""

    results: list[StageResult]
    """In the order of `STAGES`."""

    @property
    def first_difference(self) -> StageResult | None:
        """The first stage beyond its bound; None if all that were replayed agree."""
        return next((each for each in self.results if each.outcome == "differs"), None)

    def plain(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        first = self.first_difference
        return {
            "step": self.step,
            "stages": [asdict(each) for each in self.results],
            "first_difference": None if first is None else first.stage,
            "holds": first is None,
        }


def replay(step: RecordedStep, recompute: Mapping[str, Recompute] | None = None) -> Replay:
    """Compute every stage of `step` again, and compare.

    Args:
        step: a recorded step.
        recompute: functions by stage; they replace what is computed here. `prompt` returns token ids [B, T] with -1
            outside of prompts (of given rows all tokens), `reward` [B], `gradient` the norm of the first update as an
            array of one number, `loss` too where no loss of tokens was recorded, all others [B, T]. One that cannot
            answer raises `NotReplayable`. Besides, `layers` returns what `LayerNorms.take` gave of the first update.
    """
    given: dict[str, Any] = {"advantage": plain_advantages, "loss": plain_losses, **(recompute or {})}
    layers: Callable[[RecordedStep], Mapping[str, float]] = given.pop("layers", lambda _: {})
    if unknown := sorted(set(given) - set(STAGES)):
        raise ValueError(f"{', '.join(unknown)} is no stage; the stages are {', '.join(STAGES)}")
    bounds = BOUNDS.get(str(step.data.get("precision")), BOUNDS["float32"])
    results = []
    for stage in STAGES:
        try:
            recorded = _recorded(step, stage)
            recomputed = np.asarray(given.get(stage, _need_the_program)(step))
            if stage in {"logp", "loss"} and recomputed.ndim == 2:
                recomputed = _of_first_update(step, recomputed)
        except NotReplayable as error:
            results.append(StageResult(stage=stage, outcome="not replayed", reason=str(error)))
            continue
        result = _compare(stage, recorded, recomputed, bound=bounds.get(stage, 0.0))
        known = step.data.get("layers")
        if stage == "logp" and result.outcome != "same" and known:
            other = first_layer_that_differs(known, layers(step), bound=LAYER_BOUND)
            result = replace(result, layer=None if other is None else other[0])
        results.append(result)
    return Replay(step=step.step, results=results)


def _recorded(step: RecordedStep, stage: str) -> Array:
    if stage == "prompt" and step.data.get("given_rows"):
        return step.padded("tokens")
    if stage == "prompt":
        starts = np.where(step.response.any(axis=1), step.response.argmax(axis=1), 0)
        return np.where(np.arange(step.filled.shape[1]) < starts[:, None], step.padded("tokens"), -1)
    if stage == "reward":
        failed = step.row("failed", missing=0).astype(bool)
        return np.where(failed, np.nan, step.columns["rewards"])
    if stage == "gradient":
        norm = step.updates[0].get("grad_norm") if step.updates else None
        if norm is None:
            raise NotReplayable("no gradient norm was recorded")
        return np.array([norm], dtype=np.float64)
    if step.data.get("given_rows") and stage in {"reward", "advantage", "logp_old"}:
        raise NotReplayable("the rows were given, and nothing was sampled")
    if stage == "loss" and not step.has("loss") and step.updates and step.updates[0].get("loss") is not None:
        return np.array([step.updates[0]["loss"]], dtype=np.float64)
    if not step.has(stage):
        unknown = step.cut_told if stage in step.cut else "it was not recorded"
        raise NotReplayable(str(step.data.get("not_recorded", {}).get(stage, unknown)))
    values = step.padded(stage)
    return _of_first_update(step, values) if stage in {"logp", "loss"} else values


def _of_first_update(step: RecordedStep, values: Array) -> Array:
    """The values of the tokens that the first update trained on; nobody has the weights of later ones."""
    first = step.row("update", missing=0) == 0
    return np.where(first[:, None] & step.trainable, values, np.nan)


def _need_the_program(step: RecordedStep) -> Array:
    del step
    raise NotReplayable("it needs the model, the template or the reward function of the run")


def _compare(stage: str, recorded: Array, recomputed: Array, *, bound: float) -> StageResult:
    if recorded.shape != recomputed.shape:
        raise ValueError(
            f"the stage {stage} was recomputed as an array of shape {list(recomputed.shape)}, and recorded as "
            f"{list(recorded.shape)}"
        )
    if recorded.dtype.kind == "f":
        recomputed = recomputed.astype(recorded.dtype)
        both = np.isfinite(recorded) & np.isfinite(recomputed)
        one = np.isfinite(recorded) != np.isfinite(recomputed)
        difference = np.where(both, np.abs(recorded - recomputed), 0.0)
        allowed = bound * np.maximum(1.0, np.abs(np.where(both, recorded, 0.0)))
        wrong = one | (difference > allowed)
        same = not one.any() and np.array_equal(recorded[both], recomputed[both])
        compared, largest = int((both | one).sum()), float(difference.max(initial=0.0)) if not one.any() else math.inf
    else:
        wrong = recorded != recomputed
        same = not wrong.any()
        compared, largest = int((recorded >= 0).sum()), float(wrong.any())
    if not wrong.any():
        outcome = "same" if same else "within"
        return StageResult(stage=stage, outcome=outcome, compared=compared, largest=largest)
    place = tuple(int(index) for index in np.argwhere(wrong)[0])
    return StageResult(
        stage=stage,
        outcome="differs",
        compared=compared,
        largest=largest,
        row=place[0] if recorded.size > 1 or stage == "reward" else None,
        token=place[1] if len(place) > 1 else None,
        recorded=float(recorded[place]),
        recomputed=float(recomputed[place]),
    )


# -- Plain GRPO, written out once more -----------------------------------------------------------------------------


def plain_advantages(step: RecordedStep) -> Array:
    """(r - mean) of each group, divided by its standard deviation if the objective says so: [B, T].

    Raises:
        NotReplayable: the objective is not known, or is none of the plain ones.
    """
    objective = step.data.get("objective")
    config = (objective or {}).get("advantage", {})
    if not objective or not config:
        raise NotReplayable("the objective was not recorded")
    overlong, kl = objective.get("overlong", {}), objective.get("kl", {})
    special = {
        f"baseline={config.get('baseline')}": config.get("baseline") not in {"group_mean", "leave_one_out"},
        f"scale={config.get('scale')}": config.get("scale") not in {"none", "group_std"},
        f"whiten={config.get('whiten')}": config.get("whiten", "none") != "none",
        "normalize_each_reward": bool(config.get("normalize_each_reward")),
        f"estimator={config.get('estimator')}": config.get("estimator") is not None,
        "a penalty of length": overlong.get("max_length") is not None,
        "a KL in the reward": bool(kl.get("weight")) and kl.get("place") == "reward",
    }
    if named := [name for name, is_special in special.items() if is_special]:
        raise NotReplayable(f"the advantage has {', '.join(named)}, which only the program that trained computes")
    rewards, groups = step.columns["rewards"], step.columns["groups"]
    failed = step.row("failed", missing=0).astype(bool)
    of_rows = np.full(len(step), np.nan)
    rows = np.flatnonzero(~failed)
    rows = rows[np.argsort(groups[rows], kind="stable")]  # groups one after another
    _, starts, sizes = np.unique(groups[rows], return_index=True, return_counts=True)
    for size in np.unique(sizes).tolist():  # all groups of one size at once: [G, size]
        of_size = rows[starts[sizes == size][:, None] + np.arange(size)]
        given = rewards[of_size]
        centered = given - given.mean(axis=1, keepdims=True)
        if config["baseline"] == "leave_one_out":
            centered = centered * size / max(1, size - 1)
        if config["scale"] == "group_std" and size > 1:
            centered = centered / (given.std(axis=1, ddof=1, keepdims=True) + config.get("epsilon", 1e-6))
        of_rows[of_size] = np.where(np.ptp(given, axis=1, keepdims=True) == 0, 0.0, centered)
    where = np.isfinite(step.padded("advantage")) if step.has("advantage") else step.trainable
    return np.where(where, of_rows[:, None], np.nan).astype(np.float32)


def plain_losses(step: RecordedStep) -> Array:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A) / N of the first update, N its trainable tokens: [B, T].

    Raises:
        NotReplayable: the objective is not known or none of the plain ones, or a column was not recorded.
    """
    objective = step.data.get("objective")
    if not objective:
        raise NotReplayable("the objective was not recorded")
    ratio = objective.get("ratio", {})
    special = {
        f"surrogate={ratio.get('surrogate')}": ratio.get("surrogate") != "clip",
        f"level={ratio.get('level')}": ratio.get("level") != "token",
        f"proximal={ratio.get('proximal')}": ratio.get("proximal") != "sampler",
        "dual_clip": ratio.get("dual_clip") is not None,
        f"aggregation={objective.get('aggregation')}": objective.get("aggregation") != "token-mean",
        "a KL in the loss": bool(objective.get("kl", {}).get("weight")),
        "an entropy bonus": bool(objective.get("entropy_weight")),
        "selected tokens": objective.get("selection", {}).get("tokens") is not None,
        "a bound on off-policy sequences": objective.get("correction", {}).get("off_policy_threshold") is not None,
    }
    if named := [name for name, is_special in special.items() if is_special]:
        raise NotReplayable(f"the loss has {', '.join(named)}, which only the program that trained computes")
    for name in ("logp", "logp_old", "advantage"):
        if not step.has(name):
            raise NotReplayable(f"{name} was not recorded")
    where = step.trainable & (step.row("update", missing=0) == 0)[:, None]
    logp, logp_old, advantage = (step.padded(name).astype(np.float64) for name in ("logp", "logp_old", "advantage"))
    rho = np.exp(np.clip(logp - logp_old, -20, 20))
    held = np.clip(rho, 1 - ratio["clip_low"], 1 + ratio["clip_high"])
    loss = -np.minimum(rho * advantage, held * advantage) / max(1, int(where.sum()))
    return np.where(where, loss, np.nan).astype(np.float32)

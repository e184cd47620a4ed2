"""From what ranks measured to verdicts: which check holds, what is wrong with which parameter, and what that means."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rl_parallel_plans.structure import collapsed
from rl_parallel_plans.verification.question import COLLECTIVES, COLLECTIVES_DEEPER, Question, Task
from rl_parallel_plans.verification.report import Check, Verdict

BAR = 1e-5
"""Relative error of logits and gradients in fp32 that reordered sums may cost."""
NOISE = 4.0
"""How often the rounding noise of the unsharded model itself an error may be, where that is above the bar."""
STEP = 1e-4
"""Relative error of a norm, a clip or an optimizer step."""

NOTHING_COMPARED = "nothing to compare"
"""What a check says that looked at nothing: it is a note, since ok would claim more than was seen."""

Facts = Mapping[str, Any]


def judged(question: Question, facts: Mapping[str, Facts]) -> list[Check]:
    """The checks of every task that ran, in order."""
    checks: list[Check] = []
    for task in question.tasks:
        found = facts.get(task.name)
        if found is None:
            continue
        checks += _of_task(question, task, found)
    return checks


def judged_plan(answer: Facts) -> list[Check]:
    """What needed no ranks: the plan at full size, and that of a wrapped class."""
    checks = []
    if (problems := answer.get("full_size")) is not None:
        if isinstance(problems, str):  # transformers cannot build it, which says nothing about the plan
            checks.append(Check(name="fits at full size", verdict="skipped", detail=problems[:300]))
        else:
            lines = tuple(problem[:600] for problem in problems[:6])
            checks.append(Check(name="fits at full size", verdict=_verdict(wrong=bool(problems)), culprits=lines))
    if (differences := answer.get("wrapped")) is not None:
        lines = tuple(differences[:4])
        if differences:
            lines += ("a class that a library made from this one, under the same name, must get the same plan",)
        checks.append(Check(name="wrapped class, same plan", verdict=_verdict(wrong=bool(differences)), culprits=lines))
    return checks


def judged_collectives(answer: Facts) -> list[Check]:
    """The collectives of one layer more: counted, beside what the plan's styles tell."""
    found = [answer["facts"].get(name) for name in (COLLECTIVES, COLLECTIVES_DEEPER)]
    if any(facts is None or "forward" not in facts for facts in found):
        return []
    counted = [_less(found[1], found[0], way) for way in ("forward", "backward")]
    said = "; ".join(f"{way} {_counts(count)}" for way, count in zip(("forward", "backward"), counted, strict=True))
    told = answer.get("told") or {}
    if not {"as given", "deeper"} <= told.keys() or told["deeper"]["untold"]:
        return [Check(name=COLLECTIVES, verdict="note", detail=said)]
    runs = found[1].get("runs") or {}
    expected = [
        {kind: count * max(runs.get(way, 1), 1) for kind, count in _less(told["deeper"], told["as given"], way).items()}
        for way in ("forward", "backward")
    ]
    if max(runs.values(), default=1) > 1:
        said += f"; a layer runs {runs['forward']} times forward, {runs['backward']} of them with a gradient"
    if not any(counted) and not any(expected):
        return [Check(name=COLLECTIVES, verdict="note", detail=f"{said}: {NOTHING_COMPARED}")]
    if counted == expected:
        return [Check(name=COLLECTIVES, verdict="ok", detail=said)]
    line = f"the plan tells of forward {_counts(expected[0])}; backward {_counts(expected[1])}"
    more = sum(sum(c.values()) for c in counted) > sum(sum(c.values()) for c in expected)
    return [Check(name=COLLECTIVES, verdict="WRONG" if more else "note", detail=said, culprits=(line,))]


def _less(larger: Facts, smaller: Facts, way: str) -> dict[str, int]:
    kinds = sorted({*larger[way], *smaller[way]})
    difference = {kind: larger[way].get(kind, 0) - smaller[way].get(kind, 0) for kind in kinds}
    return {kind: count for kind, count in difference.items() if count}


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"


def _of_task(question: Question, task: Task, facts: Facts) -> list[Check]:
    if "skipped" in facts:
        return [Check(name=task.name, verdict="skipped", detail=facts["skipped"])]
    if "failed" in facts:
        return [Check(name=task.name, verdict="WRONG", detail="it did not run", culprits=(_failure(facts["failed"]),))]
    if task.only == "clip":
        return [_bf16_clip(task, facts)]
    if task.only == "count":
        return []
    if task.only == "checkpoint":
        return [_checkpoint(task, facts)]
    if task.only == "outputs":
        return _outputs(task, facts)
    checks = [_logits(task, facts)] if task.loss != "hidden" else []
    if task.loss != "logits":
        checks.append(_logp(task, facts))
    if "loss" in facts and question.pp > 1:
        checks.append(_loss(task, facts))
    checks.append(_gradients(task, facts))
    if task.backend:
        checks.append(_compiled(task, facts))
    if task.freeze:
        checks.append(_frozen(task, facts))
    if task.optimize:
        checks += [] if question.pp > 1 else [_head(question, facts), _placements(facts)]
        checks += [
            _ties("tied parameters stay tied", facts),
            *_steps(facts),
        ]
    elif task.variant != "as given" and question.pp == 1:
        checks.append(_ties(f"{task.name}: ties", facts))
    return checks


def _verdict(*, wrong: bool) -> Verdict:
    return "WRONG" if wrong else "ok"


def _failure(text: str) -> str:
    """Where a rank ended: the last line of a traceback, and the last frame that is in it."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not any(line.lstrip().startswith("File ") for line in lines):
        return " ".join(text.split())[:900]
    head = lines[0].split(":")[0]
    said = next((line for line in reversed(lines) if not line.startswith(" ")), lines[-1])
    return f"{head}: {said[:600]} {where(text)}"


def where(text: str) -> str:
    """The last frame of a traceback that is not torch's, in brackets; nothing where there is none."""
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")]
    own = [frame for frame in frames if "/torch/" not in frame] or frames
    return f"({'/'.join(own[-1].replace('File ', '').replace(chr(34), '').split('/')[-3:])})" if own else ""


def _loss(task: Task, facts: Facts) -> Check:
    """The sum of the losses of all microbatches, each divided by the tokens of the whole step."""
    error = abs(facts["loss"] - facts["true_loss"]) / max(abs(facts["true_loss"]), 1e-30)
    wrong = not error <= BAR
    line = f"the losses of a step add up to {facts['loss']:.6f} over all stages and not to {facts['true_loss']:.6f}"
    return Check(name=f"{task.name}: loss", verdict=_verdict(wrong=wrong), error=error, culprits=(line,) * wrong)


def _logits(task: Task, facts: Facts) -> Check:
    error, noise = facts["logits"], facts["logits_noise"]
    wrong = not error <= max(BAR, NOISE * noise)
    detail = f"rank {facts['logits_rank']} is the worst" if wrong else _noise(error, noise)
    culprits = (_sentence_of_logits(facts),) if wrong else ()
    return Check(
        name=f"{task.name}: logits", verdict=_verdict(wrong=wrong), error=error, detail=detail, culprits=culprits
    )


def _sentence_of_logits(facts: Facts) -> str:
    margin = facts.get("margin", math.inf)
    if margin < 1e-6:
        return f"a router of this model is {margin:.0e} from a tie, so that rounding may choose another expert"
    return "the forward differs from that of the unsharded model: see which module begins it"


def _noise(error: float, noise: float) -> str:
    return f"the model's own rounding: {noise:.1e}" if error > BAR else ""


def _logp(task: Task, facts: Facts) -> Check:
    error = facts["logp"]
    wrong = not error <= max(10 * BAR, 40 * facts["logits_noise"])
    share = facts["logp_wrong"]
    culprits: tuple[str, ...] = ()
    if wrong:
        said = f"{share:.0%} of the tokens are wrong, by up to {error:.1f} nats"
        if facts["shape"][1][-1] % 2 and task.loss == "logp":
            said += (
                ": this vocabulary does not divide evenly, where DTensor cuts ceil(V / tp) words a rank; an interval "
                "of V // tp reads other words"
            )
        culprits = (said,)
    name = f"{task.name}: log-probabilities" if task.loss == "logp" else task.name
    return Check(name=name, verdict=_verdict(wrong=wrong), error=error, culprits=culprits)


def _gradients(task: Task, facts: Facts) -> Check:
    wrong = [row for row in facts["rows"] if _is_wrong(row)]
    worst = max(facts["rows"], key=lambda row: _size(row["error"]), default=None)
    culprits = [*_grouped(wrong), *(f"{name}: it is not there after sharding" for name in facts["absent"][:4])]
    detail = ""
    if worst is not None and not wrong and worst["error"] > BAR:
        detail = f"{worst['name']}; the model's own rounding: {worst['noise']:.1e}"
    elif wrong:
        detail = f"{len(wrong)} of {len(facts['rows'])} parameters"
    elif worst is None:
        detail = NOTHING_COMPARED
    return Check(
        name=f"{task.name}: gradients",
        verdict="note" if worst is None and not culprits else _verdict(wrong=bool(culprits)),
        error=None if worst is None else worst["error"],
        detail=detail,
        culprits=tuple(culprits),
    )


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _is_wrong(row: Mapping[str, Any]) -> bool:
    return not row["error"] <= max(BAR, NOISE * row["noise"]) or not row["spread"] <= max(BAR, NOISE * row["noise"])


def _grouped(rows: Sequence[Mapping[str, Any]], most: int = 6) -> list[str]:
    """One line for the same parameter in every layer, the surely explained first."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((collapsed(row["name"]), row["diagnosis"]), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (not item[0][1], -_size(max(r["error"] for r in item[1]))))
    lines = []
    for (name, diagnosis), members in ordered[:most]:
        ratios = sorted(row["ratio"] for row in members)
        ratio = f"{ratios[0]:.2f}" if ratios[-1] - ratios[0] < 0.01 else f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        agree = "ranks disagree" if any(row["spread"] > BAR for row in members) else "ranks agree"
        error = max(row["error"] for row in members)
        sentence = f"; {diagnosis}" if diagnosis else ""
        lines.append(f"{name} ({len(members)}): error {error:.1e}, norm {ratio} of the true one, {agree}{sentence}")
    if len(ordered) > most:
        lines.append(f"and {len(ordered) - most} more")
    return lines


def _frozen(task: Task, facts: Facts) -> Check:
    thawed = facts["thawed"]
    if not thawed and not facts["frozen"]:
        return Check(name=f"{task.name}: stay frozen", verdict="note", detail=NOTHING_COMPARED)
    return Check(
        name=f"{task.name}: stay frozen",
        verdict=_verdict(wrong=bool(thawed)),
        culprits=tuple(f"{name}: requires_grad is no longer what it was" for name in thawed[:4]),
    )


def _head(question: Question, facts: Facts) -> Check:
    placed, shape = facts["placed"], facts["shape"]
    name = "lm_head ends sharded"
    if question.tp == 1:
        return Check(name=name, verdict="skipped", detail="tp=1")
    if placed == "words":
        return Check(name=name, verdict="ok", detail="logits are a DTensor Shard(-1)")
    if shape[0] != shape[1]:
        said = "logits are a plain slice of the vocabulary, and nothing says which; give it use_local_output=False"
    else:
        said = (
            "every rank holds the logits of all words, [tokens, vocabulary], and their fp32 copies with the loss; give "
            "it ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"
        )
    return Check(name=name, verdict="WRONG", culprits=(f"lm_head: {said}",))


def _placements(facts: Facts) -> Check:
    misplaced = {collapsed(name): placements for name, placements in facts["misplaced"].items()}
    lines = tuple(f"{name}: gradient {of[0]}, parameter {of[1]}" for name, of in list(misplaced.items())[:4])
    unsummed = any("Partial" in gradient for gradient, _ in misplaced.values())
    if not facts["placed_gradients"]:
        return Check(name="gradients lie where parameters lie", verdict="note", detail=NOTHING_COMPARED)
    return Check(
        name="gradients lie where parameters lie",
        verdict="WRONG" if unsummed else "note" if misplaced else "ok",
        detail="" if unsummed or not misplaced else "right numbers, more bytes than the parameter",
        culprits=lines,
    )


def _ties(name: str, facts: Facts) -> Check:
    if not facts["ties"]:
        return Check(name=name, verdict="skipped", detail="this model ties nothing")
    if facts["tied"]:
        return Check(name=name, verdict="ok", detail="; ".join(" = ".join(names) for names in facts["ties"])[:120])
    said = tuple(
        f"{' = '.join(names)} were one parameter and are not any more: each gets a part of the gradient, and they "
        "part at the first step"
        for names in facts["ties"]
    )
    return Check(name=name, verdict="WRONG", culprits=said)


def _steps(facts: Facts) -> list[Check]:
    checks = []
    if "norm" in facts:
        ratio = facts["norm"] / max(facts["held_norm"], 1e-30)
        checks.append(
            _ratio(
                "gradient norm",
                found=ratio,
                expected=1.0,
                sentence=f"{ratio:.3f} times that of the gradients: {_norm(ratio)}",
            )
        )
    if "clipped" in facts:
        expected = facts["true_norm"] / 2 / max(facts["norm"], 1e-30)
        said = f"gradients were scaled by {facts['clipped']:.3f}, and should be by {expected:.3f}"
        checks.append(_ratio("clipping", found=facts["clipped"], expected=expected, sentence=said))
    if "optimizer_error" in facts:
        checks.append(Check(name="optimizer steps", verdict="WRONG", culprits=(_optimizer(facts),)))
    elif "drift" in facts:
        checks.append(_step(facts))
    return checks


def _ratio(name: str, *, found: float, expected: float, sentence: str) -> Check:
    error = abs(found / expected - 1)
    wrong = not error <= STEP
    return Check(name=name, verdict=_verdict(wrong=wrong), error=error, culprits=(sentence,) if wrong else ())


def _norm(ratio: float) -> str:
    if ratio > 1:
        return "what several ranks hold whole is counted once for each of them"
    return "a part of the gradients is not counted"


def _optimizer(facts: Facts) -> str:
    said = facts["optimizer_error"]
    if "mixed" in said or "same mesh" in said:
        said += "; some parameters are plain or on another mesh than the rest: make them all DTensors on one mesh"
    return str(said)


def _step(facts: Facts) -> Check:
    drift, weights = facts["drift"], facts["weights"]
    error = weights[0][1] if weights else 0.0
    lines = [f"{name}: no longer the same on every rank after a step" for name in drift[:4]]
    if not error <= STEP:
        lines += [f"{name}: off by {e:.1e} of the largest step" for name, e in weights if not e <= STEP]
    if not weights and not lines:
        return Check(name="optimizer steps", verdict="note", detail=NOTHING_COMPARED)
    return Check(name="optimizer steps", verdict=_verdict(wrong=bool(lines)), error=error, culprits=tuple(lines))


def _bf16_clip(task: Task, facts: Facts) -> Check:
    ratio, clipped = facts["bf16_norm"], facts["bf16_clipped"]
    lines = []
    if abs(ratio - 1) > 1e-2:
        lines.append(f"the norm of bf16 gradients is {ratio:.3f} of what it is: {_norm(ratio)}")
    if abs(clipped * ratio - 0.5) > 1e-2:
        lines.append(
            f"clipping scaled bf16 gradients by {clipped:.3f} and not by {0.5 / ratio:.3f}"
            + (": it scaled a copy (a cast before mul_)" if abs(clipped - 1) < 1e-2 else "")
        )
    return Check(
        name=task.name, verdict=_verdict(wrong=bool(lines)), error=abs(clipped * ratio - 0.5), culprits=tuple(lines)
    )


def _checkpoint(task: Task, facts: Facts) -> Check:
    lines = tuple(
        f"{road}: {len(names)} differ, {collapsed(names[0])}" for road, names in facts["roads"].items() if names
    )
    detail = "" if lines else f"{len(facts['roads'])} roads, every weight bit for bit that of the unsharded model"
    return Check(name=task.name, verdict=_verdict(wrong=bool(lines)), detail=detail, culprits=lines)


def _compiled(task: Task, facts: Facts) -> Check:
    found = facts["compiler"]
    lines = tuple(f"graph break ({count}): {reason}" for reason, count in found["breaks"].items())
    if not found["graphs"]:
        lines += ("nothing was compiled",)
    return Check(
        name=f"{task.name}: graph breaks",
        verdict=_verdict(wrong=bool(lines)),
        detail=f"{sum(found['breaks'].values())} breaks, {found['graphs']} graphs",
        culprits=lines,
    )


def _outputs(task: Task, facts: Facts) -> list[Check]:
    """The first wrong output at the level of layers and of the blocks inside them; deeper ones are parts of sums."""
    near = [(name, error) for name, error in facts["wrong"] if len(collapsed(name).partition("*")[2].split(".")) <= 2]
    if not near:
        return []
    name, error = near[0]
    return [Check(name=task.name, verdict="WRONG", error=error, culprits=(f"{name}: the first wrong output",))]

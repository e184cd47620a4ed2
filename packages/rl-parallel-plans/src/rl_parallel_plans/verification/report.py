"""From what the ranks measured to verdicts, and the report as text, as JSON and as an exit code.

`CHECKS` lists what is compared after each step: the name of the check, when it applies, and the function that judges.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rl_parallel_plans.structure import collapsed
from rl_parallel_plans.verification.tasks import BAR, COLLECTIVES, COLLECTIVES_DEEPER, Request, Task

Verdict = Literal["ok", "note", "WRONG", "skipped"]
Facts = Mapping[str, Any]

NOISE = 4.0
"""How many times the rounding noise of the unsharded model an error may be, where that is above the bar."""
STEP = 1e-4
"""Relative error of a norm, a clip or an optimizer step."""
NOTHING_COMPARED = "nothing to compare"
"""Detail of a check that looked at nothing: it is a note, since ok would claim more than was seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The verdict on one property of the sharded model."""

    name: str
    """What was compared."""
    verdict: Verdict
    """`ok`; `note` where something costs and is not wrong, or nothing was there to compare; `WRONG`; or `skipped` where
    the check cannot be made of this model."""
    error: float | None = None
    """Largest relative error, where the check has one."""
    detail: str = ""
    """The result in one line."""
    culprits: tuple[str, ...] = ()
    """What is wrong where: a parameter or module, its numbers, and what that means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The checks of one model at one layout."""

    model: str
    """Class of the model and what was verified of it."""
    layout: str
    """Ranks and options."""
    source: str
    """Which rule made the plan."""
    checks: tuple[Check, ...]
    """In the order in which they ran."""
    refused: str | None = None
    """Why nothing ran: no plan, or one with problems, or a model that is unusable."""
    unusable: bool = False
    """Whether the model itself cannot be built or run here, sharded or not; `refused` then says why, and nothing about
    a plan."""
    seconds: float = 0.0
    """Time that the verification took."""
    versions: str = ""
    """Releases of torch and transformers."""

    @property
    def ok(self) -> bool:
        """Whether the plan is exact: it was not refused and no check is WRONG."""
        return self.refused is None and all(check.verdict != "WRONG" for check in self.checks)

    @property
    def exit_code(self) -> int:
        """0 for an exact plan, 1 for one that is not, 2 for a refused one."""
        return 2 if self.refused is not None else int(not self.ok)

    @property
    def error(self) -> float:
        """The largest relative error of all checks; 0 without any."""
        return max((check.error for check in self.checks if check.error is not None), default=0.0)

    def text(self) -> str:
        """The report for people: one line for each check, and its culprits under each wrong one."""
        lines = [f"{self.model}, {self.layout}", f"plan: {self.source}"] if self.source else [self.model]
        if self.refused is not None:
            return "\n".join([*lines, "", f"{'SKIPPED' if self.unusable else 'REFUSED'}: {self.refused}"])
        lines.append("")
        width = max(len(check.name) for check in self.checks)
        for check in self.checks:
            error = "" if check.error is None else f"{check.error:.1e}"
            lines.append(f"{check.name:<{width}}  {check.verdict:<7}  {error:>7}  {check.detail}".rstrip())
            lines += [f"{'':<{width}}    - {culprit}" for culprit in check.culprits]
        wrong = [check.name for check in self.checks if check.verdict == "WRONG"]
        verdict = f"WRONG: {len(wrong)} of {len(self.checks)} checks ({', '.join(wrong)})" if wrong else "exact"
        return "\n".join([*lines, "", f"{verdict}; {self.versions}, {self.seconds:.1f} s"])

    def json(self) -> str:
        """Everything as one line of JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, default=str)


# -- Verdicts ------------------------------------------------------------------------------------


def judge(request: Request, facts: Mapping[str, Facts]) -> list[Check]:
    """The checks of every task that ran, in order."""
    checks: list[Check] = []
    for task in request.tasks:
        of_task = facts.get(task.name)
        if of_task is None:
            continue
        if "skipped" in of_task:
            checks.append(Check(name=task.name, verdict="skipped", detail=of_task["skipped"]))
            continue
        if "failed" in of_task:
            line = _failure(of_task["failed"])
            checks.append(Check(name=task.name, verdict="WRONG", detail="it did not run", culprits=(line,)))
            continue
        for name, applies, judge_one in CHECKS:
            if applies(request, task) and (outcome := judge_one(request, task, of_task)) is not None:
                checks.append(Check(name=name.format(task=task.name), **outcome))
    return checks


Outcome = dict[str, Any]
"""Arguments of `Check` without its name."""


def _outcome(lines: Sequence[str], *, error: float | None = None, detail: str = "", compared: bool = True) -> Outcome:
    """WRONG with the lines that say why; without any, ok, or a note if nothing was compared."""
    if not lines and not compared:
        return {"verdict": "note", "detail": NOTHING_COMPARED, "error": error}
    return {"verdict": "WRONG" if lines else "ok", "error": error, "detail": detail, "culprits": tuple(lines)}


def _failure(text: str) -> str:
    """Why a rank ended: the last line of a traceback and its last frame."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    if not any(line.lstrip().startswith("File ") for line in lines):
        return " ".join(text.split())[:900]
    message = next((line for line in reversed(lines) if not line.startswith(" ")), lines[-1])
    return f"{lines[0].split(':')[0]}: {message[:600]} {where(text)}"


def where(text: str) -> str:
    """The last frame of a traceback that is not torch's, in brackets; empty if there is none."""
    frames = [line.strip() for line in text.splitlines() if line.lstrip().startswith("File ")]
    own = [frame for frame in frames if "/torch/" not in frame] or frames
    return f"({'/'.join(own[-1].replace('File ', '').replace(chr(34), '').split('/')[-3:])})" if own else ""


def _logits(_request: Request, _task: Task, facts: Facts) -> Outcome:
    error, noise, margin = facts["logits"], facts["logits_noise"], facts.get("margin", math.inf)
    if error <= max(BAR, NOISE * noise):
        return _outcome((), error=error, detail=f"the model's own rounding: {noise:.1e}" if error > BAR else "")
    if margin < 1e-6:
        line = f"a router of this model is {margin:.0e} from a tie, so that rounding may choose another expert"
    else:
        line = "the forward differs from that of the unsharded model: see which module begins it"
    return _outcome((line,), error=error, detail=f"rank {facts['logits_rank']} is the worst")


def _logp(_request: Request, task: Task, facts: Facts) -> Outcome:
    error = facts["logp"]
    if error <= max(10 * BAR, 40 * facts["logits_noise"]):
        return _outcome((), error=error)
    line = f"{facts['logp_wrong']:.0%} of the tokens are wrong, by up to {error:.1f} nats"
    if task.loss == "logp" and facts["shape"][1][-1] % 2:
        line += (
            ": this vocabulary does not divide evenly, where DTensor cuts ceil(V / tp) words a rank; an interval "
            "of V // tp reads other words"
        )
    return _outcome((line,), error=error)


def _loss(_request: Request, _task: Task, facts: Facts) -> Outcome | None:
    """The sum of the losses of all microbatches, each divided by the tokens of the whole step."""
    if "loss" not in facts:
        return None
    loss, true = facts["loss"], facts["true_loss"]
    error = abs(loss - true) / max(abs(true), 1e-30)
    line = f"the losses of a step add up to {loss:.6f} over all stages and not to {true:.6f}"
    return _outcome((line,) * (not error <= BAR), error=error)


def _gradients(_request: Request, _task: Task, facts: Facts) -> Outcome:
    def size(error: float) -> float:
        return math.inf if math.isnan(error) else error

    rows = facts["rows"]
    wrong = [row for row in rows if not max(size(row["error"]), size(row["spread"])) <= max(BAR, NOISE * row["noise"])]
    # One line for the same parameter in every layer, those with a diagnosis first.
    groups: dict[tuple[str, str], list[Facts]] = {}
    for row in wrong:
        groups.setdefault((collapsed(row["name"]), row["diagnosis"]), []).append(row)
    ordered = sorted(groups.items(), key=lambda item: (not item[0][1], -max(size(row["error"]) for row in item[1])))
    lines = []
    for (name, diagnosis), members in ordered[:6]:
        low, high = (each(row["ratio"] for row in members) for each in (min, max))
        ratio = f"{low:.2f}" if high - low < 0.01 else f"{low:.2f} to {high:.2f}"
        agree = "ranks disagree" if any(row["spread"] > BAR for row in members) else "ranks agree"
        error = max(row["error"] for row in members)
        line = f"{name} ({len(members)}): error {error:.1e}, norm {ratio} of the true one, {agree}"
        lines.append(f"{line}; {diagnosis}" if diagnosis else line)
    lines += [f"and {len(ordered) - 6} more"] * (len(ordered) > 6)
    lines += [f"{name}: it is not there after sharding" for name in facts["absent"][:4]]
    if not rows:
        return _outcome(lines, detail=NOTHING_COMPARED, compared=False)
    worst = max(rows, key=lambda row: size(row["error"]))
    detail = f"{worst['name']}; the model's own rounding: {worst['noise']:.1e}" if worst["error"] > BAR else ""
    detail = f"{len(wrong)} of {len(rows)} parameters" if wrong else detail
    return _outcome(lines, error=worst["error"], detail=detail)


def _graph_breaks(_request: Request, _task: Task, facts: Facts) -> Outcome:
    breaks, graphs = facts["compiler"]["breaks"], facts["compiler"]["graphs"]
    lines = [f"graph break ({count}): {reason}" for reason, count in breaks.items()]
    lines += ["nothing was compiled"] * (not graphs)
    return _outcome(lines, detail=f"{sum(breaks.values())} breaks, {graphs} graphs")


def _frozen(_request: Request, _task: Task, facts: Facts) -> Outcome:
    lines = [f"{name}: requires_grad is no longer what it was" for name in facts["thawed"][:4]]
    return _outcome(lines, compared=bool(facts["frozen"]))


def _head(request: Request, _task: Task, facts: Facts) -> Outcome:
    if request.tp == 1:
        return {"verdict": "skipped", "detail": "tp=1"}
    if facts["placed"] == "vocabulary":
        return _outcome((), detail="logits are a DTensor Shard(-1)")
    if facts["shape"][0] != facts["shape"][1]:
        line = "logits are a plain slice of the vocabulary, and nothing says which; give it use_local_output=False"
    else:
        line = (
            "every rank holds the logits of all words, [tokens, vocabulary], and their fp32 copies with the loss; give "
            "it ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)"
        )
    return _outcome((f"lm_head: {line}",))


def _placements(_request: Request, _task: Task, facts: Facts) -> Outcome:
    if not facts["placed_gradients"]:
        return _outcome((), compared=False)
    misplaced = {collapsed(name): placements for name, placements in facts["misplaced"].items()}
    lines = [f"{name}: gradient {of[0]}, parameter {of[1]}" for name, of in list(misplaced.items())[:4]]
    if lines and not any("Partial" in gradient for gradient, _ in misplaced.values()):
        return {"verdict": "note", "detail": "right numbers, more bytes than the parameter", "culprits": tuple(lines)}
    return _outcome(lines)


def _ties(_request: Request, _task: Task, facts: Facts) -> Outcome:
    if not facts["ties"]:
        return {"verdict": "skipped", "detail": "this model ties nothing"}
    names = [" = ".join(group) for group in facts["ties"]]
    if facts["tied"]:
        return _outcome((), detail="; ".join(names)[:120])
    reason = "each gets a part of the gradient, and they part at the first step"
    return _outcome([f"{group} were one parameter and are not any more: {reason}" for group in names])


def _miscounted(ratio: float) -> str:
    if ratio > 1:
        return "what several ranks hold whole is counted once for each of them"
    return "a part of the gradients is not counted"


def _norm(_request: Request, _task: Task, facts: Facts) -> Outcome | None:
    if "norm" not in facts:
        return None
    ratio = facts["norm"] / max(facts["held_norm"], 1e-30)
    line = f"{ratio:.3f} times that of the gradients: {_miscounted(ratio)}"
    return _outcome((line,) * (not abs(ratio - 1) <= STEP), error=abs(ratio - 1))


def _clipping(_request: Request, _task: Task, facts: Facts) -> Outcome | None:
    if "clipped" not in facts:
        return None
    expected = facts["true_norm"] / 2 / max(facts["norm"], 1e-30)
    error = abs(facts["clipped"] / expected - 1)
    line = f"gradients were scaled by {facts['clipped']:.3f}, and should be by {expected:.3f}"
    return _outcome((line,) * (not error <= STEP), error=error)


def _optimizer(_request: Request, _task: Task, facts: Facts) -> Outcome | None:
    if (message := facts.get("optimizer_error")) is not None:
        if "mixed" in message or "same mesh" in message:
            message += "; some parameters are plain or on another mesh than the rest"
            message += ": make them all DTensors on one mesh"
        return _outcome((message,))
    if "drift" not in facts:
        return None
    weights = facts["weights"]
    lines = [f"{name}: no longer the same on every rank after a step" for name in facts["drift"][:4]]
    lines += [f"{name}: off by {error:.1e} of the largest step" for name, error in weights if not error <= STEP]
    return _outcome(lines, error=weights[0][1] if weights else None, compared=bool(weights))


def _bf16_clipping(_request: Request, _task: Task, facts: Facts) -> Outcome:
    ratio, clipped = facts["bf16_norm"], facts["bf16_clipped"]
    lines = []
    if abs(ratio - 1) > 1e-2:
        lines.append(f"the norm of bf16 gradients is {ratio:.3f} of what it is: {_miscounted(ratio)}")
    if abs(clipped * ratio - 0.5) > 1e-2:
        copied = ": it scaled a copy (a cast before mul_)" if abs(clipped - 1) < 1e-2 else ""
        lines.append(f"clipping scaled bf16 gradients by {clipped:.3f} and not by {0.5 / ratio:.3f}{copied}")
    return _outcome(lines, error=abs(clipped * ratio - 0.5))


def _checkpoint(_request: Request, _task: Task, facts: Facts) -> Outcome:
    ways = facts["ways"]
    lines = [f"{way}: {len(names)} differ, {collapsed(names[0])}" for way, names in ways.items() if names]
    detail = "" if lines else f"{len(ways)} roads, every weight bit for bit that of the unsharded model"
    return _outcome(lines, detail=detail)


def _first_wrong_output(_request: Request, _task: Task, facts: Facts) -> Outcome | None:
    """The first wrong output of a layer or of a block inside one; deeper modules hold parts of sums."""
    for name, error in facts["wrong"]:
        if len(collapsed(name).partition("*")[2].split(".")) <= 2:
            return _outcome((f"{name}: the first wrong output",), error=error)
    return None


def _step(applies: "Applies" = lambda *_: True) -> "Applies":
    return lambda request, task: task.measure == "step" and applies(request, task)


Applies = Callable[[Request, Task], bool]
CHECKS: tuple[tuple[str, Applies, Callable[[Request, Task, Facts], Outcome | None]], ...] = (
    ("{task}: logits", _step(lambda _, task: task.loss != "hidden"), _logits),
    ("{task}: log-probabilities", _step(lambda _, task: task.loss == "logp"), _logp),
    ("{task}", _step(lambda _, task: task.loss == "hidden"), _logp),
    ("{task}: loss", _step(lambda request, _: request.pp > 1), _loss),
    ("{task}: gradients", _step(), _gradients),
    ("{task}: graph breaks", _step(lambda _, task: bool(task.backend)), _graph_breaks),
    ("{task}: stay frozen", _step(lambda _, task: task.freeze), _frozen),
    ("lm_head ends sharded", _step(lambda request, task: task.optimize and request.pp == 1), _head),
    ("gradients lie where parameters lie", _step(lambda request, task: task.optimize and request.pp == 1), _placements),
    ("tied parameters stay tied", _step(lambda _, task: task.optimize), _ties),
    ("gradient norm", _step(lambda _, task: task.optimize), _norm),
    ("clipping", _step(lambda _, task: task.optimize), _clipping),
    ("optimizer steps", _step(lambda _, task: task.optimize), _optimizer),
    ("{task}: ties", _step(lambda request, task: task.variant == "uneven" and request.pp == 1), _ties),
    ("{task}", lambda _, task: task.measure == "clip", _bf16_clipping),
    ("{task}", lambda _, task: task.measure == "checkpoint", _checkpoint),
    ("{task}", lambda _, task: task.measure == "outputs", _first_wrong_output),
)
"""Name of the check, when it applies, and what judges it. Collectives are judged by `judge_collectives`."""


def judge_plan(answer: Facts) -> list[Check]:
    """The checks that need no ranks: the plan at full size, and that of a wrapped class."""
    checks = []
    problems = answer.get("full_size")
    if isinstance(problems, str):  # transformers cannot build it, which says nothing about the plan
        checks.append(Check(name="fits at full size", verdict="skipped", detail=problems[:300]))
    elif problems is not None:
        checks.append(Check(name="fits at full size", **_outcome([problem[:600] for problem in problems[:6]])))
    if (differences := answer.get("wrapped")) is not None:
        reason = "a class that a library made from this one, under the same name, must get the same plan"
        lines = [*differences[:4], reason] if differences else []
        checks.append(Check(name="wrapped class, same plan", **_outcome(lines)))
    return checks


def judge_collectives(answer: Facts) -> list[Check]:
    """The collectives of one further layer, as counted and as the plan's styles predict them."""
    shallow, deeper = (answer["facts"].get(name) or {} for name in (COLLECTIVES, COLLECTIVES_DEEPER))
    if "forward" not in shallow or "forward" not in deeper:
        return []

    def added(larger: Facts, smaller: Facts, way: str) -> dict[str, int]:
        kinds = sorted({*larger[way], *smaller[way]})
        counts = {kind: larger[way].get(kind, 0) - smaller[way].get(kind, 0) for kind in kinds}
        return {kind: count for kind, count in counts.items() if count}

    def shown(counts: Mapping[str, int]) -> str:
        return ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "none"

    ways = ("forward", "backward")
    counted = [added(deeper, shallow, way) for way in ways]
    detail = "; ".join(f"{way} {shown(counts)}" for way, counts in zip(ways, counted, strict=True))
    predicted = answer.get("predicted") or {}
    if not {"as given", "deeper"} <= predicted.keys() or predicted["deeper"]["unknown"]:
        return [Check(name=COLLECTIVES, verdict="note", detail=detail)]
    runs = deeper.get("runs") or {}
    expected = []
    for way in ways:
        once = added(predicted["deeper"], predicted["as given"], way)
        expected.append({kind: count * max(runs.get(way, 1), 1) for kind, count in once.items()})
    if max(runs.values(), default=1) > 1:
        detail += f"; a layer runs {runs['forward']} times forward, {runs['backward']} of them with a gradient"
    if not any(counted) and not any(expected):
        return [Check(name=COLLECTIVES, verdict="note", detail=f"{detail}: {NOTHING_COMPARED}")]
    if counted == expected:
        return [Check(name=COLLECTIVES, verdict="ok", detail=detail)]
    line = f"the plan tells of forward {shown(expected[0])}; backward {shown(expected[1])}"
    more = sum(sum(each.values()) for each in counted) > sum(sum(each.values()) for each in expected)
    return [Check(name=COLLECTIVES, verdict="WRONG" if more else "note", detail=detail, culprits=(line,))]
